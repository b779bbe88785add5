"""RWKV-7's initialisation, which is that of RWKV-LM for the model, and this project's own for DeepEmbed."""

import math
from typing import cast

import torch
from torch import nn

from rwkv.model.base import Model
from rwkv.model.rwkv7.architecture import LOW_RANK
from rwkv.model.rwkv7.deep_embed import DeepEmbedChannelMix
from rwkv.model.rwkv7.mix import Block, ChannelMix, TimeMix


@torch.no_grad()
def init_weights(model: Model) -> None:
    """Initialises a model as RWKV-LM does, since quality depends on it, with torch's global random generator."""
    V, C = model.emb.weight.shape
    nn.init.uniform_(model.emb.weight, -1e-4, 1e-4)
    nn.init.orthogonal_(model.head.weight, gain=0.5 * math.sqrt(max(V / C, 1.0)))
    for layer, block in enumerate(cast(list[Block], [*model.blocks])):
        _init_time_mix(block.att, layer, len(model.blocks))
        _init_channel_mix(block.ffn, layer, len(model.blocks))


def _init_time_mix(att: TimeMix, layer: int, L: int) -> None:
    C, N = att.key.in_features, att.N
    rho, sigma = layer / max(L - 1, 1), 1 - layer / L
    n = torch.arange(C)
    u, line = n / C, n / max(C - 1, 1) - 0.5
    position = (n % N - (N - 1) / 2) / max((N - 1) / 2, 0.5)             # from -1 to 1 in each head
    zigzag = position * position.abs()
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
    """Initialises DeepEmbed so that a new model's outputs are as without DeepEmbed, and s_emb and s_emb_x learn from step 1."""
    assert ffn.s_emb_x is not None
    nn.init.zeros_(ffn.s_emb.weight)
    nn.init.zeros_(ffn.s_emb_x.weight)
    nn.init.orthogonal_(ffn.s1)
    nn.init.orthogonal_(ffn.s2, gain=0.1)
    nn.init.ones_(ffn.s0)
