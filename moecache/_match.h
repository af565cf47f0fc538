/* The loops worth wide registers: two over all stored requests, one over all experts of a layer. Compiled once per instruction set and chosen at load time,
 * so that one wheel is fast on AVX-512, AVX2 and plain machines alike. */
#ifndef MOECACHE_MATCH_H
#define MOECACHE_MATCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOE_CLONES
#endif

/* Entries a column is read in at a time; columns are padded to a multiple. The sums of one such block stay in registers
 * over all k columns, which the compiler does not find out by itself: hence the vector types. */
#define MOE_LANES 64
typedef uint8_t moe_bytes __attribute__((vector_size(MOE_LANES), aligned(1), may_alias));
typedef uint16_t moe_shorts __attribute__((vector_size(2 * MOE_LANES)));

/* dots[i] += sum_j weight[j] * column_j[i], exact in integers. `wide` is 0 when every weight is 1 and k <= 257:
 * then a 16-bit partial sum cannot overflow. The tail may run over `n`, never over the padded store. */
MOE_CLONES static void moe_add_columns(int64_t *restrict dots, const uint8_t *restrict columns, ptrdiff_t stride,
                                       const int32_t *restrict gids, const int32_t *restrict weights, int k, int wide,
                                       ptrdiff_t n) {
    for (ptrdiff_t base = 0; base < n; base += MOE_LANES) {
        int64_t *restrict out = dots + base;
        if (!wide) {
            moe_shorts sum = {0};
            uint16_t lanes[MOE_LANES];
            for (int j = 0; j < k; j++) {
                const moe_bytes column = *(const moe_bytes *)(columns + (ptrdiff_t)gids[j] * stride + base);
                sum += __builtin_convertvector(column, moe_shorts);
            }
            memcpy(lanes, &sum, sizeof lanes);
            for (int i = 0; i < MOE_LANES; i++) out[i] += lanes[i];
        } else {
            for (int j = 0; j < k; j++) {
                const uint8_t *restrict column = columns + (ptrdiff_t)gids[j] * stride + base;
                const int64_t weight = weights[j];
                for (int i = 0; i < MOE_LANES; i++) out[i] += weight * column[i];
            }
        }
    }
}

/* Index of the largest dots[i] * inverse_norm[i], the lowest on ties; -1 when none is above zero. Non-negative floats
 * order as their bit patterns do, and an integer maximum vectorises without licence to reorder float arithmetic. */
MOE_CLONES static ptrdiff_t moe_best(const int64_t *restrict dots, const float *restrict inverse_norm, ptrdiff_t n,
                                     float *value) {
    enum { BLOCK = 8 * MOE_LANES };
    ptrdiff_t best = -1;
    int32_t best_bits = 0;
    for (ptrdiff_t base = 0; base < n; base += BLOCK) {
        const int m = (int)(n - base < BLOCK ? n - base : BLOCK);
        int32_t bits[BLOCK];
        float scores[BLOCK];
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

/* out[e] = product over the `n` given experts i of P(e | i) / P(e): how much more often than usual e followed each.
 * table[i * width + e] counts e after i, origins[i] how often i was followed at all, targets[e] how often e was an
 * origin itself, that is used, by tokens of k experts. Few observations are pulled to the usual by `prior` more. */
MOE_CLONES static void moe_lift(double *restrict out, double *restrict rarity, const int32_t *restrict table,
                                const int32_t *restrict origins, const int32_t *restrict targets, int width,
                                const int32_t *restrict experts, int n, int k, double prior) {
    double tokens = 0;
    for (int e = 0; e < width; e++) tokens += targets[e];
    tokens = tokens / k + 1;
    const double unseen = (double)k / width;
    for (int e = 0; e < width; e++) {
        rarity[e] = tokens / (targets[e] + unseen);
        out[e] = 1;
    }
    for (int i = 0; i < n; i++) {
        if (experts[i] < 0) continue;
        const int32_t *restrict row = table + (ptrdiff_t)experts[i] * width;
        const double scale = 1 / (origins[experts[i]] + prior);
        for (int e = 0; e < width; e++) out[e] *= (row[e] * rarity[e] + prior) * scale;
    }
}

/* The float fourth root of each. */
MOE_CLONES static void moe_fourth_root(float *restrict out, const double *restrict in, int n) {
    for (int e = 0; e < n; e++) out[e] = (float)__builtin_sqrt(__builtin_sqrt(in[e]));
}

/* Chance that a request's next step uses each expert: its decayed frequencies and the prior, weighted, as odds times its
 * surge. 1 - (1 - p)^rows for `rows` tokens a step. */
MOE_CLONES static void moe_chance(float *restrict out, const float *restrict fast, const float *restrict slow,
                                  const float *restrict prior, const float *restrict surge, int n, float weight_fast,
                                  float weight_slow, float weight_prior, float least, int rows) {
    for (int e = 0; e < n; e++) {
        float p = weight_fast * fast[e] + weight_slow * slow[e] + weight_prior * prior[e] + least;
        p = p < 0.9999f ? p : 0.9999f;
        out[e] = p * surge[e] / (1 - p + p * surge[e]);
    }
    if (rows > 1)
        for (int e = 0; e < n; e++) out[e] = 1 - __builtin_powf(1 - out[e], (float)rows);
}

/* use = 1 - (1 - use)(1 - chance): somebody uses it. */
MOE_CLONES static void moe_join(float *restrict use, const float *restrict chance, int n) {
    for (int e = 0; e < n; e++) use[e] = 1 - (1 - use[e]) * (1 - chance[e]);
}

/* Layer steps to expect before the layer's visit that uses it, beyond its next one: visits are independent, one in
 * 1 / use. */
MOE_CLONES static void moe_wait(float *restrict wait, const float *restrict use, int n, float layers) {
    for (int e = 0; e < n; e++) wait[e] = layers * (1 / use[e] - 1);
}

#endif
