/* The routing forecaster's loops: float16 weights against a short float32 state. docs/forecaster.md has the formulas. */
#ifndef MOECACHE_FORECAST_H
#define MOECACHE_FORECAST_H

#include "_hazard.h"

/* Rows of weights are padded to whole registers' worth of lanes. */
enum { MOE_HALVES = 16 };
typedef int16_t moe_halves __attribute__((vector_size(2 * MOE_HALVES), aligned(2), may_alias));
typedef int32_t moe_words __attribute__((vector_size(4 * MOE_HALVES)));
typedef float moe_floats __attribute__((vector_size(4 * MOE_HALVES)));
typedef float moe_unaligned __attribute__((vector_size(4 * MOE_HALVES), aligned(4), may_alias));

/* A finite, normal float16 widened by moving its bits is the number divided by 2^112: no instruction set is asked for, and
 * the factor is put into what it is multiplied with. The sign, extended by the conversion, is cut back to one bit. */
#define MOE_HALF_SCALE 0x1p112f
#define MOE_WIDEN(halves) ((moe_floats)((__builtin_convertvector((halves), moe_words) << 13) & (int32_t)0x8fffffff))

/* out[0:n] += sum_j state[j] * weights[j * n : (j + 1) * n]; n a multiple of MOE_HALVES. */
MOE_CLONES static void moe_read(float *restrict out, const uint16_t *restrict weights, const float *restrict state, int r,
                                int n) {
    enum { WIDE = 4 };
    int base = 0;
    for (; base + WIDE * MOE_HALVES <= n; base += WIDE * MOE_HALVES) {
        moe_floats sum[WIDE] = {{0}};
        for (int j = 0; j < r; j++) {
            const float factor = state[j] * MOE_HALF_SCALE;
            const moe_halves *row = (const moe_halves *)(weights + (ptrdiff_t)j * n + base);
            for (int v = 0; v < WIDE; v++) sum[v] += factor * MOE_WIDEN(row[v]);
        }
        for (int v = 0; v < WIDE; v++) *(moe_unaligned *)(out + base + v * MOE_HALVES) += sum[v];
    }
    for (; base < n; base += MOE_HALVES) {
        moe_floats sum = {0};
        for (int j = 0; j < r; j++)
            sum += state[j] * MOE_HALF_SCALE * MOE_WIDEN(*(const moe_halves *)(weights + (ptrdiff_t)j * n + base));
        *(moe_unaligned *)(out + base) += sum;
    }
}

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
