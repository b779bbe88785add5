"""The structs that RWKV-4's decoding step on a CPU reads (csrc/step.c)."""

from typing import NamedTuple, cast

from torch import Tensor

from kernels.wkv4 import decay_exponent
from rwkv.model import base
from rwkv.model.decoding.c_step import NO_NORM, Builder, Common, Matrix, Norm
from rwkv.model.rwkv4.mix import Block


class Layer(NamedTuple):
    ln0: Norm
    ln1: Norm
    ln2: Norm
    mixes: Tensor
    decay: Tensor
    first: Tensor
    key: Matrix
    value: Matrix
    receptance: Matrix
    output: Matrix
    ffn_mixes: Tensor
    ffn_key: Matrix
    ffn_receptance: Matrix
    ffn_value: Matrix


class Model(NamedTuple):
    common: Common
    A: int
    F: int
    mixed: int
    k: int
    v: int
    r: int
    y: int
    out: int
    relu: int
    gate: int
    layers: tuple[Layer, ...]


def c_model(model: base.Model, builder: Builder) -> Model:
    blocks = cast(list[Block], [*model.blocks])
    block = blocks[0]
    C, A, F = model.config.n_embd, block.att.key.out_features, block.ffn.key.out_features
    widths = {"mixed": 3 * C, "k": A, "v": A, "r": A, "y": A, "out": C, "relu": F, "gate": C}
    offsets: dict[str, int] = {name: builder.allocate(width) for name, width in widths.items()}
    layers = tuple(_layer(block, builder) for block in blocks)
    return Model(common=builder.common(), A=A, F=F, **offsets, layers=layers)


def _layer(block: Block, builder: Builder) -> Layer:
    att, ffn, norm, matrix = block.att, block.ffn, builder.norm, builder.matrix
    return Layer(
        ln0=norm(block.ln0) if block.first else NO_NORM, ln1=norm(block.ln1), ln2=norm(block.ln2),
        mixes=builder.vectors(att.time_mix_k, att.time_mix_v, att.time_mix_r),
        decay=decay_exponent(builder.vector(att.time_decay)), first=builder.vector(att.time_first),
        key=matrix(att.key), value=matrix(att.value), receptance=matrix(att.receptance), output=matrix(att.output),
        ffn_mixes=builder.vectors(ffn.time_mix_k, ffn.time_mix_r),
        ffn_key=matrix(ffn.key), ffn_receptance=matrix(ffn.receptance), ffn_value=builder.sparse_matrix(ffn.value))
