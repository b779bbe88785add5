// What the C sources of the operators share: vectors of 8 numbers in float32, and e^x of them.

#pragma once
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")
#define SEVERAL _Pragma("clang loop unroll_count(4)")

typedef __m256 v8;

INLINE v8 at(const float *p) { return _mm256_loadu_ps(p); }
INLINE void put(float *p, v8 v) { _mm256_storeu_ps(p, v); }
INLINE v8 all(float x) { return _mm256_set1_ps(x); }
INLINE v8 plus(v8 a, v8 b) { return _mm256_add_ps(a, b); }
INLINE v8 minus(v8 a, v8 b) { return _mm256_sub_ps(a, b); }
INLINE v8 times(v8 a, v8 b) { return _mm256_mul_ps(a, b); }
INLINE v8 over(v8 a, v8 b) { return _mm256_div_ps(a, b); }
INLINE v8 most(v8 a, v8 b) { return _mm256_max_ps(a, b); }
INLINE v8 times_plus(v8 a, v8 b, v8 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE v8 minus_size(v8 x) { return _mm256_or_ps(x, all(-0.0f)); }       // -|x|

// the sum of 8 lanes, in one order
INLINE float sum8(__m256 v) {
    __m128 fours = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
    return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
}

// e^x for x <= 0, as e^-80 below -80; to 2 units in the last place
INLINE v8 exp_of(v8 x) {
    v8 z = times(most(x, all(-80.0f)), all(1.4426950408889634f));
    v8 power = _mm256_floor_ps(plus(z, all(0.5f))), f = minus(z, power);
    v8 m = all(0.00015403530393381606f);
    m = times_plus(m, f, all(0.0013333558146428443f));
    m = times_plus(m, f, all(0.009618129107628477f));
    m = times_plus(m, f, all(0.05550410866482158f));
    m = times_plus(m, f, all(0.2402265069591007f));
    m = times_plus(m, f, all(0.6931471805599453f));
    m = times_plus(m, f, all(1.0f));
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    return times(m, _mm256_castsi256_ps(bits));
}
