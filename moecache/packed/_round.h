/* Storing float32 values as the dtype a parameter has, rounded as torch does: to nearest, ties to even. */
#ifndef MOECACHE_ROUND_H
#define MOECACHE_ROUND_H

#include "_simd.h"

/* Output dtypes as packed/format.py numbers them. */
enum { MOE_BF16, MOE_F16, MOE_F32 };

MOE_INLINE uint32_t moe_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

MOE_INLINE float moe_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

MOE_INLINE uint16_t moe_to_bf16(float value) {
    const uint32_t bits = moe_bits(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Without a branch, so that loops of it become vectors: adding a power of two far above the value leaves as many bits of it as
 * float16 has there, subnormals included. */
MOE_INLINE uint16_t moe_to_f16(float value) {
    const uint32_t bits = moe_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t exponent = magnitude & 0x7f800000, low = 0x38800000;
    const uint32_t anchor = (exponent > low ? exponent : low) + (13 << 23);
    const uint32_t sum = moe_bits(moe_float(magnitude) + moe_float(magnitude < 0x47800000 ? anchor : 0));
    const uint32_t kept = sum - anchor, base = ((exponent > low ? exponent : low) - low) >> 13;
    const uint32_t finite = base + kept;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (magnitude >= 0x47800000 ? special : finite));
}

MOE_INLINE float moe_from_f16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    /* Exponent and mantissa shifted into place are the value times 2^-112, subnormals included. */
    const float value = moe_float(magnitude << 13) * 0x1p112f;
    return moe_float(sign | (magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : moe_bits(value)));
}

#endif
