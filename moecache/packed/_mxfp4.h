/* MXFP4: 32 values of four bits and a scale; decoded into columns, as the classes that compute with it hold their weights.
 *
 * A table made by torch holds the sixteen values of every scale, so that the bits are torch's own. */
#ifndef MOECACHE_MXFP4_H
#define MOECACHE_MXFP4_H

#include "_simd.h"

enum { MXFP4_COLS, MXFP4_ROWS, MXFP4_ITEM, MXFP4_TRANSPOSED };
/* Rows and columns of a tile that is decoded and then turned: a cache line of the result, and one of the packed bytes. */
enum { MXFP4_TILE_ROWS = 32, MXFP4_TILE_COLS = 128, MXFP4_BLOCK = 32 };

typedef unsigned char moe_bytes16 __attribute__((vector_size(16)));

#define MOE_MXFP4_VALUES(type)                                                                     \
    MOE_INLINE void moe_mxfp4_block_##type(type *out, const unsigned char *at, const type *values) { \
        for (int i = 0; i < MXFP4_BLOCK / 2; i++) {                                                \
            out[2 * i] = values[at[i] & 15];                                                       \
            out[2 * i + 1] = values[at[i] >> 4];                                                   \
        }                                                                                          \
    }
MOE_MXFP4_VALUES(uint16_t)
MOE_MXFP4_VALUES(uint32_t)

#define MOE_MXFP4_MATRIX(type)                                                                              \
    static void moe_mxfp4_##type(const unsigned char **streams, const int64_t *numbers, const type *table,  \
                                 int64_t first, int64_t rows, type *restrict out) {                         \
        const int64_t cols = numbers[MXFP4_COLS], all = numbers[MXFP4_ROWS], groups = cols / MXFP4_BLOCK;   \
        const int turned = numbers[MXFP4_TRANSPOSED] != 0;                                                  \
        type tile[MXFP4_TILE_ROWS][MXFP4_TILE_COLS];                                                        \
        for (int64_t col = 0; col < cols; col += MXFP4_TILE_COLS)                                           \
            for (int64_t row = 0; row < rows; row += MXFP4_TILE_ROWS) {                                     \
                const int64_t m = rows - row < MXFP4_TILE_ROWS ? rows - row : MXFP4_TILE_ROWS;              \
                const int64_t n = cols - col < MXFP4_TILE_COLS ? cols - col : MXFP4_TILE_COLS;              \
                for (int64_t i = 0; i < m; i++)                                                             \
                    for (int64_t j = 0; j < n; j += MXFP4_BLOCK) {                                          \
                        const int64_t group = (row + i) * groups + (col + j) / MXFP4_BLOCK;                 \
                        type *to = turned ? &tile[i][j] : out + (first + row + i) * cols + col + j;         \
                        moe_mxfp4_block_##type(to, streams[0] + 16 * group, table + 16 * streams[1][group]); \
                    }                                                                                       \
                for (int64_t j = 0; turned && j < n; j++) {                                                 \
                    type *to = out + (col + j) * all + first + row;                                         \
                    for (int64_t i = 0; i < m; i++) to[i] = tile[i][j];                                     \
                }                                                                                           \
            }                                                                                               \
    }
MOE_MXFP4_MATRIX(uint16_t)
MOE_MXFP4_MATRIX(uint32_t)

static void moe_mxfp4(const unsigned char **streams, const int64_t *numbers, const unsigned char *table, int64_t first,
                      int64_t rows, unsigned char *out) {
    if (numbers[MXFP4_ITEM] == 2)
        moe_mxfp4_uint16_t(streams, numbers, (const uint16_t *)table, first, rows, (uint16_t *)out);
    else
        moe_mxfp4_uint32_t(streams, numbers, (const uint32_t *)table, first, rows, (uint32_t *)out);
}

#endif
