// PTX instructions for tensor cores and for asynchronous copies to shared memory.
// Tests that run the kernels on a CPU replace this file with one in plain C++.
#pragma once

// d = a b + c by one warp, a (16,8) and b (8,8) in tf32, c and d (16,8) in float32. With g = lane / 4 and q = lane % 4
// a lane holds
//   a[0..3]: row g, column q;  row g + 8, column q;  row g, column q + 4;  row g + 8, column q + 4
//   b[0..1]: row q, column g;  row q + 4, column g
//   c[0..3]: row g, column 2q;  row g, column 2q + 1;  row g + 8, column 2q;  row g + 8, column 2q + 1
// (PTX ISA, mma.m16n8k8)
static __device__ __forceinline__ void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                           unsigned b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Starts a copy of BYTES (4 or 16) to shared memory, of zeros if `inside` is false; `from` must be a valid address in any case
template <int BYTES>
static __device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to)), bytes = inside ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(address), "l"(from), "r"(bytes) : "memory");
}

// Makes a group of the copies since the last call
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread except the latest LEFT have arrived
template <int LEFT>
static __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
