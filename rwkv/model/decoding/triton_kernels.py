"""Triton kernels that the decoding steps of all generations share: embedding, LayerNorm and mixes; matrix products.

Rows are tokens, one of each sequence. A row has its numbers in two buffers: `wide` (rows,size) in float32, and `narrow`
(rows,size) in the dtype of the products' inputs; a number's place in a row is the same for all rows. The recurrent state of a
row is states[slots[row]], a vector in float32, whose parts lie layer by layer.

A row's result does not depend on the other rows or on their number: an output of a product is summed in one order, BLOCK_K
inputs at a time, whatever the tile.

Rows of the launch that stand for no sequence read and write slot 0, which no sequence has. With TEXTS, consecutive rows of one
slot are consecutive tokens of its text: what depends on the token before, the mixes and the operator, is computed for all of
them by the program of the first one, in order, with the bits of as many steps; slot 0 is left alone.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl

# What a product's job does with its sums: to the wide buffer as they are; to the narrow one as they are, or through a function;
# added to the wide buffer, also with a gate of the wide buffer
WIDE, NARROW, TANH, SIGMOID, SQUARED_RELU, ADD, ADD_GATED = range(7)
FIRST_TILE, OUTPUTS, INPUTS, WEIGHT, SCALE, SHIFT, SOURCE, TARGET, ACTION, GATE, FIELDS = range(11)      # of a job's row
MOST_JOBS = 8                            # of a launch
BLOCK_K = 128                            # inputs that are added at a time; int4 256, as they are packed


def dtype_of(dtype: torch.dtype) -> Any:
    """Triton's dtype for one of torch's."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit
def begins(slots, row, TEXTS: tl.constexpr):
    """Whether the row's program computes anything: with TEXTS, where the row is the first one of a text."""
    if TEXTS:
        slot = tl.load(slots + row)
        return (slot != 0) & (slot != tl.load(slots + row - 1, mask=row > 0, other=0))
    else:
        return tl.full([], True, tl.int1)


@triton.jit
def can_continue(slots, row, TEXTS: tl.constexpr):
    """Whether the row after this one belongs to the same text. Behind the last row lies slot 0."""
    if TEXTS:
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
                   V, C, wide_size, narrow_size, state_size, x_place, mixed_place, state_place,
                   EMBED: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr, TEXTS: tl.constexpr):
    """Of a row: x, or the embedding of its token through ln0, which becomes x; n = LayerNorm(x); the mixes n + (s - n) past_i
    with s, the last token's n; n becomes the state's s. A number that is no token gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    if MIXES == 0:
        x = tl.load(wide + row * wide_size + x_place + c, mask=inside, other=0.0)
        normal = _layer_norm(x, inside, C, weight, bias, eps, c)
        tl.store(narrow + row * narrow_size + mixed_place + c, normal.to(narrow.dtype.element_ty), mask=inside)
    else:
        at_state = states + tl.load(slots + row) * state_size + state_place + c
        last = tl.load(at_state, mask=inside, other=0.0)
        reads = begins(slots, row, TEXTS)
        while reads:
            at_x = wide + row * wide_size + x_place + c
            if EMBED:
                token = tl.load(tokens + row)
                known = (token >= 0) & (token < V)
                x = tl.load(embedding + tl.where(known, token, 0) * C + c, mask=inside, other=0.0).to(tl.float32)
                x = _layer_norm(tl.where(known, x, float("nan")), inside, C, ln0_weight, ln0_bias, eps0, c)
                tl.store(at_x, x, mask=inside)
            else:
                x = tl.load(at_x, mask=inside, other=0.0)
            normal = _layer_norm(x, inside, C, weight, bias, eps, c)
            before = last - normal
            at_mixed = narrow + row * narrow_size + mixed_place + c
            for i in tl.static_range(MIXES):
                mixed = normal + before * tl.load(past + i * C + c, mask=inside, other=0.0)
                tl.store(at_mixed + i * C, mixed.to(narrow.dtype.element_ty), mask=inside)
            tl.store(at_state, normal, mask=inside)
            last = normal
            reads = can_continue(slots, row, TEXTS)
            row += 1


@triton.jit
def _of_words(groups, BLOCK_N: tl.constexpr):
    """A number of each of eight groups (8,BLOCK_N), for each of their 64 words."""
    return tl.reshape(tl.broadcast_to(groups[None, :, :], (8, 8, BLOCK_N)), (64, BLOCK_N))


@triton.jit(do_not_specialize=["rows"])   # or each kind of number of rows would be compiled on its own
def products(jobs, weights, scales, shifts, wide, narrow, target, wide_size, narrow_size, target_size, rows,
             FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """Several products of rows and matrices W (N,K): y[m,n] = sum_k x[m,k] W[n,k], each with its input, output and action.

    A tile of BLOCK_N outputs belongs to one job; the jobs lie in `jobs` (MOST_JOBS,FIELDS), with places of weights counted from
    `weights`, `scales` and `shifts`; rows of the table without a job begin behind the last tile. target: the buffer of the jobs
    that go to the wide one. FORM: "float", "int8" with a scale for each output, or "int4" as kernels/matvec packs it. DOT: the
    dtype in which they are multiplied.
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
        word = tl.arange(0, 64)          # of eight groups of 32: word w of group g is the (8 w + g)-th
        group = word % 8
        inside_block = 32 * group + 2 * (word // 8)
        G = (K + 255) // 256 * 8
        of_group = tl.arange(0, 8)[:, None] + n[None, :] * G
        scale = scales + tl.multiple_of(tl.load(job + 4), 8) + of_group
        shift = shifts + tl.multiple_of(tl.load(job + 5), 8) + of_group
        for block in range(G // 8):
            at_words = weight + n[None, :] * (G * 8) + block * 64 + word[:, None]
            words = tl.load(at_words, mask=in_n[None, :], other=0).to(tl.int32)
            own_scale = _of_words(tl.load(scale + block * 8, mask=in_n[None, :], other=0.0).to(tl.float32), BLOCK_N)
            own_shift = _of_words(tl.load(shift + block * 8, mask=in_n[None, :], other=0.0).to(tl.float32), BLOCK_N)
            for nibble in tl.static_range(4):        # byte 0 and 1, the low halves, then the high ones 16 places on
                k = block * 256 + inside_block + (nibble % 2) + 16 * (nibble // 2)
                x = tl.load(source[:, None] + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
                q = (words >> (8 * (nibble % 2) + 4 * (nibble // 2))) & 15
                w = q.to(tl.float32) * own_scale + own_shift
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
    place = tl.load(job + 7) + n[None, :]
    at_narrow = narrow + m[:, None] * narrow_size + place
    at_target = target + m[:, None] * target_size + place
    if action == 0:
        tl.store(at_target, sums, mask=inside)
    elif action == 1:
        tl.store(at_narrow, sums.to(narrow.dtype.element_ty), mask=inside)
    elif action == 2:
        tl.store(at_narrow, (2 * tl.sigmoid(2 * sums) - 1).to(narrow.dtype.element_ty), mask=inside)
    elif action == 3:
        tl.store(at_narrow, tl.sigmoid(sums).to(narrow.dtype.element_ty), mask=inside)
    elif action == 4:
        relu = tl.where(sums < 0, 0.0, sums)             # NaN stays NaN
        tl.store(at_narrow, (relu * relu).to(narrow.dtype.element_ty), mask=inside)
    elif action == 5:
        tl.store(at_target, tl.load(at_target, mask=inside) + sums, mask=inside)
    else:
        gate = tl.load(wide + m[:, None] * wide_size + tl.load(job + 9) + n[None, :], mask=inside, other=0.0)
        tl.store(at_target, tl.load(at_target, mask=inside) + sums * tl.sigmoid(gate), mask=inside)
