/* The loops worth wide registers: two over all stored requests, one over all experts of a layer. Compiled once per instruction set and chosen at load time,
 * so that one wheel is fast on AVX-512, AVX2 and plain machines alike. */
#ifndef MOECACHE_MATCH_H
#define MOECACHE_MATCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(MOE_PLAIN) && defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MOE_X86
#endif
/* Which clone runs is a matter of the dynamic linker, and musl's knows nothing of it. */
#if defined(MOE_X86) && defined(__GLIBC__)
#define MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOE_CLONES
#endif

/* Entries a column is read in at a time; columns are padded to a multiple. */
#define MOE_LANES 64

/* Where in its column the byte of an entry lies (_columns.h says why). */
static inline ptrdiff_t moe_place(ptrdiff_t entry) {
    const ptrdiff_t lane = entry % MOE_LANES;
    return entry - lane + 4 * (lane % (MOE_LANES / 4)) + lane / (MOE_LANES / 4);
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "columns are read as little-endian words"
#endif

#ifdef MOE_X86
/* Not target_clones, which give all versions one width and lower its vectors before they know their registers: they then
 * live in memory, and the version for 256 bits takes 1.7 times as long. */
#define MOE_NAME moe_add_columns_512
#define MOE_TARGET __attribute__((target("arch=x86-64-v4")))
#define MOE_WIDTH 64
#define MOE_VECTOR(name) moe_##name##_512
#include "_columns.h"

#define MOE_NAME moe_add_columns_256
#define MOE_TARGET __attribute__((target("arch=x86-64-v3")))
#define MOE_WIDTH 32
#define MOE_VECTOR(name) moe_##name##_256
#include "_columns.h"
#endif

#define MOE_NAME moe_add_columns_plain
#define MOE_TARGET
#define MOE_WIDTH 32
#define MOE_VECTOR(name) moe_##name##_plain
#include "_columns.h"

/* As many columns are read side by side as the memory prefetcher follows. */
#define MOE_ABREAST 8

static void moe_add_columns(double *dots, const uint8_t *columns, ptrdiff_t stride, const int32_t *gids,
                            const int32_t *weights, int k, int wide, double scale, ptrdiff_t n) {
    for (int j = 0; j < k; j += MOE_ABREAST) {
        const int m = k - j < MOE_ABREAST ? k - j : MOE_ABREAST;
#ifdef MOE_X86
        if (__builtin_cpu_supports("x86-64-v4")) {
            moe_add_columns_512(dots, columns, stride, gids + j, weights + j, m, wide, scale, n);
            continue;
        }
        if (__builtin_cpu_supports("x86-64-v3")) {
            moe_add_columns_256(dots, columns, stride, gids + j, weights + j, m, wide, scale, n);
            continue;
        }
#endif
        moe_add_columns_plain(dots, columns, stride, gids + j, weights + j, m, wide, scale, n);
    }
}

/* best[b] = the largest wait[i] + layer steps from `now` to the next visit of layer[i], 1..layers, in block b of 64 slots;
 * returns how many blocks. Non-negative floats order as their bit patterns do, and an integer maximum vectorises without
 * licence to reorder float arithmetic. */
MOE_CLONES static ptrdiff_t moe_latest(float *restrict best, const float *restrict wait, const int32_t *restrict layer,
                                       ptrdiff_t n, int32_t now, int32_t layers) {
    ptrdiff_t blocks = 0;
    for (ptrdiff_t base = 0; base < n; base += MOE_LANES, blocks++) {
        const int m = (int)(n - base < MOE_LANES ? n - base : MOE_LANES);
        int32_t bits[MOE_LANES], top = 0;
        float scores[MOE_LANES];
        for (int i = 0; i < m; i++) {
            const int32_t ahead = layer[base + i] - now;
            scores[i] = wait[base + i] + (float)(ahead > 0 ? ahead : ahead + layers);
        }
        memcpy(bits, scores, sizeof(int32_t) * (size_t)m);
        for (int i = 0; i < m; i++) top = bits[i] > top ? bits[i] : top;
        memcpy(&best[blocks], &top, sizeof top);
    }
    return blocks;
}

/* Entries of dots[i] * inverse_norm[i] >= least (above zero, so that the padding never is one), ascending; returns how
 * many. */
MOE_CLONES static ptrdiff_t moe_reaching(int32_t *restrict entries, const double *restrict dots,
                                         const float *restrict inverse_norm, ptrdiff_t n, float least) {
    ptrdiff_t found = 0;
    for (ptrdiff_t base = 0; base < n; base += MOE_LANES) {
        int32_t any = 0;
        for (int i = 0; i < MOE_LANES; i++) any |= -((float)dots[base + i] * inverse_norm[base + i] >= least);
        if (!any) continue;
        for (int i = 0; i < MOE_LANES; i++) {
            entries[found] = (int32_t)(base + i);
            found += (float)dots[base + i] * inverse_norm[base + i] >= least;
        }
    }
    return found;
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

#endif
