/* FP8 values times the scale of their block. */
#ifndef MOECACHE_FP8_H
#define MOECACHE_FP8_H

#include "_round.h"

enum { FP8_COLS, FP8_BLOCK_ROWS, FP8_BLOCK_COLS, FP8_SCALE, FP8_OUT };
enum { FP8_SCALE_F32, FP8_SCALE_BF16, FP8_SCALE_BYTE };
/* Of a block from here on, all 256 products are made once and looked up, so many blocks abreast: rows are then read and
 * written in runs of many blocks, not with the distance of rows, which is often a power of two and bad for caches. */
enum { FP8_LARGE_BLOCK = 1024, FP8_ABREAST = 32 };

MOE_INLINE float moe_fp8_scale(const unsigned char *at, int kind, const float *powers) {
    float scale;
    uint16_t half;
    if (kind == FP8_SCALE_BYTE) return powers[*at];
    if (kind == FP8_SCALE_F32) {
        memcpy(&scale, at, 4);
        return scale;
    }
    memcpy(&half, at, 2);
    return moe_float((uint32_t)half << 16);
}

/* Four values a store: a loop of single ones is as slow as its stores. */
MOE_INLINE void moe_fp8_look_up(uint16_t *out, const unsigned char *at, ptrdiff_t n, const uint16_t *products) {
    ptrdiff_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const uint16_t four[4] = {products[at[i]], products[at[i + 1]], products[at[i + 2]], products[at[i + 3]]};
        memcpy(out + i, four, 8);
    }
    for (; i < n; i++) out[i] = products[at[i]];
}

MOE_INLINE void moe_fp8_look_up_wide(float *out, const unsigned char *at, ptrdiff_t n, const float *products) {
    for (ptrdiff_t i = 0; i < n; i++) out[i] = products[at[i]];
}

#define MOE_SAME(value) (value)

/* Some blocks side by side, `wide` columns each but for the last; `n` columns in all. */
#define MOE_FP8_BLOCKS(name, type, store, look_up)                                                           \
    MOE_CLONES static void name##_products(type *restrict to, const float *restrict values, float scale) {  \
        for (int i = 0; i < 256; i++) to[i] = store(values[i] * scale);                                      \
    }                                                                                                        \
    static void name(type *out, const unsigned char *at, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t wide,        \
                     ptrdiff_t cols, const float *values, const float *scales) {                             \
        type products[FP8_ABREAST][256];                                                                     \
        const int large = rows * wide >= FP8_LARGE_BLOCK;                                                    \
        for (ptrdiff_t k = 0; large && k * wide < n; k++) name##_products(products[k], values, scales[k]);   \
        for (ptrdiff_t row = 0; row < rows; row++, out += cols, at += cols)                                  \
            for (ptrdiff_t k = 0, col = 0; col < n; k++, col += wide) {                                      \
                const ptrdiff_t m = n - col < wide ? n - col : wide;                                         \
                if (large) look_up(out + col, at + col, m, products[k]);                                     \
                else                                                                                         \
                    for (ptrdiff_t i = col; i < col + m; i++) out[i] = store(values[at[i]] * scales[k]);     \
            }                                                                                                \
    }

MOE_FP8_BLOCKS(moe_fp8_bf16, uint16_t, moe_to_bf16, moe_fp8_look_up)
MOE_FP8_BLOCKS(moe_fp8_f16, uint16_t, moe_to_f16, moe_fp8_look_up)
MOE_FP8_BLOCKS(moe_fp8_f32, float, MOE_SAME, moe_fp8_look_up_wide)

/* The table holds what each value, and then what each scale of one byte stands for, as float32. */
static void moe_fp8(const unsigned char **streams, const int64_t *numbers, const unsigned char *table, int64_t first,
                    int64_t rows, unsigned char *out) {
    const int64_t cols = numbers[FP8_COLS], high = numbers[FP8_BLOCK_ROWS], wide = numbers[FP8_BLOCK_COLS];
    const int64_t across = (cols + wide - 1) / wide, end = first + rows;
    const int kind = (int)numbers[FP8_SCALE], scale_nbytes = kind == FP8_SCALE_F32 ? 4 : kind == FP8_SCALE_BF16 ? 2 : 1;
    const float *values = (const float *)table;
    float scales[FP8_ABREAST];
    for (int64_t row = first, next; row < end; row = next) {
        next = (row / high + 1) * high < end ? (row / high + 1) * high : end;
        const unsigned char *of_rows = streams[1] + (row / high - first / high) * across * scale_nbytes;
        for (int64_t block = 0; block < across; block += FP8_ABREAST) {
            const int64_t col = block * wide, place = row * cols + col, m = next - row;
            const int64_t n = cols - col < FP8_ABREAST * wide ? cols - col : FP8_ABREAST * wide;
            const unsigned char *at = streams[0] + (row - first) * cols + col;
            for (int64_t k = 0; k < FP8_ABREAST && block + k < across; k++)
                scales[k] = moe_fp8_scale(of_rows + (block + k) * scale_nbytes, kind, values + 256);
            if (numbers[FP8_OUT] == MOE_BF16) moe_fp8_bf16((uint16_t *)out + place, at, m, n, wide, cols, values, scales);
            else if (numbers[FP8_OUT] == MOE_F16) moe_fp8_f16((uint16_t *)out + place, at, m, n, wide, cols, values, scales);
            else moe_fp8_f32((float *)out + place, at, m, n, wide, cols, values, scales);
        }
    }
}

#endif
