"""RWKV-4's initialisation, from the RWKV-4 paper (arXiv 2305.13048), appendix E, and RWKV-LM, RWKV-v4neo/src/model.py."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from rwkv.model.base import Model
from rwkv.model.rwkv4.mix import Block, ChannelMix, TimeMix


def init_weights(model: Model) -> None:
    """Initialises decays over channels and layers, and orthogonal or zero matrices, with torch's global random generator."""
    nn.init.uniform_(model.emb.weight, -1e-4, 1e-4)
    _orthogonal(model.head, scale=0.5)
    for layer, block in enumerate(cast(list[Block], [*model.blocks])):
        _init_time_mix(block.att, layer, len(model.blocks))
        _init_channel_mix(block.ffn, layer, len(model.blocks))


def _init_time_mix(att: TimeMix, layer: int, n_layer: int) -> None:
    rho, sigma = _rho_and_sigma(layer, n_layer)
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
    _, sigma = _rho_and_sigma(layer, n_layer)
    with torch.no_grad():
        for mu in (ffn.time_mix_k, ffn.time_mix_r):
            mu.copy_(_ramp(mu.shape[-1]) ** sigma)
    _zero(ffn.value, ffn.receptance)
    _orthogonal(ffn.key)


def _rho_and_sigma(layer: int, n_layer: int) -> tuple[float, float]:
    """Returns the paper's rho, which rises from 0 to 1 over the layers, and sigma, which falls from 1 towards 0."""
    return layer / max(n_layer - 1, 1), 1 - layer / n_layer


def _ramp(n_embd: int) -> Tensor:
    return torch.arange(n_embd) / n_embd


def _zero(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.zeros_(layer.weight)


def _orthogonal(layer: nn.Linear, scale: float = 1.0) -> None:
    rows, columns = layer.weight.shape
    nn.init.orthogonal_(layer.weight, gain=scale * math.sqrt(max(rows / columns, 1.0)))
