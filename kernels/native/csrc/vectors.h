// The vectors of all C kernels: LANES numbers each, by default as many as a register of x86-64 holds; a source may define LANES
// before it includes this. A source is compiled once for each level, which is a set of instructions, and its functions get the
// level's name as a suffix (kernels/native/build.py).
//
// Vectors are clang's own: + - * / < and ?: work lane by lane, and a number beside a vector stands for all lanes. Products and
// sums are rounded one by one; fused(a, b, c) is a b + c, rounded once.

#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#ifndef LANES
#if defined __AVX2__ && !defined __AVX512F__
#define LANES 8
#else
#define LANES 16                         // on ARM four registers, of which it has 32
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")
#define SEVERAL _Pragma("clang loop unroll_count(4)")
#define VECTOR(lanes) __attribute__((ext_vector_type(lanes)))

// A function that Python calls: ENTRY(name)(arguments) { ... }
#ifdef _WIN32
#define EXPORTED __attribute__((dllexport))
#else
#define EXPORTED __attribute__((visibility("default")))
#endif
#define JOINED(name, level) name##_##level
#define OF_LEVEL(name, level) JOINED(name, level)
#define ENTRY(name) EXPORTED void OF_LEVEL(name, LEVEL)

typedef float floats VECTOR(LANES);
typedef int32_t ints VECTOR(LANES);
typedef uint16_t halves VECTOR(LANES);   // the bits of bfloat16
typedef float four VECTOR(4);

INLINE floats same(float x) { return (floats)x; }

INLINE floats at(const float *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void put(float *p, floats x) { memcpy(p, &x, sizeof x); }

INLINE four four_at(const float *p) {
    four x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void put_four(float *p, four x) { memcpy(p, &x, sizeof x); }

// The transpose of a matrix, in tiles of 4 x 4. A row of `from` begins from_row numbers after the one before.
INLINE void turn(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t j = 0; j < columns; j += 4) {
            const float *tile = from + i * from_row + j;
            four a = four_at(tile), b = four_at(tile + from_row);
            four c = four_at(tile + 2 * from_row), d = four_at(tile + 3 * from_row);
            four ab_01 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_23 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            four cd_01 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_23 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            float *turned = to + j * to_row + i;
            put_four(turned, __builtin_shufflevector(ab_01, cd_01, 0, 1, 4, 5));
            put_four(turned + to_row, __builtin_shufflevector(ab_01, cd_01, 2, 3, 6, 7));
            put_four(turned + 2 * to_row, __builtin_shufflevector(ab_23, cd_23, 0, 1, 4, 5));
            put_four(turned + 3 * to_row, __builtin_shufflevector(ab_23, cd_23, 2, 3, 6, 7));
        }
}

INLINE floats fused(floats a, floats b, floats c) { return __builtin_elementwise_fma(a, b, c); }
INLINE floats less(floats a, floats b, floats c) { return __builtin_elementwise_fma(-a, b, c); }            // c - a b
INLINE floats nearest(floats x) { return __builtin_elementwise_roundeven(x); }
INLINE floats rounded_down(floats x) { return __builtin_elementwise_floor(x); }
INLINE ints bits_of(floats x) { return __builtin_bit_cast(ints, x); }
INLINE floats of_bits(ints x) { return __builtin_bit_cast(floats, x); }

// the larger and the smaller of two; b where one is no number
INLINE floats larger(floats a, floats b) { return a > b ? a : b; }
INLINE floats smaller(floats a, floats b) { return a < b ? a : b; }

INLINE int any(ints lanes) { return __builtin_reduce_or(lanes) != 0; }

// the sum of 4, 8 or 16 lanes: the upper half is added to the lower one until there is one
INLINE float sum_of_4(four x) {
    x += __builtin_shufflevector(x, x, 2, 3, 2, 3);
    return x[0] + x[1];
}

INLINE float sum_of(floats x) {
#if LANES == 16
    float VECTOR(8) eight = x.lo + x.hi;
#else
    float VECTOR(8) eight = x;
#endif
    return sum_of_4(eight.lo + eight.hi);
}

// x 2^n for whole n; 0 for n < -126, and n above 127 counts as 127; where n is NaN, 0 or NaN.
INLINE floats times_power(floats x, floats n) {
#if defined __AVX512F__ && LANES == 16
    return _mm512_scalef_ps(x, n);       // which knows larger and smaller n, too
#else
    ints power = __builtin_convertvector(smaller(larger(n, same(-127.0f)), same(127.0f)), ints);
    return x * of_bits((power + 127) << 23);
#endif
}

// In bfloat16: the number, and its bits. Rounded to nearest, ties to even; every NaN becomes 0x7FC0, since rounding could turn its
// bits into an infinity's.
INLINE floats of_bfloat16(halves x) { return of_bits(__builtin_convertvector(x, ints) << 16); }

INLINE halves as_bfloat16(floats x) {
    ints bits = bits_of(x), odd = (bits >> 16) & 1;
    ints rounded = (bits + (odd + 0x7FFF)) >> 16;
    return __builtin_convertvector(x != x ? (ints)0x7FC0 : rounded, halves);
}

// What an array holds; all arithmetic is in float32.
enum form { FLOAT32, BFLOAT16 };

INLINE int64_t bytes_of(enum form form) { return form == FLOAT32 ? 4 : 2; }

INLINE floats read(enum form form, const void *p, int64_t i) {
    if (form == FLOAT32) return at((const float *)p + i);
    halves x;
    memcpy(&x, (const uint16_t *)p + i, sizeof x);
    return of_bfloat16(x);
}

INLINE void write(enum form form, void *p, int64_t i, floats x) {
    if (form == FLOAT32) {
        put((float *)p + i, x);
        return;
    }
    halves half = as_bfloat16(x);
    memcpy((uint16_t *)p + i, &half, sizeof half);
}

// The first n <= LANES numbers alone, and 0 in the other lanes.
INLINE floats read_some(enum form form, const void *p, int64_t i, int64_t n) {
    if (n == LANES) return read(form, p, i);
    uint32_t lanes[LANES] = {0};
    memcpy(lanes, (const char *)p + i * bytes_of(form), (size_t)(n * bytes_of(form)));
    return read(form, lanes, 0);
}

INLINE void write_some(enum form form, void *p, int64_t i, int64_t n, floats x) {
    if (n == LANES) {
        write(form, p, i, x);
        return;
    }
    uint32_t lanes[LANES];
    write(form, lanes, 0, x);
    memcpy((char *)p + i * bytes_of(form), lanes, (size_t)(n * bytes_of(form)));
}

// Asks for the place of a number that is needed soon, which the CPU does not guess.
INLINE void fetch(enum form form, const void *p, int64_t i) {
    __builtin_prefetch((const char *)p + i * bytes_of(form), 0, 2);      // into the second cache: into the first is slower
}

// e^x for -80 <= x <= 0, to 2 units in the last place
INLINE floats exp_of(floats x) {
    floats z = x * 1.4426950408889634f, power = nearest(z), f = z - power;
    floats m = same(0.00015403530393381606f);
    m = fused(m, f, same(0.0013333558146428443f));
    m = fused(m, f, same(0.009618129107628477f));
    m = fused(m, f, same(0.05550410866482158f));
    m = fused(m, f, same(0.2402265069591007f));
    m = fused(m, f, same(0.6931471805599453f));
    m = fused(m, f, same(1.0f));
    return times_power(m, power);
}

// The same for any x <= 0: as e^-80 below -80.
INLINE floats exp_of_any(floats x) { return exp_of(larger(same(-80.0f), x)); }

INLINE floats sigmoid(floats x) {
    floats e = exp_of_any(-__builtin_elementwise_abs(x));
    return (x < 0.0f ? e : same(1.0f)) / (1.0f + e);
}

INLINE floats tanh_of(floats x) {
    floats e = exp_of_any(-2.0f * __builtin_elementwise_abs(x));
    return __builtin_elementwise_copysign((1.0f - e) / (1.0f + e), x);
}
