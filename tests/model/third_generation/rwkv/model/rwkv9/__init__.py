"""A toy generation that has only formulas. Each layer is x + O (sigmoid(R n) wkv9(K n)) with n = LayerNorm(x)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rwkv.model import state

NAME, OPERATOR, LEARNS_STATE = "RWKV-9", "wkv9", False
KEPT_FLOAT32, OPTIONS, UNUSED, LR_SCALES = ("decay",), (), (), {}


def shapes(config, V):
    C = config.n_embd
    block = {"ln1.weight": (C,), "ln1.bias": (C,), "att.decay": (C,),
             **{f"att.{name}.weight": (C, C) for name in ("receptance", "key", "output")}}
    blocks = {f"blocks.{layer}.{name}": shape for layer in range(config.n_layer) for name, shape in block.items()}
    return {"emb.weight": (V, C), **blocks, "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}


def with_default_widths(config):
    return config


def non_negative(config):
    return ()


def operator_work(config):
    return 2 * config.n_embd


def saved_activations(config, half):
    return 6 * config.n_embd


def saved_when_recomputing(config, half, layers, vectors):
    return 6 * config.n_embd


def group(name):
    return "embedding" if name in ("emb.weight", "head.weight") else "vector" if "ln" in name or "decay" in name else "matrix"


class _Tensors(NamedTuple):
    wkv: Tensor


class State(_Tensors, state.State):
    __slots__ = ()


def empty_state(config, B, device="cpu"):
    return State(torch.zeros(config.n_layer, B, config.n_embd, device=device))


class TimeMix(nn.Module):
    def __init__(self, C, wkv):
        super().__init__()
        self.wkv, self.decay = wkv, nn.Parameter(torch.zeros(C))
        self.receptance, self.key, self.output = (nn.Linear(C, C, bias=False) for _ in range(3))

    def forward(self, x, before, packing):
        k = self.key(x)
        if packing is None:
            y, after = self.wkv(self.decay, k, before)
        else:
            y, after = packing.apply_per_sequence(lambda k: self.wkv(self.decay, k)[0], k), None
        return self.output(torch.sigmoid(self.receptance(x)) * y), after


class Block(nn.Module):
    def __init__(self, config, layer, wkv):
        super().__init__()
        self.ln1, self.att = nn.LayerNorm(config.n_embd), TimeMix(config.n_embd, wkv)

    def forward(self, x, before, carry=None, packing=None):
        mixed, after = self.att(self.ln1(x), None if before is None else before.wkv, packing)
        return x + mixed, None if after is None else State(after), None


def init_weights(model):
    nn.init.normal_(model.emb.weight, std=0.1)
    with torch.no_grad():
        for block in model.blocks:
            block.att.decay.copy_(torch.linspace(-3, 1, len(block.att.decay)))
