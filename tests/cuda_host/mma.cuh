// Replaces kernels/timex/csrc/mma.cuh in tests on a CPU. Fragments have the layout in PTX ISA, section mma.m16n8k8. Sums are
// computed as on tensor cores, which truncate every addend one or two bits below the last bit of the largest addend.
#pragma once

namespace cuda_host {

inline double tf32(unsigned bits) {
    float x;
    if (bits & 0x1fffu) fail("%08x is not tf32: its last 13 bits are not 0", bits);
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline double first_bit(double x) {                         // 2^n for |x| from 2^n to below 2^(n + 1); frexp is slow
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= uint64_t(0x7ff) << 52;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline float dot_and_add(const double (&a)[8], const double (&b)[8], float c) {
    double addends[9] = {c}, largest = std::abs(c), sum = 0;
    for (int k = 0; k < 8; ++k) addends[k + 1] = a[k] * b[k], largest = std::max(largest, std::abs(addends[k + 1]));
    for (const double addend : addends) sum += addend;
    if (sum == 0 || !std::isfinite(sum)) return static_cast<float>(sum);
    const double unit = first_bit(largest) * 0x1p-24, per_unit = 1 / unit;
    int64_t units = 0;
    for (const double addend : addends) units += static_cast<int64_t>(addend * per_unit);
    const double rounded = static_cast<double>(units) * unit, last = first_bit(rounded) * 0x1p-23;
    return units == 0 ? 0.0f : static_cast<float>(static_cast<double>(static_cast<int64_t>(rounded / last)) * last);
}

struct Fragments { unsigned a[4], b[2]; };
struct Copy {
    float* to;
    const float* from;
    int words;
    bool inside;

    void make() const {
        for (int i = 0; i < words; ++i) to[i] = inside ? from[i] : 0.0f;
    }
};

struct Thread {
    bool odd = false;                                       // index of the slots of the current mma
    std::vector<std::vector<Copy>> groups{1};               // groups of copies; the last group is open
};

inline unsigned thread_number() {
    return (here.thread.z * here.block_size.y + here.thread.y) * here.block_size.x + here.thread.x;
}

inline Thread& this_thread() {
    static Thread all[1024];
    return all[thread_number()];
}

}  // namespace cuda_host

static void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                const float (&c)[4]) {
    static cuda_host::Fragments slots[2][1024];             // used alternately, so that one barrier is enough
    const bool odd = cuda_host::this_thread().odd ^= true;
    const unsigned lane = cuda_host::lane(), group = lane / 4, in_group = lane % 4;
    cuda_host::Fragments* const of = slots[odd] + cuda_host::thread_number() - lane;
    of[lane] = {{a0, a1, a2, a3}, {b0, b1}};
    cuda_host::wait_for_warp(~0u);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = i < 2 ? group : group + 8, column = in_group * 2 + i % 2;
        double a[8], b[8];
        for (unsigned k = 0; k < 8; ++k) {
            a[k] = cuda_host::tf32(of[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]);
            b[k] = cuda_host::tf32(of[column * 4 + k % 4].b[k / 4]);
        }
        d[i] = cuda_host::dot_and_add(a, b, c[i]);
    }
}

// Half of the threads copy as early as possible, over data that other threads may still be reading; the other half copy as late as
// possible, so that data read without waiting are still poison.
template <int BYTES> static void copy_async(float* to, const float* from, bool inside) {
    static_assert(BYTES == 4 || BYTES == 16);
    if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
        cuda_host::fail("cp.async of %d bytes from or to an address that is no multiple of that", BYTES);
    const cuda_host::Copy copy{to, from, BYTES / 4, inside};
    if (cuda_host::thread_number() % 2) copy.make();
    else cuda_host::this_thread().groups.back().push_back(copy);
}

static void commit_copies() { cuda_host::this_thread().groups.emplace_back(); }

template <int LEFT> static void await_copies() {
    auto& groups = cuda_host::this_thread().groups;
    while (groups.size() > LEFT + 1) {
        for (const auto& copy : groups.front()) copy.make();
        groups.erase(groups.begin());
    }
}
