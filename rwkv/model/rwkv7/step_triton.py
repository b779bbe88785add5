"""RWKV-7's decoding step on a GPU, with eight kernel launches per layer. mix.py has the formulas.

norm and mixes    n = LayerNorm(x); the inputs of r, k, v, w, a and g
products          r, k, v; the gates' hidden layers with their tanh and sigmoid
products          the gates
wkv               everything between the products: updates the state S in place, normalises y, adds the bonus, multiplies by g
products          x = x + O y
norm and mixes    n = LayerNorm(x); the input of channel mixing
products          relu(K m)^2
products          x = x + V relu(K m)^2
"""

# mypy: disable-error-code="no-untyped-def"
from typing import cast

import triton
import triton.language as tl

from rwkv.model.base import Model
from rwkv.model.decoding.triton_kernels import ADD, NARROW, SIGMOID, SQUARED_RELU, TANH, WIDE, can_continue, starts_sequence
from rwkv.model.decoding.triton_step import Builder, Launch, warps_for
from rwkv.model.rwkv7 import architecture
from rwkv.model.rwkv7.architecture import GATES, STEP_MIXES
from rwkv.model.rwkv7.mix import Block

FASTEST_LOG_W = tl.constexpr(architecture.FASTEST_LOG_W)
LEAST_NORM = tl.constexpr(architecture.LEAST_NORM)
ROWS = 64                                # rows of S per tile


def launches(model: Model, builder: Builder) -> list[Launch]:
    """Returns the kernel launches of one step."""
    config = model.config
    blocks = cast(list[Block], [*model.blocks])
    C, N, F = config.n_embd, config.head_size, blocks[0].ffn.key.out_features
    ranks = {name: max(getattr(block.att, f"{name}1").shape[1] for block in blocks) for name in GATES}
    x, r, k, v, v_first, z, rate, g, v_gate, y = (builder.allocate_wide(C) for _ in range(10))
    mixed, readout, relu = builder.allocate_narrow(6 * C), builder.allocate_narrow(C), builder.allocate_narrow(F)
    hidden = {name: builder.allocate_narrow(rank) for name, rank in ranks.items()}
    targets = {"w": z, "a": rate, "g": g, "v": v_gate}
    hidden_actions = {"w": TANH, "a": NARROW, "g": SIGMOID, "v": NARROW}
    sources = {name: mixed + i * C for i, name in enumerate(STEP_MIXES)}
    steps = []
    for number, block in enumerate(blocks):
        att, ffn = block.att, block.ffn
        gates = GATES[:-1] if number == 0 else GATES
        state = builder.state_offset(number)
        past = builder.vectors(*(getattr(att, f"x_{name}") for name in STEP_MIXES))
        steps.append(builder.norm_and_mixes(block.ln1, x, past, mixed, state, ln0=block.ln0 if number == 0 else None))
        steps += builder.products(
            *(builder.job(layer, sources[name], target, WIDE)
              for name, layer, target in (("r", att.receptance, r), ("k", att.key, k), ("v", att.value, v))),
            *(builder.matrix_job(getattr(att, f"{name}1").T, sources[name], hidden[name], hidden_actions[name])
              for name in gates))
        steps += builder.products(*(builder.matrix_job(getattr(att, f"{name}2").T, hidden[name], targets[name], WIDE)
                                    for name in gates))
        vectors = builder.vectors(att.k_k, att.k_a, att.w0, att.a0, att.v0, att.r_k, att.ln_x.weight, att.ln_x.bias)
        offsets = (r, k, v, v_first, z, rate, g, v_gate, y)
        width = triton.next_power_of_2(N)
        tile_rows = min(ROWS, width)
        steps.append(Launch(
            _wkv, lambda rows: (rows, C // N),
            (builder.slots, vectors, builder.wide_buffer, builder.narrow_buffer, builder.states, builder.wide_size,
             builder.narrow_size, builder.state_size, state + C, readout, C, att.ln_x.eps, *offsets),
            {"FIRST": number == 0, "N": N, "BLOCK": width, "ROWS": tile_rows, "num_warps": warps_for(tile_rows * width)},
            takes_prefill=True))
        steps += builder.products(builder.job(att.output, readout, x, ADD))
        past = builder.vectors(ffn.x_k)
        steps.append(builder.norm_and_mixes(block.ln2, x, past, mixed, state + C + C * N))
        steps += builder.products(builder.job(ffn.key, mixed, relu, SQUARED_RELU))
        steps += builder.products(builder.job(ffn.value, relu, x, ADD))
    return [*steps, builder.norm_and_mixes(model.ln_out, x, None, mixed, 0), *builder.head(model.head, mixed)]


@triton.jit
def _wkv(slots, vectors, wide, narrow, states, wide_size, narrow_size, state_size, state_offset, readout_offset, C, eps,
         r_offset, k_offset, v_offset, v_first_offset, z_offset, rate_offset, g_offset, v_gate_offset, y_offset,
         FIRST: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PREFILL: tl.constexpr):
    """Computes one head of one row or, with PREFILL, of all rows of a sequence.

    `vectors` (8,C) has k_k, k_a, w0, a0, v0, r_k, and the norm's weight and bias.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * N
    S = states + tl.load(slots + row) * state_size + state_offset + tl.program_id(1) * N * N
    active = starts_sequence(slots, row, PREFILL)
    while active:
        row_ptr = wide + row * wide_size + first
        out_ptr = narrow + row * narrow_size + readout_offset + first
        _advance_head(S, vectors + first, row_ptr, out_ptr, C, eps, r_offset, k_offset, v_offset, v_first_offset, z_offset,
                      rate_offset, g_offset, v_gate_offset, y_offset, FIRST, N, BLOCK, ROWS)
        active = can_continue(slots, row, PREFILL)
        row += 1


@triton.jit
def _advance_head(S, vectors, row_ptr, out_ptr, C, eps, r_offset, k_offset, v_offset, v_first_offset, z_offset, rate_offset,
                  g_offset, v_gate_offset, y_offset, FIRST: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
                  ROWS: tl.constexpr):
    """Updates the head's state S (N,N) for one token, and stores the head's output.

    `row_ptr` points to the head's channels of the row in the wide buffer, and `out_ptr` to its channels in the narrow buffer.
    """
    j = tl.arange(0, BLOCK)
    inside = j < N
    vector = vectors + j
    r = tl.load(row_ptr + r_offset + j, mask=inside, other=0.0)
    k = tl.load(row_ptr + k_offset + j, mask=inside, other=0.0)
    v = tl.load(row_ptr + v_offset + j, mask=inside, other=0.0)
    direction = k * tl.load(vector, mask=inside, other=0.0)
    kk = direction / tl.maximum(tl.sqrt(tl.sum(direction * direction, 0)), LEAST_NORM)
    rate = tl.sigmoid(tl.load(row_ptr + rate_offset + j, mask=inside, other=0.0)
                      + tl.load(vector + 3 * C, mask=inside, other=0.0))
    z = tl.load(row_ptr + z_offset + j, mask=inside, other=0.0) + tl.load(vector + 2 * C, mask=inside, other=0.0)
    w = tl.exp(tl.sigmoid(z) * FASTEST_LOG_W)
    k = k * (1 + (rate - 1) * tl.load(vector + C, mask=inside, other=0.0))
    bonus = tl.sum(r * k * tl.load(vector + 5 * C, mask=inside, other=0.0), 0)
    if FIRST:
        tl.store(row_ptr + v_first_offset + j, v, mask=inside)
    else:
        gate = tl.sigmoid(tl.load(row_ptr + v_gate_offset + j, mask=inside, other=0.0)
                          + tl.load(vector + 4 * C, mask=inside, other=0.0))
        v += (tl.load(row_ptr + v_first_offset + j, mask=inside, other=0.0) - v) * gate
        tl.debug_barrier()               # all threads must have loaded v before it is overwritten
        tl.store(row_ptr + v_offset + j, v, mask=inside)
        tl.debug_barrier()               # the loop below loads v row by row
    for first_row in range(0, N, ROWS):
        i = first_row + tl.arange(0, ROWS)
        in_i = i < N
        cells = i[:, None] * N + j[None, :]
        both = in_i[:, None] & inside[None, :]
        state = tl.load(S + cells, mask=both, other=0.0)
        value = tl.load(row_ptr + v_offset + i, mask=in_i, other=0.0)
        removed = -tl.sum(state * kk[None, :], 1)
        state = state * w[None, :] + removed[:, None] * (kk * rate)[None, :] + value[:, None] * k[None, :]
        tl.store(S + cells, state, mask=both)
        tl.store(row_ptr + y_offset + i, tl.sum(state * r[None, :], 1), mask=in_i)
    tl.debug_barrier()                   # y must be complete before it is loaded
    y = tl.load(row_ptr + y_offset + j, mask=inside, other=0.0)
    centred = tl.where(inside, y - tl.sum(y, 0) / N, 0.0)
    normal = centred / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    normal = normal * tl.load(vector + 6 * C, mask=inside, other=0.0) + tl.load(vector + 7 * C, mask=inside, other=0.0)
    out = (normal + bonus * v) * tl.load(row_ptr + g_offset + j, mask=inside, other=0.0)
    tl.store(out_ptr + j, out.to(out_ptr.dtype.element_ty), mask=inside)
