/* The loops behind the chance of use: logistic hazards of coming token intervals, and the online Newton steps that learn their
 * weights. */
#ifndef MOECACHE_HAZARD_H
#define MOECACHE_HAZARD_H

#include <math.h>
#include "_fastmath.h"
#include "_intervals.h"

enum { MOE_FEATURES = 5, MOE_WIDEST_MODEL = MOE_FEATURES + 1 };

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
 * not NULL, is a forecaster's log odds [6, n]; `blend` [6, 3] joins them with those of the counts. `rows` tokens a step
 * are so many chances. */
MOE_CLONES static void moe_hazards(float *restrict hazard, ptrdiff_t stride, const float *restrict x,
                                   const double *restrict weights, const float *restrict outside,
                                   const double *restrict blend, float *restrict work, int n, int rows) {
    for (int i = 0; i < MOE_INTERVALS; i++) {
        float *restrict out = hazard + i * stride;
        const double *restrict t = blend + 3 * i;
        moe_linear(work, weights + i * MOE_WIDEST_MODEL, x, MOE_FEATURES, n);
        if (outside != NULL)
            for (int e = 0; e < n; e++) work[e] = (float)t[0] + (float)t[1] * work[e] + (float)t[2] * outside[i * n + e];
        for (int e = 0; e < n; e++) out[e] = moe_sigmoid(work[e]);
        if (rows > 1)
            for (int e = 0; e < n; e++) out[e] = 1 - powf(1 - out[e], (float)rows);
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
