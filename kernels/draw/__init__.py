"""The next token of each row of logits, drawn after filters with the row's own random number.

    weight_i = exp(logit_i / temperature)         the token is the first at which the cumulative weight exceeds uniform * sum

top_k keeps the k likeliest tokens (0, V or more: all); top_p the fewest likeliest ones whose share of the weight is at least
top_p; min_p those with at least that share of the largest weight. filters_first: the filters use the weights at temperature 1,
and top_p the share of all tokens, not of those that top_k keeps. If top_k and top_p keep all, tokens are in the order of the
vocabulary; otherwise the largest logits come first, ties in the order of the vocabulary. A weight below e^-80 of the largest
counts as 0.

A file beside this one has REQUIRES and draw(logits (B,V) float32, uniform (B,) float64, filters, bias) -> (B,) int64: -1 for a
row whose largest logit is not finite, or which has a NaN. It leaves the logits unchanged.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """temperature must be positive, top_p in (0, 1], min_p in [0, 1]."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters_first: bool = False


class Bias(NamedTuple):
    """Added to the logits of tokens before the filters: ids (n) int32, each below V, and values (n) float32."""

    ids: Tensor
    values: Tensor


NO_BIAS = Bias(torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu"))
Draw = Callable[[Tensor, Tensor, Filters, Bias], Tensor]


def penalize(logits: Tensor, counts: Tensor, flags: Tensor, slots: Tensor, tokens: Tensor, options: Tensor) -> Tensor:
    """The logits (B,V) after penalties of repeated tokens, on a GPU; _penalties.py documents the arguments."""
    from kernels.draw import _penalties  # Triton is imported where it runs

    return _penalties.penalize(logits, counts, flags, slots, tokens, options)
