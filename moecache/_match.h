/* The two loops that touch every stored request. Compiled once per instruction set and chosen at load time,
 * so that one wheel is fast on AVX-512, AVX2 and plain machines alike. */
#ifndef MOECACHE_MATCH_H
#define MOECACHE_MATCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOE_CLONES
#endif

#define MOE_BLOCK 512

/* dots[i] += sum_j weight[j] * column_j[i], exact in integers. `wide` is 0 when every weight is 1 and k <= 256:
 * then a 16-bit partial sum cannot overflow and twice the lanes fit a register. */
MOE_CLONES static void moe_add_columns(int64_t *restrict dots, const uint8_t *restrict columns, ptrdiff_t stride,
                                       const int32_t *restrict gids, const int32_t *restrict weights, int k, int wide,
                                       ptrdiff_t n) {
    for (ptrdiff_t base = 0; base < n; base += MOE_BLOCK) {
        /* Columns are padded to a whole number of blocks of 64, so the tail may run over `n`, never over the store. */
        const int m = (int)(n - base < MOE_BLOCK ? (n - base + 63) / 64 * 64 : MOE_BLOCK);
        int64_t *restrict out = dots + base;
        if (!wide) {
            uint16_t sum[MOE_BLOCK];
            memset(sum, 0, sizeof(uint16_t) * (size_t)m);
            for (int j = 0; j < k; j++) {
                const uint8_t *restrict column = columns + (ptrdiff_t)gids[j] * stride + base;
                for (int i = 0; i < m; i++) sum[i] = (uint16_t)(sum[i] + column[i]);
            }
            for (int i = 0; i < m; i++) out[i] += sum[i];
        } else {
            for (int j = 0; j < k; j++) {
                const uint8_t *restrict column = columns + (ptrdiff_t)gids[j] * stride + base;
                const int64_t w = weights[j];
                for (int i = 0; i < m; i++) out[i] += w * column[i];
            }
        }
    }
}

/* Index of the largest dots[i] * inverse_norm[i], the lowest on ties; -1 when none is above zero. Non-negative floats
 * order as their bit patterns do, and an integer maximum vectorises without licence to reorder float arithmetic. */
MOE_CLONES static ptrdiff_t moe_best(const int64_t *restrict dots, const float *restrict inverse_norm, ptrdiff_t n,
                                     float *value) {
    ptrdiff_t best = -1;
    int32_t best_bits = 0;
    for (ptrdiff_t base = 0; base < n; base += MOE_BLOCK) {
        const int m = (int)(n - base < MOE_BLOCK ? n - base : MOE_BLOCK);
        int32_t bits[MOE_BLOCK];
        float scores[MOE_BLOCK];
        int32_t top = 0;
        for (int i = 0; i < m; i++) scores[i] = (float)dots[base + i] * inverse_norm[base + i];
        memcpy(bits, scores, sizeof(int32_t) * (size_t)m);
        for (int i = 0; i < m; i++) top = bits[i] > top ? bits[i] : top;
        if (top > best_bits) {
            best_bits = top;
            for (int i = 0; i < m; i++)
                if (bits[i] == top) { best = base + i; break; }
        }
    }
    memcpy(value, &best_bits, sizeof(float));
    return best;
}

#endif
