"""RWKV-7 in NumPy and float64, from the formulas of arXiv 2503.14456 (section 4): the reference for all tests.

This file shares no code with rwkv/ and kernels/, and computes the recurrence step by step, with S as a matrix.

    B rows, T tokens, V vocabulary, C n_embd in H heads of N, L layers; weights by their official names
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy import ndarray


class LayerState(NamedTuple):
    """The state of one layer: its last inputs att_x and ffn_x (B,C), and S (B,H,N,N), with rows for values, columns for
    keys."""

    att_x: ndarray
    wkv: ndarray
    ffn_x: ndarray


class NumpyRWKV7:
    """Computes model(tokens (B,T), state=None) -> (logits (B,T,V), state). The state is a list of one LayerState per layer.

    `epsilon` is that of the norm of each head.
    """

    def __init__(self, weights: Mapping[str, ndarray], epsilon: float = 64e-5) -> None:
        self.epsilon = epsilon
        self.weights = {name: np.asarray(tensor, dtype=np.float64).squeeze() for name, tensor in weights.items()}
        self.n_layer = sum(name.endswith(".ln1.weight") for name in weights)
        self.H, self.N = weights["blocks.0.att.r_k"].shape

    def __call__(self, tokens: ndarray, state: list[LayerState] | None = None) -> tuple[ndarray, list[LayerState]]:
        x = embedded = self.norm("blocks.0.ln0", self.weights["emb.weight"][tokens])
        v_first, after = None, []
        for layer, before in enumerate(state or self.empty_state(len(tokens))):
            deep = self.deep_matrices(f"blocks.{layer}.ffn", tokens, embedded)
            x, v_first, layer_state = self.block(f"blocks.{layer}", x, v_first, before, deep)
            after.append(layer_state)
        return self.norm("ln_out", x) @ self.weights["head.weight"].T, after

    def empty_state(self, B: int) -> list[LayerState]:
        x = np.zeros((B, self.H * self.N))
        return [LayerState(x, np.zeros((B, self.H, self.N, self.N)), x)] * self.n_layer

    def deep_matrices(self, name: str, tokens: ndarray, embedded: ndarray) -> ndarray | None:
        """Returns RWKV-7a's matrix (R,R) of each token, or None if the model has none."""
        if f"{name}.s_emb.weight" not in self.weights:
            return None
        rows = self.weights[f"{name}.s_emb.weight"][tokens] + embedded @ self.weights[f"{name}.s_emb_x.weight"].T
        R = self.weights[f"{name}.s1"].shape[1]
        return rows.reshape(*tokens.shape, R, R)

    def block(self, name: str, x: ndarray, v_first: ndarray | None, state: LayerState,
              deep: ndarray | None = None) -> tuple[ndarray, ndarray, LayerState]:
        att_x = self.norm(f"{name}.ln1", x)
        mixed, v_first, S = self.time_mixing(f"{name}.att", att_x, v_first, state)
        x = x + mixed
        ffn_x = self.norm(f"{name}.ln2", x)
        hidden = np.maximum(self.mix(f"{name}.ffn.x_k", ffn_x, state.ffn_x) @ self.weights[f"{name}.ffn.key.weight"].T, 0)
        hidden = hidden ** 2
        if deep is not None:
            s0, s1, s2 = (self.weights[f"{name}.ffn.s{number}"] for number in range(3))
            hidden = hidden * (np.einsum("btr,btrs->bts", ffn_x @ s1, deep) @ s2 + s0)
        x = x + hidden @ self.weights[f"{name}.ffn.value.weight"].T
        return x, v_first, LayerState(att_x[:, -1], S, ffn_x[:, -1])

    def norm(self, name: str, x: ndarray, epsilon: float = 1e-5) -> ndarray:
        return centred(x, epsilon) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def mix(self, name: str, x: ndarray, before: ndarray) -> ndarray:
        """Returns x_t + (x_{t-1} - x_t) mu, where mu is the weight of the previous step."""
        past = np.concatenate([before[:, None], x[:, :-1]], axis=1)
        return x + (past - x) * self.weights[name]

    def time_mixing(self, name: str, x: ndarray, v_first: ndarray | None,
                    state: LayerState) -> tuple[ndarray, ndarray, ndarray]:
        own = {key.removeprefix(f"{name}."): weight for key, weight in self.weights.items() if key.startswith(f"{name}.")}
        m_r, m_w, m_k, m_v, m_a, m_g = (self.mix(f"{name}.x_{letter}", x, state.att_x) for letter in "rwkvag")
        r, k, v = m_r @ own["receptance.weight"].T, m_k @ own["key.weight"].T, m_v @ own["value.weight"].T
        w = np.exp(-np.exp(-0.5) * sigmoid(own["w0"] + np.tanh(m_w @ own["w1"]) @ own["w2"]))
        rate = sigmoid(own["a0"] + m_a @ own["a1"] @ own["a2"])
        g = sigmoid(m_g @ own["g1"]) @ own["g2"]
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * sigmoid(own["v0"] + m_v @ own["v1"] @ own["v2"])
        kk = self.heads(k * own["k_k"])
        kk = kk / np.maximum(np.linalg.norm(kk, axis=-1, keepdims=True), 1e-12)
        k = k * (1 + (rate - 1) * own["k_a"])
        r, w, k, v, rate = map(self.heads, (r, w, k, v, rate))
        y, S = wkv(r, w, k, v, kk, rate, state.wkv)
        y = self.flat(centred(y, self.epsilon)) * own["ln_x.weight"] + own["ln_x.bias"]
        bonus = (r * k * own["r_k"]).sum(-1, keepdims=True) * v
        return ((y + self.flat(bonus)) * g) @ own["output.weight"].T, v_first, S

    def heads(self, x: ndarray) -> ndarray:
        return x.reshape(*x.shape[:2], self.H, self.N)

    def flat(self, x: ndarray) -> ndarray:
        return x.reshape(*x.shape[:2], self.H * self.N)


def wkv(r: ndarray, w: ndarray, k: ndarray, v: ndarray, kk: ndarray, rate: ndarray, S: ndarray) -> tuple[ndarray, ndarray]:
    """Computes S_t = S_{t-1} (diag(w) - kk (kk rate)^T) + v k^T and y_t = S_t r_t.

    All inputs but S have the shape (B,T,H,N).
    """
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        transition = np.eye(v.shape[-1]) * w[:, t, :, None, :] - kk[:, t, ..., :, None] * (kk * rate)[:, t, ..., None, :]
        S = S @ transition + v[:, t, ..., :, None] * k[:, t, ..., None, :]
        y[:, t] = (S @ r[:, t, ..., None])[..., 0]
    return y, S


def centred(x: ndarray, epsilon: float) -> ndarray:
    difference = x - x.mean(-1, keepdims=True)
    return difference / np.sqrt((difference ** 2).mean(-1, keepdims=True) + epsilon)


def sigmoid(x: ndarray) -> ndarray:
    return 1 / (1 + np.exp(-x))
