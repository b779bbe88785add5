"""Small models whose every weight matters, and the kernels that they can run on here."""

import pytest
import torch

from kernels.registry import why_not
from kernels.select import folder, select, selectable
from rwkv.config import ModelConfig
from rwkv.pretrained import RWKV

SMALL = {"n_layer": 3, "n_embd": 16, "ctx_len": 32}


def reasons() -> dict[str, str | None]:
    """Every selectable kernel, and why it cannot run on this machine's CPU, None where it can."""
    return {name: why_not(folder("wkv4", name), name) for name in selectable("wkv4")}


def kernels() -> list[object]:
    """Every selectable kernel as a parameter; those that cannot run on this machine's CPU are skipped with their reason."""
    return [pytest.param(name, marks=[pytest.mark.skip(reason)] if reason else []) for name, reason in reasons().items()]


def small_model(kernel: str = "reference", vocab_size: int = 50, seed: int = 0, **sizes: int) -> RWKV:
    """A model with the matrices that start at zero, the norms and the mixing weights randomised: logits of order 1."""
    torch.manual_seed(seed)
    model = RWKV(ModelConfig(**{**SMALL, **sizes}), vocab_size, select("wkv4", kernel)).init_weights()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            elif "ln" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def tokens(model: RWKV, B: int = 2, T: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(model.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))
