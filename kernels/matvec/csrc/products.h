// y[r,n] = sum_k x[r,k] W[n,k] for a few rows of x (products.c).
//
// W in float32, bfloat16, int8 or int4, as kernels/matvec/__init__.py packs it. An output is the sum of chains, one for each lane
// of a vector, of which each adds up its products in order, whatever the number of rows is: a row's result does not depend, to the
// bit, on the rows beside it.

#pragma once
#define LANES 8                          // of all but the products, which have more where the CPU has
#include "../../native/csrc/vectors.h"

enum kind { OF_FLOAT32, OF_BFLOAT16, OF_BFLOAT16_BOTH, OF_INT8, OF_INT4 };       // of W; BOTH: x is rounded to bfloat16, too
enum {
    GROUP = 32,              // of int4: neighbours that share a scale
    BLOCK = 8 * GROUP,       // of int4: eight groups, side by side
    PART = 32,               // of a W that is stored by input: outputs that lie together
    OUTPUTS = 128,           // of a sparse product: a tile, four lines of the cache in bfloat16
};

// What a product works on. Its input is x (R,K), whose rows are x_row numbers apart, or, where the kind of W has x rounded, what
// `prepare` has made of it: q, whose rows are q_row bytes apart, and x, which then holds the size of a step (int8), or steps and
// sums of groups (int4).
struct product {
    enum kind kind;
    const void *w, *scale, *shift;       // of W (N,K); scale and shift as in Packed
    const float *x;
    const uint8_t *q;
    float *y;
    int64_t R, K, x_row, q_row, y_row;
    int64_t offset;                      // of int8: what was added to each whole number of x
    int in_steps;                        // of int8: y is multiplied by the size of a step of its row
};

#define products OF_LEVEL(products, LEVEL)
#define products_by_input OF_LEVEL(products_by_input, LEVEL)
#define products_of_sparse OF_LEVEL(products_of_sparse, LEVEL)
#define prepare OF_LEVEL(prepare, LEVEL)

// outputs begin <= n < end of all rows
void products(const struct product *p, int64_t begin, int64_t end);

// The same for a W in float32 or bfloat16 that is stored by input, PART outputs after the other: (N / PART,K,PART). begin and end
// are multiples of PART, and each output is one chain.
void products_by_input(const struct product *p, int64_t begin, int64_t end);

// The same for a W that is stored by input, (K,N), and finite: what it has for inputs that are 0 in several rows at once is not
// read. begin is a multiple of OUTPUTS.
void products_of_sparse(const struct product *p, int64_t N, int64_t begin, int64_t end);

// What a product of that kind reads in place of n numbers of a row x (K) from `first` on: writes `floats` (x) and q. n is K in int8,
// and `first` is whole blocks in int4. steps: of int8, of the largest magnitude; offset: what is added to them, 0 where x is never
// negative. All sizes are multiples of 8. OF_BFLOAT16_BOTH writes q where the CPU has products of bfloat16, otherwise
// floats.
void prepare(enum kind kind, const float *x, int64_t K, int64_t first, int64_t n, int64_t steps, int64_t offset, float *floats,
             uint8_t *q);

// Of int4: what eight groups have for themselves, in eight lanes.
INLINE floats of_groups(const void *p, int64_t at) { return read(BFLOAT16, p, at * 8); }
