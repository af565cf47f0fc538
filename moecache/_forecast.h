/* The routing forecaster's loops: int8 and float16 weights against a short float32 state. docs/forecaster.md has the formulas. */
#ifndef MOECACHE_FORECAST_H
#define MOECACHE_FORECAST_H

#include "_hazard.h"

/* Rows of weights are padded to whole registers' worth of lanes. */
enum { MOE_PADDED = 16 };

typedef int8_t moe_bytes_16 __attribute__((vector_size(MOE_PADDED), aligned(1), may_alias));
typedef float moe_floats_16 __attribute__((vector_size(4 * MOE_PADDED)));
#define MOE_WIDEN(p) __builtin_convertvector(*(const moe_bytes_16 *)(p), moe_floats_16)

/* out[e] += scale[e] * sum_j state[j] * weights[j * n + e]; n a multiple of MOE_PADDED. The sums of a block stay in
 * registers over all of the state: the weights are read once, and reading them is what this costs. */
#define MOE_DEFINE_READ(name, target, floats, lanes, widen)                                                            \
    target static void name(float *restrict out, const int8_t *restrict weights, const float *restrict scale,          \
                            const float *restrict state, int r, int n) {                                               \
        enum { WIDE = 64 / lanes, NARROW = MOE_PADDED / lanes };                                                       \
        int base = 0;                                                                                                  \
        for (; base + 64 <= n; base += 64) {                                                                           \
            floats sum[WIDE] = {{0}};                                                                                  \
            for (int j = 0; j < r; j++)                                                                                \
                for (int v = 0; v < WIDE; v++) sum[v] += state[j] * widen(weights + (ptrdiff_t)j * n + base + v * lanes); \
            for (int v = 0; v < WIDE; v++)                                                                             \
                for (int i = 0; i < lanes; i++) out[base + v * lanes + i] += scale[base + v * lanes + i] * sum[v][i];  \
        }                                                                                                              \
        for (; base < n; base += MOE_PADDED) {                                                                         \
            floats sum[NARROW] = {{0}};                                                                                \
            for (int j = 0; j < r; j++)                                                                                \
                for (int v = 0; v < NARROW; v++)                                                                       \
                    sum[v] += state[j] * widen(weights + (ptrdiff_t)j * n + base + v * lanes);                         \
            for (int v = 0; v < NARROW; v++)                                                                           \
                for (int i = 0; i < lanes; i++) out[base + v * lanes + i] += scale[base + v * lanes + i] * sum[v][i];  \
        }                                                                                                              \
    }

MOE_DEFINE_READ(moe_read_plain, , moe_floats_16, MOE_PADDED, MOE_WIDEN)

#if defined(__x86_64__) && defined(__GNUC__)
/* The compiler does not find these processors' own conversion by itself. */
#include <immintrin.h>
#define MOE_WIDEN_512(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define MOE_WIDEN_256(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
MOE_DEFINE_READ(moe_read_512, __attribute__((target("avx512f"))), __m512, 16, MOE_WIDEN_512)
MOE_DEFINE_READ(moe_read_256, __attribute__((target("avx2,fma"))), __m256, 8, MOE_WIDEN_256)

static void moe_read(float *restrict out, const int8_t *restrict weights, const float *restrict scale,
                     const float *restrict state, int r, int n) {
    if (__builtin_cpu_supports("avx512f"))
        moe_read_512(out, weights, scale, state, r, n);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        moe_read_256(out, weights, scale, state, r, n);
    else
        moe_read_plain(out, weights, scale, state, r, n);
}
#else
#define moe_read moe_read_plain
#endif

/* out[0:n] += weights[0:n], float16. A finite, normal float16 widened by moving its bits is the number divided by 2^112, on any
 * machine; the sign, extended by the conversion, is cut back to one bit. */
MOE_CLONES static void moe_add_halves(float *restrict out, const uint16_t *restrict weights, int n) {
    for (int e = 0; e < n; e++) {
        const int32_t bits = ((int32_t)(int16_t)weights[e] << 13) & (int32_t)0x8fffffff;
        float value;
        memcpy(&value, &bits, 4);
        out[e] += value * 0x1p112f;
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
