/* FP8 values times the scale of their block. */
#ifndef MOECACHE_FP8_H
#define MOECACHE_FP8_H

#include "_round.h"

enum { FP8_COLS, FP8_BLOCK_ROWS, FP8_BLOCK_COLS, FP8_E5M2, FP8_SCALE, FP8_OUT };
enum { FP8_SCALE_F32, FP8_SCALE_BF16, FP8_SCALE_TABLE };

MOE_INLINE float moe_fp8_scale(const unsigned char *at, int kind, const unsigned char *table) {
    float scale;
    uint16_t half;
    if (kind == FP8_SCALE_BF16) {
        memcpy(&half, at, 2);
        return moe_float((uint32_t)half << 16);
    }
    memcpy(&scale, kind == FP8_SCALE_F32 ? at : table + 4 * *at, 4);
    return scale;
}

/* Exponent and mantissa shift into a float32's place; one multiplication makes up for the other bias, subnormals included. */
MOE_INLINE float moe_from_e4m3(uint32_t x) {
    const uint32_t magnitude = x & 0x7f, value = moe_bits(moe_float(magnitude << 20) * 0x1p120f);
    return moe_float((x & 0x80) << 24 | (magnitude == 0x7f ? 0x7fc00000 : value));
}

MOE_INLINE float moe_from_e5m2(uint32_t x) {
    const uint32_t magnitude = x & 0x7f, value = moe_bits(moe_float(magnitude << 21) * 0x1p112f);
    return moe_float((x & 0x80) << 24 | (magnitude >= 0x7c ? 0x7f800000 | magnitude << 21 : value));
}

#define MOE_FP8_RUN(name, from, store, type)                                                              \
    MOE_CLONES static void name(type *restrict out, const unsigned char *restrict at, ptrdiff_t n, float scale) { \
        for (ptrdiff_t i = 0; i < n; i++) out[i] = store(from(at[i]) * scale);                             \
    }
#define MOE_SAME(value) (value)

MOE_FP8_RUN(moe_e4m3_bf16, moe_from_e4m3, moe_to_bf16, uint16_t)
MOE_FP8_RUN(moe_e4m3_f16, moe_from_e4m3, moe_to_f16, uint16_t)
MOE_FP8_RUN(moe_e4m3_f32, moe_from_e4m3, MOE_SAME, float)
MOE_FP8_RUN(moe_e5m2_bf16, moe_from_e5m2, moe_to_bf16, uint16_t)
MOE_FP8_RUN(moe_e5m2_f16, moe_from_e5m2, moe_to_f16, uint16_t)
MOE_FP8_RUN(moe_e5m2_f32, moe_from_e5m2, MOE_SAME, float)

static void moe_fp8_run(const int64_t *numbers, unsigned char *out, const unsigned char *at, ptrdiff_t n, float scale) {
    switch (3 * (numbers[FP8_E5M2] != 0) + numbers[FP8_OUT]) {
    case MOE_BF16: moe_e4m3_bf16((uint16_t *)out, at, n, scale); break;
    case MOE_F16: moe_e4m3_f16((uint16_t *)out, at, n, scale); break;
    case MOE_F32: moe_e4m3_f32((float *)out, at, n, scale); break;
    case 3 + MOE_BF16: moe_e5m2_bf16((uint16_t *)out, at, n, scale); break;
    case 3 + MOE_F16: moe_e5m2_f16((uint16_t *)out, at, n, scale); break;
    default: moe_e5m2_f32((float *)out, at, n, scale);
    }
}

static void moe_fp8(const unsigned char **streams, const int64_t *numbers, const unsigned char *table, int64_t first,
                    int64_t rows, unsigned char *out) {
    const int64_t cols = numbers[FP8_COLS], high = numbers[FP8_BLOCK_ROWS], wide = numbers[FP8_BLOCK_COLS];
    const int kind = (int)numbers[FP8_SCALE], item = numbers[FP8_OUT] == MOE_F32 ? 4 : 2;
    const int64_t scale_nbytes = kind == FP8_SCALE_F32 ? 4 : kind == FP8_SCALE_BF16 ? 2 : 1;
    const int64_t across = (cols + wide - 1) / wide;
    for (int64_t row = first; row < first + rows; row++) {
        const unsigned char *scales = streams[1] + (row / high - first / high) * across * scale_nbytes;
        const unsigned char *at = streams[0] + (row - first) * cols;
        for (int64_t col = 0; col < cols; col += wide) {
            const int64_t n = cols - col < wide ? cols - col : wide;
            const float scale = moe_fp8_scale(scales + col / wide * scale_nbytes, kind, table);
            moe_fp8_run(numbers, out + (row * cols + col) * item, at + col, n, scale);
        }
    }
}

#endif
