"""RWKV-7's constants, tensors and their shapes, optimiser groups, memory per token, and state. mix.py has the formulas.

The letters are V for the vocabulary size, C for n_embd, H = C/N for the number of heads, N for head_size, F for n_ffn, L for
the number of layers, and R for deep_embed_dim.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.wkv7 import empty_state as empty_wkv
from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.model import state

NAME = "RWKV-7"                          # rwkv.model.base.Generation documents these constants, up to LEARNS_STATE
OPERATOR = "wkv7"
KEPT_FLOAT32: tuple[str, ...] = ("w0",)                   # rounding to bfloat16 would change the decay
OPTIONS: tuple[str, ...] = (
    "head_size", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "deep_embed_dim")
LR_SCALES = {"w0": "time_decay_lr_scale"}
UNUSED: tuple[str, ...] = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
LEARNS_STATE = True

FASTEST_LOG_W = -0.6065306597126334      # -e^-0.5: log_w of the fastest decay
LEAST_NORM = 1e-12                       # lower bound of the divisor of kk, as in torch.nn.functional.normalize
EPS = 64e-5                              # epsilon of the GroupNorm over each head

MIXES = "rwkvag"                         # names of the mixes x_n, in the order of the model and of RWKV-LM's files
LOW_RANK = "wavg"                        # names of the low-rank gates, in the same order
STEP_MIXES = "rkvwag"                    # the mixes in the order of decoding steps, which need those of R, K and V first
GATES = "wagv"                           # the gates in the order of fused code and decoding steps; layer 0 has no gate v
RANK_FACTORS = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}
DEEP_EMBED = ("s_emb.weight", "s_emb_x.weight", "s1", "s2", "s0")        # the tensors of DeepEmbed in a block's ffn
Shape = tuple[int, ...]


class Sizes(NamedTuple):
    C: int
    H: int
    N: int
    F: int
    ranks: dict[str, int]                # the ranks of the low-rank gates


def sizes(config: ModelConfig) -> Sizes:
    """Returns the widths of a model.

    The default rank of a gate is the one of RWKV-LM's current trainer, a multiple of 32. Published files have different ranks.
    Raises UserError if n_embd is not a multiple of head_size.
    """
    C, N = config.n_embd, config.head_size
    if C % N:
        raise UserError(f"model.n_embd must be a multiple of model.head_size ({N}); got {C}")
    overrides = {"w": config.decay_low_rank_dim, "a": config.a_low_rank_dim, "v": config.v_low_rank_dim,
                 "g": config.gate_low_rank_dim}
    ranks = {name: rank or max(32, 32 * round(RANK_FACTORS[name] * math.sqrt(C) / 32)) for name, rank in overrides.items()}
    return Sizes(C, C // N, N, config.n_ffn or 4 * C, ranks)


def shapes(config: ModelConfig, V: int) -> dict[str, Shape]:
    """Returns the name and shape of every tensor of a model, in the model's order.

    The unused tensors v0, v1 and v2 of layer 0 are included.
    """
    C, H, N, F, ranks = sizes(config)
    tensors: dict[str, Shape] = {"emb.weight": (V, C)}
    for layer in range(config.n_layer):
        norms = (["ln0"] if layer == 0 else []) + ["ln1", "ln2"]
        block: dict[str, Shape] = {f"{norm}.{part}": (C,) for norm in norms for part in ("weight", "bias")}
        block |= {f"att.x_{name}": (1, 1, C) for name in MIXES}
        for name in LOW_RANK:
            bias: dict[str, Shape] = {} if name == "g" else {f"att.{name}0": (1, 1, C)}
            block |= bias | {f"att.{name}1": (C, ranks[name]), f"att.{name}2": (ranks[name], C)}
        block |= {"att.k_k": (1, 1, C), "att.k_a": (1, 1, C), "att.r_k": (H, N)}
        block |= {f"att.{name}.weight": (C, C) for name in ("receptance", "key", "value", "output")}
        block |= {"att.ln_x.weight": (C,), "att.ln_x.bias": (C,)}
        block |= {"ffn.x_k": (1, 1, C), "ffn.key.weight": (F, C), "ffn.value.weight": (C, F)}
        if R := config.deep_embed_dim:
            deep = (V, R * R), (R * R, C), (C, R), (R, F), (1, 1, F)
            block |= {f"ffn.{name}": shape for name, shape in zip(DEEP_EMBED, deep, strict=True)}
        tensors |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return tensors | {"ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}


def with_default_widths(config: ModelConfig) -> ModelConfig:
    """Returns the configuration with n_ffn and the ranks filled in where they are None."""
    _, _, _, F, ranks = sizes(config)
    return replace(config, n_ffn=F, decay_low_rank_dim=ranks["w"], a_low_rank_dim=ranks["a"], v_low_rank_dim=ranks["v"],
                   gate_low_rank_dim=ranks["g"])


def operator_work(config: ModelConfig) -> int:
    """Returns the peak number of float32 values per token in the operator of one layer, without saved activations."""
    return 16 * config.n_embd


def saved_activations(config: ModelConfig, half: bool) -> float:
    """Returns the number of float32 values per token that one block saves for backward.

    `half` tells whether autocast to half precision is on. The operator saves its inputs (log_w always in float32) and up to two
    more float32 tensors.
    """
    C, _, _, F, ranks = sizes(config)
    d, R = sum(ranks.values()), config.deep_embed_dim or 0
    deep = R and 2 * R * R + 2 * R + 3 * F
    return (15 * C + 2 * d + F if half else 26 * C + 3 * d + 2 * F) + deep


def saved_when_recomputing(config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float:
    """Returns saved_activations for a block with frozen weights or packed sequences, which recomputes more.

    The block saves the inputs of both LayerNorms in float32; r, k, v, the hidden layers of the low-rank gates, and the input of
    the squared ReLU; the input of att.output if that layer is trained; and, if mixes are trained, the x from which they are
    computed. Mixes are recomputed.

    Args:
        layers: the linear layers that are trained.
        vectors: whether vectors are trained too.
    """
    C, _, _, F, ranks = sizes(config)
    saved = 3 * C + sum(ranks.values()) + F + ("att.output" in layers) * C
    return 2 * C * (1 + vectors) + saved / (2 if half else 1)


def group(name: str) -> str:
    """Returns the optimiser group of a parameter.

    The groups are "matrix" (of a block), "gate" (receptance), "embedding" (also the head), "low rank" and "vector". The first
    three groups have weight decay.
    """
    if name in ("emb.weight", "head.weight") or name.endswith("ffn.s_emb.weight"):
        return "embedding"
    if name.endswith(tuple(f"ffn.{part}" for part in DEEP_EMBED)):
        return "vector" if name.endswith("s0") else "low rank"
    if name.endswith(("key.weight", "value.weight", "receptance.weight", "output.weight")):
        return "gate" if name.endswith("receptance.weight") else "matrix"
    return "low rank" if name.endswith(tuple(f".{gate}{part}" for gate in LOW_RANK for part in "12")) else "vector"


def non_negative(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the layers whose inputs are squares, or none with DeepEmbed, whose factors may be negative."""
    return () if config.deep_embed_dim else ("ffn.value",)


class _Tensors(NamedTuple):
    att_x: Tensor
    wkv: Tensor
    ffn_x: Tensor


class State(_Tensors, state.State):
    """RWKV-7's state, in float32.

    att_x and ffn_x (L,B,C) are the last inputs of time and channel mixing. wkv (L,B,H,N,N) is the operator's state.
    """

    __slots__ = ()


def empty_state(config: ModelConfig, B: int, device: torch.device | str = "cpu") -> State:
    """Returns the state before the first token, for B rows."""
    (C, H, N, _, _), L = sizes(config), config.n_layer
    return State(torch.zeros(L, B, C, device=device), empty_wkv(L * B, H, N, device).view(L, B, H, N, N),
                 torch.zeros(L, B, C, device=device))
