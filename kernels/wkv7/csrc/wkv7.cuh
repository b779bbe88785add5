// Shared by all versions: loads and stores in float32 or, with BFLOAT16, in bfloat16; and the index of a head's step in (B,T,H,N).
#pragma once

#if BFLOAT16
typedef unsigned short Number;
#else
typedef float Number;
#endif

static __device__ __forceinline__ float load(const float* from) { return *from; }

static __device__ __forceinline__ float load(const unsigned short* from) { return __uint_as_float(unsigned(*from) << 16); }

static __device__ __forceinline__ void store(float* to, float x) { *to = x; }

// Rounds to nearest, ties to even
static __device__ __forceinline__ void store(unsigned short* to, float x) {
    const unsigned bits = __float_as_uint(x);
    *to = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The index of element 0 of step t; head = b * H + h
static __device__ __forceinline__ long long place(int head, int t, int T, int H, int size) {
    return (((long long)(head / H) * T + t) * H + head % H) * size;
}

static __device__ __forceinline__ long long matrix(long long index, int size) { return index * size * size; }
