"""RWKV-7 "Goose": tensors and shapes, state, time and channel mixing, blocks, initialisation and optimiser groups.

Time mixing of x_t (after ln1), with m_n = x_t + (x_{t-1} - x_t) x_n for n in r w k v a g:

    r = R m_r    k = K m_k    v = V m_v    g = sigmoid(m_g g1) g2
    log_w = -e^-0.5 sigmoid(w0 + tanh(m_w w1) w2)                 rate = sigmoid(a0 + (m_a a1) a2)
    v = v + (v_first - v) sigmoid(v0 + (m_v v1) v2)               v_first: v of layer 0, for the same token
    kk = k k_k, each head divided by its norm                     k = k (1 + (rate - 1) k_a)
    y = wkv7(r, log_w, k, v, -kk, kk rate)                        out = O ((GroupNorm(y) + (sum over the head of r k r_k) v) g)

Channel mixing, the feed-forward half, is V relu(K m_k)^2 (after ln2). RWKV-7a has DeepEmbed beside it: in every layer each
token of the vocabulary has a matrix E of R x R numbers, and channel mixing of x_t is

    V (relu(K m_k)^2 (((x_t s1) E) s2 + s0))                      E = s_emb[token] + s_emb_x ln0(emb[token])

The second summand of E depends on the token alone. Training computes it; for inference it is merged into s_emb.

V vocabulary, C n_embd, H = C/N heads of N = head_size, F n_ffn, L layers, R deep_embed_dim
Sources: the RWKV-7 paper (arXiv 2503.14456), section 4 and appendix; for names, initialisation and optimiser groups RWKV-LM,
RWKV-v7/train_temp/src/model.py, whose files have unused v0, v1 and v2 in layer 0; for DeepEmbed RWKV-LM,
RWKV-v7/rwkv_v7a_demo.py, which has no initialisation and no groups.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, normalize
from torch.utils.checkpoint import checkpoint

from kernels.wkv7 import WKV7
from kernels.wkv7 import empty_state as empty_wkv
from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.model import fused, rwkv7_fused, state
from rwkv.model.decoding.rwkv7_c import c_model as c_model
from rwkv.model.decoding.rwkv7_step import Step as Step
from rwkv.model.hooks import untouched
from rwkv.model.packing import Packing

NAME = "RWKV-7"                          # up to LEARNS_STATE documented in rwkv.model.base.Generation
OPERATOR = "wkv7"
KEPT_FLOAT32: tuple[str, ...] = ("w0",)                   # a decay rounded to bfloat16 is another decay
OPTIONS: tuple[str, ...] = (
    "head_size", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "deep_embed_dim")
LR_SCALES = {"w0": "time_decay_lr_scale"}
UNUSED: tuple[str, ...] = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
LEARNS_STATE = True
MIXES = "rwkvag"
LOW_RANK = "wavg"
RANK_FACTORS = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}
DEEP_EMBED = ("s_emb.weight", "s_emb_x.weight", "s1", "s2", "s0")        # the tensors of DeepEmbed in a block's ffn
MERGED_ROWS = 4096                       # rows of s_emb that are merged at a time
Shape = tuple[int, ...]
Recompute = Callable[[], Tensor]         # recomputes the input x of one half of a block, in the backward pass


class Sizes(NamedTuple):
    C: int
    H: int
    N: int
    F: int
    ranks: dict[str, int]                # of the low-rank gates


def sizes(config: ModelConfig) -> Sizes:
    """The widths of a model.

    A rank of None is that of the official trainer today, a multiple of 32; released files have other ranks. Raises UserError if
    the width is not a multiple of head_size.
    """
    C, N = config.n_embd, config.head_size
    if C % N:
        raise UserError(f"model.n_embd must be a multiple of model.head_size, which is {N}; got {C}")
    overrides = {"w": config.decay_low_rank_dim, "a": config.a_low_rank_dim, "v": config.v_low_rank_dim,
                 "g": config.gate_low_rank_dim}
    ranks = {name: rank or max(32, 32 * round(RANK_FACTORS[name] * math.sqrt(C) / 32)) for name, rank in overrides.items()}
    return Sizes(C, C // N, N, config.n_ffn or 4 * C, ranks)


def shapes(config: ModelConfig, V: int) -> dict[str, Shape]:
    """The name and shape of every tensor of a model, in the model's order; layer 0 has the unused v0, v1 and v2."""
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


def resolved(config: ModelConfig) -> ModelConfig:
    """The configuration with n_ffn and the ranks filled in where they are None."""
    _, _, _, F, ranks = sizes(config)
    return replace(config, n_ffn=F, decay_low_rank_dim=ranks["w"], a_low_rank_dim=ranks["a"], v_low_rank_dim=ranks["v"],
                   gate_low_rank_dim=ranks["g"])


def operator_work(config: ModelConfig) -> int:
    """The peak number of float32 values per token in the operator of one layer, without those that it saves."""
    return 16 * config.n_embd


def saved_activations(config: ModelConfig, half: bool) -> float:
    """The number of float32 values per token that one block saves for backward; half: under autocast to half precision.

    The operator saves its inputs, one of them float32 in any case, and up to two more float32 tensors.
    """
    C, _, _, F, ranks = sizes(config)
    d, R = sum(ranks.values()), config.deep_embed_dim or 0
    deep = R and 2 * R * R + 2 * R + 3 * F
    return (15 * C + 2 * d + F if half else 26 * C + 3 * d + 2 * F) + deep


def saved_when_recomputing(config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float:
    """The same for a block that has frozen weights or reads packed rows. layers: the linear layers that are trained; vectors:
    whether vectors are trained too.

    It saves the inputs of both LayerNorms in float32; r, k, v, the hidden layers of the low-rank gates, the input of the
    squared ReLU, and that of att.output if this is trained. Mixes are recomputed; if they are trained, their x is saved.
    """
    C, _, _, F, ranks = sizes(config)
    saved = 3 * C + sum(ranks.values()) + F + ("att.output" in layers) * C
    return 2 * C * (1 + vectors) + saved / (2 if half else 1)


def group(name: str) -> str:
    """A parameter's group: "matrix" (of a block), "gate" (a block's receptance), "embedding" (and the head), "low rank" or
    "vector". Weight decay is for the first three."""
    if name in ("emb.weight", "head.weight") or name.endswith("ffn.s_emb.weight"):
        return "embedding"
    if name.endswith(tuple(f"ffn.{part}" for part in DEEP_EMBED)):
        return "vector" if name.endswith("s0") else "low rank"
    if name.endswith(("key.weight", "value.weight", "receptance.weight", "output.weight")):
        return "gate" if name.endswith("receptance.weight") else "matrix"
    return "low rank" if name.endswith(tuple(f".{gate}{part}" for gate in LOW_RANK for part in "12")) else "vector"


def non_negative(config: ModelConfig) -> tuple[str, ...]:
    """The layers whose inputs are squares of a ReLU; with DeepEmbed none, since it multiplies these by negative numbers too."""
    return () if config.deep_embed_dim else ("ffn.value",)


class _Tensors(NamedTuple):
    att_x: Tensor
    wkv: Tensor
    ffn_x: Tensor


class State(_Tensors, state.State):
    """att_x, ffn_x (L,B,C): the last step's inputs; wkv (L,B,H,N,N): the operator's state. All are float32."""

    __slots__ = ()


def empty_state(config: ModelConfig, B: int, device: torch.device | str = "cpu") -> State:
    """The state before the first token, for B rows."""
    (C, H, N, _, _), L = sizes(config), config.n_layer
    return State(torch.zeros(L, B, C, device=device), empty_wkv(L * B, H, N, device).view(L, B, H, N, N),
                 torch.zeros(L, B, C, device=device))


class TimeMix(nn.Module):
    """(x (B,T,C), last_x (B,C), the operator's state, v_first (B,T,C)) -> (out, last x, state, v_first).

    An empty state is None. In layer 0 the argument v_first is None, and the result is the layer's v.
    """

    w0: Tensor
    w1: Tensor
    w2: Tensor
    a0: Tensor
    a1: Tensor
    a2: Tensor
    v0: Tensor
    v1: Tensor
    v2: Tensor
    g1: Tensor
    g2: Tensor
    time_state: nn.Parameter | None

    def __init__(self, config: ModelConfig, layer: int, wkv: WKV7) -> None:
        super().__init__()
        C, H, N, _, ranks = sizes(config)
        self.wkv, self.first, self.N = wkv, layer == 0, N
        for name in MIXES:
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, C)))
        for name in LOW_RANK:
            tensors = {f"{name}1": torch.zeros(C, ranks[name]), f"{name}2": torch.zeros(ranks[name], C)}
            if name != "g":
                tensors = {f"{name}0": torch.zeros(1, 1, C), **tensors}
            for full_name, tensor in tensors.items():
                if self.first and name == "v":           # unused, but in the official files
                    self.register_buffer(full_name, tensor)
                else:
                    self.register_parameter(full_name, nn.Parameter(tensor))
        self.k_k = nn.Parameter(torch.zeros(1, 1, C))
        self.k_a = nn.Parameter(torch.zeros(1, 1, C))
        self.r_k = nn.Parameter(torch.zeros(H, N))
        self.register_parameter("time_state", None)              # (H,N,N), S before the first token; None: zeros
        self.receptance = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False)
        self.output = nn.Linear(C, C, bias=False)
        self.ln_x = nn.GroupNorm(H, C, eps=rwkv7_fused.EPS)

    def forward(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                packing: Packing | None = None,
                recompute_x: Recompute | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """With a packing, every sequence starts from the empty state, and there is no state after the row.

        recompute_x(): recomputes x in the backward pass, so that x is not saved.
        """
        before = self._initial_state(len(x)) if before is None else before
        if packing is not None:
            last_x = before = None
        fuses = packing is None and self._can_fuse()
        if fuses:
            out, after, v_first = self._fused_mix(x, last_x, before, v_first)
        elif self._can_recompute():
            out, after, v_first = self._recompute_mix(x, last_x, before, v_first, packing, recompute_x or (lambda: x))
        else:
            out, after, v_first = self._plain_mix(x, last_x, before, v_first, packing)
        return out, fused.last(x, saved=fuses), after, v_first

    def _can_fuse(self) -> bool:
        """Whether the layers may be computed without being called, and no weight is frozen.

        The fused form would compute the gradients of frozen weights for nothing.
        """
        if not fused.can_fuse(self.receptance, self.key, self.value, self.output):       # first, for torch.compile
            return False
        trained = all(parameter.requires_grad for parameter in self._parameters.values() if parameter is not None)
        return (trained or not torch.is_grad_enabled()) and self._has_usual_norm()

    def _can_recompute(self) -> bool:
        """Whether gradients are wanted, and fused functions may replace the formulas."""
        return fused.can_use_functions() and torch.is_grad_enabled() and self._has_usual_norm()

    def _has_usual_norm(self) -> bool:
        """Whether the group norm is the one that the fused functions compute."""
        norm = self.ln_x
        return (type(norm) is nn.GroupNorm and untouched(norm) and norm.affine
                and (norm.num_groups, norm.eps) == (len(self.r_k), rwkv7_fused.EPS))

    def _plain_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                   packing: Packing | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The formulas at the top of this file: (out, the operator's state, v_first)."""
        past = [1 - mu for mu in self._mixes()]
        m_r, m_w, m_k, m_v, m_a, m_g = fused.token_shift(x, last_x, *past, first=packing.shift_mask if packing else None)
        r, k, v = self.receptance(m_r), self.key(m_k), self.value(m_v)
        low_rank = partial(self._low_rank, m_r.dtype)
        g = torch.sigmoid(m_g @ low_rank("g1")) @ low_rank("g2")
        rate = torch.sigmoid(self.a0 + (m_a @ low_rank("a1")) @ low_rank("a2"))
        z = torch.tanh(m_w @ low_rank("w1")) @ low_rank("w2")
        log_w = rwkv7_fused.FASTEST_LOG_W * torch.sigmoid(self.w0 + z.to(torch.promote_types(z.dtype, torch.float32)))
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + (m_v @ low_rank("v1")) @ low_rank("v2"))
        keys = self._heads(k * self.k_k)
        kk = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1, eps=rwkv7_fused.LEAST_NORM)
        kk = kk.to(r.dtype).flatten(2)
        k = (k * (1 + (rate - 1) * self.k_a)).to(r.dtype)
        v, b = v.to(r.dtype), (kk * rate).to(r.dtype)
        y, after = self._wkv(r, log_w, k, v, -kk, b, before, packing)
        bonus = (self._heads(r) * self._heads(k) * self.r_k).sum(-1, keepdim=True)
        normal = self.ln_x(y.flatten(0, 1).flatten(1)).view_as(x)
        return self.output((normal + (bonus * self._heads(v)).flatten(2)) * g), after, v_first

    def _fused_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None,
                   v_first: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The same in two autograd functions and the operator."""
        inputs = rwkv7_fused.inputs(x, last_x, v_first, self.N, self._inputs(v_first is not None))
        y, after = self._operator(inputs.r, inputs.log_w, inputs.k, inputs.v, inputs.a, inputs.b, before)
        out = rwkv7_fused.output(y, inputs.output_r, inputs.output_k, inputs.output_v, inputs.output_g, self.r_k,
                                 self.ln_x.weight, self.ln_x.bias, self.output.weight)
        v_first = inputs.v_first if v_first is None else v_first
        assert v_first is not None
        return out, after, v_first

    def _recompute_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                       packing: Packing | None, recompute_x: Recompute) -> tuple[Tensor, Tensor | None, Tensor]:
        """The same for any layers and packings, with fewer saved activations: r, k, v, the hidden layers of the gates, the
        operator's state, and the input of O if O is trained. Backward recomputes the operations between the large products.
        """
        past = tuple(1 - mu for mu in self._mixes())
        first = packing.shift_mask if packing else None
        mixes = m_r, m_w, m_k, m_v, m_a, m_g = fused.token_shift(x, last_x, *past, first=first)
        with fused.recompute_mixes(recompute_x, last_x, past, first, mixes):
            r, k, v = self.receptance(m_r), self.key(m_k), self.value(m_v)
            inputs = {"w1": m_w, "a1": m_a, "g1": m_g} | ({} if v_first is None else {"v1": m_v})
            hidden = [mix @ self._low_rank(mix.dtype, name) for name, mix in inputs.items()]
        mixed, after = checkpoint(self._between_products, before, packing, r, k, v, v_first, *hidden, use_reentrant=False,
                                  preserve_rng_state=False, determinism_check="none")
        return self.output(mixed), after, v if v_first is None else v_first

    def _between_products(self, before: Tensor | None, packing: Packing | None, r: Tensor, k: Tensor, v: Tensor,
                          v_first: Tensor | None, *hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input of O, and the operator's state after the sequence, from r, k, v and the hidden layers of the gates."""
        v_gate = "" if v_first is None else "v"
        biases = [getattr(self, f"{name}0") for name in f"wa{v_gate}"]
        second = [self._low_rank(k.dtype, f"{name}2") for name in f"wag{v_gate}"]
        # products in int8 are float32 under autocast too, and then so is everything here
        with torch.autocast(k.device.type, enabled=False):
            hidden = tuple(part.to(k.dtype) for part in hidden)
            gates = rwkv7_fused.gates(k, v, v_first, hidden, self.N, (self.k_k, self.k_a, *biases), tuple(second))
            y, after = self._wkv(r, gates.log_w, gates.k, gates.v, gates.a, gates.b, before, packing)
            mixed = rwkv7_fused.gated(y, r, gates.k, gates.v, gates.g, self.r_k, self.ln_x.weight, self.ln_x.bias)
        return mixed, after

    def _low_rank(self, dtype: torch.dtype, name: str) -> Tensor:
        """A gate's matrix for products in `dtype`. A quantised model has it as in the file, for products in float32."""
        weight: Tensor = getattr(self, name)
        return weight.float() if (weight.dtype, dtype) == (torch.bfloat16, torch.float32) else weight

    def _initial_state(self, B: int) -> Tensor | None:
        """The operator's state before the first token, for B rows; None for zeros."""
        return None if self.time_state is None else self.time_state.repeat(B, 1, 1, 1)

    def _inputs(self, v_gate: bool) -> rwkv7_fused.Parameters:
        """The parameters of rwkv7_fused.inputs. v_gate: with the gate of v."""
        weights = {name: getattr(self, name).weight for name in ("receptance", "key", "value")}
        omitted = () if v_gate else ("v0", "v1", "v2")
        vectors: dict[str, Any] = {name: None if name in omitted else getattr(self, name)
                                   for name in rwkv7_fused.Parameters._fields if name not in weights}
        return rwkv7_fused.Parameters(**vectors | weights)

    def _mixes(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"x_{name}") for name in MIXES)

    def _heads(self, tensor: Tensor) -> Tensor:
        """(B,T,C) as (B,T,H,N)."""
        return tensor.unflatten(-1, (-1, self.N))

    def _wkv(self, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, before: Tensor | None,
             packing: Packing | None = None) -> tuple[Tensor, Tensor | None]:
        """The operator on inputs of (B,T,C) each. Returns y (B,T,H,N) and the state."""
        r, log_w, k, v, a, b = (self._heads(tensor) for tensor in (r, log_w, k, v, a, b))
        if packing is not None:
            def each(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
                return self.wkv(r, log_w, k, v, a, b, self._initial_state(len(r)))[0]

            return packing.each_sequence(each, r, log_w, k, v, a, b), None
        return self._operator(r, log_w, k, v, a, b, before)

    def _operator(self, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                  before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The operator on inputs of (B,T,H,N) each; for T = 1 without gradients its step, which is faster."""
        if r.shape[1] == 1 and before is not None and not torch.is_grad_enabled():
            y, after = self.wkv.step(r[:, 0], log_w[:, 0], k[:, 0], v[:, 0], a[:, 0], b[:, 0], before)
            return y.unsqueeze(1), after
        return self.wkv(r, log_w, k, v, a, b, before)


class ChannelMix(nn.Module):
    """(x (B,T,C), last_x (B,C), None for zeros) -> (out (B,T,C), last x)."""

    def __init__(self, n_embd: int, n_ffn: int) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_ffn, bias=False)
        self.value = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor | None, packing: Packing | None = None,
                recompute_x: Recompute | None = None) -> tuple[Tensor, Tensor]:
        """recompute_x: as in TimeMix."""
        if packing is not None or not fused.can_fuse(self.key, self.value):
            past, first = (1 - self.x_k,), packing.shift_mask if packing else None
            mixes = fused.token_shift(x, last_x, *past, first=first)
            with fused.recompute_mixes(recompute_x or (lambda: x), last_x, past, first, mixes):
                k = self.key(*mixes)
            return fused.squared_relu_linear(self.value, k), fused.last(x)
        return rwkv7_fused.channel_mixing(x, last_x, self.x_k, self.key.weight, self.value.weight), fused.last(x, saved=True)


class Carry(NamedTuple):
    """The values beside x that a block passes to the next. tokens and embedded are None in a model without DeepEmbed."""

    v_first: Tensor | None = None        # (B,T,C), None before layer 0
    tokens: Tensor | None = None         # (B,T)
    embedded: Tensor | None = None       # ln0(emb[token]), (B,T,C)


def first_carry(tokens: Tensor) -> Carry:
    return Carry(tokens=tokens)


class DeepEmbedChannelMix(ChannelMix):
    """ChannelMix with DeepEmbed, R = deep_embed_dim. It reads the tokens and, until merge(), their embeddings."""

    def __init__(self, n_embd: int, n_ffn: int, vocab_size: int, R: int) -> None:
        super().__init__(n_embd, n_ffn)
        self.R = R
        self.s_emb = nn.Embedding(vocab_size, R * R)
        self.s_emb_x: nn.Linear | None = nn.Linear(n_embd, R * R, bias=False)
        self.s1 = nn.Parameter(torch.zeros(n_embd, R))
        self.s2 = nn.Parameter(torch.zeros(R, n_ffn))
        self.s0 = nn.Parameter(torch.ones(1, 1, n_ffn))

    def forward(self, x: Tensor, last_x: Tensor | None, packing: Packing | None = None, recompute_x: Recompute | None = None,
                carry: Carry = Carry()) -> tuple[Tensor, Tensor]:        # noqa: B008  immutable
        (mixed,) = fused.token_shift(x, last_x, 1 - self.x_k, first=packing.shift_mask if packing else None)
        relu = torch.relu(self.key(mixed))
        inner = (x @ self.s1).unsqueeze(-2) @ self._matrices(x, carry)           # (B,T,1,R)
        return self.value(relu * relu * (inner.squeeze(-2) @ self.s2 + self.s0)), fused.last(x)

    def _matrices(self, x: Tensor, carry: Carry) -> Tensor:
        """E (B,T,R,R)."""
        rows = self.s_emb(carry.tokens).to(x.dtype)
        if self.s_emb_x is not None:
            rows = rows + self.s_emb_x(carry.embedded)
        return rows.unflatten(-1, (self.R, self.R))

    @torch.no_grad()
    def merge(self, embedding: Tensor, norm: nn.LayerNorm) -> None:
        """Adds s_emb_x ln0(emb[token]) to each row of s_emb, computed in float32, and drops s_emb_x."""
        assert self.s_emb_x is not None
        merged = torch.empty_like(self.s_emb.weight)
        weight, bias, matrix = norm.weight.float(), norm.bias.float(), self.s_emb_x.weight.float()
        for start in range(0, len(merged), MERGED_ROWS):
            rows = slice(start, start + MERGED_ROWS)
            normal = layer_norm(embedding[rows].float(), norm.normalized_shape, weight, bias, norm.eps)
            merged[rows] = linear(normal, matrix).add_(self.s_emb.weight[rows])
        self.s_emb.weight = nn.Parameter(merged, requires_grad=self.s_emb.weight.requires_grad)
        self.s_emb_x = None


def add_deep_embed(model: Any) -> None:
    """Gives each block of a new model its table of DeepEmbed, with a row for each token."""
    C, _, _, F, _ = sizes(model.config)
    for block in model.blocks:
        block.ffn = DeepEmbedChannelMix(C, F, model.vocab_size, model.config.deep_embed_dim)


def merge(model: Any) -> None:
    """Merges the embedding into every layer's s_emb, unless this has been done."""
    for block in model.blocks:
        if block.ffn.s_emb_x is not None:
            block.ffn.merge(model.emb.weight, model.blocks[0].ln0)


class Block(nn.Module):
    """x + att(ln1(x)), then x + ffn(ln2(x)); the first block also normalises the embedding with ln0."""

    def __init__(self, config: ModelConfig, layer: int, wkv: WKV7) -> None:
        super().__init__()
        C, _, _, F, _ = sizes(config)
        self.first = layer == 0
        if self.first:
            self.ln0 = nn.LayerNorm(C)
        self.ln1 = nn.LayerNorm(C)
        self.ln2 = nn.LayerNorm(C)
        self.att = TimeMix(config, layer, wkv)
        self.ffn = ChannelMix(C, F)

    def forward(self, x: Tensor, before: State | None, carry: Carry | None = None,
                packing: Packing | None = None) -> tuple[Tensor, State | None, Carry]:
        """(x (B,T,C), this layer's state before x, None for the empty one, carry) -> (x, the state after x, carry).

        packing: for rows of several sequences. Each starts from the empty state, and the state after such rows is None.
        """
        att_x, wkv, ffn_x = (None, None, None) if before is None else before
        x = self.ln0(x) if self.first else x
        carry = carry or Carry()
        if self.first and carry.tokens is not None:
            carry = carry._replace(embedded=x)
        mixed, att_x, wkv, v_first = self.att(self.ln1(x), att_x, wkv, carry.v_first, packing, partial(self.ln1, x))
        carry = carry._replace(v_first=v_first)
        x = x + mixed
        deep = () if carry.tokens is None else (carry,)
        mixed, ffn_x = self.ffn(self.ln2(x), ffn_x, packing, partial(self.ln2, x), *deep)
        return x + mixed, None if wkv is None else State(att_x, wkv, ffn_x), carry


PLAIN = (Block, TimeMix, ChannelMix, nn.GroupNorm)       # modules that Step computes without calling them


def gpu_launches(model: Any, builder: Any) -> Any:
    """The launches of the decoding step on a GPU (decoding/triton_step.py)."""
    from rwkv.model.decoding.rwkv7_triton import launches  # Triton is imported where it runs

    return launches(model, builder)


@torch.no_grad()
def init_weights(model: Any) -> None:
    """The official initialisation, on which the model's quality depends, with torch's global generator."""
    V, C = model.emb.weight.shape
    nn.init.uniform_(model.emb.weight, -1e-4, 1e-4)
    nn.init.orthogonal_(model.head.weight, gain=0.5 * math.sqrt(max(V / C, 1.0)))
    for layer, block in enumerate(model.blocks):
        _init_time_mix(block.att, layer, len(model.blocks))
        _init_channel_mix(block.ffn, layer, len(model.blocks))


def _init_time_mix(att: TimeMix, layer: int, L: int) -> None:
    C, N = att.key.in_features, att.N
    rho, sigma = layer / max(L - 1, 1), 1 - layer / L
    n = torch.arange(C)
    u, line = n / C, n / max(C - 1, 1) - 0.5
    within = (n % N - (N - 1) / 2) / max((N - 1) / 2, 0.5)               # from -1 to 1 in each head
    zigzag = within * within.abs()
    for names, power in (("rg", 0.2), ("wa", 0.9), ("kv", 0.7)):
        for name in names:
            getattr(att, f"x_{name}").copy_(1 - u ** (power * sigma))
    att.w0.copy_(-6 + 6 * (line + 0.5) ** (1 + rho ** 0.3) + 0.5 + 2.5 * zigzag)
    att.a0.copy_(-0.19 + 0.3 * zigzag + 0.4 * line)
    att.v0.copy_(0.73 - 0.4 * line)
    att.k_k.copy_(0.71 - 0.1 * line)
    att.k_a.fill_(1.02)
    att.r_k.fill_(-0.04)
    for name in LOW_RANK:
        down, up = getattr(att, f"{name}1"), getattr(att, f"{name}2")
        down.zero_()
        nn.init.orthogonal_(up, gain=0.1 * math.sqrt(max(len(up) / C, 1.0)))
    nn.init.orthogonal_(att.receptance.weight)
    nn.init.orthogonal_(att.key.weight, gain=0.1)
    nn.init.orthogonal_(att.value.weight)
    nn.init.zeros_(att.output.weight)
    att.ln_x.weight.fill_(((layer + 1) / L) ** 0.7)


def _init_channel_mix(ffn: ChannelMix, layer: int, L: int) -> None:
    C = ffn.key.in_features
    ffn.x_k.copy_(1 - (torch.arange(C) / C) ** ((1 - layer / L) ** 4))
    nn.init.orthogonal_(ffn.key.weight)
    nn.init.zeros_(ffn.value.weight)
    if isinstance(ffn, DeepEmbedChannelMix):
        _init_deep_embed(ffn)


def _init_deep_embed(ffn: DeepEmbedChannelMix) -> None:
    """This project's initialisation: a new model equals one without DeepEmbed; s_emb and s_emb_x learn from step 1."""
    assert ffn.s_emb_x is not None
    nn.init.zeros_(ffn.s_emb.weight)
    nn.init.zeros_(ffn.s_emb_x.weight)
    nn.init.orthogonal_(ffn.s1)
    nn.init.orthogonal_(ffn.s2, gain=0.1)
    nn.init.ones_(ffn.s0)
