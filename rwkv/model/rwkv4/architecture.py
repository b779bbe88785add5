"""RWKV-4's tensors and their shapes, optimiser groups, memory per token, and state. mix.py has the formulas.

The letters are V for the vocabulary size, C for n_embd, A for n_att, F for n_ffn and L for the number of layers.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.wkv4 import WKVState
from rwkv.config import ModelConfig
from rwkv.model import state

NAME = "RWKV-4"                          # rwkv.model.base.Generation documents these constants
OPERATOR = "wkv4"
OPTIONS: tuple[str, ...] = ("n_att",)
LR_SCALES = {name: f"{name}_lr_scale" for name in ("time_mix", "time_decay", "time_first")}
UNUSED: tuple[str, ...] = ()
LEARNS_STATE = False
KEPT_FLOAT32: tuple[str, ...] = ("time_decay", "time_first")      # rounding to bfloat16 would change the decay
Shape = tuple[int, ...]


def sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Returns C, A and F: the widths of the residual stream, of time mixing and of channel mixing's hidden layer."""
    return config.n_embd, config.n_att or config.n_embd, config.n_ffn or 4 * config.n_embd


def shapes(config: ModelConfig, V: int) -> dict[str, Shape]:
    """Returns the name and shape of every tensor of a model, in the model's order."""
    C, A, F = sizes(config)
    tensors: dict[str, Shape] = {"emb.weight": (V, C)}
    for layer in range(config.n_layer):
        norms = (["ln0"] if layer == 0 else []) + ["ln1", "ln2"]
        block: dict[str, Shape] = {f"{norm}.{part}": (C,) for norm in norms for part in ("weight", "bias")}
        block |= {"att.time_decay": (A,), "att.time_first": (A,)}
        block |= {f"att.time_mix_{name}": (1, 1, C) for name in "kvr"}
        block |= {"att.key.weight": (A, C), "att.value.weight": (A, C), "att.receptance.weight": (A, C),
                  "att.output.weight": (C, A)}
        block |= {"ffn.time_mix_k": (1, 1, C), "ffn.time_mix_r": (1, 1, C)}
        block |= {"ffn.key.weight": (F, C), "ffn.receptance.weight": (C, C), "ffn.value.weight": (C, F)}
        tensors |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return tensors | {"ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}


def with_default_widths(config: ModelConfig) -> ModelConfig:
    """Returns the configuration with n_att and n_ffn filled in where they are None."""
    _, A, F = sizes(config)
    return replace(config, n_att=A, n_ffn=F)


def non_negative(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the layers whose inputs are squares, and so never negative."""
    return ("ffn.value",)


def operator_work(config: ModelConfig) -> int:
    """Returns the peak number of float32 values per token in the operator of one layer (kernels/wkv4/README.md)."""
    return 8 * sizes(config)[1]


def saved_activations(config: ModelConfig, half: bool) -> float:
    """Returns the number of float32 values per token that one block saves for backward.

    `half` tells whether autocast to half precision is on.
    """
    C, A, F = sizes(config)
    return 7 * C + 2.5 * A + F if half else 10 * C + 5 * A + 2 * F


def saved_when_recomputing(config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float:
    """Returns saved_activations for a block with frozen weights or packed sequences, which recomputes more.

    Args:
        layers: the linear layers that are trained. Their inputs are saved, but that of ffn.value is recomputed.
        vectors: whether vectors are trained too.
    """
    C, A, F = sizes(config)
    inputs = {"att.output": A, "ffn.value": 0}
    saved = 3 * C + 6 * A + F + sum(inputs.get(layer, C) for layer in layers)
    return 2 * C * (1 + vectors) + saved / (2 if half else 1)


def group(name: str) -> str:
    """Returns a parameter's optimiser group: "matrix", "gate" (receptance), "embedding" (also the head) or "vector"."""
    if name in ("emb.weight", "head.weight"):
        return "embedding"
    if not name.endswith(("key.weight", "value.weight", "receptance.weight", "output.weight")):
        return "vector"
    return "gate" if name.endswith("receptance.weight") else "matrix"


class _Tensors(NamedTuple):
    att_x: Tensor
    a: Tensor
    b: Tensor
    p: Tensor
    ffn_x: Tensor


class State(_Tensors, state.State):
    """RWKV-4's state, in float32.

    att_x and ffn_x (L,B,C) are the last token's inputs of time and channel mixing. a, b and p (L,B,A) are the operator's state.
    """

    __slots__ = ()

    @property
    def wkv(self) -> WKVState:
        return WKVState(self.a, self.b, self.p)


def empty_state(config: ModelConfig, B: int, device: torch.device | str = "cpu") -> State:
    """Returns the state before the first token, for B rows. Elements do not share memory, so in-place updates are possible."""
    (C, A, _), L = sizes(config), config.n_layer
    a, b, p = (part.view(L, B, A) for part in WKVState.empty(L * B, A, device))
    return State(torch.zeros(L, B, C, device=device), a, b, p, torch.zeros(L, B, C, device=device))
