/* Compiles the file MOE_LOOPS once for each width of vector registers. In it, MOE_VERSION(name) names this version, MOE_TARGET is
 * its attribute and MOE_WIDTH the bytes of its registers; MOE_NATIVE is defined where these registers are known to exist.
 *
 * Not target_clones, which give all versions one width and lower its vectors before they know their registers: they then live in
 * memory, and the version for 256 bits takes 1.7 times as long. No include guard: each file of loops includes this one. */
#ifdef MOE_X86
#define MOE_NATIVE
#define MOE_WIDTH 64
#define MOE_TARGET __attribute__((target("arch=x86-64-v4")))
#define MOE_VERSION(name) MOE_JOIN(name, _512)
#include MOE_LOOPS
#undef MOE_WIDTH
#undef MOE_TARGET
#undef MOE_VERSION

#define MOE_WIDTH 32
#define MOE_TARGET __attribute__((target("arch=x86-64-v3")))
#define MOE_VERSION(name) MOE_JOIN(name, _256)
#include MOE_LOOPS
#undef MOE_WIDTH
#undef MOE_TARGET
#undef MOE_VERSION
#undef MOE_NATIVE
#endif

#define MOE_WIDTH 32
#define MOE_TARGET
#define MOE_VERSION(name) MOE_JOIN(name, _plain)
#include MOE_LOOPS
#undef MOE_WIDTH
#undef MOE_TARGET
#undef MOE_VERSION
#undef MOE_LOOPS
