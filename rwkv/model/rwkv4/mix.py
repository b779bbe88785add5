"""RWKV-4: tensors and shapes, state, time and channel mixing, blocks, initialisation and optimiser groups.

Time mixing reads the past through the operator WKV (kernels/wkv4); channel mixing is the feed-forward half:

    r, k, v = R mix_r(x), K mix_k(x), V mix_v(x)        time:    O (sigmoid(r) * wkv(k, v))
    r, k    = R mix_r(x), K mix_k(x)                    channel: sigmoid(r) * (V relu(k)^2)

with mix(x) = mu x_t + (1 - mu) x_{t-1}.    V vocabulary, C n_embd, A n_att, F n_ffn, L layers
Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1, initialisation in appendix E; names and initialisation are those of
RWKV-LM, RWKV-v4neo/src/model.py.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.wkv4 import WKV4, WKVState
from rwkv.config import ModelConfig
from rwkv.model import fused, state
from rwkv.model.packing import Packing
from rwkv.model.rwkv4 import fused as rwkv4_fused

NAME = "RWKV-4"                          # documented in rwkv.model.base.Generation
OPERATOR = "wkv4"
OPTIONS: tuple[str, ...] = ("n_att",)
LR_SCALES = {name: f"{name}_lr_scale" for name in ("time_mix", "time_decay", "time_first")}
UNUSED: tuple[str, ...] = ()
LEARNS_STATE = False
KEPT_FLOAT32: tuple[str, ...] = ("time_decay", "time_first")      # a rounded decay is another decay
Shape = tuple[int, ...]


def sizes(config: ModelConfig) -> tuple[int, int, int]:
    """C, A and F: the widths of the model, of time mixing and of channel mixing."""
    return config.n_embd, config.n_att or config.n_embd, config.n_ffn or 4 * config.n_embd


def shapes(config: ModelConfig, V: int) -> dict[str, Shape]:
    """The name and shape of every tensor of a model, in the model's order."""
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


def resolved(config: ModelConfig) -> ModelConfig:
    """The configuration with n_att and n_ffn filled in where they are None."""
    _, A, F = sizes(config)
    return replace(config, n_att=A, n_ffn=F)


def non_negative(config: ModelConfig) -> tuple[str, ...]:
    """The layers whose inputs are squares of a ReLU."""
    return ("ffn.value",)


def operator_work(config: ModelConfig) -> int:
    """The peak number of float32 values per token in the operator of one layer: kernels/wkv4/README.md."""
    return 8 * sizes(config)[1]


def saved_activations(config: ModelConfig, half: bool) -> float:
    """The number of float32 values per token that one block saves for backward; half: under autocast to half precision."""
    C, A, F = sizes(config)
    return 7 * C + 2.5 * A + F if half else 10 * C + 5 * A + 2 * F


def saved_when_recomputing(config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float:
    """The same for a block that has frozen weights or reads packed rows.

    layers: the linear layers that are trained, whose inputs are saved; that of ffn.value is recomputed. vectors: whether
    vectors are trained too.
    """
    C, A, F = sizes(config)
    inputs = {"att.output": A, "ffn.value": 0}
    saved = 3 * C + 6 * A + F + sum(inputs.get(layer, C) for layer in layers)
    return 2 * C * (1 + vectors) + saved / (2 if half else 1)


def group(name: str) -> str:
    """A parameter's group: "matrix" (of a block), "gate" (a block's receptance), "embedding" (and the head) or "vector"."""
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
    """att_x, ffn_x (L,B,C): the last step's inputs; a, b, p (L,B,A): WKV's state. All are float32, on the model's device."""

    __slots__ = ()

    @property
    def wkv(self) -> WKVState:
        return WKVState(self.a, self.b, self.p)


def empty_state(config: ModelConfig, B: int, device: torch.device | str = "cpu") -> State:
    """The state before the first token, for B rows; no two of its elements share memory."""
    (C, A, _), L = sizes(config), config.n_layer
    a, b, p = (part.view(L, B, A) for part in WKVState.empty(L * B, A, device))
    return State(torch.zeros(L, B, C, device=device), a, b, p, torch.zeros(L, B, C, device=device))


class TimeMix(nn.Module):
    """(x (B,T,C), last_x (B,C), WKV's state before x) -> (out (B,T,C), last x, WKV's state after x). None: an empty state."""

    def __init__(self, n_embd: int, n_att: int, wkv: WKV4) -> None:
        super().__init__()
        self.wkv = wkv
        self.time_decay = nn.Parameter(torch.zeros(n_att))
        self.time_first = nn.Parameter(torch.zeros(n_att))
        self.time_mix_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_v = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_att, bias=False)
        self.value = nn.Linear(n_embd, n_att, bias=False)
        self.receptance = nn.Linear(n_embd, n_att, bias=False)
        self.output = nn.Linear(n_att, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor | None, before: WKVState | None,
                packing: Packing | None = None) -> tuple[Tensor, Tensor, WKVState | None]:
        """With a packing, every sequence starts from the empty state, and there is no state after the row."""
        mus = self.time_mix_k, self.time_mix_v, self.time_mix_r
        if packing is not None or not fused.can_fuse(self.key, self.value, self.receptance, self.output):
            mix_k, mix_v, mix_r = fused.token_shift(x, last_x, *mus, first=packing.shift_mask if packing else None)
            y, after = self._wkv(self.key(mix_k), self.value(mix_v), before, packing)
            return self.output(torch.sigmoid(self.receptance(mix_r)) * y), fused.last(x), after
        weights = self.key.weight, self.value.weight, self.receptance.weight
        k, v, r = fused.mixed_products(x, last_x, mus, weights)
        y, after = self._wkv(k, v, before)
        return rwkv4_fused.gated_product(r, y, self.output.weight), fused.last(x, saved=True), after

    def _wkv(self, k: Tensor, v: Tensor, before: WKVState | None,
             packing: Packing | None = None) -> tuple[Tensor, WKVState | None]:
        if packing is not None:
            return packing.each_sequence(lambda k, v: self.wkv(self.time_decay, self.time_first, k, v, None)[0], k, v), None
        if k.shape[1] == 1 and before is not None and not torch.is_grad_enabled():
            y, after = self.wkv.step(self.time_decay, self.time_first, k[:, 0], v[:, 0], before)
            return y.unsqueeze(1), after
        return self.wkv(self.time_decay, self.time_first, k, v, before)


class ChannelMix(nn.Module):
    """(x (B,T,C), last_x (B,C), None for zeros) -> (out (B,T,C), last x)."""

    def __init__(self, n_embd: int, n_ffn: int) -> None:
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_ffn, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor | None, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
        mus = self.time_mix_k, self.time_mix_r
        if packing is not None or not fused.can_fuse(self.key, self.receptance, self.value):
            mix_k, mix_r = fused.token_shift(x, last_x, *mus, first=packing.shift_mask if packing else None)
            mixed = fused.squared_relu_linear(self.value, self.key(mix_k))
            return torch.sigmoid(self.receptance(mix_r)) * mixed, fused.last(x)
        weights = self.key.weight, self.receptance.weight, self.value.weight
        return rwkv4_fused.channel_mixing(x, last_x, mus, *weights), fused.last(x, saved=True)


class Block(nn.Module):
    """x + att(ln1(x)), then x + ffn(ln2(x)); the first block also normalises the embedding with ln0."""

    def __init__(self, config: ModelConfig, layer: int, wkv: WKV4) -> None:
        super().__init__()
        C, A, F = sizes(config)
        self.first = layer == 0
        if self.first:
            self.ln0 = nn.LayerNorm(C)
        self.ln1 = nn.LayerNorm(C)
        self.ln2 = nn.LayerNorm(C)
        self.att = TimeMix(C, A, wkv)
        self.ffn = ChannelMix(C, F)

    def forward(self, x: Tensor, before: State | None, carry: None = None,
                packing: Packing | None = None) -> tuple[Tensor, State | None, None]:
        """(x (B,T,C), this layer's state before x, None for the empty one) -> (x, the state after x, None).

        carry is passed from block to block; RWKV-4 passes nothing. packing: for rows of several sequences. Each starts from
        the empty state, and the state after such rows is None.
        """
        att_x, wkv, ffn_x = (None, None, None) if before is None else (before.att_x, before.wkv, before.ffn_x)
        x = self.ln0(x) if self.first else x
        mixed, att_x, wkv = self.att(self.ln1(x), att_x, wkv, packing)
        x = x + mixed
        mixed, ffn_x = self.ffn(self.ln2(x), ffn_x, packing)
        return x + mixed, None if wkv is None else State(att_x, wkv.a, wkv.b, wkv.p, ffn_x), None


PLAIN = (Block, TimeMix, ChannelMix)     # modules that Step computes without calling them


def gpu_launches(model: Any, builder: Any) -> Any:
    """The launches of the decoding step on a GPU (decoding/triton_step.py)."""
    from rwkv.model.rwkv4.step_triton import launches  # Triton is imported where it runs

    return launches(model, builder)


def init_weights(model: Any) -> None:
    """Spreads the decays over channels and layers, and makes matrices orthogonal or zero, with torch's global generator."""
    nn.init.uniform_(model.emb.weight, -1e-4, 1e-4)
    _orthogonal(model.head, scale=0.5)
    for layer, block in enumerate(model.blocks):
        _init_time_mix(block.att, layer, len(model.blocks))
        _init_channel_mix(block.ffn, layer, len(model.blocks))


def _init_time_mix(att: TimeMix, layer: int, n_layer: int) -> None:
    rho, sigma = _depth(layer, n_layer)
    n_att, x = len(att.time_decay), _ramp(att.time_mix_k.shape[-1])
    h = torch.arange(n_att)
    with torch.no_grad():
        att.time_decay.copy_(-5 + 8 * (h / max(n_att - 1, 1)) ** (0.7 + 1.3 * rho))
        att.time_first.copy_(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
        att.time_mix_k.copy_(x ** sigma)
        att.time_mix_v.copy_(x ** sigma + 0.3 * rho)
        att.time_mix_r.copy_(x ** (0.5 * sigma))
    _zero(att.key, att.receptance, att.output)
    _orthogonal(att.value)


def _init_channel_mix(ffn: ChannelMix, layer: int, n_layer: int) -> None:
    _, sigma = _depth(layer, n_layer)
    with torch.no_grad():
        for mu in (ffn.time_mix_k, ffn.time_mix_r):
            mu.copy_(_ramp(mu.shape[-1]) ** sigma)
    _zero(ffn.value, ffn.receptance)
    _orthogonal(ffn.key)


def _depth(layer: int, n_layer: int) -> tuple[float, float]:
    """rho, which rises from 0 to 1 over the layers, and sigma, which falls from 1 towards 0."""
    return layer / max(n_layer - 1, 1), 1 - layer / n_layer


def _ramp(n_embd: int) -> Tensor:
    return torch.arange(n_embd) / n_embd


def _zero(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.zeros_(layer.weight)


def _orthogonal(layer: nn.Linear, scale: float = 1.0) -> None:
    rows, columns = layer.weight.shape
    nn.init.orthogonal_(layer.weight, gain=scale * math.sqrt(max(rows / columns, 1.0)))
