"""Computes the outputs of our model and of the float64 model, in the form of the peers' outputs."""

from pathlib import Path

import numpy as np
import torch
from models import as_values
from numpy import ndarray
from numpy_rwkv4 import LayerState, NumpyRWKV4
from numpy_rwkv7 import LayerState as LayerState7
from numpy_rwkv7 import NumpyRWKV7
from parity.cases import GREEDY, Case, Case7, random_tokens, random_weights
from parity.peers import outputs, state_values

from rwkv.model.state import State
from rwkv.pretrained import RWKV


def ours(case: Case | Case7, path: Path, kernel: str, n_greedy: int = GREEDY) -> dict[str, ndarray]:
    """Returns the outputs of our model from the checkpoint at `path` under `kernel`."""
    model = RWKV.from_pretrained(path, kernel)

    def forward(tokens: ndarray, state: State | None) -> tuple[ndarray, State]:
        with torch.no_grad():
            logits, state = model(torch.tensor(tokens), state)
        return logits.numpy(), state

    return outputs(forward, our_values, random_tokens(case), list(case.chunks), n_greedy)


def our_values(state: State) -> dict[str, ndarray]:
    return {name: part.numpy() for name, part in as_values(state).items()}


def float64(case: Case | Case7) -> dict[str, ndarray]:
    """Returns the outputs of the NumPy model in float64 for the same weights."""
    if isinstance(case, Case7):
        return outputs(NumpyRWKV7(random_weights(case)), numpy_values_7, random_tokens(case), list(case.chunks), GREEDY)
    return outputs(NumpyRWKV4(random_weights(case)), numpy_values, random_tokens(case), list(case.chunks), GREEDY)


def numpy_values_7(state: list[LayerState7]) -> dict[str, ndarray]:
    return {name: np.stack([getattr(layer, name) for layer in state]) for name in LayerState7._fields}


def numpy_values(state: list[LayerState]) -> dict[str, ndarray]:
    att_x, a, b, ffn_x = (np.stack(parts) for parts in zip(*state, strict=True))
    return state_values(att_x, a, b, np.zeros_like(b), ffn_x)
