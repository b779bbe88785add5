"""Triton kernels for the decoding steps of all generations: one for embedding, LayerNorm and mixes, one for matrix products.

A row is one token. In a decoding step each row belongs to a different sequence. Intermediate values are in two buffers: `wide`
(rows,size) in float32, and `narrow` (rows,size) in the dtype of the products' inputs. A value has the same offset in all rows.
The recurrent state of a row is states[slots[row]], a float32 vector with the state of layer 0, then of layer 1, and so on.

A row's result depends neither on the other rows nor on their number, because each output of a product is summed in the same
order, BLOCK_K inputs at a time, for every tile size.

Padding rows of a launch use slot 0, which belongs to no sequence. With PREFILL, consecutive rows with the same slot are
consecutive tokens of one sequence, and slot 0 is skipped. The mixes and the operator depend on the previous token, so the
program of the first row computes them for all rows of the sequence, in order. The results are bit-identical to those of one
step per token.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl

# A job's actions. WIDE stores the product in the wide buffer, and NARROW in the narrow buffer. TANH, SIGMOID and SQUARED_RELU
# store the activation in the narrow buffer. ADD adds the product to the wide buffer, and ADD_GATED multiplies it by a gate
# first.
WIDE, NARROW, TANH, SIGMOID, SQUARED_RELU, ADD, ADD_GATED = range(7)
FIRST_TILE, OUTPUTS, INPUTS, WEIGHT, SCALE, SHIFT, SOURCE, TARGET, ACTION, GATE, FIELDS = range(11)      # columns of `jobs`
MAX_JOBS = 8                             # a launch runs at most this many jobs
BLOCK_K = 128                            # inputs per partial sum; int4 uses its packed blocks of 256


def dtype_of(dtype: torch.dtype) -> Any:
    """Returns the Triton dtype that corresponds to a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit
def starts_sequence(slots, row, PREFILL: tl.constexpr):
    """Returns True if the row's program computes anything. With PREFILL, only the first row of a sequence does."""
    if PREFILL:
        slot = tl.load(slots + row)
        return (slot != 0) & (slot != tl.load(slots + row - 1, mask=row > 0, other=0))
    else:
        return tl.full([], True, tl.int1)


@triton.jit
def can_continue(slots, row, PREFILL: tl.constexpr):
    """Returns True if the next row belongs to the same sequence. `slots` has a further 0 after the last row's slot."""
    if PREFILL:
        return tl.load(slots + row) == tl.load(slots + row + 1)
    else:
        return tl.full([], False, tl.int1)


@triton.jit
def _layer_norm(x, inside, C, weight, bias, eps, c):
    """Computes the LayerNorm of one row x (BLOCK,). `inside` marks the first C elements, which are valid."""
    centred = tl.where(inside, x - tl.sum(x, 0) / C, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    return centred * scale * tl.load(weight + c, mask=inside, other=0.0) + tl.load(bias + c, mask=inside, other=0.0)


@triton.jit
def norm_and_mixes(tokens, slots, embedding, ln0_weight, ln0_bias, eps0, weight, bias, eps, past, wide, narrow, states,
                   V, C, wide_size, narrow_size, state_size, x_offset, mixed_offset, state_offset,
                   EMBED: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr, PREFILL: tl.constexpr):
    """Computes n = LayerNorm(x) and the mixes n + (s - n) past_i of each row. s is the previous token's n, from the state.

    The kernel then stores n as the new s. With EMBED, x = ln0(embedding[token]) is computed and stored first. An invalid token
    gives NaN.
    """
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
        active = starts_sequence(slots, row, PREFILL)
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
    """Broadcasts one number per group, for eight groups (8,BLOCK_N), to the groups' 64 words."""
    return tl.reshape(tl.broadcast_to(groups[None, :, :], (8, 8, BLOCK_N)), (64, BLOCK_N))


@triton.jit(do_not_specialize=["rows"])  # otherwise Triton would compile rows = 1 and multiples of 16 separately
def products(jobs, weights, scales, shifts, wide, narrow, target, wide_size, narrow_size, target_size, rows,
             FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """Runs several jobs, each of which computes y[m,n] = sum_k x[m,k] W[n,k] with a matrix W (N,K) and its own action.

    Each tile of BLOCK_N outputs belongs to one job.

    Args:
        jobs (MAX_JOBS,FIELDS): a table of jobs. WEIGHT, SCALE and SHIFT are offsets from `weights`, `scales` and `shifts`. In
            unused rows, FIRST_TILE is the number of tiles.
        target: the buffer to which WIDE, ADD and ADD_GATED write.
        FORMAT: "float", "int8" with a scale per output, or "int4" as packed by kernels/matvec.
        DOT: the dtype to which both factors are converted.
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
    if FORMAT == "int4":
        word = tl.arange(0, 64)          # there are eight groups of 32 inputs; word w of group g has index 8 w + g
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
            for nibble in tl.static_range(4):        # low nibbles of bytes 0 and 1, then high nibbles, for inputs 16 later
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
        if FORMAT == "int8":
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
