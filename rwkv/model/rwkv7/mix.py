"""The blocks of RWKV-7 "Goose": the formulas of time and channel mixing, and whether a layer uses the fused ones.

Time mixing of x_t (after ln1), with m_n = x_t + (x_{t-1} - x_t) x_n for n in r w k v a g:

    r = R m_r    k = K m_k    v = V m_v    g = sigmoid(m_g g1) g2
    log_w = -e^-0.5 sigmoid(w0 + tanh(m_w w1) w2)                 rate = sigmoid(a0 + (m_a a1) a2)
    v = v + (v_first - v) sigmoid(v0 + (m_v v1) v2)               v_first: v of layer 0, for the same token
    kk = k k_k, each head divided by its norm                     k = k (1 + (rate - 1) k_a)
    y = wkv7(r, log_w, k, v, -kk, kk rate)                        out = O ((GroupNorm(y) + (sum over the head of r k r_k) v) g)

Channel mixing, the feed-forward half, is V relu(K m_k)^2 (after ln2). RWKV-7a adds DeepEmbed: in every layer each token of the
vocabulary has a matrix E of R x R numbers, and channel mixing of x_t is

    V (relu(K m_k)^2 (((x_t s1) E) s2 + s0))                      E = s_emb[token] + s_emb_x ln0(emb[token])

The second summand of E depends only on the token. Training computes this summand, and inference merges it into s_emb.

The source of the formulas is the RWKV-7 paper (arXiv 2503.14456), section 4 and appendix. Names, initialisation and optimiser
groups are those of RWKV-LM, RWKV-v7/train_temp/src/model.py, whose files contain unused v0, v1 and v2 in layer 0. DeepEmbed is
from RWKV-LM, RWKV-v7/rwkv_v7a_demo.py, which specifies neither its initialisation nor its optimiser groups.
"""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from kernels.wkv7 import WKV7
from rwkv.config import ModelConfig
from rwkv.model import fused
from rwkv.model.hooks import is_unmodified
from rwkv.model.packing import Packing
from rwkv.model.rwkv7 import fused as rwkv7_fused
from rwkv.model.rwkv7.architecture import EPS, FASTEST_LOG_W, LEAST_NORM, LOW_RANK, MIXES, State, sizes

Recompute = Callable[[], Tensor]         # in backward, recomputes the input of time or channel mixing


class TimeMix(nn.Module):
    """Time mixing: (x (B,T,C), last_x (B,C), the operator's state, v_first (B,T,C)) -> (out, last step of x, state, v_first).

    An empty state is None. In layer 0 the argument v_first is None, and the returned v_first is this layer's v.
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
                if self.first and name == "v":           # RWKV-LM's files contain these unused tensors
                    self.register_buffer(full_name, tensor)
                else:
                    self.register_parameter(full_name, nn.Parameter(tensor))
        self.k_k = nn.Parameter(torch.zeros(1, 1, C))
        self.k_a = nn.Parameter(torch.zeros(1, 1, C))
        self.r_k = nn.Parameter(torch.zeros(H, N))
        self.register_parameter("time_state", None)              # (H,N,N), S before the first token; None stands for zeros
        self.receptance = nn.Linear(C, C, bias=False)
        self.key = nn.Linear(C, C, bias=False)
        self.value = nn.Linear(C, C, bias=False)
        self.output = nn.Linear(C, C, bias=False)
        self.ln_x = nn.GroupNorm(H, C, eps=EPS)

    def forward(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                packing: Packing | None = None,
                recompute_x: Recompute | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Computes time mixing. With a packing, each sequence starts from the initial state, and the returned state is None.

        recompute_x() recomputes x in the backward pass, so that x need not be saved.
        """
        before = self._initial_state(len(x)) if before is None else before
        if packing is not None:
            last_x = before = None
        fuses = packing is None and self._can_fuse()
        if fuses:
            out, after, v_first = self._fused_mix(x, last_x, before, v_first)
        elif self._can_recompute():
            out, after, v_first = self._recompute_mix(x, last_x, before, v_first, packing, _recompute_function(x, recompute_x))
        else:
            out, after, v_first = self._plain_mix(x, last_x, before, v_first, packing)
        return out, fused.last_step(x, saved=fuses), after, v_first

    def _can_fuse(self) -> bool:
        """Returns True if the layers may be computed without being called, and no weight is frozen.

        Fused functions would waste time on the gradients of frozen weights.
        """
        if not fused.can_fuse(self.receptance, self.key, self.value, self.output):       # torch.compile traces no further
            return False
        trained = all(parameter.requires_grad for parameter in self._parameters.values() if parameter is not None)
        return (trained or not torch.is_grad_enabled()) and self._has_standard_norm()

    def _can_recompute(self) -> bool:
        return fused.can_use_functions() and torch.is_grad_enabled() and self._has_standard_norm()

    def _has_standard_norm(self) -> bool:
        """Returns True if ln_x is the GroupNorm that the fused functions compute: H groups, EPS, no hooks."""
        norm = self.ln_x
        return (type(norm) is nn.GroupNorm and is_unmodified(norm) and norm.affine
                and (norm.num_groups, norm.eps) == (len(self.r_k), EPS))

    def _plain_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                   packing: Packing | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes the formulas at the top of this file. Returns (out, the operator's new state, v_first)."""
        past = [1 - mu for mu in self._mixes()]
        m_r, m_w, m_k, m_v, m_a, m_g = fused.token_shift(x, last_x, *past, first=packing.shift_mask if packing else None)
        r, k, v = self.receptance(m_r), self.key(m_k), self.value(m_v)
        low_rank = partial(self._low_rank, m_r.dtype)
        g = torch.sigmoid(m_g @ low_rank("g1")) @ low_rank("g2")
        rate = torch.sigmoid(self.a0 + (m_a @ low_rank("a1")) @ low_rank("a2"))
        z = torch.tanh(m_w @ low_rank("w1")) @ low_rank("w2")
        log_w = FASTEST_LOG_W * torch.sigmoid(self.w0 + z.to(torch.promote_types(z.dtype, torch.float32)))
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + (m_v @ low_rank("v1")) @ low_rank("v2"))
        keys = self._split_heads(k * self.k_k)
        kk = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1, eps=LEAST_NORM)
        kk = kk.to(r.dtype).flatten(2)
        k = (k * (1 + (rate - 1) * self.k_a)).to(r.dtype)
        v, b = v.to(r.dtype), (kk * rate).to(r.dtype)
        y, after = self._apply_operator(r, log_w, k, v, -kk, b, before, packing)
        bonus = (self._split_heads(r) * self._split_heads(k) * self.r_k).sum(-1, keepdim=True)
        normal = self.ln_x(y.flatten(0, 1).flatten(1)).view_as(x)
        return self.output((normal + (bonus * self._split_heads(v)).flatten(2)) * g), after, v_first

    def _fused_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None,
                   v_first: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        inputs = rwkv7_fused.inputs(x, last_x, v_first, self.N, self._input_parameters(v_first is not None))
        y, after = self._apply_operator_to_heads(inputs.r, inputs.log_w, inputs.k, inputs.v, inputs.a, inputs.b, before)
        out = rwkv7_fused.output(y, inputs.output_r, inputs.output_k, inputs.output_v, inputs.output_g, self.r_k,
                                 self.ln_x.weight, self.ln_x.bias, self.output.weight)
        v_first = inputs.v_first if v_first is None else v_first
        assert v_first is not None
        return out, after, v_first

    def _recompute_mix(self, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None,
                       packing: Packing | None, recompute_x: Recompute) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes _plain_mix, but recomputes the operations between the large products in backward.

        Only these activations are saved: r, k, v, the hidden layers of the gates, the operator's state, and, if O is trained,
        the input of O.
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
        """Returns the input of O and the operator's new state, from r, k, v and the hidden layers of the gates."""
        v_gate = "" if v_first is None else "v"
        biases = [getattr(self, f"{name}0") for name in f"wa{v_gate}"]
        second = [self._low_rank(k.dtype, f"{name}2") for name in f"wag{v_gate}"]
        # autocast is off, because int8 layers return float32 even under autocast, and all products here use the dtype of k
        with torch.autocast(k.device.type, enabled=False):
            hidden = tuple(part.to(k.dtype) for part in hidden)
            gates = rwkv7_fused.gates(k, v, v_first, hidden, self.N, (self.k_k, self.k_a, *biases), tuple(second))
            y, after = self._apply_operator(r, gates.log_w, gates.k, gates.v, gates.a, gates.b, before, packing)
            mixed = rwkv7_fused.gated(y, r, gates.k, gates.v, gates.g, self.r_k, self.ln_x.weight, self.ln_x.bias)
        return mixed, after

    def _low_rank(self, dtype: torch.dtype, name: str) -> Tensor:
        """Returns a gate's matrix for products in `dtype`. A quantised model may have it in bfloat16 for float32 products."""
        weight: Tensor = getattr(self, name)
        return weight.float() if (weight.dtype, dtype) == (torch.bfloat16, torch.float32) else weight

    def _initial_state(self, B: int) -> Tensor | None:
        return None if self.time_state is None else self.time_state.repeat(B, 1, 1, 1)

    def _input_parameters(self, v_gate: bool) -> rwkv7_fused.Parameters:
        """Returns the parameters of rwkv7_fused.inputs, with those of the gate of v if `v_gate` is true."""
        weights = {name: getattr(self, name).weight for name in ("receptance", "key", "value")}
        omitted = () if v_gate else ("v0", "v1", "v2")
        vectors: dict[str, Any] = {name: None if name in omitted else getattr(self, name)
                                   for name in rwkv7_fused.Parameters._fields if name not in weights}
        return rwkv7_fused.Parameters(**vectors | weights)

    def _mixes(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"x_{name}") for name in MIXES)

    def _split_heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (-1, self.N))

    def _apply_operator(self, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, before: Tensor | None,
                        packing: Packing | None = None) -> tuple[Tensor, Tensor | None]:
        """Applies the operator to inputs (B,T,C). Returns y (B,T,H,N) and the new state."""
        r, log_w, k, v, a, b = (self._split_heads(tensor) for tensor in (r, log_w, k, v, a, b))
        if packing is not None:
            def each(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
                return self.wkv(r, log_w, k, v, a, b, self._initial_state(len(r)))[0]

            return packing.apply_per_sequence(each, r, log_w, k, v, a, b), None
        return self._apply_operator_to_heads(r, log_w, k, v, a, b, before)

    def _apply_operator_to_heads(self, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                                 before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Applies the operator to inputs (B,T,H,N). For T = 1 without gradients, wkv.step is faster."""
        if r.shape[1] == 1 and before is not None and not torch.is_grad_enabled():
            y, after = self.wkv.step(r[:, 0], log_w[:, 0], k[:, 0], v[:, 0], a[:, 0], b[:, 0], before)
            return y.unsqueeze(1), after
        return self.wkv(r, log_w, k, v, a, b, before)


def _recompute_function(x: Tensor, recompute_x: Recompute | None) -> Recompute:
    """Returns recompute_x, or a function that returns x."""
    return (lambda: x) if recompute_x is None else recompute_x           # torch.compile of torch 2.11 cannot trace `or`


class ChannelMix(nn.Module):
    """Channel mixing: (x (B,T,C), last_x (B,C) or None for zeros) -> (out (B,T,C), last step of x)."""

    def __init__(self, n_embd: int, n_ffn: int) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_ffn, bias=False)
        self.value = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor | None, packing: Packing | None = None,
                recompute_x: Recompute | None = None) -> tuple[Tensor, Tensor]:
        """Computes channel mixing. `recompute_x` is as in TimeMix."""
        if packing is not None or not fused.can_fuse(self.key, self.value):
            past, first = (1 - self.x_k,), packing.shift_mask if packing else None
            mixes = fused.token_shift(x, last_x, *past, first=first)
            with fused.recompute_mixes(_recompute_function(x, recompute_x), last_x, past, first, mixes):
                k = self.key(*mixes)
            return fused.squared_relu_linear(self.value, k), fused.last_step(x)
        y = rwkv7_fused.channel_mixing(x, last_x, self.x_k, self.key.weight, self.value.weight)
        return y, fused.last_step(x, saved=True)


class Carry(NamedTuple):
    """The values other than x that a block passes to the next. Without DeepEmbed, `tokens` and `embedded` are None."""

    v_first: Tensor | None = None        # (B,T,C), None before layer 0
    tokens: Tensor | None = None         # (B,T)
    embedded: Tensor | None = None       # ln0(emb[token]), (B,T,C)
    has_gradient: bool = True            # False if the block before did not record its input's gradient


class Block(nn.Module):
    """Computes x + att(ln1(x)), then x + ffn(ln2(x)). The first block begins by normalising the embedding with ln0."""

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
        """Returns the new x (B,T,C), this layer's state after x, and the new carry.

        `before` is this layer's state before x; None stands for the empty state. With a packing, a row holds several sequences.
        Each sequence then starts from the initial state, and the returned state is None.
        """
        att_x, wkv, ffn_x = (None, None, None) if before is None else before
        keeps_gradient = torch.is_grad_enabled() or not x.requires_grad
        x = self.ln0(x) if self.first else x
        v_first, tokens, embedded, has_gradient = carry or Carry()
        if x.requires_grad and torch.is_grad_enabled() and not has_gradient:
            raise ValueError("the gradient of a block's carry (v_first) is lost, because torch.utils.checkpoint computed the "
                             "block before without gradients: pass use_reentrant=False to torch.utils.checkpoint")
        if self.first and tokens is not None:
            embedded = x
        mixed, att_x, wkv, v_first = self.att(self.ln1(x), att_x, wkv, v_first, packing, partial(self.ln1, x))
        carry = Carry(v_first, tokens, embedded, keeps_gradient)         # torch.compile of torch 2.11 lacks _replace()
        x = x + mixed
        deep = () if tokens is None else (carry,)
        mixed, ffn_x = self.ffn(self.ln2(x), ffn_x, packing, partial(self.ln2, x), *deep)
        return x + mixed, None if wkv is None else State(att_x, wkv, ffn_x), carry
