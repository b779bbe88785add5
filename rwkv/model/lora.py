"""Low-rank adapters (LoRA) for the linear layers of a model.

The weight of an adapted layer is W + alpha / rank B A. W is frozen; A (rank,in) and B (out,rank) are trained. A starts random,
and B starts at zero.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.model.base import Model, generation, is_linear_weight
from rwkv.model.first_derivative import Context, first_derivative
from rwkv.model.fused import product_backward, product_dtype, squared_relu, squared_relu_backward
from rwkv.model.hooks import is_unmodified
from rwkv.model.quantized import Int4Linear, Int8Linear, PackedLinear


class LoraLinear(nn.Module):
    """A linear layer with an adapter. Computes base(x) + alpha / rank B A dropout(x), (...,out), from x (...,in).

    `base` is an Int8Linear, an Int4Linear, a PackedLinear, or an nn.Linear without a bias.
    """

    def __init__(self, base: nn.Module, out_features: int, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        assert isinstance(base, (nn.Linear, Int8Linear, Int4Linear, PackedLinear))
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._sum(self.base(x), self.lora_A(self.dropout(x)))

    def squared_relu_linear(self, x: Tensor) -> Tensor:
        """Computes forward(relu(x)^2), but saves x for backward instead of the square."""
        if (self.training and self.dropout.p) or not (is_unmodified(self) and is_unmodified(self.lora_A)):
            return self(torch.relu(x).square())
        square, hidden = _SquareAndProduct.apply(product_dtype(x), x, self.lora_A.weight)
        return self._sum(self.base(square), hidden)

    def _sum(self, base: Tensor, hidden: Tensor) -> Tensor:
        if base.dtype != hidden.dtype or not is_unmodified(self.lora_B):
            product: Tensor = self.lora_B(hidden)
            return base + self.scale * product.to(base.dtype)
        rows = torch.addmm(base.flatten(0, -2), hidden.flatten(0, -2), self.lora_B.weight.T, alpha=self.scale)
        return rows.view_as(base)


class _SquareAndProduct(torch.autograd.Function):
    """Computes s = relu(x)^2 from x (B,T,in), and the product s A^T (B,T,rank) with A (rank,in)."""

    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, A)
        ctx.dtype = dtype
        square = squared_relu(x)
        return square, linear(square.to(dtype), A.to(dtype))

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad_square: Tensor, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, A = ctx.saved_tensors
        grad_square_from_A, grad_A = product_backward(grad, squared_relu(x).to(ctx.dtype), A.to(ctx.dtype))
        return None, squared_relu_backward(grad_square + grad_square_from_A, x), grad_A


def linear_layer_names(config: ModelConfig) -> list[str]:
    """Returns the names of a block's linear layers, such as "att.key"."""
    module, first = generation(config), "blocks.0."
    return [name.removeprefix(first).removesuffix(".weight") for name in module.shapes(config, 1)
            if name.startswith(first) and is_linear_weight(name, module.group(name))]


def layers_to_adapt(config: ModelConfig, modules: Sequence[str]) -> list[str]:
    """Returns the names of a block's linear layers that get an adapter: `modules`, or all layers if `modules` is empty.

    Raises UserError for an unknown name.
    """
    layers = linear_layer_names(config)
    for name in modules:
        if name not in layers:
            raise UserError(f"tune.modules must name only layers of {generation(config).NAME} ({', '.join(layers)}); "
                            f"got {name!r}")
    return [name for name in layers if not modules or name in modules]


def require_rank(config: ModelConfig, modules: Sequence[str], rank: int) -> None:
    """Raises UserError for a rank above that of every adapted matrix: the excess would cost memory and time without effect."""
    shapes = generation(config).shapes(config, 1)
    most = max(min(shapes[f"blocks.0.{name}.weight"]) for name in layers_to_adapt(config, modules))
    if rank > most:
        raise UserError(f"tune.rank must be at most {most}, the largest rank of an adapted matrix; got {rank}")


def add_adapters(model: Model, modules: Sequence[str], rank: int, alpha: float, dropout: float = 0.0) -> None:
    """Freezes the model, and adds an adapter to each layer that `layers_to_adapt` returns, with a random A and B = 0."""
    shapes = model.generation.shapes(model.config, model.vocab_size)
    model.requires_grad_(False)
    for layer, block in enumerate(model.blocks):
        for name in layers_to_adapt(model.config, modules):
            out_features = shapes[f"blocks.{layer}.{name}.weight"][0]
            block.set_submodule(name, LoraLinear(block.get_submodule(name), out_features, rank, alpha, dropout))


def is_adapter(name: str) -> bool:
    """Returns True for the name of an adapter's A or B, such as "blocks.0.att.key.lora_A.weight"."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_tensors(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the adapters' tensors, by their names in the model."""
    return {name: tensor for name, tensor in names.items() if is_adapter(name)}


def merge_adapter(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Returns W + scale B A, in float32 or wider: 16-bit rounding would lose most updates of a short training run."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(dtype), B.to(dtype), A.to(dtype), alpha=scale)
