// SIMD vectors of LANES numbers for all C kernels. LANES defaults to the number of floats in an x86-64 vector register; a source
// may define it before including this header. Each source is compiled once per level (a set of instructions), and the level's name
// is appended to its functions' names (kernels/native/build.py).
//
// Vectors are clang's vector extensions: + - * / < and ?: work lane by lane, and a scalar operand is broadcast. The compiler does
// not contract a * b + c (-ffp-contract=off): write fma(a, b, c) for a single rounding.

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
#define LANES 16                         // on ARM, four of the 32 registers
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_4 _Pragma("clang loop unroll_count(4)")
#define VECTOR(lanes) __attribute__((ext_vector_type(lanes)))

#ifdef _WIN32
#define EXPORTED __attribute__((dllexport))
#else
#define EXPORTED __attribute__((visibility("default")))
#endif
#define CONCAT(name, level) name##_##level
#define WITH_LEVEL(name, level) CONCAT(name, level)

// Exports sizeof(type) as size_of_NAME, which kernels/native compares with the size of Python's arguments.
#define EXPORT_SIZE(name, type) EXPORTED const int64_t WITH_LEVEL(size_of_##name, LEVEL) = sizeof(type);

// Defines a function that Python calls with a struct of 64-bit numbers: ENTRY(name, struct call) { ... }
#define ENTRY(name, type) \
    EXPORT_SIZE(name, type) \
    EXPORTED void WITH_LEVEL(name, LEVEL)(const type *call, int64_t threads)

typedef float floats VECTOR(LANES);
typedef int32_t ints VECTOR(LANES);
typedef uint16_t bfloats VECTOR(LANES);  // bfloat16, as bits
typedef float floats4 VECTOR(4);

INLINE floats splat(float x) { return (floats)x; }

INLINE floats load(const float *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store(float *p, floats x) { memcpy(p, &x, sizeof x); }

INLINE floats4 load4(const float *p) {
    floats4 x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store4(float *p, floats4 x) { memcpy(p, &x, sizeof x); }

// Transposes a (rows,columns) matrix in 4 x 4 tiles. to_row, from_row: row strides, in numbers.
INLINE void transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t j = 0; j < columns; j += 4) {
            const float *tile = from + i * from_row + j;
            floats4 a = load4(tile), b = load4(tile + from_row);
            floats4 c = load4(tile + 2 * from_row), d = load4(tile + 3 * from_row);
            floats4 ab_01 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_23 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            floats4 cd_01 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_23 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            float *transposed = to + j * to_row + i;
            store4(transposed, __builtin_shufflevector(ab_01, cd_01, 0, 1, 4, 5));
            store4(transposed + to_row, __builtin_shufflevector(ab_01, cd_01, 2, 3, 6, 7));
            store4(transposed + 2 * to_row, __builtin_shufflevector(ab_23, cd_23, 0, 1, 4, 5));
            store4(transposed + 3 * to_row, __builtin_shufflevector(ab_23, cd_23, 2, 3, 6, 7));
        }
}

INLINE floats fma(floats a, floats b, floats c) { return __builtin_elementwise_fma(a, b, c); }
INLINE floats fnmadd(floats a, floats b, floats c) { return __builtin_elementwise_fma(-a, b, c); }            // c - a b
INLINE floats round_even(floats x) { return __builtin_elementwise_roundeven(x); }
INLINE floats round_down(floats x) { return __builtin_elementwise_floor(x); }
INLINE ints as_ints(floats x) { return __builtin_bit_cast(ints, x); }
INLINE floats as_floats(ints x) { return __builtin_bit_cast(floats, x); }

// max and min return b if either operand is NaN.
INLINE floats max(floats a, floats b) { return a > b ? a : b; }
INLINE floats min(floats a, floats b) { return a < b ? a : b; }

INLINE int any(ints lanes) { return __builtin_reduce_or(lanes) != 0; }

// Horizontal sums: the upper half is added to the lower half until one lane is left.
INLINE float hsum4(floats4 x) {
    x += __builtin_shufflevector(x, x, 2, 3, 2, 3);
    return x[0] + x[1];
}

INLINE float hsum(floats x) {
#if LANES == 16
    float VECTOR(8) eight = x.lo + x.hi;
#else
    float VECTOR(8) eight = x;
#endif
    return hsum4(eight.lo + eight.hi);
}

// Returns x 2^n for an integer n, passed as a float: 0 for n < -126; n > 127 is clamped to 127; 0 or NaN if n is NaN.
INLINE floats scalef(floats x, floats n) {
#if defined __AVX512F__ && LANES == 16
    return _mm512_scalef_ps(x, n);       // also handles n out of range
#else
    ints power = __builtin_convertvector(min(max(n, splat(-127.0f)), splat(127.0f)), ints);
    return x * as_floats((power + 127) << 23);
#endif
}

// bfloat16 conversions. to_bfloat16 rounds to nearest even and maps every NaN to 0x7FC0, since rounding a NaN's bits could yield
// infinity.
INLINE floats from_bfloat16(bfloats x) { return as_floats(__builtin_convertvector(x, ints) << 16); }

INLINE bfloats to_bfloat16(floats x) {
    ints bits = as_ints(x), odd = (bits >> 16) & 1;
    ints rounded = (bits + (odd + 0x7FFF)) >> 16;
    return __builtin_convertvector(x != x ? (ints)0x7FC0 : rounded, bfloats);
}

// The element type of an array in memory; all arithmetic is in float32.
enum dtype { FLOAT32, BFLOAT16 };

INLINE int64_t dtype_size(enum dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE floats load_as(enum dtype dtype, const void *p, int64_t i) {
    if (dtype == FLOAT32) return load((const float *)p + i);
    bfloats x;
    memcpy(&x, (const uint16_t *)p + i, sizeof x);
    return from_bfloat16(x);
}

INLINE void store_as(enum dtype dtype, void *p, int64_t i, floats x) {
    if (dtype == FLOAT32) {
        store((float *)p + i, x);
        return;
    }
    bfloats half = to_bfloat16(x);
    memcpy((uint16_t *)p + i, &half, sizeof half);
}

// Loads or stores only the first n <= LANES numbers; load_partial fills the remaining lanes with 0.
INLINE floats load_partial(enum dtype dtype, const void *p, int64_t i, int64_t n) {
    if (n == LANES) return load_as(dtype, p, i);
    uint32_t lanes[LANES] = {0};
    memcpy(lanes, (const char *)p + i * dtype_size(dtype), (size_t)(n * dtype_size(dtype)));
    return load_as(dtype, lanes, 0);
}

INLINE void store_partial(enum dtype dtype, void *p, int64_t i, int64_t n, floats x) {
    if (n == LANES) {
        store_as(dtype, p, i, x);
        return;
    }
    uint32_t lanes[LANES];
    store_as(dtype, lanes, 0, x);
    memcpy((char *)p + i * dtype_size(dtype), lanes, (size_t)(n * dtype_size(dtype)));
}

// Software prefetch, for strides that the hardware prefetcher does not detect.
INLINE void prefetch(enum dtype dtype, const void *p, int64_t i) {
    __builtin_prefetch((const char *)p + i * dtype_size(dtype), 0, 2);      // into L2; prefetching into L1 was slower
}

// e^x for -80 <= x <= 0, within 2 ulp
INLINE floats exp_neg(floats x) {
    floats z = x * 1.4426950408889634f, power = round_even(z), f = z - power;
    floats m = splat(0.00015403530393381606f);
    m = fma(m, f, splat(0.0013333558146428443f));
    m = fma(m, f, splat(0.009618129107628477f));
    m = fma(m, f, splat(0.05550410866482158f));
    m = fma(m, f, splat(0.2402265069591007f));
    m = fma(m, f, splat(0.6931471805599453f));
    m = fma(m, f, splat(1.0f));
    return scalef(m, power);
}

// e^x for any x <= 0; below -80 it returns e^-80.
INLINE floats exp_neg_clamped(floats x) { return exp_neg(max(splat(-80.0f), x)); }

INLINE floats sigmoid(floats x) {
    floats e = exp_neg_clamped(-__builtin_elementwise_abs(x));
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

INLINE floats tanh(floats x) {
    floats e = exp_neg_clamped(-2.0f * __builtin_elementwise_abs(x));
    return __builtin_elementwise_copysign((1.0f - e) / (1.0f + e), x);
}
