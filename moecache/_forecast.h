/* The routing forecaster's loops: float16 weights against a short float32 state. docs/forecaster.md has the formulas. */
#ifndef MOECACHE_FORECAST_H
#define MOECACHE_FORECAST_H

#include "_hazard.h"

/* Rows of weights are padded to whole registers' worth of lanes. */
enum { MOE_HALVES = 16 };

/* A finite, normal float16 widened by moving its bits is the number divided by 2^112, on any machine; the factor is put into
 * what it is multiplied with. The sign, extended by the conversion, is cut back to one bit. */
#define MOE_HALF_SCALE 0x1p112f
typedef int16_t moe_halves __attribute__((vector_size(2 * MOE_HALVES), aligned(2), may_alias));
typedef int32_t moe_words __attribute__((vector_size(4 * MOE_HALVES)));
typedef float moe_floats __attribute__((vector_size(4 * MOE_HALVES)));
#define MOE_WIDEN(p) \
    ((moe_floats)((__builtin_convertvector(*(const moe_halves *)(p), moe_words) << 13) & (int32_t)0x8fffffff))

/* out[0:n] += sum_j state[j] * weights[j * n : (j + 1) * n]; n a multiple of MOE_HALVES. The sums of a block stay in
 * registers over all of the state. */
#define MOE_DEFINE_READ(name, target, floats, lanes, widen, scale)                                                     \
    target static void name(float *restrict out, const uint16_t *restrict weights, const float *restrict state, int r, \
                            int n) {                                                                                   \
        enum { WIDE = 64 / lanes, NARROW = MOE_HALVES / lanes };                                                       \
        int base = 0;                                                                                                  \
        for (; base + 64 <= n; base += 64) {                                                                           \
            floats sum[WIDE];                                                                                          \
            memcpy(sum, out + base, sizeof sum);                                                                       \
            for (int j = 0; j < r; j++) {                                                                              \
                const uint16_t *row = weights + (ptrdiff_t)j * n + base;                                               \
                const float factor = state[j] * scale;                                                                 \
                for (int v = 0; v < WIDE; v++) sum[v] += factor * widen(row + v * lanes);                              \
            }                                                                                                          \
            memcpy(out + base, sum, sizeof sum);                                                                       \
        }                                                                                                              \
        for (; base < n; base += MOE_HALVES) {                                                                         \
            floats sum[NARROW];                                                                                        \
            memcpy(sum, out + base, sizeof sum);                                                                       \
            for (int j = 0; j < r; j++) {                                                                              \
                const uint16_t *row = weights + (ptrdiff_t)j * n + base;                                               \
                const float factor = state[j] * scale;                                                                 \
                for (int v = 0; v < NARROW; v++) sum[v] += factor * widen(row + v * lanes);                            \
            }                                                                                                          \
            memcpy(out + base, sum, sizeof sum);                                                                       \
        }                                                                                                              \
    }

MOE_DEFINE_READ(moe_read_plain, , moe_floats, MOE_HALVES, MOE_WIDEN, MOE_HALF_SCALE)

#if defined(__x86_64__) && defined(__GNUC__)
/* The compiler does not find these processors' own conversion by itself. */
#include <immintrin.h>
#define MOE_WIDEN_512(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define MOE_WIDEN_256(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
MOE_DEFINE_READ(moe_read_512, __attribute__((target("avx512f"))), __m512, 16, MOE_WIDEN_512, 1)
MOE_DEFINE_READ(moe_read_256, __attribute__((target("avx2,f16c,fma"))), __m256, 8, MOE_WIDEN_256, 1)

static void moe_read(float *restrict out, const uint16_t *restrict weights, const float *restrict state, int r, int n) {
    if (__builtin_cpu_supports("avx512f"))
        moe_read_512(out, weights, state, r, n);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma"))
        moe_read_256(out, weights, state, r, n);
    else
        moe_read_plain(out, weights, state, r, n);
}
#else
#define moe_read moe_read_plain
#endif

/* out[0:n] += weights[0:n] */
MOE_CLONES static void moe_add_halves(float *restrict out, const uint16_t *restrict weights, int n) {
    for (int e = 0; e < n; e++) {
        const int32_t bits = ((int32_t)(int16_t)weights[e] << 13) & (int32_t)0x8fffffff;
        float value;
        memcpy(&value, &bits, 4);
        out[e] += value * MOE_HALF_SCALE;
    }
}

/* One token at one layer: kept <- (1 - a) kept + a (written - usual), and what that changes is added to the state. */
MOE_CLONES static void moe_write(float *restrict kept, float *restrict state, const float *restrict written,
                                 const float *restrict usual, int r, float a) {
    for (int j = 0; j < r; j++) {
        const float change = a * (written[j] - usual[j] - kept[j]);
        kept[j] += change;
        state[j] += change;
    }
}

/* out[0:n] = log((average + floor) / (prior + floor)) */
MOE_CLONES static void moe_log_ratio(float *restrict out, const float *restrict average, const float *restrict prior, int n) {
    for (int e = 0; e < n; e++) out[e] = moe_log((average[e] + 1e-3f) / (prior[e] + 1e-3f));
}

/* out[0:n] += sum_j weights[j] * logs[j * stride + e] */
MOE_CLONES static void moe_add_logs(float *restrict out, const float *restrict logs, ptrdiff_t stride,
                                    const float *restrict weights, int scales, int n) {
    for (int j = 0; j < scales; j++)
        for (int e = 0; e < n; e++) out[e] += weights[j] * logs[j * stride + e];
}

MOE_CLONES static void moe_sigmoids(float *restrict z, int n) {
    for (int e = 0; e < n; e++) z[e] = moe_sigmoid(z[e]);
}

#endif
