"""Layers as plain functions of rows, for decoding, in which calling a module costs as much as a small tensor operation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.matvec import MOST_ROWS
from rwkv.model.quantized import BFloat16Linear, BlockEmbedding, BlockLinear, Int4Linear, Int8Linear, PackedLinear, matvec_for

Products = Callable[[Tensor], list[Tensor]]
VECTOR = 32                              # a multiple of PyTorch's vector length, in numbers, on every CPU
PLAIN = (nn.ModuleList, nn.Embedding, nn.LayerNorm, nn.Linear, BFloat16Linear, Int8Linear, Int4Linear, PackedLinear,
         BlockLinear, BlockEmbedding)    # this file has functions for these layers; nn.ModuleList contains blocks


def norm_function(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the LayerNorm as a function of rows (B,C)."""
    assert isinstance(norm, nn.LayerNorm)
    return partial(torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias, eps=norm.eps)


def product_function(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the linear layer as a function of rows (B,K)."""
    product = products_function(layer)
    return lambda rows: product(rows.unsqueeze(0))[0]


def products_function(*layers: nn.Module) -> Products:
    """Returns n linear layers as one function from their stacked inputs (n,B,K) to their n outputs.

    Int4 layers multiply up to MOST_ROWS rows by kernels.matvec in one call. Other layers run one after another.
    """
    if all(isinstance(layer, Int4Linear) for layer in layers):
        return _int4_products(cast(tuple[Int4Linear, ...], layers))
    if all(isinstance(layer, Int8Linear | PackedLinear) for layer in layers):
        packed = cast(tuple[Int8Linear | PackedLinear, ...], layers)
        return lambda inputs: [layer.forward_rows(rows) for layer, rows in zip(packed, inputs.unbind(), strict=True)]
    by_rows = (BlockLinear, BFloat16Linear)
    if any(isinstance(layer, by_rows) for layer in layers):              # a GGUF file may mix types of blocks in a layer
        functions = [layer.forward_rows if isinstance(layer, by_rows) else layer for layer in layers]
        return lambda inputs: [function(rows) for function, rows in zip(functions, inputs.unbind(), strict=True)]
    return _float_products([cast(nn.Linear, layer).weight.detach() for layer in layers])


def embedding_function(embedding: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the embedding as a function of tokens (B,)."""
    if isinstance(embedding, BlockEmbedding):
        return embedding.forward
    return partial(F.embedding, weight=cast(nn.Embedding, embedding).weight)


class LowRank:
    """Computes n gates f(x A) B, with A (C,D) and B (D,C) for each gate, from inputs (n,B,C). The n outputs are (B,C).

    f changes the hidden layers (n,B,D) in place. All ranks are zero-padded to the largest rank, rounded up to whole vectors,
    because PyTorch has different code, which rounds differently, for the elements after the last whole vector.
    """

    def __init__(self, down: Sequence[Tensor], up: Sequence[Tensor]) -> None:
        C, D = len(down[0]), -(-max(map(len, up)) // VECTOR) * VECTOR
        down_weights, up_weights = down[0].new_zeros(len(down), D, C), down[0].new_zeros(len(down), C, D)
        for i, (to_rank, from_rank) in enumerate(zip(down, up, strict=True)):
            down_weights[i, :len(from_rank)] = to_rank.T
            up_weights[i, :, :len(from_rank)] = from_rank.T
        self._down, self._up = _float_products(list(down_weights.unbind())), _float_products(list(up_weights.unbind()))

    def __call__(self, inputs: Tensor, f: Callable[[Tensor], None]) -> list[Tensor]:
        hidden = torch.stack(self._down(inputs))
        f(hidden)
        return self._up(hidden)


def _float_products(weights: list[Tensor]) -> Products:
    return lambda inputs: [F.linear(rows, weight) for rows, weight in zip(inputs.unbind(), weights, strict=True)]


def _int4_products(layers: Sequence[Int4Linear]) -> Products:
    matvec = matvec_for("int4").bind(*(layer.packed for layer in layers))
    return lambda inputs: matvec(inputs) if 0 < inputs.shape[1] <= MOST_ROWS else [
        layer.forward_rows(rows) for layer, rows in zip(layers, inputs.unbind(), strict=True)]
