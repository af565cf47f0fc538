/* MXFP4: 32 values of four bits and a scale; decoded into columns, as the classes that compute with it hold their weights.
 *
 * A table made by torch holds the sixteen values of every scale, so that the bits are torch's own. */
#ifndef MOECACHE_MXFP4_H
#define MOECACHE_MXFP4_H

#include "_simd.h"

/* Scales from LOW to HIGH add their exponent, SHIFT bits up, to a value's own without leaving the dtype's normal numbers. */
enum { MXFP4_COLS, MXFP4_ROWS, MXFP4_ITEM, MXFP4_SHIFT, MXFP4_LOW, MXFP4_HIGH };
/* Rows and columns of a tile that is decoded and turned: a cache line of the result, and one of the packed bytes. */
enum { MXFP4_TILE_ROWS = 32, MXFP4_TILE_COLS = 128, MXFP4_BLOCK = 32, MXFP4_ONE = 127 };

typedef unsigned char moe_bytes16 __attribute__((vector_size(16)));
typedef uint16_t moe_halves8 __attribute__((vector_size(16)));

#define MOE_LOOPS "_mxfp4_tile.h"
#include "_widths.h"

/* Any scale, any number of rows. */
#define MOE_MXFP4_BLOCK(type)                                                                                   \
    static void moe_mxfp4_block_##type(type *out, int64_t stride, const unsigned char *blocks, const unsigned char *scales, \
                                       int64_t groups, int64_t rows, const type *table) {                       \
        type turned[MXFP4_BLOCK][MXFP4_TILE_ROWS];                                                              \
        for (int64_t i = 0; i < rows; i++) {                                                                    \
            const unsigned char *at = blocks + 16 * i * groups;                                                 \
            const type *values = table + 16 * scales[i * groups];                                               \
            for (int j = 0; j < MXFP4_BLOCK / 2; j++) {                                                         \
                turned[2 * j][i] = values[at[j] & 15];                                                          \
                turned[2 * j + 1][i] = values[at[j] >> 4];                                                      \
            }                                                                                                   \
        }                                                                                                       \
        for (int j = 0; j < MXFP4_BLOCK; j++) memcpy(out + j * stride, turned[j], (size_t)rows * sizeof(type)); \
    }
MOE_MXFP4_BLOCK(uint16_t)
MOE_MXFP4_BLOCK(uint32_t)

static void moe_mxfp4_half(uint16_t *out, const int64_t *numbers, const unsigned char *blocks, const unsigned char *scales,
                           int64_t rows, const uint16_t *table, const moe_bytes16 *planes) {
    const int64_t groups = numbers[MXFP4_COLS] / MXFP4_BLOCK, stride = numbers[MXFP4_ROWS];
    uint16_t added[MXFP4_TILE_ROWS];
    int within = rows == MXFP4_TILE_ROWS;
    for (int64_t i = 0; i < rows; i++) {
        const int scale = scales[i * groups];
        within &= scale >= numbers[MXFP4_LOW] && scale <= numbers[MXFP4_HIGH];
        added[i] = (uint16_t)((unsigned)(scale - MXFP4_ONE) << numbers[MXFP4_SHIFT]);
    }
    if (within) MOE_WIDEST(moe_mxfp4_tile, out, stride, blocks, 16 * groups, added, planes);
    else moe_mxfp4_block_uint16_t(out, stride, blocks, scales, groups, rows, table);
}

static void moe_mxfp4(const unsigned char **streams, const int64_t *numbers, const unsigned char *table, int64_t first,
                      int64_t rows, unsigned char *out) {
    const int64_t cols = numbers[MXFP4_COLS], all = numbers[MXFP4_ROWS], groups = cols / MXFP4_BLOCK;
    const uint16_t *one = (const uint16_t *)table + 16 * MXFP4_ONE;
    moe_bytes16 planes[2];
    for (int i = 0; i < 16; i++) planes[0][i] = one[i] & 0xff, planes[1][i] = one[i] >> 8;
    for (int64_t begin = 0; begin < cols; begin += MXFP4_TILE_COLS)
        for (int64_t row = 0; row < rows; row += MXFP4_TILE_ROWS)
            for (int64_t col = begin; col < cols && col < begin + MXFP4_TILE_COLS; col += MXFP4_BLOCK) {
                const int64_t m = rows - row < MXFP4_TILE_ROWS ? rows - row : MXFP4_TILE_ROWS;
                const int64_t group = row * groups + col / MXFP4_BLOCK, place = col * all + first + row;
                const unsigned char *blocks = streams[0] + 16 * group, *scales = streams[1] + group;
                if (numbers[MXFP4_ITEM] == 2)
                    moe_mxfp4_half((uint16_t *)out + place, numbers, blocks, scales, m, (const uint16_t *)table, planes);
                else
                    moe_mxfp4_block_uint32_t((uint32_t *)out + place, all, blocks, scales, groups, m, (const uint32_t *)table);
            }
}

#endif
