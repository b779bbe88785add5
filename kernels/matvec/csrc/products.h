// y[r,n] = sum_k x[r,k] W[n,k] for a few rows of x (products.c).
//
// W is float32, bfloat16, int8 or int4, packed as in kernels/matvec/__init__.py, or GGUF's blocks (blocks.c). An output is the
// horizontal sum of one accumulator vector, whose lanes add their products in the same order for any R. A row's result is
// therefore bitwise independent of the other rows.

#pragma once
#define LANES 8                          // except in the products, which use wider vectors if the CPU has them
#include "../../native/csrc/vectors.h"

// The format of W, numbered as KINDS in Python. WX_BFLOAT16: x is rounded to bfloat16 as well. W_Q8_0 and later: GGUF's blocks.
enum kind {
    W_FLOAT32, W_BFLOAT16, WX_BFLOAT16, W_INT8, W_INT4,
    W_Q8_0, W_Q4_0, W_Q4_1, W_Q5_0, W_Q5_1,      // blocks of 32; x is rounded to integers of 8 bits
    W_Q4_K, W_Q5_K, W_Q6_K,                      // blocks of 256, likewise
};
enum {
    GROUP = 32,              // int4: neighbours that share a scale
    BLOCK = 8 * GROUP,       // int4: eight interleaved groups; GGUF: a block of a k-quant, or eight blocks of 32
    SIGNED = 128,            // int8: zero point of signed 8-bit inputs
    SUB_BLOCK = 16,          // GGUF's blocks: neighbours of x that share a scale
    SUB_BLOCKS = BLOCK / SUB_BLOCK,
    COLUMN_TILE = 32,        // W stored by input: outputs in a tile, a cache line in bfloat16
    SPARSE_TILE = 512,       // sparse product: largest number of outputs in a tile
};

// A product's operands. The rows of x (R,K) are x_row numbers apart. Kinds that round x read the output of prepare_input instead:
// the rounded x in q, whose rows are q_row bytes apart, and in x each row's scale (int8), or the scales and sums of each block's
// groups (int4) or sub-blocks (GGUF's blocks).
struct product {
    enum kind kind;
    const void *w, *scale, *shift;       // W (N,K); scale and shift as in Packed
    const float *x;
    const uint8_t *q;
    float *y;
    int64_t R, K, x_row, q_row, y_row;
    int64_t offset;                      // int8: zero point of q; SIGNED for signed 8-bit inputs
    int apply_x_scale;                   // int8: multiply y by the row's scale
    int is_signed;                       // int8, set by matmul: multiply q - SIGNED as signed bytes
};

#define matmul WITH_LEVEL(matmul, LEVEL)
#define matmul_by_columns WITH_LEVEL(matmul_by_columns, LEVEL)
#define matmul_sparse WITH_LEVEL(matmul_sparse, LEVEL)
#define matmul_int8_by_input WITH_LEVEL(matmul_int8_by_input, LEVEL)
#define matmul_blocks WITH_LEVEL(matmul_blocks, LEVEL)
#define unpack_blocks WITH_LEVEL(unpack_blocks, LEVEL)
#define matmul_in_order WITH_LEVEL(matmul_in_order, LEVEL)
#define matmul_amx WITH_LEVEL(matmul_amx, LEVEL)
#define prepare_input WITH_LEVEL(prepare_input, LEVEL)

INLINE int rounds_input(enum kind kind) { return kind >= WX_BFLOAT16; }

// Computes outputs begin <= n < end of all rows.
void matmul(const struct product *p, int64_t begin, int64_t end);

// The same for GGUF's blocks; called by matmul. A block's bytes are read in place, at any address.
void matmul_blocks(const struct product *p, int64_t begin, int64_t end);

// Unpacks row n of a W (N,K) of GGUF's blocks to float32: exactly the values that GGUF defines.
void unpack_blocks(enum kind kind, const void *w, int64_t K, int64_t n, float *row);

// Bit-identical to matmul, for a float32 or bfloat16 W stored by input, (K,N); x is not rounded.
void matmul_by_columns(const struct product *p, int64_t N, int64_t begin, int64_t end);

// Sums each output in a single lane, input after input. W is finite and stored by input, (K,N). Skips weights whose inputs are zero
// in every row of a tile, which can change only the sign of a zero. Rounds x itself.
void matmul_sparse(const struct product *p, int64_t N, int64_t begin, int64_t end);

// Bit-identical to matmul, for an int8 W stored by input, (K,N), and nonnegative inputs (offset 0). With up to 16 rows, skips
// weights whose inputs are zero in every row (by_input.c). K is a multiple of 8.
void matmul_int8_by_input(const struct product *p, int64_t N, int64_t begin, int64_t end);

// Computes outputs begin <= n < end of int8 products with AMX. N: the row stride of a W stored by input, (K,N); 0 if W is stored by
// output; such products with fewer than AMX_OUTPUTS outputs are faster without AMX. can_use_amx returns 1 if the CPU has AMX and the
// product has enough rows and inputs.
enum { AMX_ROWS = 32, AMX_INPUTS = 64, AMX_OUTPUTS = 64 };
#if defined __AVX512BF16__ && defined __linux__
int timemix_has_amx(void);
#else
#define timemix_has_amx() 0
#endif
INLINE int can_use_amx(const struct product *p) {
    return p->kind == W_INT8 && p->R >= AMX_ROWS && p->K >= AMX_INPUTS && timemix_has_amx();
}
void matmul_amx(const struct product *p, int64_t N, int64_t begin, int64_t end);

// Bit-identical to matmul_sparse, for a bfloat16 W stored by output, (N,K); reads all of W. K is a multiple of 8.
void matmul_in_order(const struct product *p, int64_t begin, int64_t end);

// Rounds numbers first to first + n - 1 of a row x (K) for a product of this kind. Writes q, and `floats`, the product's x.
//     int8          n = K. levels: the integer of the row's largest magnitude; offset: zero point of q, 0 if x >= 0
//     int4, GGUF's blocks   first: a multiple of BLOCK; q and floats are filled up to a multiple of BLOCK
//     WX_BFLOAT16   writes q if the CPU has bfloat16 dot products, otherwise floats
// K, first and n are multiples of 8.
void prepare_input(enum kind kind, const float *x, int64_t K, int64_t first, int64_t n, int64_t levels, int64_t offset,
                   float *floats, uint8_t *q);

// Returns the largest of 8 lanes, at least 1e-30, or NaN if any lane of `is_nan` is set, because max() drops a NaN.
INLINE float max_magnitude(floats largest, ints is_nan) {
    if (any(is_nan)) return __builtin_nanf("");
    float top = 1e-30f;
    UNROLL for (int l = 0; l < 8; l++) top = largest[l] > top ? largest[l] : top;
    return top;
}

// int4: returns the scales or shifts of a block's eight groups.
INLINE floats load_groups(const void *p, int64_t block) { return load_as(BFLOAT16, p, block * 8); }
