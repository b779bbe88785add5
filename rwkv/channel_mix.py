"""Channel mixing, RWKV-4's feed-forward: sigmoid(R mix_r(x)) * (V relu(K mix_k(x))^2).

Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1; names are RWKV-LM's.
"""

import torch
from torch import Tensor, nn

from rwkv import fused
from rwkv.token_shift import last, token_shift


class ChannelMix(nn.Module):
    """x (B,T,C) and last_x (B,C) before it -> (out (B,T,C), last x)."""

    def __init__(self, n_embd: int, n_ffn: int) -> None:
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_ffn, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor) -> tuple[Tensor, Tensor]:
        mus = self.time_mix_k, self.time_mix_r
        if not fused.fits(self.key, self.receptance, self.value):
            for_k, for_r = token_shift(x, last_x, *mus)
            positive = torch.relu(self.key(for_k))
            return torch.sigmoid(self.receptance(for_r)) * self.value(positive * positive), last(x)
        weights = self.key.weight, self.receptance.weight, self.value.weight
        return fused.channel_mixing(x, last_x, mus, *weights), last(x)
