/* Logarithm, exponential and logistic function in float32, without branches, so that they vectorise without a vector library. */
#ifndef MOECACHE_FASTMATH_H
#define MOECACHE_FASTMATH_H

#include "_simd.h"

/* Natural logarithm of a positive normal float: exponent by bits, and of the mantissa in [sqrt 1/2, sqrt 2) twice the
 * series of artanh((m - 1) / (m + 1)). Within 1e-6. Branch-free, so that it vectorises without a vector library. */
MOE_INLINE float moe_log(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    const int32_t e = (bits - 0x3f3504f3) >> 23;
    bits -= e << 23;
    float m;
    memcpy(&m, &bits, 4);
    const float s = (m - 1) / (m + 1), t = s * s;
    return 2 * s * (1 + t * (1.0f / 3 + t * (1.0f / 5 + t * (1.0f / 7 + t * (1.0f / 9))))) + 0.693147181f * (float)e;
}

/* exp(x) for |x| <= 80: 2^k by bits, the rest by Taylor's series on |r| <= ln 2 / 2. Within 4e-6 of its size
 * (1e-6 where |x| <= 15). */
MOE_INLINE float moe_exp(float x) {
    const float nearest = 12582912.0f; /* 1.5 * 2^23: what is added to it loses its fraction */
    const float whole = x * 1.442695041f + nearest - nearest;
    const int32_t k = (int32_t)whole;
    const float r = x - whole * 0.693147181f;
    const float p = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
    const int32_t bits = (k + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* One choice after the other: each is a minimum or maximum instruction; nested, they are branches to the vectoriser. */
MOE_INLINE float moe_clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

MOE_INLINE float moe_logit(float p) {
    p = moe_clamp(p, 1e-4f, 0.9999f);
    return moe_log(p / (1 - p));
}

MOE_INLINE float moe_sigmoid(float z) { return 1 / (1 + moe_exp(-moe_clamp(z, -15, 15))); }

#endif
