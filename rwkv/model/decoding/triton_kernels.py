"""Triton kernels that the decoding steps of all generations share: embedding, LayerNorm and mixes; matrix products.

Rows are tokens, one of each sequence. A row has two buffers: `wide` (rows,size) in float32, and `narrow` (rows,size) in the
dtype of the products' inputs, with the same offsets in all rows. The recurrent state of a row is states[slots[row]], a float32
vector, layer by layer.

A row's result does not depend on the other rows or on their number: an output of a product is summed in one order, BLOCK_K
inputs at a time, whatever the tile.

Padding rows of a launch use slot 0, which no sequence has. With PREFILL, consecutive rows of one slot are consecutive tokens of
its sequence: what depends on the previous token, the mixes and the operator, is computed for all of them by the program of the
first row, in order, with the bits of as many steps; slot 0 is not touched.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl

# Actions of a product's job on its sums: store to the wide buffer; store to the narrow one, with an activation; add to the wide
# buffer, optionally gated
WIDE, NARROW, TANH, SIGMOID, SQUARED_RELU, ADD, ADD_GATED = range(7)
FIRST_TILE, OUTPUTS, INPUTS, WEIGHT, SCALE, SHIFT, SOURCE, TARGET, ACTION, GATE, FIELDS = range(11)      # of a job's row
MAX_JOBS = 8                             # per launch
BLOCK_K = 128                            # inputs per partial sum; 256 in int4, as packed


def dtype_of(dtype: torch.dtype) -> Any:
    """Triton's dtype for one of torch's."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit
def begins(slots, row, PREFILL: tl.constexpr):
    """Whether the row's program computes anything: with PREFILL, only for the first row of a sequence."""
    if PREFILL:
        slot = tl.load(slots + row)
        return (slot != 0) & (slot != tl.load(slots + row - 1, mask=row > 0, other=0))
    else:
        return tl.full([], True, tl.int1)


@triton.jit
def can_continue(slots, row, PREFILL: tl.constexpr):
    """Whether the next row belongs to the same sequence. Slot 0 follows the last row."""
    if PREFILL:
        return tl.load(slots + row) == tl.load(slots + row + 1)
    else:
        return tl.full([], False, tl.int1)


@triton.jit
def _layer_norm(x, inside, C, weight, bias, eps, c):
    """LayerNorm of one row (BLOCK,), of which C elements are inside."""
    centred = tl.where(inside, x - tl.sum(x, 0) / C, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    return centred * scale * tl.load(weight + c, mask=inside, other=0.0) + tl.load(bias + c, mask=inside, other=0.0)


@triton.jit
def norm_and_mixes(tokens, slots, embedding, ln0_weight, ln0_bias, eps0, weight, bias, eps, past, wide, narrow, states,
                   V, C, wide_size, narrow_size, state_size, x_offset, mixed_offset, state_offset,
                   EMBED: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr, PREFILL: tl.constexpr):
    """Of a row: x (with EMBED the embedding through ln0, stored as x); n = LayerNorm(x); the mixes n + (s - n) past_i, where s
    in the state is the previous token's n; stores n as s. An invalid token gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    if MIXES == 0:
        x = tl.load(wide + row * wide_size + x_offset + c, mask=inside, other=0.0)
        normal = _layer_norm(x, inside, C, weight, bias, eps, c)
        tl.store(narrow + row * narrow_size + mixed_offset + c, normal.to(narrow.dtype.element_ty), mask=inside)
    else:
        state_ptr = states + tl.load(slots + row) * state_size + state_offset + c
        last = tl.load(state_ptr, mask=inside, other=0.0)
        active = begins(slots, row, PREFILL)
        while active:
            x_ptr = wide + row * wide_size + x_offset + c
            if EMBED:
                token = tl.load(tokens + row)
                valid = (token >= 0) & (token < V)
                x = tl.load(embedding + tl.where(valid, token, 0) * C + c, mask=inside, other=0.0).to(tl.float32)
                x = _layer_norm(tl.where(valid, x, float("nan")), inside, C, ln0_weight, ln0_bias, eps0, c)
                tl.store(x_ptr, x, mask=inside)
            else:
                x = tl.load(x_ptr, mask=inside, other=0.0)
            normal = _layer_norm(x, inside, C, weight, bias, eps, c)
            before = last - normal
            mixed_ptr = narrow + row * narrow_size + mixed_offset + c
            for i in tl.static_range(MIXES):
                mixed = normal + before * tl.load(past + i * C + c, mask=inside, other=0.0)
                tl.store(mixed_ptr + i * C, mixed.to(narrow.dtype.element_ty), mask=inside)
            tl.store(state_ptr, normal, mask=inside)
            last = normal
            active = can_continue(slots, row, PREFILL)
            row += 1


@triton.jit
def _expand_groups(groups, BLOCK_N: tl.constexpr):
    """Broadcasts one number for each of eight groups (8,BLOCK_N) to their 64 words."""
    return tl.reshape(tl.broadcast_to(groups[None, :, :], (8, 8, BLOCK_N)), (64, BLOCK_N))


@triton.jit(do_not_specialize=["rows"])  # or rows = 1 and multiples of 16 would compile variants
def products(jobs, weights, scales, shifts, wide, narrow, target, wide_size, narrow_size, target_size, rows,
             FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """Several products of rows and matrices W (N,K): y[m,n] = sum_k x[m,k] W[n,k], each with its input, output and action.

    A tile of BLOCK_N outputs belongs to one job. jobs (MAX_JOBS,FIELDS): a table with offsets from `weights`, `scales` and
    `shifts`; unused rows begin after the last tile. target: the buffer of the jobs that write to the wide one. FORM: "float",
    "int8" with a scale per output, or "int4" as packed by kernels/matvec. DOT: the dtype of the products.
    """
    tile = tl.program_id(0)
    first_tiles = tl.load(jobs + tl.arange(0, 8) * 10)
    job = jobs + (tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1) * 10
    N = tl.load(job + 1)
    K = tl.multiple_of(tl.load(job + 2), 8)
    n = ((tile - tl.load(job)) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    in_n = n < N
    in_m = m < rows
    weight = weights + tl.multiple_of(tl.load(job + 3), 16)
    source = narrow + m * narrow_size + tl.multiple_of(tl.load(job + 6), 8)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if FORM == "int4":
        word = tl.arange(0, 64)          # of eight groups of 32 inputs: word w of group g has index 8 w + g
        group = word % 8
        inside_block = 32 * group + 2 * (word // 8)
        G = (K + 255) // 256 * 8
        group_index = tl.arange(0, 8)[:, None] + n[None, :] * G
        scale = scales + tl.multiple_of(tl.load(job + 4), 8) + group_index
        shift = shifts + tl.multiple_of(tl.load(job + 5), 8) + group_index
        for block in range(G // 8):
            words_ptr = weight + n[None, :] * (G * 8) + block * 64 + word[:, None]
            words = tl.load(words_ptr, mask=in_n[None, :], other=0).to(tl.int32)
            word_scale = _expand_groups(tl.load(scale + block * 8, mask=in_n[None, :], other=0.0).to(tl.float32), BLOCK_N)
            word_shift = _expand_groups(tl.load(shift + block * 8, mask=in_n[None, :], other=0.0).to(tl.float32), BLOCK_N)
            for nibble in tl.static_range(4):        # the low nibbles of bytes 0 and 1, then the high ones, 16 inputs on
                k = block * 256 + inside_block + (nibble % 2) + 16 * (nibble // 2)
                x = tl.load(source[:, None] + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
                q = (words >> (8 * (nibble % 2) + 4 * (nibble // 2))) & 15
                w = q.to(tl.float32) * word_scale + word_shift
                sums = tl.dot(x.to(DOT), w.to(DOT), sums, input_precision="ieee")
    else:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(source[:, None] + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
            w = tl.load(weight + n[None, :] * K + k[:, None], mask=in_n[None, :] & (k < K)[:, None], other=0)
            sums = tl.dot(x.to(DOT), w.to(DOT), sums, input_precision="ieee")
        if FORM == "int8":
            sums = sums * tl.load(scales + tl.load(job + 4) + n, mask=in_n, other=0.0)[None, :]
    action = tl.load(job + 8)
    inside = in_m[:, None] & in_n[None, :]
    offset = tl.load(job + 7) + n[None, :]
    narrow_ptr = narrow + m[:, None] * narrow_size + offset
    target_ptr = target + m[:, None] * target_size + offset
    if action == 0:
        tl.store(target_ptr, sums, mask=inside)
    elif action == 1:
        tl.store(narrow_ptr, sums.to(narrow.dtype.element_ty), mask=inside)
    elif action == 2:
        tl.store(narrow_ptr, (2 * tl.sigmoid(2 * sums) - 1).to(narrow.dtype.element_ty), mask=inside)
    elif action == 3:
        tl.store(narrow_ptr, tl.sigmoid(sums).to(narrow.dtype.element_ty), mask=inside)
    elif action == 4:
        relu = tl.where(sums < 0, 0.0, sums)             # NaN stays NaN
        tl.store(narrow_ptr, (relu * relu).to(narrow.dtype.element_ty), mask=inside)
    elif action == 5:
        tl.store(target_ptr, tl.load(target_ptr, mask=inside) + sums, mask=inside)
    else:
        gate = tl.load(wide + m[:, None] * wide_size + tl.load(job + 9) + n[None, :], mask=inside, other=0.0)
        tl.store(target_ptr, tl.load(target_ptr, mask=inside) + sums * tl.sigmoid(gate), mask=inside)
