"""Time mixing, RWKV-4's attention: what it reads of the past comes through the WKV operator that it is given.

    r, k, v = R mix_r(x), K mix_k(x), V mix_v(x)        out = O (sigmoid(r) * wkv(k, v))

with mix(x) = mu x_t + (1 - mu) x_{t-1}. Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1; names are RWKV-LM's.
"""

import torch
from torch import Tensor, nn

from kernels.wkv import WKV, WKVState
from rwkv import fused
from rwkv.token_shift import last, token_shift


class TimeMix(nn.Module):
    """x (B,T,C), last_x (B,C) and state before it -> (out (B,T,C), last x, state after it)."""

    def __init__(self, n_embd: int, n_att: int, wkv: WKV) -> None:
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

    def forward(self, x: Tensor, last_x: Tensor, state: WKVState) -> tuple[Tensor, Tensor, WKVState]:
        mus = self.time_mix_k, self.time_mix_v, self.time_mix_r
        if not fused.fits(self.key, self.value, self.receptance, self.output):
            for_k, for_v, for_r = token_shift(x, last_x, *mus)
            y, state = self._remember(self.key(for_k), self.value(for_v), state)
            return self.output(torch.sigmoid(self.receptance(for_r)) * y), last(x), state
        weights = self.key.weight, self.value.weight, self.receptance.weight
        k, v, r = fused.mixed_products(x, last_x, mus, weights)
        y, state = self._remember(k, v, state)
        return fused.gated_product(r, y, self.output.weight), last(x), state

    def _remember(self, k: Tensor, v: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
        if k.shape[1] == 1 and not torch.is_grad_enabled():
            y, state = self.wkv.step(self.time_decay, self.time_first, k[:, 0], v[:, 0], state)
            return y.unsqueeze(1), state
        return self.wkv(self.time_decay, self.time_first, k, v, state)
