/* The loops over all stored requests: columns of counts added to dot products, and the entries that come close to the best. */
#ifndef MOECACHE_MATCH_H
#define MOECACHE_MATCH_H

#include "_simd.h"

/* Where in its column the byte of an entry lies (_columns.h says why). */
static inline ptrdiff_t moe_place(ptrdiff_t entry) {
    const ptrdiff_t lane = entry % MOE_LANES;
    return entry - lane + 4 * (lane % (MOE_LANES / 4)) + lane / (MOE_LANES / 4);
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "columns are read as little-endian words"
#endif

#define MOE_LOOPS "_columns.h"
#include "_widths.h"

/* As many columns are read side by side as the memory prefetcher follows. */
#define MOE_ABREAST 8

static void moe_add_columns(double *dots, const uint8_t *columns, ptrdiff_t stride, const int32_t *gids,
                            const int32_t *weights, int k, int wide, double scale, ptrdiff_t n) {
    for (int j = 0; j < k; j += MOE_ABREAST) {
        const int m = k - j < MOE_ABREAST ? k - j : MOE_ABREAST;
        MOE_WIDEST(moe_add_columns, dots, columns, stride, gids + j, weights + j, m, wide, scale, n);
    }
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

#endif
