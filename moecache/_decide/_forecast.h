/* The routing forecaster's loops: int8 and float16 weights against a short float32 state. docs/forecaster.md has the formulas. */
#ifndef MOECACHE_FORECAST_H
#define MOECACHE_FORECAST_H

#include "_fastmath.h"
#ifdef MOE_X86
#include <immintrin.h>
#endif

/* Rows of weights are padded to whole registers' worth of lanes. */
enum { MOE_PADDED = 16 };

#define MOE_LOOPS "_read.h"
#include "_widths.h"

static void moe_read(float *restrict out, const int8_t *restrict weights, const float *restrict scale,
                     const float *restrict state, int r, int n) {
    MOE_WIDEST(moe_read, out, weights, scale, state, r, n);
}

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
