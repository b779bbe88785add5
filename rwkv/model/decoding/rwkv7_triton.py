"""RWKV-7's decoding step on a GPU: eight launches a layer. The formulas are at the top of rwkv/model/rwkv7.py.

    norm and mixes    n = LayerNorm(x); the inputs of r, k, v, w, a and g
    products          r, k, v; the hidden layers of the gates with their tanh and sigmoid
    products          the gates
    wkv               all between the products, the state S in place, y normalised, its readout and the product with g
    products          x = x + O y
    norm and mixes    n = LayerNorm(x); the input of channel mixing
    products          relu(K m)^2
    products          x = x + V relu(K m)^2
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl

from rwkv.model.decoding.triton_kernels import ADD, NARROW, SIGMOID, SQUARED_RELU, TANH, WIDE, begins, can_continue
from rwkv.model.decoding.triton_step import Builder, Launch, warps_for

FASTEST_LOG_W = tl.constexpr(-0.6065306597126334)        # e^-0.5, negated: the fastest decay
LEAST_NORM = tl.constexpr(1e-12)
ROWS = 64                                # rows of S that a program holds at a time
MIXES = "rkvwag"


def launches(model: Any, builder: Builder) -> list[Launch]:
    """The launches of one step, without the last LayerNorm and the head."""
    config = model.config
    C, N, F = config.n_embd, config.head_size, model.blocks[0].ffn.key.out_features
    ranks = {name: max(getattr(block.att, f"{name}1").shape[1] for block in model.blocks) for name in "wagv"}
    x, r, k, v, v_first, z, rate, g, share, y = (builder.wide(C) for _ in range(10))
    mixed, readout, relu = builder.narrow(6 * C), builder.narrow(C), builder.narrow(F)
    hidden = {name: builder.narrow(rank) for name, rank in ranks.items()}
    targets = {"w": z, "a": rate, "g": g, "v": share}
    hidden_actions = {"w": TANH, "a": NARROW, "g": SIGMOID, "v": NARROW}
    source_of = {name: mixed + MIXES.index(name) * C for name in MIXES}
    steps = []
    for number, block in enumerate(model.blocks):
        att, ffn = block.att, block.ffn
        gates = "wag" if number == 0 else "wagv"
        state = builder.state_place(number)
        past = builder.vectors(*(getattr(att, f"x_{name}") for name in MIXES))
        steps.append(builder.norm_and_mixes(block.ln1, x, past, mixed, state, ln0=block.ln0 if number == 0 else None))
        steps += builder.products(
            *(builder.job(layer, source_of[name], target, WIDE)
              for name, layer, target in (("r", att.receptance, r), ("k", att.key, k), ("v", att.value, v))),
            *(builder.job_of_matrix(getattr(att, f"{name}1").T, source_of[name], hidden[name], hidden_actions[name])
              for name in gates))
        steps += builder.products(*(builder.job_of_matrix(getattr(att, f"{name}2").T, hidden[name], targets[name], WIDE)
                                    for name in gates))
        vectors = builder.vectors(att.k_k, att.k_a, att.w0, att.a0, att.v0, att.r_k, att.ln_x.weight, att.ln_x.bias)
        places = (r, k, v, v_first, z, rate, g, share, y)
        width = triton.next_power_of_2(N)
        at_once = min(ROWS, width)
        steps.append(Launch(
            _wkv, lambda rows: (rows, C // N),
            (builder.slots, vectors, builder.wide_buffer, builder.narrow_buffer, builder.states, builder.wide_size,
             builder.narrow_size, builder.state_size, state + C, readout, C, att.ln_x.eps, *places),
            {"FIRST": number == 0, "N": N, "BLOCK": width, "ROWS": at_once, "num_warps": warps_for(at_once * width)},
            takes_texts=True))
        steps += builder.products(builder.job(att.output, readout, x, ADD))
        past = builder.vectors(ffn.x_k)
        steps.append(builder.norm_and_mixes(block.ln2, x, past, mixed, state + C + C * N))
        steps += builder.products(builder.job(ffn.key, mixed, relu, SQUARED_RELU))
        steps += builder.products(builder.job(ffn.value, relu, x, ADD))
    return [*steps, builder.norm_and_mixes(model.ln_out, x, None, mixed, 0), *builder.head(model.head, mixed)]


@triton.jit
def _wkv(slots, vectors, wide, narrow, states, wide_size, narrow_size, state_size, state_place, readout_place, C, eps,
         r_place, k_place, v_place, v_first_place, z_place, rate_place, g_place, share_place, y_place,
         FIRST: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TEXTS: tl.constexpr):
    """One head of one row, or of a text's rows. vectors (8,C): k_k, k_a, w0, a0, v0, r_k, the weight and bias of the norm."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * N
    S = states + tl.load(slots + row) * state_size + state_place + tl.program_id(1) * N * N
    reads = begins(slots, row, TEXTS)
    while reads:
        own = wide + row * wide_size + first
        to = narrow + row * narrow_size + readout_place + first
        _one_token(S, vectors + first, own, to, C, eps, r_place, k_place, v_place, v_first_place, z_place, rate_place, g_place,
                   share_place, y_place, FIRST, N, BLOCK, ROWS)
        reads = can_continue(slots, row, TEXTS)
        row += 1


@triton.jit
def _one_token(S, vectors, own, to, C, eps, r_place, k_place, v_place, v_first_place, z_place, rate_place, g_place, share_place,
               y_place, FIRST: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The head's state S (N,N) one token on, and its readout. own: the head's part of the row in the wide buffer; to: of its
    place in the narrow one."""
    j = tl.arange(0, BLOCK)
    inside = j < N
    vector = vectors + j
    r = tl.load(own + r_place + j, mask=inside, other=0.0)
    k = tl.load(own + k_place + j, mask=inside, other=0.0)
    v = tl.load(own + v_place + j, mask=inside, other=0.0)
    direction = k * tl.load(vector, mask=inside, other=0.0)
    kk = direction / tl.maximum(tl.sqrt(tl.sum(direction * direction, 0)), LEAST_NORM)
    rate = tl.sigmoid(tl.load(own + rate_place + j, mask=inside, other=0.0) + tl.load(vector + 3 * C, mask=inside, other=0.0))
    z = tl.load(own + z_place + j, mask=inside, other=0.0) + tl.load(vector + 2 * C, mask=inside, other=0.0)
    w = tl.exp(tl.sigmoid(z) * FASTEST_LOG_W)
    k = k * (1 + (rate - 1) * tl.load(vector + C, mask=inside, other=0.0))
    bonus = tl.sum(r * k * tl.load(vector + 5 * C, mask=inside, other=0.0), 0)
    if FIRST:
        tl.store(own + v_first_place + j, v, mask=inside)
    else:
        gate = tl.sigmoid(tl.load(own + share_place + j, mask=inside, other=0.0)
                          + tl.load(vector + 4 * C, mask=inside, other=0.0))
        v += (tl.load(own + v_first_place + j, mask=inside, other=0.0) - v) * gate
        tl.debug_barrier()               # all threads have loaded v
        tl.store(own + v_place + j, v, mask=inside)
        tl.debug_barrier()               # v is loaded by rows below
    for first_row in range(0, N, ROWS):
        i = first_row + tl.arange(0, ROWS)
        in_i = i < N
        places = i[:, None] * N + j[None, :]
        both = in_i[:, None] & inside[None, :]
        state = tl.load(S + places, mask=both, other=0.0)
        value = tl.load(own + v_place + i, mask=in_i, other=0.0)
        removed = -tl.sum(state * kk[None, :], 1)
        state = state * w[None, :] + removed[:, None] * (kk * rate)[None, :] + value[:, None] * k[None, :]
        tl.store(S + places, state, mask=both)
        tl.store(own + y_place + i, tl.sum(state * r[None, :], 1), mask=in_i)
    tl.debug_barrier()                   # y is complete
    y = tl.load(own + y_place + j, mask=inside, other=0.0)
    centred = tl.where(inside, y - tl.sum(y, 0) / N, 0.0)
    normal = centred / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    normal = normal * tl.load(vector + 6 * C, mask=inside, other=0.0) + tl.load(vector + 7 * C, mask=inside, other=0.0)
    out = (normal + bonus * v) * tl.load(own + g_place + j, mask=inside, other=0.0)
    tl.store(to + j, out.to(to.dtype.element_ty), mask=inside)
