// The WKV scan. A block processes 32 channels of one batch; a warp scans a segment of STEPS steps, all its warps one chunk.
//
//   lane      a channel, so that a warp reads 128 contiguous bytes of each row of k (B,T,C)
//   Power     m 2^n, an exponential; n is an integer, so rescaling is exact
//   State     a 2^P and b 2^P
//   decay     e^w, w = -exp(time_decay);   over a segment: e^(STEPS w);   bonus: e^time_first
//   Gradient  of a and b, at the scale 2^P of one step
//
// Macros: STEPS, WARPS, and BFLOAT16, the dtype of k, v, y and their gradients; everything else is float32. k and v are read
// once: a segment stays in registers, its sum passes through shared memory, and the sums of the preceding segments yield its
// initial state.

#include "fast.cuh"
#include "number.cuh"

constexpr int LANES = 32, THREADS = LANES * WARPS, CHUNK = STEPS * WARPS;
constexpr float LIMIT = 1.1e7f;             // largest |k|, |p| and |time_first|; above it float32 has no fraction
constexpr double LOST = -67108864.0;        // exponent of a decay that erases the state for any k
constexpr double FASTEST_DECAY = 50.0, LOG2_E = 1.4426950408889634;
constexpr float LN_2 = 0.6931471805599453f, LN_2_HIGH = 0.693359375f, LN_2_LOW = -2.1219444005469058e-4f;

struct Power { float m; int n; };
struct State { float a, b; int P; };
struct Scales { float state, input; int P; };   // factors of the previous state and of the new term; P after the step
struct Gradient { float a, b; };
struct Sum { Gradient own; float through; };    // a segment's own gradient, and the factor of the gradient after it

// Clamps x. Comparisons propagate NaN, unlike fminf; 0 x turns infinity into NaN
static __device__ __forceinline__ float within_limit(float x) {
    return x > LIMIT ? LIMIT + 0.0f * x : x < -LIMIT ? -LIMIT : x;
}

// 2^n for n in [-126, 127]; 0 for n = -127
static __device__ __forceinline__ float pow2(int n) { return __int_as_float((n + 127) << 23); }

// e^x with m in [1, 2): x - n log 2 is exact, because the high part of log 2 has few bits; the polynomial's error is 2e-9
static __device__ __forceinline__ Power exponential(float x) {
    x = within_limit(x);
    const int n = __float2int_rd(x * float(LOG2_E));
    const float power = float(n), r = fmaf(power, -LN_2_LOW, fmaf(power, -LN_2_HIGH, x));
    float m = fmaf(r, 0.001955775417299989f, 0.007776794816698978f);
    m = fmaf(m, r, 0.041928080322846804f);
    m = fmaf(m, r, 0.16660485760579424f);
    m = fmaf(m, r, 0.5000068453211467f);
    m = fmaf(m, r, 0.9999997208349418f);
    return {fmaf(m, r, 1.0000000018154944f), n};
}

// e^x with m in [0.7, 1.4], so that high powers of m stay in range
static __device__ Power exponential(double x) {
    const double power = x * LOG2_E, n = rint(fmax(power, LOST));
    return {float(exp2(power - n)), int(n)};
}

static __device__ double decay_exponent(float time_decay) {
    return -exp(time_decay > FASTEST_DECAY ? FASTEST_DECAY : double(time_decay));
}

// The factors of the previous state and of a new term m 2^n, relative to 2^P after the step
static __device__ __forceinline__ Scales scales(Power decay, int P, float m, int n) {
    const int lead = n - (P + decay.n), up = max(lead, 0);
    return {decay.m * pow2(-min(up, 127)), m * pow2(max(lead - up, -127)), P + decay.n + up};
}

static __device__ __forceinline__ State after(State before, Power decay, State sum) {
    const Scales scale = scales(decay, before.P, 1.0f, sum.P);
    return {scale.state * before.a + scale.input * sum.a, scale.state * before.b + scale.input * sum.b, scale.P};
}

static __device__ __forceinline__ Gradient before(Sum sum, Gradient after) {
    return {sum.own.a + sum.through * after.a, sum.own.b + sum.through * after.b};
}

static __device__ __forceinline__ int exponent(float x) {
    return min(max(((__float_as_int(x) >> 23) & 255) - 127, -126), 126);
}

// The state, rescaled so that b is in [1, 2)
static __device__ __forceinline__ State normal(State s) {
    const int n = exponent(s.b);
    return {pow2(-n) * s.a, pow2(-n) * s.b, s.P + n};
}

// The incoming state at scale 2^P, and the factor applied to a and b
static __device__ State enter(float a, float b, float p, float& scale) {
    const Power e = exponential(p);
    const int n = exponent(b);
    scale = e.m * pow2(-n);
    return {scale * a, scale * b, e.n + n};
}

// p, and the factor 2^P / e^p for a and b, which corrects the rounding of p
static __device__ float leave(int P, float& p) {
    p = LN_2 * float(P);
    const Power e = exponential(p);
    return pow2(min(max(P - e.n, -127), 127)) * reciprocal(e.m);
}

template <class Step>
static __device__ __forceinline__ void forwards(int length, Step step) {
    if (length == STEPS) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) step(i);
    } else {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) if (i < length) step(i);
    }
}

template <class Step>
static __device__ __forceinline__ void backwards(int length, Step step) {
    if (length == STEPS) {
#pragma unroll
        for (int i = STEPS - 1; i >= 0; --i) step(i);
    } else {
#pragma unroll
        for (int i = STEPS - 1; i >= 0; --i) if (i < length) step(i);
    }
}

// A thread's position in the tensors
struct Place {
    int warp, lane, b, channel, B, T, C;    // lanes beyond the last channel duplicate its work

    __device__ Place(unsigned block, int B, int T, int C) : warp(threadIdx.y), lane(threadIdx.x), B(B), T(T), C(C) {
        const unsigned tiles = (C - 1) / LANES + 1;
        b = block / tiles, channel = min(int(block % tiles) * LANES + lane, C - 1);
    }
    __device__ long long rows() const { return (long long)B * C; }
    __device__ long long row() const { return (long long)b * C + channel; }
    __device__ int chunks() const { return (T - 1) / CHUNK + 1; }
    __device__ int length(int chunk, int segment) const { return min(max(T - chunk * CHUNK - segment * STEPS, 0), STEPS); }
    __device__ long long at(int chunk) const { return ((long long)b * T + chunk * CHUNK + warp * STEPS) * C + channel; }
};

// A channel's e^w, e^w over a full segment and over the last, shorter one, and e^time_first; computed once, in shared memory
struct Weights {
    const Power (*all)[LANES];
    int lane;

    __device__ Power decay() const { return all[0][lane]; }
    __device__ Power over(int length) const { return length == STEPS ? all[1][lane] : all[2][lane]; }
    __device__ Power bonus() const { return all[3][lane]; }
};

static __device__ Weights weights(const Place& place, const float* time_decay, const float* time_first) {
    __shared__ Power all[4][LANES];
    for (int i = place.warp; i < 4; i += WARPS) {
        const int steps = i == 0 ? 1 : i == 1 ? STEPS : place.T % STEPS;
        all[i][place.lane] = i < 3 ? exponential(steps * decay_exponent(time_decay[place.channel]))
                                   : exponential(time_first[place.channel]);
    }
    __syncthreads();
    return {all, place.lane};
}

// A thread's steps: e^k = m 2^n, and v
struct Segment {
    float m[STEPS], v[STEPS];
    int n[STEPS];

    __device__ __forceinline__ void load(const Number* k, const Number* v_from, int C, int length) {
        forwards(length, [&](int i) { m[i] = number(k + i * C), v[i] = number(v_from + i * C); });
    }
    __device__ __forceinline__ void exponentiate(int length) {
        forwards(length, [&](int i) { const Power e = exponential(m[i]); m[i] = e.m, n[i] = e.n; });
    }
    // The contribution of these steps to the state after them. The decays are known, so the largest exponent is computed first.
    __device__ __forceinline__ State sum(Power decay, int length) const {
        State s = {0.0f, 0.0f, -2147483647 - 1};
        forwards(length, [&](int i) { s.P = max(s.P, n[i] + (length - 1 - i) * decay.n); });
        forwards(length, [&](int i) {
            const float scale = m[i] * pow2(max(n[i] + (length - 1 - i) * decay.n - s.P, -127));
            s.a = s.a * decay.m + scale * v[i], s.b = s.b * decay.m + scale;
        });
        return s;
    }
};

// The state before `segment` of a chunk that starts with state `s`
static __device__ __forceinline__ State before(int segment, State s, const State (*sums)[LANES], const Place& place, int chunk,
                                        const Weights& by) {
    for (int i = 0; i < segment; ++i) {
        const int length = place.length(chunk, i);
        if (length > 0) s = after(s, by.over(length), sums[i][place.lane]);
    }
    return s;
}

static __device__ __forceinline__ float current_scale(Power bonus, int P, float m, int n) {
    return bonus.m * m * pow2(min(max(bonus.n + n - P, -64), 64));
}

static __device__ void save(float* states, const Place& place, State s) {
    states[place.row()] = s.a;
    states[place.row() + place.rows()] = s.b;
    states[place.row() + 2 * place.rows()] = __int_as_float(s.P);
}

static __device__ State saved(const float* states, const Place& place) {
    return {states[place.row()], states[place.row() + place.rows()], __float_as_int(states[place.row() + 2 * place.rows()])};
}

// Writes y if OUTPUT, otherwise the state before each chunk. Returns the state after the last step.
template <bool OUTPUT>
static __device__ __forceinline__ State scan(const Place& place, const float* time_decay, const float* time_first,
                                             const Number* k, const Number* v, const float* a, const float* b,
                                             const float* p, Number* y, float* states) {
    __shared__ State sums[2][WARPS][LANES], starts[2][LANES];   // double-buffered: a fast warp writes while a slow one reads
    const Weights by = weights(place, time_decay, time_first);
    const Power decay = by.decay(), bonus = by.bonus();
    const int warp = place.warp, lane = place.lane, C = place.C, chunks = place.chunks();
    if (warp == WARPS - 1) {
        float scale;
        starts[0][lane] = enter(a[place.row()], b[place.row()], p[place.row()], scale);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int length = place.length(chunk, warp);
        const long long at = place.at(chunk);
        Segment own = {};
        own.load(k + at, v + at, C, length);
        own.exponentiate(length);
        sums[chunk & 1][warp][lane] = own.sum(decay, length);
        __syncthreads();
        const State (*all)[LANES] = sums[chunk & 1];
        State state = starts[chunk & 1][lane];
        if (!OUTPUT && warp == 0) save(states + 3 * place.rows() * chunk, place, state);
        if (OUTPUT || warp == WARPS - 1) state = before(warp, state, all, place, chunk, by);
        if (warp == WARPS - 1) {
            const State next = length == 0 ? state : after(state, by.over(length), all[warp][lane]);
            starts[(chunk + 1) & 1][lane] = normal(next);
        }
        if (OUTPUT) {
            Number* const y_own = y + at;
            forwards(length, [&](int i) {
                const float now = current_scale(bonus, state.P, own.m[i], own.n[i]);
                write(y_own + i * C, (state.a + now * own.v[i]) * reciprocal(state.b + now));
                const Scales scale = scales(decay, state.P, own.m[i], own.n[i]);
                state = {scale.state * state.a + scale.input * own.v[i], scale.state * state.b + scale.input, scale.P};
            });
        }
    }
    __syncthreads();
    return starts[chunks & 1][lane];
}

// k, v, y (B,T,C); everything else (B,C)
extern "C" __global__ void __launch_bounds__(THREADS, 3)
scan_forward(const float* __restrict__ time_decay, const float* __restrict__ time_first, const Number* __restrict__ k,
             const Number* __restrict__ v, const float* __restrict__ a, const float* __restrict__ b,
             const float* __restrict__ p, Number* __restrict__ y, float* __restrict__ a_after, float* __restrict__ b_after,
             float* __restrict__ p_after, int B, int T, int C) {
    const Place place(blockIdx.x, B, T, C);
    const State after = scan<true>(place, time_decay, time_first, k, v, a, b, p, y, nullptr);
    if (place.warp > 0) return;
    const long long row = place.row();
    const float scale = leave(after.P, p_after[row]);
    a_after[row] = scale * after.a, b_after[row] = scale * after.b;
}

// states (chunks + 1,3,B,C)
extern "C" __global__ void __launch_bounds__(THREADS, 3)
scan_states(const float* __restrict__ time_decay, const float* __restrict__ time_first, const Number* __restrict__ k,
            const Number* __restrict__ v, const float* __restrict__ a, const float* __restrict__ b,
            const float* __restrict__ p, float* __restrict__ states, int B, int T, int C) {
    const Place place(blockIdx.x, B, T, C);
    const State after = scan<false>(place, time_decay, time_first, k, v, a, b, p, nullptr, states);
    if (place.warp == 0) save(states + 3 * place.rows() * place.chunks(), place, after);
}

// Forward pass through a segment, in the backward kernel: saves values for the reverse recurrence, and sums the terms that do not
// depend on the gradient after the segment. da and db are the derivatives of a and b with respect to w within the segment.
struct Replay {
    float input_scale[STEPS], state_scale[STEPS], grad_num[STEPS], grad_den[STEPS];
    float da, db, grad_w, grad_u;
    Gradient own;
    int P;

    __device__ __forceinline__ void forward(const Segment& segment, State s, Power decay, Power bonus, const float* grad_y,
                                            int length, float* by_k, float* by_v) {
        float through = 1.0f;
        forwards(length, [&](int i) {
            const float m = segment.m[i], v = segment.v[i], now = current_scale(bonus, s.P, m, segment.n[i]);
            const float over = reciprocal(s.b + now), y = (s.a + now * v) * over, g = grad_y[i] * over, here = now * g;
            const float gain = over * (v * s.b - s.a);                  // v - y, exact where this step dominates y
            by_v[i * THREADS] = here, by_k[i * THREADS] = here * gain;
            grad_num[i] = g, grad_den[i] = g * y;
            own.a += through * g, own.b -= through * (g * y);
            grad_u += here * gain;
            grad_w += g * (da - y * db);
            const Scales scale = scales(decay, s.P, m, segment.n[i]);
            const float a = scale.state * s.a, b = scale.state * s.b;
            state_scale[i] = scale.state, input_scale[i] = scale.input;
            through *= scale.state;
            da = scale.state * da + a, db = scale.state * db + b;
            s = {a + scale.input * v, b + scale.input, scale.P};
        });
        P = s.P;
    }
};

// Inputs grad_a, grad_b; outputs grad_a_before, grad_b_before, grad_decay and grad_first, the last two to be summed over B
extern "C" __global__ void __launch_bounds__(THREADS, 2)
scan_backward(const float* __restrict__ time_decay, const float* __restrict__ time_first, const Number* __restrict__ k,
              const Number* __restrict__ v, const float* __restrict__ a, const float* __restrict__ b,
              const float* __restrict__ p, const float* __restrict__ states, const Number* __restrict__ grad_y,
              const float* __restrict__ grad_a, const float* __restrict__ grad_b, Number* __restrict__ grad_k,
              Number* __restrict__ grad_v, float* __restrict__ grad_decay, float* __restrict__ grad_first,
              float* __restrict__ grad_a_before, float* __restrict__ grad_b_before, int B, int T, int C) {
    __shared__ State sums[WARPS][LANES];
    __shared__ Sum back[WARPS][LANES];
    __shared__ Gradient after_chunk[LANES];
    __shared__ float by_k[STEPS][THREADS], by_v[STEPS][THREADS];    // the contributions of y; no registers are left for them
    const Place place(gridDim.x - 1 - blockIdx.x, B, T, C);         // last block first: scan_states read it last, so it is cached
    const Weights by = weights(place, time_decay, time_first);
    const Power decay = by.decay(), bonus = by.bonus();
    const int warp = place.warp, lane = place.lane, thread = warp * LANES + lane, chunks = place.chunks();
    const long long row = place.row(), stride = 3 * place.rows();
    float grad_w = 0.0f, grad_u = 0.0f, unused, scale;
    if (warp == 0) {
        scale = leave(saved(states + stride * chunks, place).P, unused);
        after_chunk[lane] = {scale * grad_a[row], scale * grad_b[row]};
    }
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const int length = place.length(chunk, warp);
        const long long at = place.at(chunk);
        const Number *const v_own = v + at, *const grad_y_own = grad_y + at;
        Number *const grad_k_own = grad_k + at, *const grad_v_own = grad_v + at;
        Segment own = {};
        float g[STEPS] = {};
        own.load(k + at, v_own, C, length);
        forwards(length, [&](int i) { g[i] = number(grad_y_own + i * C); });
        own.exponentiate(length);
        const State sum = own.sum(decay, length);
        sums[warp][lane] = sum;
        __syncthreads();
        Gradient gradient = after_chunk[lane];
        const State start = before(warp, saved(states + stride * chunk, place), sums, place, chunk, by);
        const Power over = length > 0 ? by.over(length) : Power{1.0f, 0};
        const int P_after = warp == WARPS - 1 ? saved(states + stride * (chunk + 1), place).P
                            : length > 0 ? after(start, over, sum).P : start.P;
        Replay replay = {};
        replay.forward(own, start, decay, bonus, g, length, &by_k[0][thread], &by_v[0][thread]);
        back[warp][lane] = {replay.own, over.m * pow2(min(max(start.P + over.n - P_after, -127), 127))};
        __syncthreads();
        for (int i = WARPS - 1; i > warp; --i) gradient = before(back[i][lane], gradient);
        if (warp == 0) after_chunk[lane] = before(back[0][lane], gradient);
        const float rescale = pow2(min(max(replay.P - P_after, -126), 126));
        float A = rescale * gradient.a, B = rescale * gradient.b;
        grad_u += replay.grad_u;
        grad_w += replay.grad_w + A * replay.da + B * replay.db;
        backwards(length, [&](int i) {
            write(grad_k_own + i * C, by_k[i][thread] + replay.input_scale[i] * (A * number(v_own + i * C) + B));
            write(grad_v_own + i * C, by_v[i][thread] + replay.input_scale[i] * A);
            A = replay.state_scale[i] * A + replay.grad_num[i], B = replay.state_scale[i] * B - replay.grad_den[i];
        });
    }
    sums[warp][lane] = {grad_w, grad_u, 0};
    __syncthreads();
    if (warp > 0) return;
    for (int i = 1; i < WARPS; ++i) grad_w += sums[i][lane].a, grad_u += sums[i][lane].b;
    enter(a[row], b[row], p[row], scale);
    grad_decay[row] = float(decay_exponent(time_decay[place.channel])) * grad_w;
    grad_first[row] = grad_u;
    grad_a_before[row] = scale * after_chunk[lane].a, grad_b_before[row] = scale * after_chunk[lane].b;
}
