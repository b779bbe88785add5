// Packs a matrix W (N,K), when a model is loaded, into int8, int4, or a bfloat16 copy, and transposes int8. Formulas:
// kernels/matvec/_packing.py. A task is a row.

#include "products.h"
#include "../../native/csrc/threads.h"

enum { PIECE = 1 << 14 };
#define MIN_MAGNITUDE 1e-30f             // lower bound of the largest magnitude, so that zeros get a nonzero scale

typedef int8_t bytes VECTOR(LANES);

INLINE int64_t lanes_left(int64_t i, int64_t end) { return end - i < LANES ? (end > i ? end - i : 0) : LANES; }
INLINE float hmax(floats x) { return __builtin_reduce_max(x); }
INLINE float hmin(floats x) { return __builtin_reduce_min(x); }

struct int8_call {
    int64_t N, K;
    const void *w;
    int8_t *q;                           // (N,K)
    float *scale;                        // (N)
};

INLINE void quantize_row_int8(enum dtype dtype, const struct int8_call *call, int64_t n) {
    int64_t first = n * call->K, end = first + call->K;
    floats largest = splat(0.0f);
    ints is_nan = (ints)0;
    for (int64_t i = first; i < end; i += LANES) {
        floats x = load_partial(dtype, call->w, i, lanes_left(i, end));
        largest = max(__builtin_elementwise_abs(x), largest);
        is_nan |= x != x;
    }
    float magnitude = hmax(largest);
    float scale = any(is_nan) ? __builtin_nanf("") : (magnitude > MIN_MAGNITUDE ? magnitude : MIN_MAGNITUDE) / 127.0f;
    call->scale[n] = scale;
    for (int64_t i = first; i < end; i += LANES) {
        int64_t lanes = lanes_left(i, end);
        floats levels = round_even(load_partial(dtype, call->w, i, lanes) / scale);
        bytes q = __builtin_convertvector(__builtin_convertvector(levels, ints), bytes);
        memcpy(call->q + i, &q, (size_t)lanes);
    }
}

struct int4_call {
    int64_t N, K, symmetric, n_fractions;
    const void *w;
    const float *fractions;              // (n_fractions): fractions of a group's range that the 15 steps may cover
    uint8_t *q;                          // (N,G,GROUP / 2): element i in the low nibble, i + GROUP / 2 in the high nibble
    uint16_t *scale, *shift;             // (N,G)
};

INLINE float round_to_bfloat16(float x) { return from_bfloat16(to_bfloat16(splat(x)))[0]; }

INLINE floats to_levels(floats shifted, float scale) {
    return min(max(round_even(shifted / scale), splat(0.0f)), splat(15.0f));
}

INLINE float squared_error(const floats *x, float scale, float shift) {
    floats error = splat(0.0f);
    UNROLL for (int part = 0; part < GROUP / LANES; part++) {
        floats shifted = x[part] - shift, difference = shifted - to_levels(shifted, scale) * scale;
        error += difference * difference;
    }
    return hsum(error);
}

// Quantizes a group with the fraction of its range that has the least squared error; scale and shift are NaN if it is not finite.
INLINE void quantize_group(const struct int4_call *call, const floats *x, int64_t group) {
    floats lows = x[0], highs = x[0];
    UNROLL for (int part = 1; part < GROUP / LANES; part++) {
        lows = min(lows, x[part]);
        highs = max(highs, x[part]);
    }
    float low = hmin(lows), high = hmax(highs), least = __builtin_inff();
    float scale = __builtin_nanf(""), shift = __builtin_nanf("");
    if (call->symmetric) {
        high = -low > high ? -low : high;
        low = -high;
    }
    for (int64_t i = 0; i < call->n_fractions; i++) {
        float step = (high - low) * call->fractions[i] / 15.0f;
        float new_scale = round_to_bfloat16(step > MIN_MAGNITUDE ? step : MIN_MAGNITUDE);
        float new_shift = call->symmetric ? -8.0f * new_scale : round_to_bfloat16((low + high) / 2.0f - 7.5f * new_scale);
        float error = squared_error(x, new_scale, new_shift);
        if (error < least) {
            least = error;
            scale = new_scale;
            shift = new_shift;
        }
    }
    call->scale[group] = to_bfloat16(splat(scale))[0];
    call->shift[group] = to_bfloat16(splat(shift))[0];
    UNROLL for (int part = 0; part < GROUP / LANES / 2; part++) {
        ints low_nibbles = __builtin_convertvector(to_levels(x[part] - shift, scale), ints);
        ints high_nibbles = __builtin_convertvector(to_levels(x[part + GROUP / LANES / 2] - shift, scale), ints);
        bytes both = __builtin_convertvector(low_nibbles | high_nibbles << 4, bytes);
        memcpy(call->q + group * (GROUP / 2) + part * LANES, &both, sizeof both);
    }
}

INLINE void quantize_row_int4(enum dtype dtype, const struct int4_call *call, int64_t n) {
    int64_t groups = (call->K + GROUP - 1) / GROUP, end = (n + 1) * call->K;
    for (int64_t g = 0; g < groups; g++) {
        floats x[GROUP / LANES];
        UNROLL for (int part = 0; part < GROUP / LANES; part++) {
            int64_t i = n * call->K + g * GROUP + part * LANES;
            x[part] = load_partial(dtype, call->w, i, lanes_left(i, end));
        }
        quantize_group(call, x, n * groups + g);
    }
}

#define PACK(name, dtype, int8_or_4)                                                                                              \
    static void name##_rows(struct tasks *tasks, int64_t thread) {                                                                \
        const struct int8_or_4##_call *call = tasks->call;                                                                        \
        (void)thread;                                                                                                             \
        for (int64_t n; (n = next_task(tasks)) < call->N;) quantize_row_##int8_or_4(dtype, call, n);                              \
    }                                                                                                                             \
    ENTRY(matvec_##name, struct int8_or_4##_call) { parallel_for(name##_rows, call, threads); }

PACK(int8_float32, FLOAT32, int8)
PACK(int8_bfloat16, BFLOAT16, int8)
PACK(int4_float32, FLOAT32, int4)
PACK(int4_bfloat16, BFLOAT16, int4)

// Copies `size` numbers, PIECE per task. Sets `inexact` and stops early if bfloat16 cannot represent one of them.
struct copy_call {
    int64_t size;
    const float *w;
    uint16_t *copy;
    int64_t *inexact;
};

static void copy_pieces(struct tasks *tasks, int64_t thread) {
    const struct copy_call *call = tasks->call;
    (void)thread;
    for (int64_t task; (task = next_task(tasks)) * PIECE < call->size;) {
        int64_t first = task * PIECE, end = first + PIECE < call->size ? first + PIECE : call->size;
        ints low_bits = (ints)0;
        for (int64_t i = first; i < end; i += LANES) {
            int64_t lanes = lanes_left(i, end);
            floats x = load_partial(FLOAT32, call->w, i, lanes);
            low_bits |= as_ints(x) & 0xFFFF;
            store_partial(BFLOAT16, call->copy, i, lanes, x);
        }
        if (any(low_bits)) __atomic_store_n(call->inexact, 1, __ATOMIC_RELAXED);
        if (__atomic_load_n(call->inexact, __ATOMIC_RELAXED)) return;
    }
}

ENTRY(matvec_exact_copy, struct copy_call) { parallel_for(copy_pieces, call, threads); }

// Transposes bytes w (N,K) in squares, which are first copied, because the rows of a wide matrix collide in L1. A task is SIDE
// columns.
enum { SIDE = 64 };

struct transpose_call {
    int64_t N, K;
    const int8_t *w;
    int8_t *transposed;                  // (K,N)
};

static void transpose_columns(struct tasks *tasks, int64_t thread) {
    const struct transpose_call *call = tasks->call;
    int64_t N = call->N, K = call->K;
    (void)thread;
    for (int64_t task; (task = next_task(tasks)) * SIDE < K;) {
        int64_t k = task * SIDE, columns = K - k < SIDE ? K - k : SIDE;
        for (int64_t n = 0; n < N; n += SIDE) {
            int64_t rows = N - n < SIDE ? N - n : SIDE;
            int8_t square[SIDE][SIDE];
            for (int64_t i = 0; i < rows; i++) memcpy(square[i], call->w + (n + i) * K + k, (size_t)columns);
            for (int64_t j = 0; j < columns; j++)
                for (int64_t i = 0; i < rows; i++) call->transposed[(k + j) * N + n + i] = square[i][j];
        }
    }
}

ENTRY(matvec_transpose, struct transpose_call) { parallel_for(transpose_columns, call, threads); }
