// WKV-4 and its gradients. Every exponential is m 2^n with a whole n, so that each rescaling is exact.
//
// Per channel a step is, with w = -exp(time_decay), u = time_first and the state (a, b) at the scale 2^P,
//
//     y = (a + e^(u+k) v) / (b + e^(u+k))         a <- e^w a + e^k v         b <- e^w b + e^k
//
// P is the larger of the decayed state's exponent and the newest step's: nothing is lost however far apart the k are. (e^(u+k)
// relative to the state is clamped to 2^64.) The mantissa of e^w, within [0.7, 1.4], moves b away from 2^P. After each chunk its
// power moves into P, computed from w alone: backward finds the same P, to the bit. Exponents are float32, which are exact up to
// 2^24; |k|, |p| and |time_first| are clamped to 1.1e7, above which float32 has no fraction, and a state that decays by more is
// lost anyway. NaN stays NaN, in its channel, and infinity becomes NaN.
//
// g is the gradient of what stands behind it. Backward notes the state before each chunk; then, from the last chunk to the
// first, it computes the chunk again and goes back through it:
//
//     gnum = gy / (b + now)       gk = now gnum (v - y) + new (ga v + gb)         gv = now gnum + new ga
//     ga <- kept ga + gnum        gb <- kept gb - gnum y         gw += kept (ga a + gb b)         gu += now gnum (v - y)
//
// now = e^(u+k), kept = e^w and new = e^k at the scales of their step. A row is LANES channels of one b; k, v, y (B,T,C), all else
// (B,C) or (C). SHARE channels of one b are a task.

#define LANES 16                         // with AVX2 two registers: a whole line of the cache

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    CHUNK = 32,                          // steps between two states that are kept
    KEPT = 3, SAVED = 5,                 // vectors for a chunk: a, b, P; and for a step: a, b, now, kept, new
    SHARE = 32,                          // channels: whole lines of the cache in each dtype
    AHEAD = 16,                          // steps that are fetched before they are needed: the CPU does not guess places C apart
};

static const float LIMIT = 1.1e7f, LOST = 16.0f, LOST_SHIFT = -268435456.0f;     // time_decay above which a step forgets all
static const float LOG2_E = 1.4426950408889634f, ROOT_2 = 1.4142135f;
static const float LN_2 = 0.6931471805599453f, LN_2_HIGH = 0.693359375f, LN_2_LOW = -2.1219444005469058e-4f;

// The arguments of a call, as c_v0.py lists them. scratch: scratch_size numbers for each thread, of backward alone.
struct call {
    int64_t B, T, C, scratch_size;
    float *scratch;
    const float *time_decay, *time_first;
    const void *k, *v;
    const float *a, *b, *p;
    void *y;                             // in backward gy
    float *after_a, *after_b;            // in backward ga and gb
    float *after_p;                      // of forward alone
    void *gk, *gv;                       // of backward alone, as all below
    float *gw, *gu, *ga, *gb;            // (B,C): the gradients of time_decay and time_first of each b
};

// A row: its first number in (B,T,C) and in (B,C), its channel, and how many of its lanes there are.
struct row {
    int64_t first, of_state, channel, lanes;
};

struct power { floats m, n; };           // m 2^n

struct state { floats a, b, P; };

struct weights {
    floats w;
    struct power decay, bonus;           // e^w and e^u
    floats drift;                        // log2 of the power of decay.m over a chunk
};

struct step { floats now, kept, new, P; };               // P: after it

// e^x, m within [1, 2), to one unit in the last place
INLINE struct power power_of(floats x) {
    x = x == __builtin_inff() ? same(__builtin_nanf("")) : x;
    x = larger(same(-LIMIT), smaller(same(LIMIT), x));
    floats n = rounded_down(x * LOG2_E);
    floats r = less(n, same(LN_2_LOW), less(n, same(LN_2_HIGH), x));
    floats m = same(0.001955775417299989f);              // of e^r on [0, log 2], to 2e-9
    m = fused(m, r, same(0.007776794816698978f));
    m = fused(m, r, same(0.041928080322846804f));
    m = fused(m, r, same(0.16660485760579424f));
    m = fused(m, r, same(0.5000068453211467f));
    m = fused(m, r, same(0.9999997208349418f));
    m = fused(m, r, same(1.0000000018154944f));
    return (struct power){m, n};
}

INLINE floats power_of_2(floats n) { return times_power(same(1.0f), n); }

INLINE struct weights weights_of(const struct call *call, const struct row *row) {
    floats time_decay = read_some(FLOAT32, call->time_decay, row->channel, row->lanes);
    struct power speed = power_of(smaller(same(LOST), time_decay));
    struct weights weights = {.w = -times_power(speed.m, speed.n)};
    struct power decay = power_of(weights.w);
    decay.n = decay.m > ROOT_2 ? decay.n + 1.0f : decay.n;
    decay.m = decay.m > ROOT_2 ? decay.m * 0.5f : decay.m;
    weights.drift = (float)CHUNK * fused(weights.w, same(LOG2_E), -decay.n);
    decay.n = time_decay > LOST ? same(LOST_SHIFT) : decay.n;
    weights.decay = decay;
    weights.bonus = power_of(read_some(FLOAT32, call->time_first, row->channel, row->lanes));
    return weights;
}

// The incoming state with b within [1, 2), and the factor by which a and b were multiplied.
INLINE struct state enter(const struct call *call, const struct row *row, floats *scale) {
    floats a = read_some(FLOAT32, call->a, row->of_state, row->lanes), b = read_some(FLOAT32, call->b, row->of_state, row->lanes);
    struct power power = power_of(read_some(FLOAT32, call->p, row->of_state, row->lanes));
    floats n = __builtin_convertvector((bits_of(b) >> 23) - 127, floats);
    n = larger(same(-126.0f), smaller(same(126.0f), n));
    *scale = times_power(power.m, -n);
    return (struct state){*scale * a, *scale * b, power.n + n};
}

// The factor 2^P / e^p that brings a and b to the scale e^p, which corrects the rounding of p; and p.
INLINE floats leave(floats P, floats *p) {
    *p = P * LN_2;
    struct power power = power_of(*p);
    return power_of_2(P - power.n) / power.m;
}

// The same state with the power of decay.m over chunk j moved into P; scale: the factor of a and b, and of their gradients.
INLINE struct state settled(const struct weights *weights, int64_t j, struct state state, floats *scale) {
    floats n = rounded_down((float)(j + 1) * weights->drift) - rounded_down((float)j * weights->drift);
    *scale = power_of_2(-n);
    return (struct state){*scale * state.a, *scale * state.b, state.P + n};
}

INLINE struct step step_of(const struct weights *weights, floats P, floats k) {
    struct power power = power_of(k);
    floats lead = power.n - P, relative = weights->bonus.n + lead, decayed = P + weights->decay.n;
    relative = larger(same(-64.0f), smaller(same(64.0f), relative));
    struct step step = {.now = times_power(weights->bonus.m * power.m, relative), .P = larger(decayed, power.n)};
    step.kept = times_power(weights->decay.m, decayed - step.P);
    step.new = times_power(power.m, power.n - step.P);
    return step;
}

INLINE struct state advanced(struct state state, const struct step *step, floats v) {
    return (struct state){fused(step->kept, state.a, step->new * v), fused(step->kept, state.b, step->new), step->P};
}

INLINE floats read_row(enum form form, const struct row *row, const void *p, int64_t i) {
    return read_some(form, p, i, row->lanes);
}

INLINE void put_row(const struct row *row, float *p, floats x) { write_some(FLOAT32, p, row->of_state, row->lanes, x); }

INLINE void forward_row(enum form form, const struct call *call, const struct row *row) {
    struct weights weights = weights_of(call, row);
    floats scale, p;
    struct state state = enter(call, row, &scale);
    for (int64_t j = 0; j * CHUNK < call->T; j++) {
        int64_t end = (j + 1) * CHUNK < call->T ? (j + 1) * CHUNK : call->T;
        for (int64_t t = j * CHUNK; t < end; t++) {
            int64_t i = row->first + t * call->C;
            fetch(form, call->k, i + AHEAD * call->C);
            fetch(form, call->v, i + AHEAD * call->C);
            floats v = read_row(form, row, call->v, i);
            struct step step = step_of(&weights, state.P, read_row(form, row, call->k, i));
            write_some(form, call->y, i, row->lanes, fused(step.now, v, state.a) / (state.b + step.now));
            state = advanced(state, &step, v);
        }
        state = settled(&weights, j, state, &scale);
    }
    scale = leave(state.P, &p);
    put_row(row, call->after_a, scale * state.a);
    put_row(row, call->after_b, scale * state.b);
    put_row(row, call->after_p, p);
}

INLINE void keep(float *place, struct state state) {
    put(place, state.a);
    put(place + LANES, state.b);
    put(place + 2 * LANES, state.P);
}

INLINE struct state kept_at(const float *place) { return (struct state){at(place), at(place + LANES), at(place + 2 * LANES)}; }

// Notes the state before each chunk; returns the state's P after the last one.
INLINE floats keep_states(enum form form, const struct call *call, const struct row *row, const struct weights *weights,
                          struct state state, float *kept) {
    floats scale;
    for (int64_t j = 0; j * CHUNK < call->T; j++) {
        int64_t end = (j + 1) * CHUNK < call->T ? (j + 1) * CHUNK : call->T;
        keep(kept + j * KEPT * LANES, state);
        for (int64_t t = j * CHUNK; t < end; t++) {
            int64_t i = row->first + t * call->C;
            fetch(form, call->k, i + AHEAD * call->C);
            fetch(form, call->v, i + AHEAD * call->C);
            struct step step = step_of(weights, state.P, read_row(form, row, call->k, i));
            state = advanced(state, &step, read_row(form, row, call->v, i));
        }
        state = settled(weights, j, state, &scale);
    }
    return state.P;
}

// Computes a chunk again and saves what its steps need on the way back.
INLINE void save_steps(enum form form, const struct call *call, const struct row *row, const struct weights *weights,
                       struct state state, int64_t first, int64_t steps, float *saved) {
    for (int64_t s = 0; s < steps; s++, saved += SAVED * LANES) {
        int64_t i = first + s * call->C;
        struct step step = step_of(weights, state.P, read_row(form, row, call->k, i));
        put(saved, state.a);
        put(saved + LANES, state.b);
        put(saved + 2 * LANES, step.now);
        put(saved + 3 * LANES, step.kept);
        put(saved + 4 * LANES, step.new);
        state = advanced(state, &step, read_row(form, row, call->v, i));
    }
}

struct gradients { floats a, b, w, u; };

INLINE struct gradients back_through(enum form form, const struct call *call, const struct row *row, int64_t first, int64_t steps,
                                     const float *saved, struct gradients g) {
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = first + s * call->C, later = i - CHUNK * call->C;
        fetch(form, call->k, later);
        fetch(form, call->v, later);
        fetch(form, call->y, later);
        const float *step = saved + s * SAVED * LANES;
        floats a = at(step), b = at(step + LANES), now = at(step + 2 * LANES);
        floats kept = at(step + 3 * LANES), new = at(step + 4 * LANES);
        floats v = read_row(form, row, call->v, i), over = same(1.0f) / (b + now);
        floats gnum = over * read_row(form, row, call->y, i), here = now * gnum;
        floats gain = here * (over * fused(v, b, -a));               // v - y; exact where this step dominates y
        write_some(form, call->gk, i, row->lanes, fused(new, fused(g.a, v, g.b), gain));
        write_some(form, call->gv, i, row->lanes, fused(new, g.a, here));
        g.u = g.u + gain;
        g.w = fused(kept, fused(g.a, a, g.b * b), g.w);
        g.a = fused(kept, g.a, gnum);
        g.b = less(gnum, over * fused(now, v, a), kept * g.b);
    }
    return g;
}

INLINE void backward_row(enum form form, const struct call *call, const struct row *row, float *scratch) {
    struct weights weights = weights_of(call, row);
    float *saved = scratch, *kept = scratch + CHUNK * SAVED * LANES;
    floats scale_in, scale, p;
    floats P = keep_states(form, call, row, &weights, enter(call, row, &scale_in), kept);
    scale = leave(P, &p);
    struct gradients g = {scale * read_some(FLOAT32, call->after_a, row->of_state, row->lanes),
                          scale * read_some(FLOAT32, call->after_b, row->of_state, row->lanes), same(0.0f), same(0.0f)};
    for (int64_t j = (call->T - 1) / CHUNK; j >= 0; j--) {
        int64_t steps = call->T - j * CHUNK < CHUNK ? call->T - j * CHUNK : CHUNK, first = row->first + j * CHUNK * call->C;
        settled(&weights, j, (struct state){g.a, g.b, P}, &scale);
        g.a = scale * g.a, g.b = scale * g.b;
        save_steps(form, call, row, &weights, kept_at(kept + j * KEPT * LANES), first, steps, saved);
        g = back_through(form, call, row, first, steps, saved, g);
    }
    put_row(row, call->gw, weights.w * g.w);
    put_row(row, call->gu, g.u);
    put_row(row, call->ga, scale_in * g.a);
    put_row(row, call->gb, scale_in * g.b);
}

// Rows whose lanes are all there are compiled apart: their loads and stores are one instruction.
INLINE void run_row(enum form form, int back, const struct call *call, const struct row *row, float *scratch) {
    if (back) backward_row(form, call, row, scratch);
    else forward_row(form, call, row);
}

INLINE void run(enum form form, int back, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    int64_t shares = (call->C + SHARE - 1) / SHARE;
    float *scratch = back ? call->scratch + thread * call->scratch_size : 0;
    for (int64_t task; (task = next_task(tasks)) < call->B * shares;) {
        int64_t b = task / shares, c = task % shares * SHARE, end = c + SHARE < call->C ? c + SHARE : call->C;
        for (; c + LANES <= end; c += LANES) {
            struct row row = {b * call->T * call->C + c, b * call->C + c, c, LANES};
            run_row(form, back, call, &row, scratch);
        }
        if (c < end) {
            struct row row = {b * call->T * call->C + c, b * call->C + c, c, end - c};
            run_row(form, back, call, &row, scratch);
        }
    }
}

static void forward_float32(struct tasks *tasks, int64_t thread) { run(FLOAT32, 0, tasks, thread); }
static void forward_bfloat16(struct tasks *tasks, int64_t thread) { run(BFLOAT16, 0, tasks, thread); }
static void backward_float32(struct tasks *tasks, int64_t thread) { run(FLOAT32, 1, tasks, thread); }
static void backward_bfloat16(struct tasks *tasks, int64_t thread) { run(BFLOAT16, 1, tasks, thread); }

ENTRY(wkv4_forward_float32)(const struct call *call, int64_t threads) { share(forward_float32, call, threads); }
ENTRY(wkv4_forward_bfloat16)(const struct call *call, int64_t threads) { share(forward_bfloat16, call, threads); }
ENTRY(wkv4_backward_float32)(const struct call *call, int64_t threads) { share(backward_float32, call, threads); }
ENTRY(wkv4_backward_bfloat16)(const struct call *call, int64_t threads) { share(backward_bfloat16, call, threads); }
