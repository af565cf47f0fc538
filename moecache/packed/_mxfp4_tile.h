/* 32 rows of one MXFP4 block each, decoded and turned, for results of 16 bits (_widths.h).
 *
 * Bytes are turned before they are decoded, where they are fewest. A value's exponent is that of its four bits and the scale's
 * added, so that one table serves all scales; the caller sees to it that no sum leaves the range. */
MOE_TARGET static inline __attribute__((always_inline)) void MOE_VERSION(moe_turn)(moe_bytes16 *rows) {
    static const moe_bytes16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    for (int stage = 0; stage < 4; stage++) {
        moe_bytes16 made[16];
        for (int i = 0; i < 8; i++) {
            made[2 * i] = __builtin_shuffle(rows[i], rows[i + 8], low);
            made[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 8], low + 8);
        }
        memcpy(rows, made, sizeof made);
    }
}

/* Row i of the block lies at blocks + i * apart, column j of the result begins at out + j * stride. */
MOE_TARGET static void MOE_VERSION(moe_mxfp4_tile)(uint16_t *out, ptrdiff_t stride, const unsigned char *blocks,
                                                   ptrdiff_t apart, const uint16_t *added, const moe_bytes16 *planes) {
    static const moe_bytes16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    for (int half = 0; half < MXFP4_TILE_ROWS; half += 16) {
        moe_bytes16 bytes[16];
        moe_halves8 more[2];
        for (int i = 0; i < 16; i++) memcpy(&bytes[i], blocks + (half + i) * apart, 16);
        memcpy(more, added + half, sizeof more);
        MOE_VERSION(moe_turn)(bytes);
        for (int j = 0; j < MXFP4_BLOCK; j++) {
            const moe_bytes16 four = j & 1 ? bytes[j / 2] >> 4 : bytes[j / 2] & 15;
            const moe_bytes16 lower = __builtin_shuffle(planes[0], four), upper = __builtin_shuffle(planes[1], four);
            moe_halves8 pair[2] = {(moe_halves8)__builtin_shuffle(lower, upper, low),
                                   (moe_halves8)__builtin_shuffle(lower, upper, low + 8)};
            for (int k = 0; k < 2; k++) pair[k] += more[k] & (moe_halves8)((pair[k] & 0x7fff) != 0);
            memcpy(out + j * stride + half, pair, sizeof pair);
        }
    }
}
