// A program of kernels/decoding: threads take the tiles of an instruction from a counter, and wait until all are done, by spinning,
// before the next one. What an instruction computes and the order of its arguments: kernels/decoding/__init__.py and c_v0.py.

#include "../../matvec/csrc/products.h"
#include "../../native/csrc/threads.h"

enum { NORM, MIX, PRODUCT, DOWN, UP, MAP, ADD, WKV4, WKV7, ROUND, ARRANGE, HALVE };
enum { TANH, SIGMOID, RELU2 };
enum {
    WIDTH = 24,              // of an instruction: its name, its tiles, its arguments
    APART = 16,              // between two counters, so that no two share a cache line
    CHANNELS = 128,          // of a tile of what is computed channel by channel
    PART = 32,               // outputs of `up` that are computed together
    N7 = 64,                 // channels of a head in all released models: wkv7 is compiled for them as well
};
#define FASTEST_LOG_W -0.6065306597126334f      // of RWKV-7's decay: -e^-0.5

typedef const float *in;

struct run {
    enum kind small;                     // of down and up, whose matrices are m
    const void *m;
    const float *c;                      // constants
    float *g;                            // registers of the rows, size numbers apart
    uint8_t *q;                          // what products multiply in place of x, for each row q_size numbers of 16 bits
    int64_t R, size, q_size, parts;      // parts: tiles that the outputs of a product are cut into
};

#define SHARED static __attribute__((noinline))          // by the programs of all forms

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

INLINE float mean_of_squares(in x, int64_t width, float mean) {
    floats squares = same(0.0f);
    for (int64_t j = 0; j < width; j += 8) {
        floats away = at(x + j) - mean;
        squares = fused(away, away, squares);
    }
    return sum_of(squares) / (float)width;
}

INLINE float mean_of(in x, int64_t width) {
    floats sums = same(0.0f);
    for (int64_t j = 0; j < width; j += 8) sums += at(x + j);
    return sum_of(sums) / (float)width;
}

INLINE float root(float x) { return __builtin_elementwise_sqrt(x); }

SHARED void norm(const struct run *run, const int64_t *code, int64_t row) {
    float *g = run->g + row * run->size, *x = g + code[0], *y = g + code[1];
    in weight = run->c + code[3], bias = run->c + code[4];
    int64_t width = code[2];
    if (code[6] >= 0) for (int64_t j = 0; j < width; j += 8) put(x + j, at(x + j) + at(g + code[6] + j));
    float mean = mean_of(x, width), factor = 1.0f / root(mean_of_squares(x, width, mean) + run->c[code[5]]);
    for (int64_t j = 0; j < width; j += 8)
        put(y + j, fused((at(x + j) - mean) * factor, at(weight + j), at(bias + j)));
}

INLINE void mix(const struct run *run, const int64_t *code, float *g, int64_t channel) {
    int64_t width = code[3], n = code[4];
    floats last = at(g + code[1] + channel), x = at(g + code[0] + channel), away = x - last;
    for (int64_t i = 0; i < n; i++)
        put(g + code[2] + i * width + channel, fused(away, at(run->c + code[5] + i * width + channel), last));
    put(g + code[1] + channel, x);
}

INLINE void map(const int64_t *code, float *g, int64_t channel) {
    floats y = at(g + code[0] + channel);
    if (code[2] == TANH) y = tanh_of(y);
    else if (code[2] == SIGMOID) y = sigmoid(y);
    else y = larger(same(0.0f), y) * larger(same(0.0f), y);
    put(g + code[0] + channel, y);
}

INLINE void add(const int64_t *code, float *g, int64_t channel) {
    floats y = at(g + code[1] + channel);
    if (code[3] >= 0) y = y * sigmoid(at(g + code[3] + channel));
    put(g + code[0] + channel, at(g + code[0] + channel) + y);
}

INLINE void wkv4(const struct run *run, const int64_t *code, float *g, int64_t channel) {
    floats k = at(g + code[0] + channel), v = at(g + code[1] + channel), r = at(g + code[2] + channel);
    floats a = at(g + code[3] + channel), b = at(g + code[4] + channel), p = at(g + code[5] + channel);
    floats w = at(run->c + code[7] + channel), u = at(run->c + code[8] + channel);
    floats top = larger(p, u + k), past = exp_of_any(p - top), now = exp_of_any(u + k - top);
    floats wkv = fused(past, a, now * v) / fused(past, b, now);
    put(g + code[6] + channel, sigmoid(r) * wkv);
    top = larger(p + w, k), past = exp_of_any(p + w - top), now = exp_of_any(k - top);
    put(g + code[3] + channel, fused(past, a, now * v));
    put(g + code[4] + channel, fused(past, b, now));
    put(g + code[5] + channel, top);
}

// kernels/wkv7's step for one head: S w + (S a) b + v k, and y = S r, row by row
INLINE void state_and_y(int64_t N, float *state, in w, in a, in b, in k, in v, in r, float *y) {
    for (int64_t i = 0; i < N; i++, state += N) {
        floats products[2] = {same(0.0f), same(0.0f)}, outputs[2] = {same(0.0f), same(0.0f)};
        SEVERAL for (int64_t j = 0; j < N / 8; j++) products[j % 2] = fused(at(state + j * 8), at(a + j * 8), products[j % 2]);
        floats sa = same(sum_of(products[0] + products[1])), value = same(v[i]);
        SEVERAL for (int64_t j = 0; j < N / 8; j++) {
            floats decayed = at(state + j * 8) * at(w + j * 8);
            floats now = fused(value, at(k + j * 8), fused(sa, at(b + j * 8), decayed));
            outputs[j % 2] = fused(now, at(r + j * 8), outputs[j % 2]);
            put(state + j * 8, now);
        }
        y[i] = sum_of(outputs[0] + outputs[1]);
    }
}

// One head of a row. z, rate, k and v become the decay, b, the key and the value; kk becomes a.
SHARED void wkv7(const struct run *run, const int64_t *code, int64_t tile) {
    int64_t heads = code[20], N = code[21], channel = tile % heads * N;
    float *row = run->g + tile / heads * run->size, *g = row + channel;
    in c = run->c + channel;
    in w0 = c + code[11], a0 = c + code[12], v0 = c + code[13], k_k = c + code[14], k_a = c + code[15], r_k = c + code[16];
    in weight = c + code[17], bias = c + code[18], r = g + code[0];
    float *key = g + code[1], *value = g + code[2], *decay = g + code[3], *rate = g + code[4], *gate = g + code[5];
    float *first = g + code[7], *kk = g + code[9], *y = g + code[10], *state = row + code[8] + channel * N;
    floats squares = same(0.0f), shares = same(0.0f);
    for (int64_t j = 0; j < N; j += 8) {
        floats k = at(key + j), v = at(value + j), rates = sigmoid((at(a0 + j) + at(rate + j)));
        put(decay + j, exp_of_any(FASTEST_LOG_W * sigmoid((at(w0 + j) + at(decay + j)))));
        if (code[6] >= 0) {
            floats share = sigmoid((at(v0 + j) + at(g + code[6] + j)));
            v = fused(at(first + j) - v, share, v);
            put(value + j, v);
        } else {
            put(first + j, v);
        }
        floats direction = k * at(k_k + j);
        squares = fused(direction, direction, squares);
        k = k * fused(rates - 1.0f, at(k_a + j), same(1.0f));
        shares = fused(at(r + j) * k, at(r_k + j), shares);
        put(key + j, k), put(rate + j, rates), put(kk + j, direction);
    }
    float length = root(sum_of(squares));
    floats factor = same(1.0f / (length > 1e-12f ? length : 1e-12f)), share = same(sum_of(shares));
    for (int64_t j = 0; j < N; j += 8) {
        floats direction = at(kk + j) * factor;
        put(kk + j, -direction);
        put(rate + j, at(rate + j) * direction);
    }
    if (N == N7) state_and_y(N7, state, decay, kk, rate, key, value, r, y);
    else state_and_y(N, state, decay, kk, rate, key, value, r, y);
    float mean = mean_of(y, N), scale = 1.0f / root(mean_of_squares(y, N, mean) + run->c[code[19]]);
    for (int64_t j = 0; j < N; j += 8) {
        floats normal = fused((at(y + j) - mean) * scale, at(weight + j), at(bias + j));
        put(y + j, fused(share, at(value + j), normal) * at(gate + j));
    }
}

enum { VECTORS = PART / WIDE };

INLINE void add_column(enum kind kind, int rows, const void *w, int64_t k, const float *x, int64_t size, wide (*acc)[VECTORS]) {
    wide weights[VECTORS];
    UNROLLED for (int c = 0; c < VECTORS; c++)
        weights[c] = read_weights(kind, (const uint8_t *)w + (k * PART + c * WIDE) * size_in(kind), WIDE);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = wide_fused(weights[c], wide_same(x[i * size + k]), acc[i][c]);
}

// PART outputs of `rows` rows, of a W that is stored in such parts (K,PART)
INLINE void part_of_up(enum kind kind, int rows, const void *w, int64_t K, const float *x, float *y, int64_t size) {
    wide acc[MOST_ROWS][VECTORS];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = wide_same(0.0f);
    SEVERAL for (int64_t k = 0; k < K; k++) add_column(kind, rows, w, k, x, size, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) wide_put(y + i * size + c * WIDE, acc[i][c]);
}

INLINE void up_in(enum kind kind, const struct run *run, const int64_t *code, int64_t tile) {
    int64_t parts = tiles(code[2], PART), K = code[3], size = run->size, each = tiles(parts, run->parts);
    for (int64_t part = tile * each; part < least(parts, (tile + 1) * each); part++) {
        const uint8_t *w = (const uint8_t *)run->m + (code[4] + part * K * PART) * size_in(kind);
        const float *x = run->g + code[0];
        float *y = run->g + code[1] + part * PART;
        int64_t r = 0;
        for (; r + 4 <= run->R; r += 4) part_of_up(kind, 4, w, K, x + r * size, y + r * size, size);
        for (; r < run->R; r++) part_of_up(kind, 1, w, K, x + r * size, y + r * size, size);
    }
}

INLINE void outputs_of_tile(const struct product *product, int64_t N, int64_t parts, int64_t tile) {
    int64_t each = tiles(N, parts);
    products(product, tile * each, least(N, (tile + 1) * each));
}

INLINE void down_in(enum kind kind, const struct run *run, const int64_t *code, int64_t tile) {
    const struct product product = {
        .kind = kind, .w = (const uint8_t *)run->m + code[4] * size_in(kind), .x = run->g + code[0],
        .y = run->g + code[1], .R = run->R, .K = code[3], .x_row = run->size, .y_row = run->size,
    };
    outputs_of_tile(&product, code[2], run->parts, tile);
}

SHARED void up(const struct run *run, const int64_t *code, int64_t tile) {
    if (run->small == OF_FLOAT32) up_in(OF_FLOAT32, run, code, tile);
    else up_in(OF_BFLOAT16, run, code, tile);
}

SHARED void down(const struct run *run, const int64_t *code, int64_t tile) {
    if (run->small == OF_FLOAT32) down_in(OF_FLOAT32, run, code, tile);
    else down_in(OF_BFLOAT16, run, code, tile);
}

INLINE void multiply(enum kind kind, const struct run *run, const int64_t *code, int64_t tile) {
    const struct product product = {
        .kind = kind, .x = run->g + code[kind == OF_INT4 ? 4 : 0], .q = run->q + 2 * code[5], .y = run->g + code[1],
        .w = (const void *)code[6], .scale = (const void *)code[7], .shift = (const void *)code[8], .offset = code[9],
        .R = run->R, .K = code[3], .x_row = run->size, .q_row = 2 * run->q_size, .y_row = run->size, .in_steps = 1,
    };
    outputs_of_tile(&product, code[2], run->parts, tile);
}

SHARED void channels(const struct run *run, const int64_t *code, int64_t tile, int64_t parts, int name, int64_t width) {
    float *g = run->g + tile / parts * run->size;
    uint16_t *q = (uint16_t *)run->q + tile / parts * run->q_size;
    int64_t first = tile % parts * CHANNELS, end = least(first + CHANNELS, width);
    for (int64_t channel = first; channel < end; channel += 8) {
        if (name == MIX) mix(run, code, g, channel);
        else if (name == MAP) map(code, g, channel);
        else if (name == ADD) add(code, g, channel);
        else if (name == HALVE) halve(g + code[0] + channel, g + code[1] + channel, q + code[3] + channel);
        else wkv4(run, code, g, channel);
    }
}

INLINE void carry_out(const struct run *run, enum kind kind, const int64_t *instruction, int64_t tile) {
    const int64_t *code = instruction + 2;
    int64_t parts = instruction[1];
    float *g = run->g;
    switch (instruction[0]) {
    case NORM: norm(run, code, tile); break;
    case MIX: channels(run, code, tile, parts, MIX, code[3]); break;
    case PRODUCT: multiply(kind, run, code, tile); break;
    case DOWN: down(run, code, tile); break;
    case UP: up(run, code, tile); break;
    case MAP: channels(run, code, tile, parts, MAP, code[1]); break;
    case ADD: channels(run, code, tile, parts, ADD, code[2]); break;
    case WKV4: channels(run, code, tile, parts, WKV4, code[9]); break;
    case HALVE: channels(run, code, tile, parts, HALVE, code[2]); break;
    case WKV7: wkv7(run, code, tile); break;
    case ROUND:
        g += tile * run->size;
        g[code[3]] = round_row(g + code[0], run->q + 2 * (tile * run->q_size + code[6]), code[2], code[4], code[5]);
        break;
    case ARRANGE:
        g += tile / parts * run->size;
        arrange_block(g + code[0], run->q + 2 * (tile / parts * run->q_size + code[3]), g + code[1], code[2], tile % parts);
        break;
    }
}

// The arguments of a call, as c_v0.py lists them. Of each instruction a counter of the tiles that are taken and one of those
// that are done, all 0.
struct call {
    const float *c;
    const void *m;
    float *g;
    uint8_t *q;
    const int64_t *code;
    int32_t *counters;
    int64_t small_is_bfloat16, count, size, q_size, R, parts;
};

INLINE void run_program(enum kind kind, const struct call *call) {
    enum kind small = call->small_is_bfloat16 ? OF_BFLOAT16 : OF_FLOAT32;
    const struct run run = {small, call->m, call->c, call->g, call->q, call->R, call->size, call->q_size, call->parts};
    for (int64_t i = 0; i < call->count; i++) {
        const int64_t *instruction = call->code + i * WIDTH;
        int32_t *taken = call->counters + 2 * i * APART, *done = taken + APART;
        int64_t name = instruction[0], tile;
        int64_t total = instruction[1] * (name == PRODUCT || name == DOWN || name == UP ? 1 : run.R);
        while ((tile = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < total) {
            carry_out(&run, kind, instruction, tile);
            __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
        }
        for (int64_t look = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < total; look++) wait_a_little(look);
    }
}

#define PROGRAM(name, kind) \
    static void name(struct tasks *tasks, int64_t thread) { (void)thread, run_program(kind, tasks->call); } \
    ENTRY(decoding_##name)(const struct call *call, int64_t threads) { share(name, call, threads); }

PROGRAM(float32, OF_FLOAT32)
PROGRAM(float32_of_bfloat16, OF_BFLOAT16)
PROGRAM(bfloat16, OF_BOTH)
PROGRAM(int8, OF_INT8)
PROGRAM(int4, OF_INT4)
