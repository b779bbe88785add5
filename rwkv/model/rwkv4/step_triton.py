"""RWKV-4's decoding step on a GPU, with seven kernel launches per layer. mix.py has the formulas."""

# mypy: disable-error-code="no-untyped-def"
from typing import cast

import triton
import triton.language as tl

from kernels.wkv4 import decay_exponent
from rwkv.model.base import Model
from rwkv.model.decoding.triton_kernels import ADD, ADD_GATED, SQUARED_RELU, WIDE, can_continue, starts_sequence
from rwkv.model.decoding.triton_step import Builder, Launch
from rwkv.model.rwkv4.mix import Block

BLOCK = 256                              # channels per program of _wkv


def launches(model: Model, builder: Builder) -> list[Launch]:
    """Returns the kernel launches of one step."""
    blocks = cast(list[Block], [*model.blocks])
    att, ffn = blocks[0].att, blocks[0].ffn
    C, A, F = model.config.n_embd, att.key.out_features, ffn.key.out_features
    x, gate = builder.allocate_wide(C), builder.allocate_wide(C)
    k, v, r = (builder.allocate_wide(A) for _ in range(3))
    mixed, y, relu = builder.allocate_narrow(3 * C), builder.allocate_narrow(A), builder.allocate_narrow(F)
    steps = []
    for number, block in enumerate(blocks):
        att, ffn = block.att, block.ffn
        state = builder.state_offset(number)
        past = builder.vectors(*(1 - mu for mu in (att.time_mix_k, att.time_mix_v, att.time_mix_r)))
        steps.append(builder.norm_and_mixes(block.ln1, x, past, mixed, state, ln0=block.ln0 if number == 0 else None))
        steps += builder.products(builder.job(att.key, mixed, k, WIDE), builder.job(att.value, mixed + C, v, WIDE),
                                  builder.job(att.receptance, mixed + 2 * C, r, WIDE))
        vectors = builder.vectors(decay_exponent(att.time_decay.detach().float()), att.time_first)
        steps.append(Launch(_wkv, lambda rows: (rows, triton.cdiv(A, BLOCK)),
                            (builder.slots, vectors, builder.wide_buffer, builder.narrow_buffer, builder.states,
                             builder.wide_size, builder.narrow_size, builder.state_size, state + C, A, k, v, r, y),
                            {"BLOCK": BLOCK}, takes_prefill=True))
        steps += builder.products(builder.job(att.output, y, x, ADD))
        past = builder.vectors(1 - ffn.time_mix_k, 1 - ffn.time_mix_r)
        steps.append(builder.norm_and_mixes(block.ln2, x, past, mixed, state + C + 3 * A))
        steps += builder.products(builder.job(ffn.key, mixed, relu, SQUARED_RELU),
                                  builder.job(ffn.receptance, mixed + C, gate, WIDE))
        steps += builder.products(builder.job(ffn.value, relu, x, ADD_GATED, gate))
    return [*steps, builder.norm_and_mixes(model.ln_out, x, None, mixed, 0), *builder.head(model.head, mixed)]


@triton.jit
def _wkv(slots, vectors, wide, narrow, states, wide_size, narrow_size, state_size, state_offset, A, k_offset, v_offset,
         r_offset, y_offset, BLOCK: tl.constexpr, PREFILL: tl.constexpr):
    """Computes y = sigmoid(r) wkv(k, v) for a block of channels of one row or, with PREFILL, of all rows of a sequence.

    `vectors` (2,A) has the exponents of the decay, and time_first.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < A
    w = tl.load(vectors + c, mask=inside, other=0.0)
    u = tl.load(vectors + A + c, mask=inside, other=0.0)
    state_ptr = states + tl.load(slots + row) * state_size + state_offset + c
    a = tl.load(state_ptr, mask=inside, other=0.0)
    b = tl.load(state_ptr + A, mask=inside, other=0.0)
    p = tl.load(state_ptr + 2 * A, mask=inside, other=0.0)
    active = starts_sequence(slots, row, PREFILL)
    while active:
        row_ptr = wide + row * wide_size + c
        k = tl.load(row_ptr + k_offset, mask=inside, other=0.0)
        v = tl.load(row_ptr + v_offset, mask=inside, other=0.0)
        r = tl.load(row_ptr + r_offset, mask=inside, other=0.0)
        top = tl.maximum(p, u + k)
        past = tl.exp(p - top)
        now = tl.exp(u + k - top)
        y = tl.sigmoid(r) * ((past * a + now * v) / (past * b + now))
        tl.store(narrow + row * narrow_size + y_offset + c, y.to(narrow.dtype.element_ty), mask=inside)
        top = tl.maximum(p + w, k)
        past = tl.exp(p + w - top)
        now = tl.exp(k - top)
        a = past * a + now * v
        b = past * b + now
        p = top
        tl.store(state_ptr, a, mask=inside)
        tl.store(state_ptr + A, b, mask=inside)
        tl.store(state_ptr + 2 * A, p, mask=inside)
        active = can_continue(slots, row, PREFILL)
        row += 1
