// A PTX instruction. Tests that run the kernels on a CPU replace this file with one in plain C++.
#pragma once

// 1 / x within one unit in the last place, for x neither subnormal nor above 2^126. (__fdividef supports these x as well, but takes
// four more instructions.)
static __device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
