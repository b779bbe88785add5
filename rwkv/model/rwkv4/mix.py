"""RWKV-4's blocks: the formulas of time and channel mixing, and whether a layer uses the fused ones.

Time mixing reads the past through the operator WKV (kernels/wkv4). Channel mixing is the feed-forward half.

    r, k, v = R mix_r(x), K mix_k(x), V mix_v(x)        time:    O (sigmoid(r) * wkv(k, v))
    r, k    = R mix_r(x), K mix_k(x)                    channel: sigmoid(r) * (V relu(k)^2)

Here mix(x) = mu x_t + (1 - mu) x_{t-1}. The source is the RWKV-4 paper (arXiv 2305.13048), section 3.1; names are those of
RWKV-LM, RWKV-v4neo/src/model.py.
"""

import torch
from torch import Tensor, nn

from kernels.wkv4 import WKV4, WKVState
from rwkv.config import ModelConfig
from rwkv.model import fused
from rwkv.model.packing import Packing
from rwkv.model.rwkv4 import fused as rwkv4_fused
from rwkv.model.rwkv4.architecture import State, sizes


class TimeMix(nn.Module):
    """Time mixing: (x (B,T,C), last_x (B,C), WKV's state or None) -> (out (B,T,C), last step of x, WKV's new state)."""

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
        """Computes time mixing. With a packing, each sequence starts from the empty state, and the new state of WKV is None."""
        mus = self.time_mix_k, self.time_mix_v, self.time_mix_r
        if packing is not None or not fused.can_fuse(self.key, self.value, self.receptance, self.output):
            mix_k, mix_v, mix_r = fused.token_shift(x, last_x, *mus, first=packing.shift_mask if packing else None)
            y, after = self._wkv(self.key(mix_k), self.value(mix_v), before, packing)
            return self.output(torch.sigmoid(self.receptance(mix_r)) * y), fused.last_step(x), after
        weights = self.key.weight, self.value.weight, self.receptance.weight
        k, v, r = fused.mixed_products(x, last_x, mus, weights)
        y, after = self._wkv(k, v, before)
        return rwkv4_fused.gated_product(r, y, self.output.weight), fused.last_step(x, saved=True), after

    def _wkv(self, k: Tensor, v: Tensor, before: WKVState | None,
             packing: Packing | None = None) -> tuple[Tensor, WKVState | None]:
        if packing is not None:
            def each(k: Tensor, v: Tensor) -> Tensor:
                return self.wkv(self.time_decay, self.time_first, k, v, None)[0]

            return packing.apply_per_sequence(each, k, v), None
        if k.shape[1] == 1 and before is not None and not torch.is_grad_enabled():
            y, after = self.wkv.step(self.time_decay, self.time_first, k[:, 0], v[:, 0], before)
            return y.unsqueeze(1), after
        return self.wkv(self.time_decay, self.time_first, k, v, before)


class ChannelMix(nn.Module):
    """Channel mixing: (x (B,T,C), last_x (B,C) or None for zeros) -> (out (B,T,C), last step of x)."""

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
            return torch.sigmoid(self.receptance(mix_r)) * mixed, fused.last_step(x)
        weights = self.key.weight, self.receptance.weight, self.value.weight
        return rwkv4_fused.channel_mixing(x, last_x, mus, *weights), fused.last_step(x, saved=True)


class Block(nn.Module):
    """Computes x + att(ln1(x)), then x + ffn(ln2(x)). The first block begins by normalising the embedding with ln0."""

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
        """Returns the new x (B,T,C), this layer's state after x, and None, because RWKV-4 needs no carry.

        `before` is this layer's state before x; None stands for the empty state. With a packing, a row holds several sequences.
        Each sequence then starts from the empty state, and the returned state is None.
        """
        att_x, wkv, ffn_x = (None, None, None) if before is None else (before.att_x, before.wkv, before.ffn_x)
        x = self.ln0(x) if self.first else x
        mixed, att_x, wkv = self.att(self.ln1(x), att_x, wkv, packing)
        x = x + mixed
        mixed, ffn_x = self.ffn(self.ln2(x), ffn_x, packing)
        return x + mixed, None if wkv is None else State(att_x, wkv.a, wkv.b, wkv.p, ffn_x), None
