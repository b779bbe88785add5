"""The structs that RWKV-7's decoding step on a CPU reads (csrc/step.c)."""

from typing import Any, NamedTuple, cast

from torch import Tensor

from rwkv.model import base
from rwkv.model.decoding.c_step import (
    DENSE_BY_INPUT,
    NO_MATRIX,
    NO_NORM,
    SPARSE_BY_INPUT,
    Builder,
    Common,
    Matrix,
    Norm,
)
from rwkv.model.rwkv7.architecture import GATES, STEP_MIXES
from rwkv.model.rwkv7.mix import Block

CHANNEL_BUFFERS = ("v_first", "r", "k", "v", "zw", "za", "zv", "g", "kk", "y", "out")        # C numbers each in a workspace row


class Layer(NamedTuple):
    ln0: Norm
    ln1: Norm
    ln2: Norm
    ln_x: Norm
    mixes: Tensor
    receptance: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    w1: Matrix
    w2: Matrix
    a1: Matrix
    a2: Matrix
    g1: Matrix
    g2: Matrix
    v1: Matrix
    v2: Matrix
    w0: Tensor
    a0: Tensor
    v0: Tensor
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    ffn_mixes: Tensor
    ffn_key: Matrix
    ffn_value: Matrix


class Model(NamedTuple):
    common: Common
    H: int
    N: int
    mixed: int
    hidden_w: int
    hidden_a: int
    hidden_g: int
    hidden_v: int
    v_first: int
    r: int
    k: int
    v: int
    zw: int
    za: int
    zv: int
    g: int
    kk: int
    y: int
    out: int
    relu: int
    layers: tuple[Layer, ...]


def c_model(model: base.Model, builder: Builder) -> Model:
    blocks = cast(list[Block], [*model.blocks])
    block, C, N = blocks[0], model.config.n_embd, model.config.head_size
    widths = {"mixed": len(STEP_MIXES) * C, **{f"hidden_{gate}": getattr(block.att, f"{gate}1").shape[1] for gate in GATES},
              **dict.fromkeys(CHANNEL_BUFFERS, C), "relu": block.ffn.key.out_features}
    offsets: dict[str, int] = {name: builder.allocate(width) for name, width in widths.items()}
    layers = tuple(_layer(block, builder) for block in blocks)
    return Model(common=builder.common(), H=C // N, N=N, **offsets, layers=layers)


def _layer(block: Block, builder: Builder) -> Layer:
    att, ffn, norm, matrix = block.att, block.ffn, builder.norm, builder.matrix
    gates: dict[str, Matrix] = {}
    for gate in GATES:
        exists = gate != "v" or not block.first
        for part, order in ("1", DENSE_BY_INPUT), ("2", SPARSE_BY_INPUT):
            gates[gate + part] = builder.low_rank(getattr(att, gate + part), order) if exists else NO_MATRIX
    vectors: dict[str, Tensor] = {name: builder.vector(getattr(att, name)) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")}
    return Layer(
        ln0=norm(block.ln0) if block.first else NO_NORM, ln1=norm(block.ln1), ln2=norm(block.ln2), ln_x=norm(att.ln_x),
        mixes=1 - builder.vectors(*(getattr(att, f"x_{name}") for name in STEP_MIXES)),
        receptance=matrix(att.receptance), key=matrix(att.key), value=matrix(att.value), output=matrix(att.output),
        **cast(dict[str, Any], gates | vectors),
        ffn_mixes=1 - builder.vector(ffn.x_k), ffn_key=matrix(ffn.key), ffn_value=builder.sparse_matrix(ffn.value))
