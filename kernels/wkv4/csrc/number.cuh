// The type of k, v, y and their gradients in memory: float32 or, with BFLOAT16, bfloat16. All arithmetic is in float32.
#pragma once

#if BFLOAT16
typedef unsigned short Number;

static __device__ __forceinline__ float number(const Number* from) { return __uint_as_float(unsigned(*from) << 16); }

// Rounds to nearest, ties to even
static __device__ __forceinline__ void write(Number* to, float x) {
    const unsigned bits = __float_as_uint(x);
    *to = x == x ? Number((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : Number(0x7FC0);
}
#else
typedef float Number;

static __device__ __forceinline__ float number(const Number* from) { return *from; }

static __device__ __forceinline__ void write(Number* to, float x) { *to = x; }
#endif
