"""From the final hidden states of a prompt to one vector: the mean over its tokens, or that of its last token."""

import torch
from torch import Tensor

from rwkv.config import Pooling
from rwkv.generation.prefill import Prefill


def pooled(prefill: Prefill, pooling: Pooling) -> Tensor:
    """The embedding (C) float32 of a prompt that was read with pool_hidden=True, of length 1."""
    assert prefill.hidden_sum is not None
    assert prefill.last_hidden is not None
    vector = prefill.hidden_sum if pooling == "mean" else prefill.last_hidden.double()
    return torch.nn.functional.normalize(vector, dim=0).float().cpu()
