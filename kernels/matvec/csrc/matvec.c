// The products of kernels/matvec, and what they need of x. A part of the outputs is a task.

#include "products.h"
#include "../../native/csrc/threads.h"

// The arguments of a call, as c_v0.py lists them. N is cut into `parts`.
struct call {
    int64_t kind, N, K, R, x_row, q_row, offset, parts;
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
        .offset = call->offset,
    };
    int64_t each = (call->N + call->parts - 1) / call->parts;
    (void)thread;
    for (int64_t part; (part = next_task(tasks)) < call->parts;) {
        int64_t end = (part + 1) * each < call->N ? (part + 1) * each : call->N;
        if (part * each < end) products(&product, part * each, end);
    }
}

ENTRY(matvec)(const struct call *call, int64_t threads) { share(multiply, call, threads); }

// Blocks of x, which is whole ones: in q (BLOCK bytes) and y (16 floats) what a product in int4 reads of each.
struct arranged {
    int64_t blocks;
    const float *x;
    uint8_t *q;
    float *y;
};

ENTRY(matvec_arrange)(const struct arranged *call, int64_t threads) {
    (void)threads;
    prepare(OF_INT4, call->x, call->blocks * BLOCK, 0, call->blocks * BLOCK, 0, 0, call->y, call->q);
}

// W (N,K) that int4 stands for: the integer times scale plus shift of its group. A row is a task.
struct unpacked {
    int64_t N, K, is_bfloat16;
    const uint16_t *w, *scale, *shift;
    void *matrix;
};

INLINE void unpack_block(enum form form, const uint16_t *words, floats scale, floats shift, void *row, int64_t first) {
    float by_element[GROUP * 8], by_group[BLOCK];
    for (int word = 0; word < GROUP / 4; word++) {
        halves bits;
        memcpy(&bits, words + word * 8, sizeof bits);
        ints whole = __builtin_convertvector(bits, ints);
        UNROLLED for (int nibble = 0; nibble < 4; nibble++) {            // of both bytes the low one and the high one
            int element = 2 * word + nibble / 2 + nibble % 2 * 16;
            put(by_element + element * 8, __builtin_convertvector((whole >> (4 * nibble)) & 15, floats) * scale + shift);
        }
    }
    turn(by_group, GROUP, by_element, 8, GROUP, 8);
    for (int64_t k = 0; k < BLOCK; k += LANES) write(form, row, first + k, at(by_group + k));
}

static void unpack_rows(struct tasks *tasks, int64_t thread) {
    const struct unpacked *call = tasks->call;
    int64_t blocks = call->K / BLOCK;
    (void)thread;
    for (int64_t n; (n = next_task(tasks)) < call->N;)
        for (int64_t block = n * blocks; block < (n + 1) * blocks; block++) {
            floats scale = of_groups(call->scale, block), shift = of_groups(call->shift, block);
            if (call->is_bfloat16) unpack_block(BFLOAT16, call->w + block * BLOCK / 4, scale, shift, call->matrix, block * BLOCK);
            else unpack_block(FLOAT32, call->w + block * BLOCK / 4, scale, shift, call->matrix, block * BLOCK);
        }
}

ENTRY(matvec_unpack)(const struct unpacked *call, int64_t threads) { share(unpack_rows, call, threads); }
