// Contains the hash of the library's sources, and detects CPU features.

#include "vectors.h"

EXPORTED const char timemix_sources[] = "timemix sources " SOURCES;

#ifdef __x86_64__
#include <cpuid.h>

enum { SSE_STATE = 1 << 1, YMM_STATE = 1 << 2, ZMM_STATE = 7 << 5 };

// Returns a bit mask of the register states that the operating system saves at a context switch.
static uint32_t read_xcr0(void) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has_all(uint32_t features, uint32_t required) { return (features & required) == required; }

enum { AVX_VNNI = 1 << 4, AVX512_BF16 = 1 << 5 };      // bits of CPUID.(7,1).EAX

// Returns a bit mask of the supported levels. Bit 0: AVX2, FMA and F16C; 1: also AVX-VNNI; 2: AVX-512 F, BW, DQ, VL and VNNI;
// 3: also AVX-512 BF16. Source: Intel's manual, CPUID.
EXPORTED int timemix_levels(void) {
    uint32_t a, b, c, d, features, extended, more = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!has_all(c, bit_OSXSAVE | bit_FMA | bit_AVX | bit_F16C)) return 0;
    uint32_t saved = read_xcr0();
    if (!__get_cpuid_count(7, 0, &a, &features, &extended, &d)) return 0;
    if (!has_all(saved, SSE_STATE | YMM_STATE) || !has_all(features, bit_AVX2)) return 0;
    if (a >= 1) __get_cpuid_count(7, 1, &more, &b, &c, &d);
    int levels = 1 | (more & AVX_VNNI ? 2 : 0);
    uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!has_all(saved, ZMM_STATE) || !has_all(features, wide) || !has_all(extended, bit_AVX512VNNI)) return levels;
    return levels | 4 | (more & AVX512_BF16 ? 8 : 0);
}

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

// AMX_TILE, AMX_INT8: bits of CPUID.(7,0).EDX. TILE_STATE: bits of XCR0. The others: arguments of arch_prctl
enum { AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25, TILE_STATE = 3 << 17, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

static int request_amx(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_all(d, AMX_TILE | AMX_INT8)) return 0;
    return has_all(read_xcr0(), TILE_STATE) && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

// Returns 1 if this process may use AMX's int8 products, which Linux permits on request. Source: Linux,
// Documentation/arch/x86/xstate.rst.
EXPORTED int timemix_has_amx(void) {
    static int has_amx = -1;
    int known = __atomic_load_n(&has_amx, __ATOMIC_RELAXED);
    if (known < 0) __atomic_store_n(&has_amx, known = request_amx(), __ATOMIC_RELAXED);
    return known;
}
#endif

#else

// Returns a bit mask of the supported levels. Bit 0: NEON, on every 64-bit ARM CPU; 1: also int8 dot products, on every ARM Mac.
// Source: Linux, Documentation/arch/arm64.
#ifdef __linux__
#include <sys/auxv.h>

enum { HAS_DOT_PRODUCTS = 1 << 20 };     // HWCAP_ASIMDDP

EXPORTED int timemix_levels(void) { return getauxval(AT_HWCAP) & HAS_DOT_PRODUCTS ? 3 : 1; }
#else
EXPORTED int timemix_levels(void) { return 3; }
#endif

#endif
