"""Two measures for the curves: how large the gradients of each part of a model are, and how much of a step is products."""

import torch
from torch import Tensor, nn

from rwkv import matmuls
from rwkv.model import RWKV
from rwkv.tracking import norm_names

LOGITS = 2 ** 25                         # timed at a time: 128 MiB, less than training itself takes
FLOP = {"cpu": 2e11, "cuda": 2e13}       # of all that is timed: a few seconds of a slow device
ENOUGH = 256                             # tokens from which on the time of a product grows with their number
CALLS = 3                                # of each product: one that warms up, and two that are timed


def gradient_norms(model: RWKV) -> dict[str, float]:
    """By the names of rwkv.tracking.norm_names: the 2-norm of all gradients of that part. One wait for the device."""
    parts = [model.emb, *model.blocks, model.ln_out, model.head]
    norms = torch.stack([_norm(part) for part in parts])
    return dict(zip(norm_names(len(model.blocks)), norms.tolist(), strict=True))


def _norm(part: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def product_seconds(model: RWKV, tokens: int, device: torch.device, dtype: torch.dtype) -> float | None:
    """Of a forward and backward pass, for each of `tokens` that go through the model together; None where it takes too long.

    Large models are timed on fewer tokens at a time, for the sake of memory and of the time before a run.
    """
    together = tokens_timed(model, tokens, device)
    if together < min(tokens, ENOUGH):
        return None
    return matmuls.seconds_per_step(model.config, model.vocab_size, 1, together, device, dtype) / together


def tokens_timed(model: RWKV, tokens: int, device: torch.device) -> int:
    """How many bring the products of one layer and the head to FLOP, and the head's results to LOGITS; at most `tokens`."""
    config, V = model.config, model.vocab_size
    per_token = matmuls.flop_per_token(config, V) - (config.n_layer - 1) * matmuls.flop_per_token(config, 0) // config.n_layer
    return min(tokens, LOGITS // V, int(FLOP[device.type] / (CALLS * per_token)))
