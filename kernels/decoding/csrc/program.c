// A program of kernels/decoding: each thread that calls a function below takes tiles of an instruction from a counter, and waits
// for the others, by spinning, before the next one.
//
// The arguments are numbers of a Taichi kernel, which hands over their addresses; arrays are addresses as numbers.
// What an instruction computes and the order of its arguments: kernels/decoding/__init__.py and taichi_v0.py.

#include "../../matvec/csrc/products.h"

const char SOURCE_HASH = 0;             // a name that tells what the bitcode was made of

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
    enum form form, small;               // of the products, and of down and up
    const void *w, *scale, *shift, *m;
    const float *c;                      // constants
    float *g;                            // registers of the rows, size numbers apart
    uint8_t *q;                          // what products multiply in place of x, for each row q_size numbers of 16 bits
    long R, size, q_size, parts;         // parts: tiles that the outputs of a product are cut into
};

#define SHARED static __attribute__((noinline))          // by the programs of all forms

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long tiles(long size, long tile) { return (size + tile - 1) / tile; }

INLINE v8 sigmoid(v8 x) {
    v8 e = exp_of(minus_size(x));
    return over(_mm256_blendv_ps(all(1.0f), e, x), plus(all(1.0f), e));              // e where x < 0
}

INLINE v8 tanh_of(v8 x) {
    v8 e = exp_of(times(all(2.0f), minus_size(x)));
    v8 size = over(minus(all(1.0f), e), plus(all(1.0f), e));
    return _mm256_or_ps(size, _mm256_and_ps(x, all(-0.0f)));
}

INLINE float mean_of_squares(in x, long width, float mean) {
    v8 squares = all(0.0f);
    for (long j = 0; j < width; j += 8) {
        v8 away = minus(at(x + j), all(mean));
        squares = times_plus(away, away, squares);
    }
    return sum8(squares) / (float)width;
}

INLINE float mean_of(in x, long width) {
    v8 sums = all(0.0f);
    for (long j = 0; j < width; j += 8) sums = plus(sums, at(x + j));
    return sum8(sums) / (float)width;
}

INLINE float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

SHARED void norm(const struct run *run, const int32_t *code, long row) {
    float *g = run->g + row * run->size, *x = g + code[0], *y = g + code[1];
    in weight = run->c + code[3], bias = run->c + code[4];
    long width = code[2];
    if (code[6] >= 0) for (long j = 0; j < width; j += 8) put(x + j, plus(at(x + j), at(g + code[6] + j)));
    float mean = mean_of(x, width), factor = 1.0f / root(mean_of_squares(x, width, mean) + run->c[code[5]]);
    for (long j = 0; j < width; j += 8)
        put(y + j, times_plus(times(minus(at(x + j), all(mean)), all(factor)), at(weight + j), at(bias + j)));
}

INLINE void mix(const struct run *run, const int32_t *code, float *g, long channel) {
    long width = code[3], n = code[4];
    v8 last = at(g + code[1] + channel), x = at(g + code[0] + channel), away = minus(x, last);
    for (long i = 0; i < n; i++)
        put(g + code[2] + i * width + channel, times_plus(away, at(run->c + code[5] + i * width + channel), last));
    put(g + code[1] + channel, x);
}

INLINE void map(const int32_t *code, float *g, long channel) {
    v8 y = at(g + code[0] + channel);
    if (code[2] == TANH) y = tanh_of(y);
    else if (code[2] == SIGMOID) y = sigmoid(y);
    else y = times(most(y, all(0.0f)), most(y, all(0.0f)));
    put(g + code[0] + channel, y);
}

INLINE void add(const int32_t *code, float *g, long channel) {
    v8 y = at(g + code[1] + channel);
    if (code[3] >= 0) y = times(y, sigmoid(at(g + code[3] + channel)));
    put(g + code[0] + channel, plus(at(g + code[0] + channel), y));
}

INLINE void wkv4(const struct run *run, const int32_t *code, float *g, long channel) {
    v8 k = at(g + code[0] + channel), v = at(g + code[1] + channel), r = at(g + code[2] + channel);
    v8 a = at(g + code[3] + channel), b = at(g + code[4] + channel), p = at(g + code[5] + channel);
    v8 w = at(run->c + code[7] + channel), u = at(run->c + code[8] + channel);
    v8 top = most(p, plus(u, k)), past = exp_of(minus(p, top)), now = exp_of(minus(plus(u, k), top));
    v8 wkv = over(times_plus(past, a, times(now, v)), times_plus(past, b, now));
    put(g + code[6] + channel, times(sigmoid(r), wkv));
    top = most(plus(p, w), k), past = exp_of(minus(plus(p, w), top)), now = exp_of(minus(k, top));
    put(g + code[3] + channel, times_plus(past, a, times(now, v)));
    put(g + code[4] + channel, times_plus(past, b, now));
    put(g + code[5] + channel, top);
}

// kernels/wkv7's step for one head: S w + (S a) b + v k, and y = S r, row by row
INLINE void state_and_y(long N, float *state, in w, in a, in b, in k, in v, in r, float *y) {
    for (long i = 0; i < N; i++, state += N) {
        v8 products[2] = {all(0.0f), all(0.0f)}, outputs[2] = {all(0.0f), all(0.0f)};
        SEVERAL for (long j = 0; j < N / 8; j++) products[j % 2] = times_plus(at(state + j * 8), at(a + j * 8), products[j % 2]);
        v8 sa = all(sum8(plus(products[0], products[1]))), value = all(v[i]);
        SEVERAL for (long j = 0; j < N / 8; j++) {
            v8 decayed = times(at(state + j * 8), at(w + j * 8));
            v8 now = times_plus(value, at(k + j * 8), times_plus(sa, at(b + j * 8), decayed));
            outputs[j % 2] = times_plus(now, at(r + j * 8), outputs[j % 2]);
            put(state + j * 8, now);
        }
        y[i] = sum8(plus(outputs[0], outputs[1]));
    }
}

// One head of a row. z, rate, k and v become the decay, b, the key and the value; kk becomes a.
SHARED void wkv7(const struct run *run, const int32_t *code, long tile) {
    long heads = code[20], N = code[21], channel = tile % heads * N;
    float *row = run->g + tile / heads * run->size, *g = row + channel;
    in c = run->c + channel;
    in w0 = c + code[11], a0 = c + code[12], v0 = c + code[13], k_k = c + code[14], k_a = c + code[15], r_k = c + code[16];
    in weight = c + code[17], bias = c + code[18], r = g + code[0];
    float *key = g + code[1], *value = g + code[2], *decay = g + code[3], *rate = g + code[4], *gate = g + code[5];
    float *first = g + code[7], *kk = g + code[9], *y = g + code[10], *state = row + code[8] + channel * N;
    v8 squares = all(0.0f), shares = all(0.0f), one = all(1.0f);
    for (long j = 0; j < N; j += 8) {
        v8 k = at(key + j), v = at(value + j), rates = sigmoid(plus(at(a0 + j), at(rate + j)));
        put(decay + j, exp_of(times(all(FASTEST_LOG_W), sigmoid(plus(at(w0 + j), at(decay + j))))));
        if (code[6] >= 0) {
            v8 share = sigmoid(plus(at(v0 + j), at(g + code[6] + j)));
            v = times_plus(minus(at(first + j), v), share, v);
            put(value + j, v);
        } else {
            put(first + j, v);
        }
        v8 direction = times(k, at(k_k + j));
        squares = times_plus(direction, direction, squares);
        k = times(k, times_plus(minus(rates, one), at(k_a + j), one));
        shares = times_plus(times(at(r + j), k), at(r_k + j), shares);
        put(key + j, k), put(rate + j, rates), put(kk + j, direction);
    }
    float length = root(sum8(squares));
    v8 factor = all(1.0f / (length > 1e-12f ? length : 1e-12f)), share = all(sum8(shares));
    for (long j = 0; j < N; j += 8) {
        v8 direction = times(at(kk + j), factor);
        put(kk + j, minus(all(0.0f), direction));
        put(rate + j, times(at(rate + j), direction));
    }
    if (N == N7) state_and_y(N7, state, decay, kk, rate, key, value, r, y);
    else state_and_y(N, state, decay, kk, rate, key, value, r, y);
    float mean = mean_of(y, N), scale = 1.0f / root(mean_of_squares(y, N, mean) + run->c[code[19]]);
    for (long j = 0; j < N; j += 8) {
        v8 normal = times_plus(times(minus(at(y + j), all(mean)), all(scale)), at(weight + j), at(bias + j));
        put(y + j, times(times_plus(share, at(value + j), normal), at(gate + j)));
    }
}

enum { VECTORS = PART / LANES };

INLINE void add_column(enum form form, int rows, const void *w, long k, const float *x, long size, floats (*acc)[VECTORS]) {
    floats weights[VECTORS];
    UNROLLED for (int c = 0; c < VECTORS; c++)
        weights[c] = load(form, (const uint8_t *)w + (k * PART + c * LANES) * (form == FLOAT32 ? 4 : 2), LANES);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = fused(weights[c], same(x[i * size + k]), acc[i][c]);
}

// PART outputs of `rows` rows, of a W that is stored in such parts (K,PART)
INLINE void part_of_up(enum form form, int rows, const void *w, long K, const float *x, float *y, long size) {
    floats acc[MOST_ROWS][VECTORS];
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) acc[i][c] = zeros();
    SEVERAL for (long k = 0; k < K; k++) add_column(form, rows, w, k, x, size, acc);
    UNROLLED for (int i = 0; i < rows; i++)
        UNROLLED for (int c = 0; c < VECTORS; c++) store(y + i * size + c * LANES, acc[i][c]);
}

INLINE void up_in(enum form form, const struct run *run, const int32_t *code, long tile) {
    long parts = tiles(code[2], PART), K = code[3], size = run->size, each = tiles(parts, run->parts);
    for (long part = tile * each; part < least(parts, (tile + 1) * each); part++) {
        const uint8_t *w = (const uint8_t *)run->m + (code[4] + part * K * PART) * (form == FLOAT32 ? 4 : 2);
        const float *x = run->g + code[0];
        float *y = run->g + code[1] + part * PART;
        long r = 0;
        for (; r + 4 <= run->R; r += 4) part_of_up(form, 4, w, K, x + r * size, y + r * size, size);
        for (; r < run->R; r++) part_of_up(form, 1, w, K, x + r * size, y + r * size, size);
    }
}

INLINE void outputs_of_tile(const struct product *product, long N, long parts, long tile) {
    long each = tiles(N, parts);
    products(product, tile * each, least(N, (tile + 1) * each));
}

INLINE void down_in(enum form form, const struct run *run, const int32_t *code, long tile) {
    const struct product product = {
        .form = form, .w = (const uint8_t *)run->m + (long)code[4] * (form == FLOAT32 ? 4 : 2), .x = run->g + code[0],
        .y = run->g + code[1], .R = run->R, .K = code[3], .x_row = run->size, .y_row = run->size,
    };
    outputs_of_tile(&product, code[2], run->parts, tile);
}

SHARED void up(const struct run *run, const int32_t *code, long tile) {
    if (run->small == FLOAT32) up_in(FLOAT32, run, code, tile);
    else up_in(BFLOAT16, run, code, tile);
}

SHARED void down(const struct run *run, const int32_t *code, long tile) {
    if (run->small == FLOAT32) down_in(FLOAT32, run, code, tile);
    else down_in(BFLOAT16, run, code, tile);
}

INLINE void multiply(enum form form, const struct run *run, const int32_t *code, long tile) {
    long K = code[3], size = form == FLOAT32 ? 4 : form == INT8 ? 1 : 2, scale_size = form == INT4 ? 2 : 4;
    struct product product = {
        .form = form, .x = run->g + code[form == INT4 ? 4 : 0], .q = run->q + 2l * code[5], .y = run->g + code[1],
        .scale = (const uint8_t *)run->scale + code[7] * scale_size, .shift = (const uint8_t *)run->shift + code[7] * scale_size,
        .w = (const uint8_t *)run->w + code[6] * size,
        .R = run->R, .K = K, .x_row = run->size, .q_row = 2 * run->q_size, .y_row = run->size, .in_steps = 1,
        .offset = code[9],
    };
    outputs_of_tile(&product, code[2], run->parts, tile);
}

SHARED void channels(const struct run *run, const int32_t *code, long tile, long parts, int name, long width) {
    float *g = run->g + tile / parts * run->size;
    uint16_t *q = (uint16_t *)run->q + tile / parts * run->q_size;
    long first = tile % parts * CHANNELS, end = least(first + CHANNELS, width);
    for (long channel = first; channel < end; channel += 8) {
        if (name == MIX) mix(run, code, g, channel);
        else if (name == MAP) map(code, g, channel);
        else if (name == ADD) add(code, g, channel);
        else if (name == HALVE) halve(g + code[0] + channel, g + code[1] + channel, q + code[3] + channel);
        else wkv4(run, code, g, channel);
    }
}

INLINE void carry_out(const struct run *run, enum form form, const int32_t *instruction, long tile) {
    const int32_t *code = instruction + 2;
    long parts = instruction[1];
    float *g = run->g;
    switch (instruction[0]) {
    case NORM: norm(run, code, tile); break;
    case MIX: channels(run, code, tile, parts, MIX, code[3]); break;
    case PRODUCT: multiply(form, run, code, tile); break;
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

INLINE void run_program(const struct run *run, enum form form, const int32_t *code, int32_t *counters, long count) {
    for (long i = 0; i < count; i++) {
        const int32_t *instruction = code + i * WIDTH;
        int32_t *taken = counters + 2 * i * APART, *done = taken + APART, name = instruction[0];
        long total = instruction[1] * (name == PRODUCT || name == DOWN || name == UP ? 1 : run->R), tile;
        while ((tile = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < total) {
            carry_out(run, form, instruction, tile);
            __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
        }
        while (__atomic_load_n(done, __ATOMIC_ACQUIRE) < total) _mm_pause();
    }
}

#define PROGRAM(name, form)                                                                                                        \
    void name(int64_t *w, int64_t *scale, int64_t *shift, int64_t *c, int64_t *m, int64_t *g, int64_t *q, int64_t *code,           \
              int64_t *counters, int32_t *small, int32_t *count, int32_t *size, int32_t *q_size, int32_t *R, int32_t *parts) {     \
        const struct run run = {form, *small, (void *)*w, (void *)*scale, (void *)*shift, (void *)*m, (void *)*c, (void *)*g,      \
                                (void *)*q, *R, *size, *q_size, *parts};                                                           \
        run_program(&run, form, (void *)*code, (void *)*counters, *count);                                                         \
    }

PROGRAM(program_float32, FLOAT32)
PROGRAM(program_float32_of_bfloat16, BFLOAT16)
PROGRAM(program_bfloat16, BOTH)
PROGRAM(program_int8, INT8)
PROGRAM(program_int4, INT4)
