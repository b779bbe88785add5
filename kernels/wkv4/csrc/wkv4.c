// WKV-4 and its gradients. Every exponential is m 2^n with an integer n, so rescaling is exact.
//
// Per channel, with w = -exp(time_decay), u = time_first and the state (a, b) scaled by 2^-P, a step is
//
//     y = (a + e^(u+k) v) / (b + e^(u+k))         a <- e^w a + e^k v         b <- e^w b + e^k
//
// P is the larger of the exponents of the decayed state and of e^k, so no spread of k loses precision. (e^(u+k) relative to the
// state is clamped to 2^64.) The mantissa of e^w, within [0.7, 1.4], makes b drift away from 2^P. After each chunk the
// accumulated power moves into P; it depends on w alone, so backward computes exactly the same P. Exponents are float32, exact up
// to 2^24; |k|, |p| and |time_first| are clamped to 1.1e7, above which float32 has no fraction; a state that decays by more than
// that vanishes anyway. NaN stays NaN, in its channel; infinity becomes NaN.
//
// gx denotes the gradient of x. Backward saves the state before each chunk; then, from the last chunk to the first, it recomputes
// the chunk and propagates gradients through it:
//
//     gnum = gy / (b + bonus)     gk = bonus gnum (v - y) + new (ga v + gb)       gv = bonus gnum + new ga
//     ga <- decay ga + gnum       gb <- decay gb - gnum y        gw += decay (ga a + gb b)        gu += bonus gnum (v - y)
//
// bonus = e^(u+k), decay = e^w and new = e^k, at the scales of their step. A row is LANES channels of one b. k, v, y are (B,T,C),
// everything else (B,C) or (C). A task is TASK_CHANNELS channels of one b.

#define LANES 16                         // floats of a cache line; with AVX2 two registers

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    CHUNK = 32,                          // steps between saved states
    PER_CHUNK = 3, PER_STEP = 5,         // vectors saved for a chunk: a, b, P; for a step: a, b, bonus, decay, new
    TASK_CHANNELS = 32,                  // a multiple of a cache line in each dtype
    PREFETCH_STEPS = 16,                 // prefetch distance in steps: hardware prefetchers do not detect a stride of C
};

static const float LIMIT = 1.1e7f;
static const float FORGET = 16.0f, FORGET_SHIFT = -268435456.0f;     // time_decay above which a step erases the state
static const float LOG2_E = 1.4426950408889634f, ROOT_2 = 1.4142135f;
static const float LN_2 = 0.6931471805599453f, LN_2_HIGH = 0.693359375f, LN_2_LOW = -2.1219444005469058e-4f;

// Arguments, in the order of c_v0.py. Gradients are named as in the formulas above.
struct call {
    int64_t B, T, C, scratch_size;       // scratch_size: numbers per thread
    float *scratch;                      // backward only
    const float *time_decay, *time_first;
    const void *k, *v;
    const float *a, *b, *p;
    void *y;                             // backward: gy
    float *after_a, *after_b;            // state after the last step; backward: ga and gb
    float *after_p;                      // forward only
    void *gk, *gv;                       // the rest: backward only
    float *gw, *gu, *ga, *gb;            // (B,C); gw, gu: gradients of time_decay and time_first, to be summed over b
};

// A row: the index of its first number in (B,T,C) and in (B,C), its first channel, and its number of lanes.
struct row {
    int64_t first, state, channel, lanes;
};

struct power { floats m, n; };           // m 2^n

struct state { floats a, b, P; };

struct weights {
    floats w;
    struct power decay, bonus;           // e^w and e^u
    floats drift;                        // log2(decay.m^CHUNK)
};

struct step { floats bonus, decay, new, P; };            // P: after the step

// e^x with m in [1, 2), within 1 ulp
INLINE struct power exp_power(floats x) {
    x = x == __builtin_inff() ? splat(__builtin_nanf("")) : x;
    x = max(splat(-LIMIT), min(splat(LIMIT), x));
    floats n = round_down(x * LOG2_E);
    floats r = fnmadd(n, splat(LN_2_LOW), fnmadd(n, splat(LN_2_HIGH), x));
    floats m = splat(0.001955775417299989f);              // e^r on [0, log 2], within 2e-9
    m = fma(m, r, splat(0.007776794816698978f));
    m = fma(m, r, splat(0.041928080322846804f));
    m = fma(m, r, splat(0.16660485760579424f));
    m = fma(m, r, splat(0.5000068453211467f));
    m = fma(m, r, splat(0.9999997208349418f));
    m = fma(m, r, splat(1.0000000018154944f));
    return (struct power){m, n};
}

INLINE floats exp2_int(floats n) { return scalef(splat(1.0f), n); }

INLINE struct weights weights_of(const struct call *call, const struct row *row) {
    floats time_decay = load_partial(FLOAT32, call->time_decay, row->channel, row->lanes);
    struct power speed = exp_power(min(splat(FORGET), time_decay));
    struct weights weights = {.w = -scalef(speed.m, speed.n)};
    struct power decay = exp_power(weights.w);
    decay.n = decay.m > ROOT_2 ? decay.n + 1.0f : decay.n;
    decay.m = decay.m > ROOT_2 ? decay.m * 0.5f : decay.m;
    weights.drift = (float)CHUNK * fma(weights.w, splat(LOG2_E), -decay.n);
    decay.n = time_decay > FORGET ? splat(FORGET_SHIFT) : decay.n;
    weights.decay = decay;
    weights.bonus = exp_power(load_partial(FLOAT32, call->time_first, row->channel, row->lanes));
    return weights;
}

// Loads the state, scaled so that b is in [1, 2); *scale: the factor applied to a and b.
INLINE struct state load_state(const struct call *call, const struct row *row, floats *scale) {
    floats a = load_partial(FLOAT32, call->a, row->state, row->lanes), b = load_partial(FLOAT32, call->b, row->state, row->lanes);
    struct power power = exp_power(load_partial(FLOAT32, call->p, row->state, row->lanes));
    floats n = __builtin_convertvector((as_ints(b) >> 23) - 127, floats);
    n = max(splat(-126.0f), min(splat(126.0f), n));
    *scale = scalef(power.m, -n);
    return (struct state){*scale * a, *scale * b, power.n + n};
}

// Computes p = P log 2; returns 2^P / e^p, which rescales a and b to e^p and corrects the rounding of p.
INLINE floats export_scale(floats P, floats *p) {
    *p = P * LN_2;
    struct power power = exp_power(*p);
    return exp2_int(P - power.n) / power.m;
}

// Moves the power accumulated in chunk j from a and b into P; *scale: the factor applied to a and b, also for their gradients.
INLINE struct state renormalize(const struct weights *weights, int64_t j, struct state state, floats *scale) {
    floats n = round_down((float)(j + 1) * weights->drift) - round_down((float)j * weights->drift);
    *scale = exp2_int(-n);
    return (struct state){*scale * state.a, *scale * state.b, state.P + n};
}

INLINE struct step make_step(const struct weights *weights, floats P, floats k) {
    struct power power = exp_power(k);
    floats lead = power.n - P, relative = weights->bonus.n + lead, decayed = P + weights->decay.n;
    relative = max(splat(-64.0f), min(splat(64.0f), relative));
    struct step step = {.bonus = scalef(weights->bonus.m * power.m, relative), .P = max(decayed, power.n)};
    step.decay = scalef(weights->decay.m, decayed - step.P);
    step.new = scalef(power.m, power.n - step.P);
    return step;
}

INLINE struct state advance(struct state state, const struct step *step, floats v) {
    return (struct state){fma(step->decay, state.a, step->new * v), fma(step->decay, state.b, step->new), step->P};
}

INLINE floats load_row(enum dtype dtype, const struct row *row, const void *p, int64_t i) {
    return load_partial(dtype, p, i, row->lanes);
}

INLINE void store_row(const struct row *row, float *p, floats x) { store_partial(FLOAT32, p, row->state, row->lanes, x); }

INLINE void forward_row(enum dtype dtype, const struct call *call, const struct row *row) {
    struct weights weights = weights_of(call, row);
    floats scale, p;
    struct state state = load_state(call, row, &scale);
    for (int64_t j = 0; j * CHUNK < call->T; j++) {
        int64_t end = (j + 1) * CHUNK < call->T ? (j + 1) * CHUNK : call->T;
        for (int64_t t = j * CHUNK; t < end; t++) {
            int64_t i = row->first + t * call->C;
            prefetch(dtype, call->k, i + PREFETCH_STEPS * call->C);
            prefetch(dtype, call->v, i + PREFETCH_STEPS * call->C);
            floats v = load_row(dtype, row, call->v, i);
            struct step step = make_step(&weights, state.P, load_row(dtype, row, call->k, i));
            store_partial(dtype, call->y, i, row->lanes, fma(step.bonus, v, state.a) / (state.b + step.bonus));
            state = advance(state, &step, v);
        }
        state = renormalize(&weights, j, state, &scale);
    }
    scale = export_scale(state.P, &p);
    store_row(row, call->after_a, scale * state.a);
    store_row(row, call->after_b, scale * state.b);
    store_row(row, call->after_p, p);
}

INLINE void save_state(float *to, struct state state) {
    store(to, state.a);
    store(to + LANES, state.b);
    store(to + 2 * LANES, state.P);
}

INLINE struct state saved_state(const float *from) {
    return (struct state){load(from), load(from + LANES), load(from + 2 * LANES)};
}

// Saves the state before each chunk; returns P after the last chunk.
INLINE floats save_chunks(enum dtype dtype, const struct call *call, const struct row *row, const struct weights *weights,
                          struct state state, float *chunks) {
    floats scale;
    for (int64_t j = 0; j * CHUNK < call->T; j++) {
        int64_t end = (j + 1) * CHUNK < call->T ? (j + 1) * CHUNK : call->T;
        save_state(chunks + j * PER_CHUNK * LANES, state);
        for (int64_t t = j * CHUNK; t < end; t++) {
            int64_t i = row->first + t * call->C;
            prefetch(dtype, call->k, i + PREFETCH_STEPS * call->C);
            prefetch(dtype, call->v, i + PREFETCH_STEPS * call->C);
            struct step step = make_step(weights, state.P, load_row(dtype, row, call->k, i));
            state = advance(state, &step, load_row(dtype, row, call->v, i));
        }
        state = renormalize(weights, j, state, &scale);
    }
    return state.P;
}

// Recomputes a chunk and saves the values of each step that backward_chunk reads.
INLINE void recompute_chunk(enum dtype dtype, const struct call *call, const struct row *row, const struct weights *weights,
                       struct state state, int64_t first, int64_t steps, float *saved) {
    for (int64_t s = 0; s < steps; s++, saved += PER_STEP * LANES) {
        int64_t i = first + s * call->C;
        struct step step = make_step(weights, state.P, load_row(dtype, row, call->k, i));
        store(saved, state.a);
        store(saved + LANES, state.b);
        store(saved + 2 * LANES, step.bonus);
        store(saved + 3 * LANES, step.decay);
        store(saved + 4 * LANES, step.new);
        state = advance(state, &step, load_row(dtype, row, call->v, i));
    }
}

struct gradients { floats a, b, w, u; };

INLINE struct gradients backward_chunk(enum dtype dtype, const struct call *call, const struct row *row, int64_t first,
                                       int64_t steps, const float *saved, struct gradients g) {
    for (int64_t s = steps - 1; s >= 0; s--) {
        int64_t i = first + s * call->C, later = i - CHUNK * call->C;
        prefetch(dtype, call->k, later);
        prefetch(dtype, call->v, later);
        prefetch(dtype, call->y, later);
        const float *step = saved + s * PER_STEP * LANES;
        floats a = load(step), b = load(step + LANES), bonus = load(step + 2 * LANES);
        floats decay = load(step + 3 * LANES), new = load(step + 4 * LANES);
        floats v = load_row(dtype, row, call->v, i), inverse = splat(1.0f) / (b + bonus);
        floats gnum = inverse * load_row(dtype, row, call->y, i), direct = bonus * gnum;
        floats gbonus = direct * (inverse * fma(v, b, -a));          // v - y, exact where this step dominates y
        store_partial(dtype, call->gk, i, row->lanes, fma(new, fma(g.a, v, g.b), gbonus));
        store_partial(dtype, call->gv, i, row->lanes, fma(new, g.a, direct));
        g.u = g.u + gbonus;
        g.w = fma(decay, fma(g.a, a, g.b * b), g.w);
        g.a = fma(decay, g.a, gnum);
        g.b = fnmadd(gnum, inverse * fma(bonus, v, a), decay * g.b);
    }
    return g;
}

INLINE void backward_row(enum dtype dtype, const struct call *call, const struct row *row, float *scratch) {
    struct weights weights = weights_of(call, row);
    float *saved = scratch, *chunks = scratch + CHUNK * PER_STEP * LANES;
    floats scale_in, scale, p;
    floats P = save_chunks(dtype, call, row, &weights, load_state(call, row, &scale_in), chunks);
    scale = export_scale(P, &p);
    struct gradients g = {scale * load_partial(FLOAT32, call->after_a, row->state, row->lanes),
                          scale * load_partial(FLOAT32, call->after_b, row->state, row->lanes), splat(0.0f), splat(0.0f)};
    for (int64_t j = (call->T - 1) / CHUNK; j >= 0; j--) {
        int64_t steps = call->T - j * CHUNK < CHUNK ? call->T - j * CHUNK : CHUNK, first = row->first + j * CHUNK * call->C;
        renormalize(&weights, j, (struct state){g.a, g.b, P}, &scale);
        g.a = scale * g.a, g.b = scale * g.b;
        recompute_chunk(dtype, call, row, &weights, saved_state(chunks + j * PER_CHUNK * LANES), first, steps, saved);
        g = backward_chunk(dtype, call, row, first, steps, saved, g);
    }
    store_row(row, call->gw, weights.w * g.w);
    store_row(row, call->gu, g.u);
    store_row(row, call->ga, scale_in * g.a);
    store_row(row, call->gb, scale_in * g.b);
}

// Inlined twice, so that full vectors are loaded and stored by single instructions.
INLINE void run_row(enum dtype dtype, int backward, const struct call *call, const struct row *row, float *scratch) {
    if (backward) backward_row(dtype, call, row, scratch);
    else forward_row(dtype, call, row);
}

INLINE void run(enum dtype dtype, int backward, struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    int64_t tasks_per_b = (call->C + TASK_CHANNELS - 1) / TASK_CHANNELS;
    float *scratch = backward ? call->scratch + thread * call->scratch_size : 0;
    for (int64_t task; (task = next_task(tasks)) < call->B * tasks_per_b;) {
        int64_t b = task / tasks_per_b, c = task % tasks_per_b * TASK_CHANNELS;
        int64_t end = c + TASK_CHANNELS < call->C ? c + TASK_CHANNELS : call->C;
        for (; c + LANES <= end; c += LANES) {
            struct row row = {b * call->T * call->C + c, b * call->C + c, c, LANES};
            run_row(dtype, backward, call, &row, scratch);
        }
        if (c < end) {
            struct row row = {b * call->T * call->C + c, b * call->C + c, c, end - c};
            run_row(dtype, backward, call, &row, scratch);
        }
    }
}

static void forward_float32(struct tasks *tasks, int64_t thread) { run(FLOAT32, 0, tasks, thread); }
static void forward_bfloat16(struct tasks *tasks, int64_t thread) { run(BFLOAT16, 0, tasks, thread); }
static void backward_float32(struct tasks *tasks, int64_t thread) { run(FLOAT32, 1, tasks, thread); }
static void backward_bfloat16(struct tasks *tasks, int64_t thread) { run(BFLOAT16, 1, tasks, thread); }

ENTRY(wkv4_forward_float32, struct call) { parallel_for(forward_float32, call, threads); }
ENTRY(wkv4_forward_bfloat16, struct call) { parallel_for(forward_bfloat16, call, threads); }
ENTRY(wkv4_backward_float32, struct call) { parallel_for(backward_float32, call, threads); }
ENTRY(wkv4_backward_bfloat16, struct call) { parallel_for(backward_bfloat16, call, threads); }
