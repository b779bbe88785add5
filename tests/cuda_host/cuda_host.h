// CUDA C++ on a CPU, for tests: declares what a C++ compiler needs to compile a .cu file, which then runs block by block.
//
// Each CUDA thread is a fibre that runs until it reaches a barrier. cuda_host.cpp contains the scheduler and main().
// In addition to CUDA's own names, `cuda_host::gather(mask, value)` returns the values of all lanes of the warp, to emulate
// warp-wide instructions.
#pragma once

// The standard library's headers come before CUDA's names, because they use __noinline__ as the name of an attribute.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
#define __shared__ static __attribute__((section("cuda_shared")))   // shared by one block at a time; poisoned before each block

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace cuda_host {

constexpr unsigned WARP = 32, LARGEST_VALUE = 64;

struct Here { uint3 thread, block; dim3 block_size, grid; };
extern Here here;                                        // indices of the running thread
extern void* dynamic_shared;

unsigned lane();
void wait_for_block();
void wait_for_warp(unsigned mask);
void* slot(unsigned lane);                               // where the lane passes a value to the others of its warp
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T> struct Lanes { T of[WARP]; };

template <class T> Lanes<T> gather(unsigned mask, T value) {
    static_assert(sizeof(T) <= LARGEST_VALUE, "gather takes values of up to 64 bytes");
    Lanes<T> all;
    memset(static_cast<void*>(&all), 0xff, sizeof all);
    memcpy(slot(lane()), &value, sizeof value);
    wait_for_warp(mask);
    for (unsigned i = 0; i < WARP; ++i)
        if (mask >> i & 1) memcpy(static_cast<void*>(&all.of[i]), slot(i), sizeof value);
    wait_for_warp(mask);
    return all;
}

template <class T> T from_lane(unsigned mask, T value, unsigned source) {
    if (!(mask >> source & 1)) fail("lane %u reads from lane %u, which is not in the mask %08x", lane(), source, mask);
    return gather(mask, value).of[source];
}

}  // namespace cuda_host

#define threadIdx (cuda_host::here.thread)
#define blockIdx (cuda_host::here.block)
#define blockDim (cuda_host::here.block_size)
#define gridDim (cuda_host::here.grid)
constexpr int warpSize = cuda_host::WARP;

inline void __syncthreads() { cuda_host::wait_for_block(); }
inline void __syncwarp(unsigned mask = ~0u) { cuda_host::wait_for_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int first = cuda_host::lane() & ~(width - 1);
    return cuda_host::from_lane(mask, value, first + (source & (width - 1)));
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_host::lane(), first = lane & ~(width - 1), source = lane - static_cast<int>(delta);
    return cuda_host::from_lane(mask, value, source < first ? lane : source);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_host::lane(), end = (lane & ~(width - 1)) + width, source = lane + static_cast<int>(delta);
    return cuda_host::from_lane(mask, value, source < end ? source : lane);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = cuda_host::lane(), end = (lane & ~(width - 1)) + width, source = lane ^ bits;
    return cuda_host::from_lane(mask, value, source < end ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto all = cuda_host::gather(mask, predicate);
    unsigned set = 0;
    for (unsigned i = 0; i < cuda_host::WARP; ++i)
        if ((mask >> i & 1) && all.of[i]) set |= 1u << i;
    return set;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T> T __ldg(const T* at) { return *at; }
template <class To, class From> To cuda_host_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline int __float_as_int(float x) { return cuda_host_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_host_bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_host_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_host_bits<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int cuda_host_saturated(float x) {                  // as in PTX: NaN becomes 0, and x is clamped to the range of int
    return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int>(x);
}
inline int __float2int_rn(float x) { return cuda_host_saturated(rintf(x)); }
inline int __float2int_rd(float x) { return cuda_host_saturated(floorf(x)); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

namespace cuda_host {

struct Kernel { const char *name, *types; const unsigned* sizes; void (*call)(void** args); };
extern const Kernel KERNELS[];                           // kernels of the file under test; the last entry has no name

template <class T> struct Parameter;                     // a kernel's parameter: a pointer, an int or a float
template <class T> struct Parameter<T*> { static constexpr char type = 'p'; static constexpr unsigned size = sizeof(T); };
template <> struct Parameter<int> { static constexpr char type = 'i'; static constexpr unsigned size = 4; };
template <> struct Parameter<float> { static constexpr char type = 'f'; static constexpr unsigned size = 4; };

template <auto function, class = decltype(function)> struct Described;
template <auto function, class... A> struct Described<function, void (*)(A...)> {
    static constexpr char types[] = {Parameter<A>::type..., 0};
    static constexpr unsigned sizes[] = {Parameter<A>::size..., 0};
    static void call(void** args) { unpack(args, std::index_sequence_for<A...>()); }
    template <size_t... I> static void unpack(void** args, std::index_sequence<I...>) { function(*static_cast<A*>(args[I])...); }
};
template <auto function> constexpr Kernel describe(const char* name) {
    return {name, Described<function>::types, Described<function>::sizes, Described<function>::call};
}

}  // namespace cuda_host
