/* Columns of counts added to dot products, for one width of vector registers (_widths.h).
 *
 * A block of 64 entries lies in a column as 16 words of four bytes; byte g of word i is entry 16 g + i of the block
 * (moe_place). Masks and shifts alone then widen bytes to sums of 32 bits in the order of the entries: no shuffles, which
 * cost more than the additions. Written in vector types because the compiler does not keep the sums of a block in
 * registers over all columns by itself. */
typedef uint32_t MOE_VERSION(moe_words) __attribute__((vector_size(MOE_WIDTH), aligned(1), may_alias));
typedef uint16_t MOE_VERSION(moe_halves) __attribute__((vector_size(MOE_WIDTH), may_alias));

/* dots[i] += scale * sum_j weight[j] * column_j[i]. `wide` is 0 when every weight is 1: then sums of 16
 * bits cannot overflow, k being small. The tail may run over `n`, never over the padded store. */
MOE_TARGET static void MOE_VERSION(moe_add_columns)(double *restrict dots, const uint8_t *restrict columns, ptrdiff_t stride,
                                const int32_t *restrict gids, const int32_t *restrict weights, int k, int wide,
                                double scale, ptrdiff_t n) {
    enum { WORDS = MOE_WIDTH / 4, PARTS = MOE_LANES / MOE_WIDTH, GROUP = MOE_LANES / 4 };
    for (ptrdiff_t base = 0; base < n; base += MOE_LANES) {
        int j = 0;
        int32_t left = k ? weights[0] : 0;
        do {
            int32_t lanes[MOE_LANES];
            const int first = j;
            const int32_t first_left = left;
            for (int part = 0; part < PARTS; part++) {
                const uint8_t *restrict at = columns + base + part * MOE_WIDTH;
                MOE_VERSION(moe_words) sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
                if (!wide) {
                    MOE_VERSION(moe_halves) even = {0}, odd = {0};
                    for (j = 0; j < k; j++) {
                        const MOE_VERSION(moe_halves) four =
                            (MOE_VERSION(moe_halves))*(const MOE_VERSION(moe_words) *)(at + (ptrdiff_t)gids[j] * stride);
                        even += four & 0xff;
                        odd += four >> 8;
                    }
                    sum0 = (MOE_VERSION(moe_words))even & 0xffff;
                    sum1 = (MOE_VERSION(moe_words))odd & 0xffff;
                    sum2 = (MOE_VERSION(moe_words))even >> 16;
                    sum3 = (MOE_VERSION(moe_words))odd >> 16;
                } else {
                    /* As many tokens at a time as 31 bits hold. */
                    j = first;
                    left = first_left;
                    for (int32_t budget = INT32_MAX / 255; j < k && budget;) {
                        const int32_t weight = left < budget ? left : budget;
                        const MOE_VERSION(moe_words) four =
                            *(const MOE_VERSION(moe_words) *)(at + (ptrdiff_t)gids[j] * stride);
                        sum0 += (four & 0xff) * (uint32_t)weight;
                        sum1 += (four >> 8 & 0xff) * (uint32_t)weight;
                        sum2 += (four >> 16 & 0xff) * (uint32_t)weight;
                        sum3 += (four >> 24) * (uint32_t)weight;
                        budget -= weight;
                        left -= weight;
                        if (left == 0 && ++j < k) left = weights[j];
                    }
                }
                memcpy(lanes + part * WORDS, &sum0, sizeof sum0);
                memcpy(lanes + part * WORDS + GROUP, &sum1, sizeof sum1);
                memcpy(lanes + part * WORDS + 2 * GROUP, &sum2, sizeof sum2);
                memcpy(lanes + part * WORDS + 3 * GROUP, &sum3, sizeof sum3);
            }
            for (int i = 0; i < MOE_LANES; i++) dots[base + i] += scale * lanes[i];
        } while (j < k);
    }
}
