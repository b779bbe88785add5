// The products of kernels/matvec for a range of outputs, and what they need of x. The arguments are numbers of a Taichi kernel, which
// hands over their addresses; arrays are addresses as numbers.

#include "products.h"

const char SOURCE_HASH = 0;             // a name that tells what the bitcode was made of

#define PRODUCTS(name, in_form)                                                                                                    \
    void name(int64_t *w, int64_t *scale, int64_t *shift, int64_t *x, int64_t *q, int64_t *y, int32_t *begin, int32_t *end,        \
              int32_t *N, int32_t *K, int32_t *R, int32_t *x_row, int32_t *q_row, int32_t *offset) {                               \
        const struct product product = {                                                                                           \
            .form = in_form, .w = (void *)*w, .scale = (void *)*scale, .shift = (void *)*shift, .x = (void *)*x, .q = (void *)*q,  \
            .y = (void *)*y, .R = *R, .K = *K, .x_row = *x_row, .q_row = *q_row, .y_row = *N, .offset = *offset,                   \
        };                                                                                                                         \
        products(&product, *begin, *end);                                                                                          \
    }

PRODUCTS(products_float32, FLOAT32)
PRODUCTS(products_bfloat16, BOTH)
PRODUCTS(products_int8, INT8)
PRODUCTS(products_int4, INT4)

// Blocks of x, which is whole ones: in q (BLOCK bytes) and y (16 floats) what a product in int4 reads of each.
void arrange_blocks(int64_t *x, int64_t *q, int64_t *y, int32_t *blocks) {
    for (long block = 0; block < *blocks; block++)
        arrange_block((const float *)*x + block * BLOCK, (uint8_t *)*q + block * BLOCK, (float *)*y + block * 16, BLOCK, 0);
}
