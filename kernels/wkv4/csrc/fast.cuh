// What CUDA C++ has no name for. A test that runs the kernels on a CPU brings a file of the same name, in plain C++.
#pragma once

// 1 / x to one unit in the last place, x neither subnormal nor above 2^126 (for those __fdividef takes four instructions more)
static __device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
