/* The loops behind the choice of victims: hazards of several requests joined, the reuse time that ranks experts by them, and the
 * blocks of slots in which the largest stand. */
#ifndef MOECACHE_RANK_H
#define MOECACHE_RANK_H

#include "_intervals.h"
#include "_simd.h"

/* hazard = 1 - (1 - hazard)(1 - other): one of two requests uses it. */
MOE_CLONES static void moe_join(float *restrict hazard, ptrdiff_t stride, const float *restrict other,
                                ptrdiff_t other_stride, int n) {
    for (int i = 0; i < MOE_INTERVALS; i++)
        for (int e = 0; e < n; e++)
            hazard[i * stride + e] = 1 - (1 - hazard[i * stride + e]) * (1 - other[i * other_stride + e]);
}

/* reuse_time[e]: layer steps beyond the layer's next visit until the expert is worth its slot: L (1 / index - 1), the index
 * being the best rate of uses per token that keeping it up to the end of some interval promises (Gittins). From one
 * constant chance p the index is p. */
MOE_CLONES static void moe_reuse_time(float *restrict reuse_time, const float *restrict hazard, ptrdiff_t stride, int n, float layers) {
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
            reuse_time[base + e] = layers * (1 / most - 1);
        }
    }
}

/* best[b] = the largest reuse_time[i] + layer steps from `now` to the next visit of layer[i], 1..layers, in block b of 64 slots;
 * returns how many blocks. Non-negative floats order as their bit patterns do, and an integer maximum vectorises without
 * licence to reorder float arithmetic. */
MOE_CLONES static ptrdiff_t moe_latest(float *restrict best, const float *restrict reuse_time, const int32_t *restrict layer,
                                       ptrdiff_t n, int32_t now, int32_t layers) {
    ptrdiff_t blocks = 0;
    for (ptrdiff_t base = 0; base < n; base += MOE_LANES, blocks++) {
        const int m = (int)(n - base < MOE_LANES ? n - base : MOE_LANES);
        int32_t bits[MOE_LANES], top = 0;
        float scores[MOE_LANES];
        for (int i = 0; i < m; i++) {
            const int32_t ahead = layer[base + i] - now;
            scores[i] = reuse_time[base + i] + (float)(ahead > 0 ? ahead : ahead + layers);
        }
        memcpy(bits, scores, sizeof(int32_t) * (size_t)m);
        for (int i = 0; i < m; i++) top = bits[i] > top ? bits[i] : top;
        memcpy(&best[blocks], &top, sizeof top);
    }
    return blocks;
}

#endif
