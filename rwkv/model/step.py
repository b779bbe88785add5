"""Layers as plain functions of rows, for decoding one token at a time: calling a module costs as much as a small operation."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwkv.model.quantized import Int8Linear, products

PLAIN = (nn.ModuleList, nn.Embedding, nn.LayerNorm, nn.Linear, Int8Linear)     # classes whose weights say what a call computes


def norm_function(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The LayerNorm as a function of (B,C)."""
    assert isinstance(norm, nn.LayerNorm)
    return partial(_layer_norm, norm.weight, norm.bias, norm.normalized_shape, norm.eps)


def _layer_norm(weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float, x: Tensor) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, eps)


def product_function(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The linear layer as a function of (B,K)."""
    return layer.of_rows if isinstance(layer, Int8Linear) else partial(F.linear, weight=cast(nn.Linear, layer).weight)


def products_function(*layers: nn.Module) -> Callable[[Tensor], list[Tensor]]:
    """Several linear layers as one function of their stacked inputs (n,B,K), which gives n outputs."""
    if all(isinstance(layer, Int8Linear) for layer in layers):
        return partial(products, cast(list[Int8Linear], layers))
    functions = [product_function(layer) for layer in layers]
    return lambda inputs: [function(rows) for function, rows in zip(functions, inputs.unbind(), strict=True)]
