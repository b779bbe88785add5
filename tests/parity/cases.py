"""The random checkpoints of the parity comparison, in which every parameter matters.

    B rows, T tokens, V vocabulary, C n_embd, A n_att, F n_ffn, L layers
"""

import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from rwkv.config import ModelConfig

B = 2
GREEDY = 64                              # tokens of the continuation, which must be the same for all
# Bounds on the largest |difference|.
TO_FLOAT64, TO_PEER, STATE = 1e-5, 2e-5, 1e-4


class Case(NamedTuple):
    """A model's sizes, the number of tokens it reads, and the chunks for reading them in chunks."""

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


CASES = {
    "one token": Case(L=2, C=32, A=32, F=128, V=50, T=1, chunks=(1,)),
    "usual": Case(L=2, C=32, A=32, F=128, V=50, T=17, chunks=(5, 1, 11)),
    "odd width": Case(L=3, C=33, A=33, F=132, V=65, T=64, chunks=(31, 33)),
    "n_att below n_embd": Case(L=3, C=48, A=35, F=100, V=77, T=67, chunks=(1, 64, 2)),
    "n_att above n_embd": Case(L=3, C=40, A=56, F=24, V=50, T=100, chunks=(70, 30)),
    "twelve layers": Case(L=12, C=64, A=64, F=256, V=300, T=130, chunks=(64, 65, 1)),
}


def sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Every parameter's official name and shape."""
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


def random_weights(case: Case, seed: int = 0) -> dict[str, ndarray]:
    """float32 weights, none at a value where it has no effect, scaled for logits of a few units."""
    rng = np.random.default_rng(seed)
    return {name: draw(rng, name, size).astype(np.float32) for name, size in sizes(case).items()}


def draw(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> ndarray:
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


def random_tokens(case: Case, seed: int = 1) -> ndarray:
    """(B,T)."""
    return np.random.default_rng(seed).integers(case.V, size=(B, case.T))
