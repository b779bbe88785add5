// What the library is made of, and which of its levels this CPU can run.

#include "vectors.h"

EXPORTED const char timemix_sources[] = "timemix sources " SOURCES;

#ifdef __x86_64__
#include <cpuid.h>

enum { SSE_STATE = 1 << 1, YMM_STATE = 1 << 2, ZMM_STATE = 7 << 5 };

static uint32_t states_that_the_system_keeps(void) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int all_in(uint32_t has, uint32_t wanted) { return (has & wanted) == wanted; }

// 0: none; 1: AVX2 and FMA; 2: AVX-512 with F, BW, DQ, VL and VNNI; 3: BF16 too. Source: Intel's manual, CPUID.
EXPORTED int timemix_level(void) {
    uint32_t a, b, c, d, features, a_1, extended, bfloat16 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!all_in(c, bit_OSXSAVE | bit_FMA | bit_AVX | bit_F16C)) return 0;
    uint32_t kept = states_that_the_system_keeps();
    if (!__get_cpuid_count(7, 0, &a, &features, &extended, &d)) return 0;
    if (!all_in(kept, SSE_STATE | YMM_STATE) || !all_in(features, bit_AVX2)) return 0;
    uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!all_in(kept, ZMM_STATE) || !all_in(features, wide) || !all_in(extended, bit_AVX512VNNI)) return 1;
    if (a >= 1 && __get_cpuid_count(7, 1, &a_1, &b, &c, &d)) bfloat16 = a_1 & (1 << 5);
    return bfloat16 ? 3 : 2;
}

#else

// 1: NEON, which every 64-bit ARM has; 2: dot products of int8, too, as on every Mac. Source: Linux, Documentation/arch/arm64.
#ifdef __linux__
#include <sys/auxv.h>

enum { HAS_DOT_PRODUCTS = 1 << 20 };     // HWCAP_ASIMDDP

EXPORTED int timemix_level(void) { return getauxval(AT_HWCAP) & HAS_DOT_PRODUCTS ? 2 : 1; }
#else
EXPORTED int timemix_level(void) { return 2; }
#endif

#endif
