/* int8 weights against a short state, for one width of vector registers (_widths.h). */
typedef float MOE_VERSION(moe_floats) __attribute__((vector_size(MOE_WIDTH)));
typedef int8_t MOE_VERSION(moe_bytes) __attribute__((vector_size(MOE_WIDTH / 4), aligned(1), may_alias));

/* The compiler does not find these processors' own conversion by itself. */
#if defined(MOE_NATIVE) && MOE_WIDTH == 64
#define MOE_WIDEN(p) (MOE_VERSION(moe_floats))_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#elif defined(MOE_NATIVE)
#define MOE_WIDEN(p) (MOE_VERSION(moe_floats))_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#else
#define MOE_WIDEN(p) __builtin_convertvector(*(const MOE_VERSION(moe_bytes) *)(p), MOE_VERSION(moe_floats))
#endif

/* out[e] += scale[e] * sum_j state[j] * weights[j * n + e] for `lanes` e's from `base` on; n a multiple of MOE_PADDED. The sums of a
 * block stay in registers over all of the state: the weights are read once, and reading them is what this costs. */
#define MOE_READ_BLOCK(lanes)                                                                                            \
    {                                                                                                                    \
        enum { EACH = MOE_WIDTH / 4, PARTS = (lanes) / EACH };                                                           \
        MOE_VERSION(moe_floats) sum[PARTS] = {{0}};                                                                      \
        for (int j = 0; j < r; j++)                                                                                      \
            for (int v = 0; v < PARTS; v++) sum[v] += state[j] * MOE_WIDEN(weights + (ptrdiff_t)j * n + base + v * EACH); \
        for (int v = 0; v < PARTS; v++)                                                                                  \
            for (int i = 0; i < EACH; i++) out[base + v * EACH + i] += scale[base + v * EACH + i] * sum[v][i];           \
    }

MOE_TARGET static void MOE_VERSION(moe_read)(float *restrict out, const int8_t *restrict weights, const float *restrict scale,
                                             const float *restrict state, int r, int n) {
    int base = 0;
    for (; base + MOE_LANES <= n; base += MOE_LANES) MOE_READ_BLOCK(MOE_LANES)
    for (; base < n; base += MOE_PADDED) MOE_READ_BLOCK(MOE_PADDED)
}

#undef MOE_READ_BLOCK
#undef MOE_WIDEN
