/* Ways of copying a chunk. An expert comes from memory and is read once by arithmetic, much later or by another core:
 * stores that go through the caches first fetch the lines they overwrite, which is half as much traffic again, and
 * memcpy() knows better only from about three quarters of the last-level cache on, far above a chunk. How stores past the
 * caches are best made differs between processors by a factor of four, so that it is measured (copying.py). */
#ifndef MOECACHE_COPY_H
#define MOECACHE_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MOE_PLAIN, MOE_SEQUENTIAL, MOE_PAGES };

#if defined(__SSE2__)
#include <emmintrin.h>
#define MOE_WAYS 3

#define MOE_PAGE 4096
#define MOE_LINE 64
/* How far ahead of the loads lines are fetched. */
#define MOE_AHEAD 512
/* Pages written in turns, so that as many row buffers of the memory and streams of the prefetcher are busy. */
#define MOE_ABREAST_PAGES 4

static inline void moe_stream_line(unsigned char *to, const unsigned char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

static void moe_stream(void *target, const void *source, size_t nbytes, int in_turns) {
    unsigned char *to = (unsigned char *)target;
    const unsigned char *from = (const unsigned char *)source;
    size_t head = (size_t)(-(uintptr_t)to & (MOE_LINE - 1));
    if (nbytes < head + MOE_LINE) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    for (; in_turns && nbytes >= MOE_ABREAST_PAGES * MOE_PAGE; nbytes -= MOE_ABREAST_PAGES * MOE_PAGE) {
        for (int at = 0; at < MOE_PAGE; at += MOE_LINE)
            for (int page = 0; page < MOE_ABREAST_PAGES; page++)
                moe_stream_line(to + page * MOE_PAGE + at, from + page * MOE_PAGE + at);
        to += MOE_ABREAST_PAGES * MOE_PAGE;
        from += MOE_ABREAST_PAGES * MOE_PAGE;
    }
    for (; nbytes >= MOE_LINE; nbytes -= MOE_LINE) {
        /* A prefetch beyond the end faults nowhere. */
        _mm_prefetch((const char *)from + MOE_AHEAD, _MM_HINT_T0);
        moe_stream_line(to, from);
        to += MOE_LINE;
        from += MOE_LINE;
    }
    memcpy(to, from, nbytes);
    /* These stores are not ordered by a release: whoever sees the slot complete must see its bytes. */
    _mm_sfence();
}

static void moe_forget(const void *memory, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += MOE_LINE) _mm_clflush((const char *)memory + at);
    _mm_mfence();
}
#else
#define MOE_WAYS 1
static void moe_forget(const void *memory, size_t nbytes) { (void)memory, (void)nbytes; }
#endif

static void moe_copy(int way, void *target, const void *source, size_t nbytes) {
#if MOE_WAYS > 1
    if (way != MOE_PLAIN) {
        moe_stream(target, source, nbytes, way == MOE_PAGES);
        return;
    }
#endif
    (void)way;
    memcpy(target, source, nbytes);
}

/* Seconds per way for one copy between cold buffers, the best of so many rounds, the ways in turn. What counts is the
 * thread's own time: others may have the processor in between. Nothing but the buffers is touched. */
static void moe_time_ways(double *best, void *target, const void *source, size_t nbytes, int rounds) {
    for (int way = 0; way < MOE_WAYS; way++) best[way] = 1e30;
    for (int turn = 0; turn < rounds; turn++)
        for (int way = 0; way < MOE_WAYS; way++) {
            struct timespec begin, end;
            moe_forget(source, nbytes);
            moe_forget(target, nbytes);
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
            moe_copy(way, target, source, nbytes);
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
            double spent = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
            if (spent < best[way]) best[way] = spent;
        }
}
#endif
