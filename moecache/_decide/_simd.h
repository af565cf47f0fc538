/* How the loops are compiled for several instruction sets, so that one wheel is fast on AVX-512, AVX2 and plain machines alike:
 * MOE_CLONES for loops that the compiler vectorises well by itself, _widths.h for those written in vector types. */
#ifndef MOECACHE_SIMD_H
#define MOECACHE_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(MOE_PLAIN) && defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MOE_X86
#endif
/* Which clone runs is a matter of the dynamic linker, and musl's knows nothing of it. */
#if defined(MOE_X86) && defined(__GLIBC__)
#define MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOE_CLONES
#endif

#define MOE_INLINE static inline __attribute__((always_inline))

/* Entries that are looked at together; columns and tables are padded to a multiple. */
#define MOE_LANES 64

/* Calls the version of a function of _widths.h that this processor runs fastest. */
#ifdef MOE_X86
#define MOE_WIDEST(name, ...)                                                         \
    (__builtin_cpu_supports("x86-64-v4")   ? MOE_JOIN(name, _512)(__VA_ARGS__)        \
     : __builtin_cpu_supports("x86-64-v3") ? MOE_JOIN(name, _256)(__VA_ARGS__)        \
                                           : MOE_JOIN(name, _plain)(__VA_ARGS__))
#else
#define MOE_WIDEST(name, ...) MOE_JOIN(name, _plain)(__VA_ARGS__)
#endif
#define MOE_JOIN(a, b) a##b

#endif
