// What is made of a matrix W (N,K) once, when a model is loaded: int8, int4, and a copy in bfloat16. kernels/matvec/_packing.py has
// the formulas. A row is a task.

#include "products.h"
#include "../../native/csrc/threads.h"

enum { PIECE = 1 << 14 };
#define SMALLEST 1e-30f                  // largest magnitude of zeros, when they are scaled

typedef int8_t bytes VECTOR(LANES);

INLINE int64_t lanes_left(int64_t i, int64_t end) { return end - i < LANES ? (end > i ? end - i : 0) : LANES; }
INLINE float largest_of(floats x) { return __builtin_reduce_max(x); }
INLINE float smallest_of(floats x) { return __builtin_reduce_min(x); }

struct int8_call {
    int64_t N, K;
    const void *w;
    int8_t *q;                           // (N,K)
    float *scale;                        // (N)
};

INLINE void row_in_int8(enum form form, const struct int8_call *call, int64_t n) {
    int64_t first = n * call->K, end = first + call->K;
    floats largest = same(0.0f);
    ints no_number = (ints)0;
    for (int64_t i = first; i < end; i += LANES) {
        floats x = read_some(form, call->w, i, lanes_left(i, end));
        largest = larger(__builtin_elementwise_abs(x), largest);
        no_number |= x != x;
    }
    float most = largest_of(largest);
    float scale = any(no_number) ? __builtin_nanf("") : (most > SMALLEST ? most : SMALLEST) / 127.0f;
    call->scale[n] = scale;
    for (int64_t i = first; i < end; i += LANES) {
        int64_t lanes = lanes_left(i, end);
        floats whole = nearest(read_some(form, call->w, i, lanes) / scale);
        bytes q = __builtin_convertvector(__builtin_convertvector(whole, ints), bytes);
        memcpy(call->q + i, &q, (size_t)lanes);
    }
}

struct int4_call {
    int64_t N, K, symmetric, n_shares;
    const void *w;
    const float *shares;                 // (n_shares): of a group's range, what the 15 steps may cover
    uint8_t *q;                          // (N,G,GROUP / 2): element i in the low bits, i + GROUP / 2 in the high ones
    uint16_t *scale, *shift;             // (N,G)
};

INLINE float kept(float x) { return of_bfloat16(as_bfloat16(same(x)))[0]; }

INLINE floats steps_of(floats shifted, float scale) {
    return smaller(larger(nearest(shifted / scale), same(0.0f)), same(15.0f));
}

INLINE float error_of(const floats *x, float scale, float shift) {
    floats error = same(0.0f);
    UNROLLED for (int part = 0; part < GROUP / LANES; part++) {
        floats shifted = x[part] - shift, off = shifted - steps_of(shifted, scale) * scale;
        error += off * off;
    }
    return sum_of(error);
}

// The share of the group's range with the least error; scale and shift are NaN where the group is not finite.
INLINE void group_in_int4(const struct int4_call *call, const floats *x, int64_t place) {
    floats lows = x[0], highs = x[0];
    UNROLLED for (int part = 1; part < GROUP / LANES; part++) {
        lows = smaller(lows, x[part]);
        highs = larger(highs, x[part]);
    }
    float low = smallest_of(lows), high = largest_of(highs), least = __builtin_inff();
    float scale = __builtin_nanf(""), shift = __builtin_nanf("");
    if (call->symmetric) {
        high = -low > high ? -low : high;
        low = -high;
    }
    for (int64_t i = 0; i < call->n_shares; i++) {
        float step = (high - low) * call->shares[i] / 15.0f, tried = kept(step > SMALLEST ? step : SMALLEST);
        float moved = call->symmetric ? -8.0f * tried : kept((low + high) / 2.0f - 7.5f * tried);
        float error = error_of(x, tried, moved);
        if (error < least) {
            least = error;
            scale = tried;
            shift = moved;
        }
    }
    call->scale[place] = as_bfloat16(same(scale))[0];
    call->shift[place] = as_bfloat16(same(shift))[0];
    UNROLLED for (int part = 0; part < GROUP / LANES / 2; part++) {
        ints lower = __builtin_convertvector(steps_of(x[part] - shift, scale), ints);
        ints upper = __builtin_convertvector(steps_of(x[part + GROUP / LANES / 2] - shift, scale), ints);
        bytes both = __builtin_convertvector(lower | upper << 4, bytes);
        memcpy(call->q + place * (GROUP / 2) + part * LANES, &both, sizeof both);
    }
}

INLINE void row_in_int4(enum form form, const struct int4_call *call, int64_t n) {
    int64_t groups = (call->K + GROUP - 1) / GROUP, end = (n + 1) * call->K;
    for (int64_t g = 0; g < groups; g++) {
        floats x[GROUP / LANES];
        UNROLLED for (int part = 0; part < GROUP / LANES; part++) {
            int64_t i = n * call->K + g * GROUP + part * LANES;
            x[part] = read_some(form, call->w, i, lanes_left(i, end));
        }
        group_in_int4(call, x, n * groups + g);
    }
}

#define PACK(name, form, int8_or_4)                                                                                               \
    static void name##_rows(struct tasks *tasks, int64_t thread) {                                                                \
        const struct int8_or_4##_call *call = tasks->call;                                                                        \
        (void)thread;                                                                                                             \
        for (int64_t n; (n = next_task(tasks)) < call->N;) row_in_##int8_or_4(form, call, n);                                     \
    }                                                                                                                             \
    ENTRY(matvec_##name)(const struct int8_or_4##_call *call, int64_t threads) { share(name##_rows, call, threads); }

PACK(int8_float32, FLOAT32, int8)
PACK(int8_bfloat16, BFLOAT16, int8)
PACK(int4_float32, FLOAT32, int4)
PACK(int4_bfloat16, BFLOAT16, int4)

// size numbers in pieces of PIECE, each a task. `inexact` becomes 1 where one is no bfloat16; then the copy is not whole.
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
        ints lower = (ints)0;
        for (int64_t i = first; i < end; i += LANES) {
            int64_t lanes = lanes_left(i, end);
            floats x = read_some(FLOAT32, call->w, i, lanes);
            lower |= bits_of(x) & 0xFFFF;
            write_some(BFLOAT16, call->copy, i, lanes, x);
        }
        if (any(lower)) __atomic_store_n(call->inexact, 1, __ATOMIC_RELAXED);
        if (__atomic_load_n(call->inexact, __ATOMIC_RELAXED)) return;
    }
}

ENTRY(matvec_exact_copy)(const struct copy_call *call, int64_t threads) { share(copy_pieces, call, threads); }
