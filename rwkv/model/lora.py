"""Low-rank adapters, LoRA: a frozen linear layer W gets alpha / rank B A beside it; A (rank,in) and B (out,rank) are trained.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685): A is random, B begins at zero.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.model.base import Model, generation, of_linear_layer
from rwkv.model.first_derivative import first_derivative
from rwkv.model.fused import can_use_functions, product_backward, product_dtype
from rwkv.model.hooks import untouched
from rwkv.model.quantized import Int4Linear, Int8Linear


class LoraLinear(nn.Module):
    """x (...,in) -> base(x) + alpha / rank B A dropout(x), (...,out).

    base: nn.Linear without a bias, Int8Linear or Int4Linear.
    """

    def __init__(self, base: nn.Module, out_features: int, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        assert isinstance(base, (nn.Linear, Int8Linear, Int4Linear))
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._sum(self.base(x), self.lora_A(self.dropout(x)))

    def of_square(self, root: Tensor) -> Tensor:
        """forward(root * root), which keeps root for its backward pass and not the square."""
        if (self.training and self.dropout.p) or not (can_use_functions() and untouched(self) and untouched(self.lora_A)):
            return self(root * root)
        return self._sum(self.base(root * root), _DownOfSquare.apply(product_dtype(root), root, self.lora_A.weight))

    def _sum(self, base: Tensor, hidden: Tensor) -> Tensor:
        added: Tensor = self.lora_B(hidden)
        return base + self.scale * added.to(base.dtype)


class _DownOfSquare(torch.autograd.Function):
    """A root^2, with root (B,T,in) and A (rank,in): (B,T,rank)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, root: Tensor, A: Tensor) -> Tensor:
        ctx.save_for_backward(root, A)
        ctx.dtype = dtype
        return linear((root * root).to(dtype), A.to(dtype))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        root, A = ctx.saved_tensors
        grad_square, grad_A = product_backward(grad, (root * root).to(ctx.dtype), A.to(ctx.dtype))
        return None, grad_square.mul_(2 * root), grad_A


def adaptable(config: ModelConfig) -> list[str]:
    """The linear layers of a block, as att.key."""
    module, first = generation(config), "blocks.0."
    return [name.removeprefix(first).removesuffix(".weight") for name in module.shapes(config, 1)
            if name.startswith(first) and of_linear_layer(name, module.group(name))]


def chosen(config: ModelConfig, modules: Sequence[str]) -> list[str]:
    """The layers of a block that get an adapter: those named, all where none is. Raises UserError for an unknown name."""
    known = adaptable(config)
    for name in modules:
        if name not in known:
            raise UserError(f"tune.modules has {name!r}, and a block of {generation(config).NAME} has {', '.join(known)}")
    return [name for name in known if not modules or name in modules]


def add_adapters(model: Model, modules: Sequence[str], rank: int, alpha: float, dropout: float = 0.0) -> None:
    """Freezes the model and gives the layers of each block that `chosen` names an adapter, from torch's global generator."""
    shapes = model.generation.shapes(model.config, model.vocab_size)
    model.requires_grad_(False)
    for layer, block in enumerate(model.blocks):
        for name in chosen(model.config, modules):
            out_features = shapes[f"blocks.{layer}.{name}.weight"][0]
            block.set_submodule(name, LoraLinear(block.get_submodule(name), out_features, rank, alpha, dropout))


def adapter_of(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' tensors alone, by their names in the model: blocks.0.att.key.lora_A.weight."""
    return {name: tensor for name, tensor in names.items() if ".lora_A." in name or ".lora_B." in name}


def merged(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in float32, in W's dtype."""
    return torch.addmm(weight.float(), B.float(), A.float(), alpha=scale).to(weight.dtype)
