"""The recurrent state of a model: everything it remembers of the tokens it has read. A value: nothing mutates one."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.wkv import WKVState


class LayerState(NamedTuple):
    """One layer's part: the last input of time mixing (B,C), of WKV (B,n_att) each, and of channel mixing (B,C)."""

    att_x: Tensor
    wkv: WKVState
    ffn_x: Tensor


class State(NamedTuple):
    """All layers: att_x and ffn_x (L,B,C), a, b and p (L,B,n_att); float32, on the model's device."""

    att_x: Tensor
    a: Tensor
    b: Tensor
    p: Tensor
    ffn_x: Tensor

    def layers(self) -> list[LayerState]:
        parts = zip(*self, strict=True)
        return [LayerState(att_x, WKVState(a, b, p), ffn_x) for att_x, a, b, p, ffn_x in parts]

    @staticmethod
    def stack(layers: list[LayerState]) -> "State":
        flat = [(layer.att_x, *layer.wkv, layer.ffn_x) for layer in layers]
        return State(*(torch.stack(parts).float() for parts in zip(*flat, strict=True)))

    @staticmethod
    def empty(n_layer: int, B: int, n_embd: int, n_att: int, device: torch.device | str = "cpu") -> "State":
        """The state of a model that has read nothing; no two of its elements share memory."""
        att_x, ffn_x = (torch.zeros(n_layer, B, n_embd, device=device) for _ in range(2))
        a, b, p = (part.repeat(n_layer, 1, 1) for part in WKVState.empty(B, n_att, device))
        return State(att_x, a, b, p, ffn_x)
