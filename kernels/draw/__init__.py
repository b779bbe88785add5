"""Samples the next token for each row of logits, after filtering, with one uniform random number per row.

    weight_i = exp(logit_i / temperature)         the token is the first at which the cumulative weight exceeds uniform * sum

top_k keeps the k likeliest tokens (0, V or more: all). top_p keeps the smallest set of likeliest tokens whose fraction of the
total weight is at least top_p. min_p keeps the tokens with at least this fraction of the largest weight. filters_first: the
filters use the weights at temperature 1, and top_p's total includes all tokens, not only those that top_k keeps. Weights are
cumulated in the order of the vocabulary if neither top_k nor top_p is set; otherwise from the largest logit to the smallest,
ties in the order of the vocabulary. A weight below e^-80 times the largest counts as 0.

An implementation, a file in this folder, defines REQUIRES and draw(logits (B,V) float32, uniform (B,) float64, filters, bias)
-> (B,) int64: -1 for a row that contains a NaN or whose largest logit is not finite. draw does not change the logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """The options of sampling. temperature must be positive, top_p in (0, 1], min_p in [0, 1]."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters_first: bool = False


class Bias(NamedTuple):
    """Numbers added to some tokens' logits before filtering: ids (n) int32, each below V, and values (n) float32."""

    ids: Tensor
    values: Tensor


NO_BIAS = Bias(torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu"))
Draw = Callable[[Tensor, Tensor, Filters, Bias], Tensor]


def penalize(logits: Tensor, counts: Tensor, flags: Tensor, slots: Tensor, tokens: Tensor, options: Tensor) -> Tensor:
    """Applies the penalties for repeated tokens to logits (B,V) on a GPU; _penalties.py documents the arguments."""
    from kernels.draw import _penalties  # imported here, because not every machine has Triton

    return _penalties.penalize(logits, counts, flags, slots, tokens, options)
