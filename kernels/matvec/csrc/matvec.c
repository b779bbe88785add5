// Entry points of kernels/matvec: products, preparation of their inputs, and unpacking of int4 weights.

#include "products.h"
#include "../../native/csrc/threads.h"

// Arguments, in the order of c_v0.py. The N outputs are divided into `parts` tasks. by_input: W is int8 and stored as (K,N).
struct call {
    int64_t kind, by_input, N, K, R, x_row, q_row, offset, apply_x_scale, parts;
    const void *w, *scale, *shift;
    const float *x;
    const uint8_t *q;
    float *y;
};

static void multiply(struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    const struct product product = {
        .kind = (enum kind)call->kind, .w = call->w, .scale = call->scale, .shift = call->shift, .x = call->x, .q = call->q,
        .y = call->y, .R = call->R, .K = call->K, .x_row = call->x_row, .q_row = call->q_row, .y_row = call->N,
        .offset = call->offset, .apply_x_scale = (int)call->apply_x_scale,
    };
    int64_t part_size = (call->N + call->parts - 1) / call->parts;
    (void)thread;
    for (int64_t part; (part = next_task(tasks)) < call->parts;) {
        int64_t end = (part + 1) * part_size < call->N ? (part + 1) * part_size : call->N;
        if (part * part_size >= end) continue;
        if (call->by_input) matmul_int8_by_input(&product, call->N, part * part_size, end);
        else matmul(&product, part * part_size, end);
    }
}

ENTRY(matvec, struct call) { parallel_for(multiply, call, threads); }

// Quantizes rows x (R,K), K a multiple of BLOCK, for products with int4 or GGUF's blocks (prepare_input). q: K bytes per row;
// y: `floats` numbers per block. A task is a row.
struct arrange_call {
    int64_t kind, R, K, floats;
    const float *x;
    uint8_t *q;
    float *y;
};

static void arrange_rows(struct tasks *tasks, int64_t thread) {
    const struct arrange_call *call = tasks->call;
    int64_t K = call->K;
    (void)thread;
    for (int64_t r; (r = next_task(tasks)) < call->R;)
        prepare_input((enum kind)call->kind, call->x + r * K, K, 0, K, 0, 0, call->y + r * (K / BLOCK) * call->floats,
                      call->q + r * K);
}

ENTRY(matvec_arrange, struct arrange_call) { parallel_for(arrange_rows, call, threads); }

// Rounds rows x (R,K) for int8 products as FBGEMM does: q = round(x / largest per_step + offset), where largest (R) is each row's
// largest magnitude, or its largest number if none is negative. A task is a row.
typedef double doubles VECTOR(8);

struct quantize_call {
    int64_t R, K, non_negative, offset;
    double per_step;
    const float *x;
    uint8_t *q;
    float *largest;
};

INLINE floats load_first_floats(const float *x, int64_t n) {
    floats values = splat(0.0f);
    for (int64_t l = 0; l < n; l++) values[l] = x[l];
    return values;
}

// Returns the row's largest magnitude, or its largest number if none is negative; NaN if x has a NaN.
INLINE float find_largest(const float *x, int64_t K, int64_t non_negative) {
    floats largest[2] = {splat(0.0f), splat(0.0f)};
    ints is_nan = (ints)0;
    for (int64_t k = 0, v = 0; k < K; k += 8, v ^= 1) {
        floats values = K - k >= 8 ? load(x + k) : load_first_floats(x + k, K - k);
        is_nan |= values != values;
        largest[v] = max(non_negative ? values : __builtin_elementwise_abs(values), largest[v]);
    }
    return max_magnitude(max(largest[0], largest[1]), is_nan);
}

INLINE uint8_t VECTOR(8) quantize_8(floats x, float largest, double per_step, double offset) {
    doubles steps = __builtin_convertvector(x / largest, doubles) * per_step;
    floats levels = round_even(__builtin_convertvector(steps + offset, floats));
    levels = __builtin_elementwise_max(__builtin_elementwise_min(levels, splat(255.0f)), splat(0.0f));
    return __builtin_convertvector(__builtin_convertvector(levels, ints), uint8_t VECTOR(8));
}

static void quantize_rows(struct tasks *tasks, int64_t thread) {
    const struct quantize_call *call = tasks->call;
    int64_t K = call->K, whole = K / 8 * 8;
    (void)thread;
    for (int64_t r; (r = next_task(tasks)) < call->R;) {
        const float *x = call->x + r * K;
        uint8_t *q = call->q + r * K;
        float largest = find_largest(x, K, call->non_negative);
        for (int64_t k = 0; k < whole; k += 8) {
            uint8_t VECTOR(8) eight = quantize_8(load(x + k), largest, call->per_step, (double)call->offset);
            memcpy(q + k, &eight, sizeof eight);
        }
        uint8_t VECTOR(8) rest = quantize_8(load_first_floats(x + whole, K - whole), largest, call->per_step, (double)call->offset);
        for (int64_t k = whole; k < K; k++) q[k] = rest[k - whole];
        call->largest[r] = largest;
    }
}

ENTRY(matvec_quantize, struct quantize_call) { parallel_for(quantize_rows, call, threads); }

// Unpacks int4 to W (N,K): integer times scale plus shift of its group. A task is a row.
struct unpack_call {
    int64_t N, K, is_bfloat16;
    const uint16_t *w, *scale, *shift;
    void *matrix;
};

INLINE void unpack_block(enum dtype dtype, const uint16_t *words, floats scale, floats shift, void *row, int64_t first) {
    float by_element[GROUP * 8], by_group[BLOCK];        // (GROUP,8) and (8,GROUP)
    for (int word = 0; word < GROUP / 4; word++) {
        bfloats bits;
        memcpy(&bits, words + word * 8, sizeof bits);
        ints nibbles = __builtin_convertvector(bits, ints);
        UNROLL for (int nibble = 0; nibble < 4; nibble++) {            // the low and the high nibble of two bytes
            int element = 2 * word + nibble / 2 + nibble % 2 * 16;
            store(by_element + element * 8, __builtin_convertvector((nibbles >> (4 * nibble)) & 15, floats) * scale + shift);
        }
    }
    transpose(by_group, GROUP, by_element, 8, GROUP, 8);
    for (int64_t k = 0; k < BLOCK; k += LANES) store_as(dtype, row, first + k, load(by_group + k));
}

static void unpack_rows(struct tasks *tasks, int64_t thread) {
    const struct unpack_call *call = tasks->call;
    int64_t blocks = call->K / BLOCK;
    (void)thread;
    for (int64_t n; (n = next_task(tasks)) < call->N;)
        for (int64_t block = n * blocks; block < (n + 1) * blocks; block++) {
            floats scale = load_groups(call->scale, block), shift = load_groups(call->shift, block);
            if (call->is_bfloat16) unpack_block(BFLOAT16, call->w + block * BLOCK / 4, scale, shift, call->matrix, block * BLOCK);
            else unpack_block(FLOAT32, call->w + block * BLOCK / 4, scale, shift, call->matrix, block * BLOCK);
        }
}

ENTRY(matvec_unpack, struct unpack_call) { parallel_for(unpack_rows, call, threads); }
