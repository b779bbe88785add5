"""Pools the final hidden states of a prompt into one vector: the mean over its tokens, or the last token's."""

import torch
from torch import Tensor

from rwkv.config import Pooling
from rwkv.generation.prefill import Prefill


def pooled(prefill: Prefill, pooling: Pooling) -> Tensor:
    """The embedding (C) float32, of length 1, after a prefill with pool_hidden=True."""
    assert prefill.hidden_sum is not None
    assert prefill.last_hidden is not None
    vector = prefill.hidden_sum if pooling == "mean" else prefill.last_hidden.double()
    return torch.nn.functional.normalize(vector, dim=0).float().cpu()
