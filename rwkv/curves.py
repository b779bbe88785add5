"""Gradient norms of each part of a model."""

import torch
from torch import Tensor, nn

from rwkv.model import RWKV
from rwkv.tracking import norm_names


def gradient_norms(model: RWKV) -> dict[str, float]:
    """By the names of rwkv.tracking.norm_names: the 2-norm of all gradients of that part. One wait for the device."""
    parts = [model.emb, *model.blocks, model.ln_out, model.head]
    norms = torch.stack([_norm(part) for part in parts])
    return dict(zip(norm_names(len(model.blocks)), norms.tolist(), strict=True))


def _norm(part: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
