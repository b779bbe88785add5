"""Random checkpoints for the parity comparison, in which every parameter affects the outputs.

    B rows, T tokens, V vocabulary, C n_embd, A n_att, F n_ffn, L layers, H heads of N
"""

import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from rwkv.config import ModelConfig

B = 2
GREEDY = 64                              # length of the continuation, which must be equal for all programs
# Bounds on the largest |difference|.
TO_FLOAT64, TO_PEER, STATE = 1e-5, 2e-5, 1e-4


class Case(NamedTuple):
    """Sizes of an RWKV-4 model, the number of tokens that it reads, and the lengths of chunks for the chunked form."""

    L: int
    C: int
    A: int
    F: int
    V: int
    T: int
    chunks: tuple[int, ...]

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(n_layer=self.L, n_embd=self.C, n_att=self.A, n_ffn=self.F, ctx_len=1024)

    def __str__(self) -> str:
        return f"L{self.L} C{self.C} A{self.A} F{self.F} V{self.V} T{self.T}"


class Case7(NamedTuple):
    """Sizes of an RWKV-7 model as in Case; `ranks` are those of the low-rank matrices w, a, v and g."""

    L: int
    H: int
    N: int
    ranks: tuple[int, int, int, int]
    V: int
    T: int
    chunks: tuple[int, ...]

    @property
    def C(self) -> int:
        return self.H * self.N

    @property
    def config(self) -> ModelConfig:
        w, a, v, g = self.ranks
        return ModelConfig(generation="rwkv7", n_layer=self.L, n_embd=self.C, head_size=self.N, ctx_len=1024,
                           decay_low_rank_dim=w, a_low_rank_dim=a, v_low_rank_dim=v, gate_low_rank_dim=g)

    def __str__(self) -> str:
        return f"RWKV-7 L{self.L} C{self.C} N{self.N} ranks {self.ranks} V{self.V} T{self.T}"


CASES = {
    "one token": Case(L=2, C=32, A=32, F=128, V=50, T=1, chunks=(1,)),
    "usual": Case(L=2, C=32, A=32, F=128, V=50, T=17, chunks=(5, 1, 11)),
    "odd width": Case(L=3, C=33, A=33, F=132, V=65, T=64, chunks=(31, 33)),
    "n_att below n_embd": Case(L=3, C=48, A=35, F=100, V=77, T=67, chunks=(1, 64, 2)),
    "n_att above n_embd": Case(L=3, C=40, A=56, F=24, V=50, T=100, chunks=(70, 30)),
    "twelve layers": Case(L=12, C=64, A=64, F=256, V=300, T=130, chunks=(64, 65, 1)),
}

CASES_7 = {
    "7: one token": Case7(L=2, H=2, N=64, ranks=(8, 12, 7, 20), V=50, T=1, chunks=(1,)),
    "7: heads of 64": Case7(L=3, H=2, N=64, ranks=(32, 24, 16, 40), V=77, T=67, chunks=(1, 64, 2)),
    "7: heads of 32": Case7(L=4, H=3, N=32, ranks=(9, 33, 5, 12), V=65, T=100, chunks=(64, 35, 1)),
}


def sizes(case: Case | Case7) -> dict[str, tuple[int, ...]]:
    """Returns the official names and shapes of all parameters."""
    return sizes_7(case) if isinstance(case, Case7) else sizes_4(case)


def sizes_4(case: Case) -> dict[str, tuple[int, ...]]:
    L, C, A, F, V = case[:5]
    norms = {f"{norm}.{part}": (C,) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    att = {"time_decay": (A,), "time_first": (A,), **{f"time_mix_{letter}": (1, 1, C) for letter in "kvr"},
           **{f"{matrix}.weight": (A, C) for matrix in ("key", "value", "receptance")}, "output.weight": (C, A)}
    ffn = {"time_mix_k": (1, 1, C), "time_mix_r": (1, 1, C),
           "key.weight": (F, C), "receptance.weight": (C, C), "value.weight": (C, F)}
    block = norms | {f"att.{name}": size for name, size in att.items()} | {f"ffn.{name}": size for name, size in ffn.items()}
    blocks = {f"blocks.{layer}.{name}": size for layer in range(L) for name, size in block.items()}
    return {"emb.weight": (V, C), "blocks.0.ln0.weight": (C,), "blocks.0.ln0.bias": (C,), **blocks,
            "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}


def sizes_7(case: Case7) -> dict[str, tuple[int, ...]]:
    C = case.C
    block: dict[str, tuple[int, ...]] = {f"{norm}.{part}": (C,) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    block |= {f"att.{name}": (1, 1, C) for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")}
    for letter, rank in zip("wavg", case.ranks, strict=True):
        block |= {f"att.{letter}1": (C, rank), f"att.{letter}2": (rank, C)}
    block |= {f"att.{name}.weight": (C, C) for name in ("receptance", "key", "value", "output")}
    block |= {"att.r_k": (case.H, case.N), "att.ln_x.weight": (C,), "att.ln_x.bias": (C,), "ffn.x_k": (1, 1, C),
              "ffn.key.weight": (4 * C, C), "ffn.value.weight": (C, 4 * C)}
    blocks = {f"blocks.{layer}.{name}": size for layer in range(case.L) for name, size in block.items()}
    return {"emb.weight": (case.V, C), "blocks.0.ln0.weight": (C,), "blocks.0.ln0.bias": (C,), **blocks,
            "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (case.V, C)}


def kinds(case: Case7) -> list[str]:
    """Returns the names of parameters without the block; v0, v1 and v2 are a kind, although layer 0 does not use its own."""
    return list(dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in sizes(case)))


def scaled(weights: dict[str, ndarray], kind: str, factor: float) -> dict[str, ndarray]:
    """Multiplies every second channel of all tensors of a kind by a factor, and returns the weights.

    A factor on all channels of the embedding would not change the model, because ln0 normalises them, and neither would a
    factor on all channels of k_k, which are normalised in each head.
    """
    factors = np.where(np.arange(2) == 0, np.float32(factor), np.float32(1))
    return {name: weight * np.resize(factors, weight.shape[-1]) if kind in (name, name.split(".", 2)[-1]) else weight
            for name, weight in weights.items()}


def random_weights(case: Case | Case7, seed: int = 0) -> dict[str, ndarray]:
    """Returns float32 weights that all have an effect, scaled so that logits are of a few units."""
    rng = np.random.default_rng(seed)
    draw = draw_weight_7 if isinstance(case, Case7) else draw_weight
    return {name: draw(rng, name, size).astype(np.float32) for name, size in sizes(case).items()}


def draw_weight(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> ndarray:
    if "time_mix" in name:
        return rng.uniform(0, 1, size)
    if "time_decay" in name:
        return rng.uniform(-5, 3, size)
    if "time_first" in name:
        return rng.normal(math.log(0.3), 1, size)
    if ".ln" in name or "ln_out" in name:
        return rng.normal("weight" in name, 0.3, size)
    if name == "emb.weight":
        return rng.normal(0, 1, size)
    gain = 2 if "att.key" in name else 1
    return rng.normal(0, gain * size[1] ** -0.5, size)


def draw_weight_7(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> ndarray:
    kind = name.split(".")[-1]
    if kind.startswith("x_"):
        return rng.uniform(0, 1, size)
    if kind in VECTORS_7:
        return rng.normal(*VECTORS_7[kind], size)
    if name.endswith("ln_x.weight"):
        return rng.normal(1, 0.3, size)
    if kind[-1] in "12":
        return rng.normal(0, size[0] ** -0.5, size)
    return draw_weight(rng, name, size)


# Means and standard deviations; w0 covers the whole range of decays
VECTORS_7 = {"w0": (-2, 3), "a0": (0, 1), "v0": (0, 1), "k_k": (0.7, 0.3), "k_a": (1.1, 0.3), "r_k": (0, 0.3)}


def random_tokens(case: Case | Case7, seed: int = 1) -> ndarray:
    """Returns token ids (B,T)."""
    return np.random.default_rng(seed).integers(case.V, size=(B, case.T))
