/* The loops behind the chance of use: logistic hazards of coming token intervals, the index that ranks victims by them,
 * and the online Newton steps that learn their weights. Compiled once per instruction set, as _match.h is. */
#ifndef MOECACHE_HAZARD_H
#define MOECACHE_HAZARD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include "_match.h"

/* Token intervals after a layer's visit: (0, 1], (1, 2], (2, 4], ... (16, 32]. */
enum { MOE_INTERVALS = 6, MOE_FEATURES = 5, MOE_HORIZON = 32, MOE_WIDEST_MODEL = MOE_FEATURES + 1 };
static const int moe_edge[MOE_INTERVALS + 1] = {0, 1, 2, 4, 8, 16, 32};

#define MOE_INLINE static inline __attribute__((always_inline))

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

/* out[f * n + e]: what is known of each expert, as log odds (the lift: its logarithm). Bounded, whatever was routed. */
MOE_CLONES static void moe_features(float *restrict out, const float *restrict slow, const float *restrict fast,
                                    const float *restrict prior, const double *restrict lift,
                                    const float *restrict matched, int n) {
    for (int e = 0; e < n; e++) {
        out[e] = moe_logit(slow[e]);
        out[n + e] = moe_logit(fast[e]);
        out[2 * n + e] = moe_logit(prior[e]);
        out[3 * n + e] = moe_log(moe_clamp((float)lift[e], 3e-4f, 3e3f));
        out[4 * n + e] = moe_logit(matched[e]);
    }
}

/* z = w[0] + sum_f w[f + 1] x[f]. */
MOE_INLINE void moe_linear(float *restrict z, const double *restrict w, const float *restrict x, int f, int n) {
    for (int e = 0; e < n; e++) z[e] = (float)w[0];
    for (int i = 0; i < f; i++) {
        const float v = (float)w[i + 1];
        for (int e = 0; e < n; e++) z[e] += v * x[(ptrdiff_t)i * n + e];
    }
}

/* hazard[i * stride + e]: chance that expert e is used within interval i, given that it was not before. `outside`, where
 * not NULL, is somebody else's log odds [6, n]; `trust` [6, 3] joins them with those of the counts. `rows` tokens a step
 * are so many chances. */
MOE_CLONES static void moe_hazards(float *restrict hazard, ptrdiff_t stride, const float *restrict x,
                                   const double *restrict weights, const float *restrict outside,
                                   const double *restrict trust, float *restrict work, int n, int rows) {
    for (int i = 0; i < MOE_INTERVALS; i++) {
        float *restrict out = hazard + i * stride;
        const double *restrict t = trust + 3 * i;
        moe_linear(work, weights + i * MOE_WIDEST_MODEL, x, MOE_FEATURES, n);
        if (outside != NULL)
            for (int e = 0; e < n; e++) work[e] = (float)t[0] + (float)t[1] * work[e] + (float)t[2] * outside[i * n + e];
        for (int e = 0; e < n; e++) out[e] = moe_sigmoid(work[e]);
        if (rows > 1)
            for (int e = 0; e < n; e++) out[e] = 1 - powf(1 - out[e], (float)rows);
    }
}

/* Chance of each expert of a layer from what it followed: the odds of its own chance `use` times the lift to a power, and
 * from `sure` on at least the mean of the transitions. `table` and `origins` as in moe_lift. */
MOE_CLONES static void moe_follow(float *restrict out, const float *restrict use, const double *restrict lift,
                                  const int32_t *restrict table, const int32_t *restrict origins, int width,
                                  const int32_t *restrict experts, int n, float prior, float power, float sure) {
    for (int e = 0; e < width; e++) out[e] = 0;
    for (int i = 0; i < n; i++) {
        const int32_t *restrict row = table + (ptrdiff_t)experts[i] * width;
        const float scale = 1 / ((float)origins[experts[i]] + prior) / (float)n;
        for (int e = 0; e < width; e++) out[e] += scale * ((float)row[e] + prior * use[e]);
    }
    for (int e = 0; e < width; e++) {
        const float bounded = moe_clamp((float)lift[e], 1e-15f, 1e15f);
        const float odds = use[e] / (1.0001f - use[e]) * moe_exp(power * moe_log(bounded));
        const float chance = odds / (1 + odds), mean = out[e] < sure ? 0 : out[e];
        out[e] = chance > mean ? chance : mean;
    }
}

/* hazard = 1 - (1 - hazard)(1 - other): one of two requests uses it. */
MOE_CLONES static void moe_join(float *restrict hazard, ptrdiff_t stride, const float *restrict other,
                                ptrdiff_t other_stride, int n) {
    for (int i = 0; i < MOE_INTERVALS; i++)
        for (int e = 0; e < n; e++)
            hazard[i * stride + e] = 1 - (1 - hazard[i * stride + e]) * (1 - other[i * other_stride + e]);
}

/* wait[e]: layer steps beyond the layer's next visit until the expert is worth its slot: L (1 / index - 1), the index
 * being the best rate of uses per token that keeping it up to the end of some interval promises (Gittins). From one
 * constant chance p the index is p. */
MOE_CLONES static void moe_wait(float *restrict wait, const float *restrict hazard, ptrdiff_t stride, int n, float layers) {
    enum { BLOCK = 64 };
    for (int base = 0; base < n; base += BLOCK) {
        const int m = n - base < BLOCK ? n - base : BLOCK;
        float alive[BLOCK], tokens[BLOCK], index[BLOCK];
        for (int e = 0; e < m; e++) alive[e] = 1, tokens[e] = 0, index[e] = 1e-5f;
        for (int i = 0; i < MOE_INTERVALS; i++) {
            const float length = (float)(moe_edge[i + 1] - moe_edge[i]);
            const float *restrict h = hazard + i * stride + base;
            for (int e = 0; e < m; e++) {
                tokens[e] += alive[e] * (length * (1 - h[e]) + h[e] * (length + 1) / 2);
                alive[e] *= 1 - h[e];
                const float rate = (1 - alive[e]) / tokens[e];
                index[e] = rate > index[e] ? rate : index[e];
            }
        }
        /* Rounding may leave an index just above 1. */
        for (int e = 0; e < m; e++) {
            const float most = index[e] < 1 ? index[e] : 1;
            wait[base + e] = layers * (1 / most - 1);
        }
    }
}

/* Cholesky solution of (A + I) s = g in place of g, for a symmetric positive semidefinite A [f, f]. */
static void moe_solve(const double *A, double *g, int f) {
    double L[MOE_WIDEST_MODEL][MOE_WIDEST_MODEL];
    for (int i = 0; i < f; i++) {
        for (int j = 0; j <= i; j++) {
            double sum = A[i * f + j] + (i == j);
            for (int k = 0; k < j; k++) sum -= L[i][k] * L[j][k];
            L[i][j] = i == j ? sqrt(sum > 1e-9 ? sum : 1e-9) : sum / L[j][j];
        }
    }
    for (int i = 0; i < f; i++) {
        for (int k = 0; k < i; k++) g[i] -= L[i][k] * g[k];
        g[i] /= L[i][i];
    }
    for (int i = f - 1; i >= 0; i--) {
        for (int k = i + 1; k < f; k++) g[i] -= L[k][i] * g[k];
        g[i] /= L[i][i];
    }
}

/* Experts whose sums are taken at a time, and partial sums that a register holds. */
enum { MOE_BATCH = 64, MOE_PARTIAL = 16 };

MOE_INLINE double moe_dot(const float *restrict a, const float *restrict b) {
    float part[MOE_PARTIAL] = {0};
    double sum = 0;
    for (int e = 0; e < MOE_BATCH; e += MOE_PARTIAL)
        for (int i = 0; i < MOE_PARTIAL; i++) part[i] += a[e + i] * b[e + i];
    for (int i = 0; i < MOE_PARTIAL; i++) sum += part[i];
    return sum;
}

/* Adds up gradient g [f + 1] and curvature A [f + 1, f + 1] (lower triangle) of a logistic model's cross-entropy: see
 * moe_learn. */
MOE_CLONES static void moe_gradient(double *restrict g, double *restrict A, const double *restrict w,
                                    const float *restrict x, const uint8_t *restrict first, int n, int low, int high,
                                    int f) {
    float row[MOE_WIDEST_MODEL][MOE_BATCH], error[MOE_BATCH], curvature[MOE_BATCH], weighted[MOE_BATCH];
    for (int base = 0; base < n; base += MOE_BATCH) {
        const int m = n - base < MOE_BATCH ? n - base : MOE_BATCH;
        memset(row, 0, sizeof row);
        memset(weighted, 0, sizeof weighted);
        for (int e = 0; e < m; e++) row[0][e] = 1;
        for (int i = 0; i < f; i++) memcpy(row[i + 1], x + (ptrdiff_t)i * n + base, sizeof(float) * (size_t)m);
        for (int i = 0; i <= f; i++)
            for (int e = 0; e < MOE_BATCH; e++) weighted[e] += (float)w[i] * row[i][e];
        for (int e = 0; e < MOE_BATCH; e++) {
            const float p = moe_sigmoid(weighted[e]);
            error[e] = p;
            curvature[e] = p * (1 - p);
        }
        for (int e = 0; e < m; e++) {
            const int used = first[base + e], asked = used == 0 || used > low;
            error[e] = asked ? error[e] - (used > low && used <= high) : 0;
            curvature[e] = asked ? curvature[e] : 0;
        }
        for (int e = m; e < MOE_BATCH; e++) error[e] = curvature[e] = 0;
        for (int i = 0; i <= f; i++) {
            g[i] += moe_dot(error, row[i]);
            for (int e = 0; e < MOE_BATCH; e++) weighted[e] = curvature[e] * row[i][e];
            for (int j = 0; j <= i; j++) A[i * (f + 1) + j] += moe_dot(weighted, row[j]);
        }
    }
}

/* One online Newton step of a logistic model on n experts of which those used first in (low, high] visits are the
 * positives and those used before are out. w [f + 1], A [f + 1, f + 1], x [f, n], first [n] (0: not used yet). Older
 * curvature fades by `decay`. Steps and weights are bounded: whatever is routed, they stay finite. */
static void moe_learn(double *w, double *A, const float *x, const uint8_t *first, int n, int low, int high, int f,
                      double decay) {
    double g[MOE_WIDEST_MODEL] = {0};
    const int width = f + 1;
    for (int i = 0; i < width * width; i++) A[i] *= decay;
    moe_gradient(g, A, w, x, first, n, low, high, f);
    moe_solve(A, g, width);
    for (int i = 0; i < width; i++) {
        const double step = g[i] < -0.5 ? -0.5 : g[i] > 0.5 ? 0.5 : g[i], next = w[i] - step;
        w[i] = next < -10 ? -10 : next > 10 ? 10 : next;
    }
}

#endif
