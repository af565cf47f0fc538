/* Large copies that pass the caches by. A chunk of an expert comes from memory and is read once by arithmetic much later
 * or by another core: stores that go through the caches first fetch the lines they overwrite, which is half as much
 * traffic again. memcpy() knows better only from about three quarters of the last-level cache on, far above a chunk. */
#ifndef MOECACHE_COPY_H
#define MOECACHE_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

#define MOE_PAGE 4096
#define MOE_LINE 64
/* Pages written in turns, so that as many row buffers of the memory and streams of the prefetcher are busy. */
#define MOE_PAGES 4

static inline void moe_stream_line(unsigned char *to, const unsigned char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

static void moe_stream(void *target, const void *source, size_t nbytes) {
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = (size_t)(-(uintptr_t)to & (MOE_LINE - 1));
    if (nbytes < head + MOE_LINE) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    for (; nbytes >= MOE_PAGES * MOE_PAGE; nbytes -= MOE_PAGES * MOE_PAGE) {
        for (int at = 0; at < MOE_PAGE; at += MOE_LINE)
            for (int page = 0; page < MOE_PAGES; page++)
                moe_stream_line(to + page * MOE_PAGE + at, from + page * MOE_PAGE + at);
        to += MOE_PAGES * MOE_PAGE;
        from += MOE_PAGES * MOE_PAGE;
    }
    for (; nbytes >= MOE_LINE; nbytes -= MOE_LINE) {
        moe_stream_line(to, from);
        to += MOE_LINE;
        from += MOE_LINE;
    }
    memcpy(to, from, nbytes);
    /* These stores are not ordered by a release: whoever sees the slot complete must see its bytes. */
    _mm_sfence();
}
#else
static void moe_stream(void *target, const void *source, size_t nbytes) { memcpy(target, source, nbytes); }
#endif
#endif
