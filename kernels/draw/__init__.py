"""Samples the next token for each row of logits, with one uniform random number per row.

    weight_i = exp(logit_i / temperature)         the token is the first at which the cumulative weight exceeds uniform * sum

Filters drop tokens before the draw:

    top_k            keeps the k likeliest tokens; 0, V and larger numbers keep all
    top_p            keeps the smallest set of likeliest tokens whose fraction of the total weight is at least top_p
    min_p            keeps the tokens with at least this fraction of the largest weight
    filters_first    the filters use the weights at temperature 1, and the total of top_p includes the tokens that top_k drops

Without top_k and top_p, weights are cumulated in the order of the vocabulary. Otherwise weights are cumulated from the largest
logit to the smallest, with ties in the order of the vocabulary. A weight below e^-80 times the largest counts as 0.

An implementation is a file in this folder with REQUIRES and draw(logits (B,V) float32, uniform (B,) float64, filters, bias) ->
tokens (B,) int64. The token is -1 in a row that contains a NaN or has no finite largest logit. draw does not change the logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """The options of sampling. `temperature` must be positive, `top_p` must be in (0, 1], and `min_p` in [0, 1]."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters_first: bool = False


class Bias(NamedTuple):
    """Numbers `values` (n,) float32 that are added to the logits of the tokens `ids` (n,) int32 before filtering."""

    ids: Tensor
    values: Tensor


NO_BIAS = Bias(torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu"))
Draw = Callable[[Tensor, Tensor, Filters, Bias], Tensor]


def penalize(logits: Tensor, counts: Tensor, flags: Tensor, slots: Tensor, tokens: Tensor, options: Tensor) -> Tensor:
    """Returns logits (B,V) on a GPU after the penalties for repeated tokens. _triton_penalties.py documents the arguments."""
    from kernels.draw import _triton_penalties  # the import is here, because not every machine has Triton

    return _triton_penalties.penalize(logits, counts, flags, slots, tokens, options)
