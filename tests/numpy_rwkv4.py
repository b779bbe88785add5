"""RWKV-4 in NumPy and float64, from the formulas of arXiv 2305.13048 (equations 11 to 18): the reference for all tests.

This file shares no code with rwkv/ and kernels/, and the recurrence is not stabilised: e^k fits into float64 for every k below
700; beyond, the returned state is not finite.

    B rows, T tokens, V vocabulary, C n_embd, A n_att, F n_ffn, L layers; weights by their official names
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy import ndarray


class LayerState(NamedTuple):
    """The state of one layer: its last inputs att_x and ffn_x (B,C), and WKV's numerator a and denominator b (B,A)."""

    att_x: ndarray
    a: ndarray
    b: ndarray
    ffn_x: ndarray


class NumpyRWKV4:
    """Computes model(tokens (B,T), state=None) -> (logits (B,T,V), state). The state is a list of one LayerState per layer."""

    def __init__(self, weights: Mapping[str, ndarray]) -> None:
        self.weights = {name: np.asarray(tensor, dtype=np.float64).squeeze() for name, tensor in weights.items()}
        self.n_layer = sum(name.endswith(".ln1.weight") for name in weights)

    def __call__(self, tokens: ndarray, state: list[LayerState] | None = None) -> tuple[ndarray, list[LayerState]]:
        x = self.norm("blocks.0.ln0", self.weights["emb.weight"][tokens])
        after = []
        for layer, before in enumerate(state or self.empty_state(len(tokens))):
            x, layer_state = self.block(f"blocks.{layer}", x, before)
            after.append(layer_state)
        return self.norm("ln_out", x) @ self.weights["head.weight"].T, after

    def empty_state(self, B: int) -> list[LayerState]:
        A, C = self.weights["blocks.0.att.key.weight"].shape
        x, wkv = np.zeros((B, C)), np.zeros((B, A))
        return [LayerState(x, wkv, wkv, x)] * self.n_layer

    def block(self, name: str, x: ndarray, state: LayerState) -> tuple[ndarray, LayerState]:
        att_x = self.norm(f"{name}.ln1", x)
        mixed, a, b = self.time_mixing(f"{name}.att", att_x, state)
        x = x + mixed
        ffn_x = self.norm(f"{name}.ln2", x)
        x = x + self.channel_mixing(f"{name}.ffn", ffn_x, state.ffn_x)
        return x, LayerState(att_x[:, -1], a, b, ffn_x[:, -1])

    def norm(self, name: str, x: ndarray) -> ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def time_mixing(self, name: str, x: ndarray, state: LayerState) -> tuple[ndarray, ndarray, ndarray]:
        last_x = shifted(x, state.att_x)
        r = self.project(f"{name}.receptance", f"{name}.time_mix_r", x, last_x)
        k = self.project(f"{name}.key", f"{name}.time_mix_k", x, last_x)
        v = self.project(f"{name}.value", f"{name}.time_mix_v", x, last_x)
        wkv, a, b = self.wkv(name, k, v, state)
        return (sigmoid(r) * wkv) @ self.weights[f"{name}.output.weight"].T, a, b

    def wkv(self, name: str, k: ndarray, v: ndarray, state: LayerState) -> tuple[ndarray, ndarray, ndarray]:
        """Returns the average of v (B,T,A) so far, weighted by e^k, and the new a and b.

        Older weights decay, and the newest weight is multiplied by e^u.
        """
        u, decay = self.weights[f"{name}.time_first"], np.exp(-np.exp(self.weights[f"{name}.time_decay"]))
        a, b, out = state.a, state.b, np.empty_like(k)
        for t in range(k.shape[1]):
            newest = np.exp(u + k[:, t])
            out[:, t] = (a + newest * v[:, t]) / (b + newest)
            a, b = decay * a + np.exp(k[:, t]) * v[:, t], decay * b + np.exp(k[:, t])
        return out, a, b

    def channel_mixing(self, name: str, x: ndarray, before: ndarray) -> ndarray:
        last_x = shifted(x, before)
        r = self.project(f"{name}.receptance", f"{name}.time_mix_r", x, last_x)
        k = self.project(f"{name}.key", f"{name}.time_mix_k", x, last_x)
        return sigmoid(r) * (np.maximum(k, 0) ** 2 @ self.weights[f"{name}.value.weight"].T)

    def project(self, matrix: str, mix: str, x: ndarray, last_x: ndarray) -> ndarray:
        mu = self.weights[mix]
        return (mu * x + (1 - mu) * last_x) @ self.weights[f"{matrix}.weight"].T


def shifted(x: ndarray, before: ndarray) -> ndarray:
    """Returns x (B,T,C) shifted by one step: `before` (B,C) comes first, and the last step is dropped."""
    return np.concatenate([before[:, None], x[:, :-1]], axis=1)


def sigmoid(x: ndarray) -> ndarray:
    return 1 / (1 + np.exp(-x))
