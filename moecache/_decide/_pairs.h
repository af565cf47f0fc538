/* The loops over pairs of experts that followed one another. */
#ifndef MOECACHE_PAIRS_H
#define MOECACHE_PAIRS_H

#include "_fastmath.h"

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

/* Chance of each expert of a layer from what it followed: the odds of its own chance `use` times the lift to a power, and
 * from `sure` on at least the mean of the transitions. `table` and `origins` as in moe_lift. */
MOE_CLONES static void moe_chances_after(float *restrict out, const float *restrict use, const double *restrict lift,
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

#endif
