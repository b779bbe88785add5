"""From logits to the next token: what may come, how likely, and a draw with a random number of the row's own.

The order, `hf` (Hugging Face's): logit bias and bans; repetition, presence and frequency penalties; temperature; top_k;
top_p, of what top_k left; min_p; the draw. `rwkv` (ChatRWKV's): top_p, top_k and min_p of the probabilities before the
temperature, which then acts on what is left.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rwkv.config import whole_number, whole_numbers

Softmax = Callable[[Tensor], Tensor]     # over the last dimension
SOFTMAX: Softmax = partial(torch.softmax, dim=-1)
ORDERS = ("hf", "rwkv")
SMALL, LARGE = 1e-30, 1e30               # logits divided or multiplied by what lies between stay within float32
SHORTLIST = 256                          # candidates looked at first: sorting a whole vocabulary costs milliseconds


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises ValueError for a value that means nothing, or of another type.

    temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0
    are off. top_p keeps the fewest most likely tokens that add up to it, at least one; min_p those at least so likely as
    that share of the likeliest. repetition_penalty (CTRL, arXiv 1909.05858) divides the positive and multiplies the
    negative logits of tokens in the prompt or the text; presence_ and frequency_penalty (OpenAI's API) are subtracted once,
    and once per occurrence, for tokens of the text. logit_bias is added by token id; banned token ids never come. Integers of
    NumPy and torch are integers here too.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    order: str = "hf"

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, SMALL, LARGE, or_zero=True)
        _require_number("top_p", self.top_p, SMALL, 1)
        _require_number("min_p", self.min_p, 0, 1)
        _require_number("repetition_penalty", self.repetition_penalty, SMALL, LARGE)
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), -LARGE, LARGE)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is a dict of token ids and numbers; got {self.logit_bias!r}")
        for bias in self.logit_bias.values():
            _require_number("logit_bias", bias, -LARGE, LARGE)
        _require(self.order in ORDERS, "order", f"one of {', '.join(ORDERS)}", self.order)
        tokens = whole_numbers("logit_bias", self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(zip(tokens, self.logit_bias.values(), strict=True)))
        object.__setattr__(self, "banned", whole_numbers("banned", self.banned))
        object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError where a biased or banned token is outside the vocabulary, or none is left."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned", self.banned)):
            for token in ids:
                _require(0 <= token < vocab_size, name, f"token ids from 0 to {vocab_size - 1}", token)
        _require(len(set(self.banned)) < vocab_size, "banned", "fewer tokens than the vocabulary has", len(self.banned))


class Seen:
    """Which tokens each of B rows has had in its prompt, and how often in its text: what penalties need."""

    def __init__(self, prompts: list[list[int]], vocab_size: int) -> None:
        self.prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
        self.count = torch.zeros(len(prompts), vocab_size)
        for row, ids in enumerate(prompts):
            self.prompt[row, ids] = True

    def add(self, tokens: Tensor) -> None:
        """One more token (B,) of each row's text."""
        self.count[torch.arange(len(tokens)), tokens] += 1

    def keep(self, rows: list[int]) -> None:
        self.prompt, self.count = self.prompt[rows], self.count[rows]


def next_tokens(logits: Tensor, uniform: Tensor, options: Sampling, seen: Seen | None = None,
                softmax: Softmax = SOFTMAX) -> Tensor:
    """The next token of each row, (B,) int64, of logits (B,V) and uniform (B,), random numbers from [0, 1).

    softmax: what makes logits into probabilities, on the CPU. Raises ValueError where the logits are not finite.
    """
    logits = adjusted(logits.float().cpu(), options, seen)
    if options.temperature == 0:
        return logits.argmax(-1)
    ids, probabilities = distribution(logits, options, softmax)
    drawn = pick(probabilities, uniform)
    return drawn if ids is None else ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def adjusted(logits: Tensor, options: Sampling, seen: Seen | None) -> Tensor:
    """The logits (B,V) after bias, bans and penalties, less the largest of their row: at most 0."""
    if options.logit_bias or options.banned:
        logits = _biased(logits, options)
    if seen is not None and options.penalises:
        logits = _penalised(logits, options, seen)
    largest = logits.amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or too large for this dtype")
    return logits - largest


def distribution(logits: Tensor, options: Sampling, softmax: Softmax = SOFTMAX) -> tuple[Tensor | None, Tensor]:
    """The ids (B,N) that may come, None for the whole vocabulary in its order, and their probabilities (B,N)."""
    before = logits / options.temperature if options.order == "hf" else logits
    ids, kept = _keep_likeliest(before, options)
    if options.min_p > 0:
        kept = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + math.log(options.min_p), -torch.inf)
    return ids, softmax(kept if options.order == "hf" else kept / options.temperature)


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The index (B,) at which the cumulative probability of each row (B,N) first exceeds uniform (B,)."""
    cumulative = probabilities.double().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform.double() * cumulative[:, -1]).unsqueeze(-1), right=True)
    return drawn.squeeze(-1)


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities, before any option: those of tokens (B,), and the ids and those of the n likeliest."""
    every = torch.log_softmax(logits.float().cpu(), -1)
    likeliest = every.topk(min(n, every.shape[-1]))
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), likeliest.indices, likeliest.values


def _keep_likeliest(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """ids and logits (B,N) after top_k and top_p, most likely first; what is dropped is -inf."""
    V = logits.shape[-1]
    top_k = min(options.top_k or V, V)
    if top_k == V and options.top_p >= 1:
        return None, logits
    if options.order == "hf" and top_k < V:
        kept, ids = logits.topk(top_k)
        return ids, _keep_top_p(kept, kept.logsumexp(-1, keepdim=True), options.top_p)
    total, N = logits.logsumexp(-1, keepdim=True), SHORTLIST if options.top_p < 1 else top_k
    while True:                          # until the shortlist holds all that top_p keeps, or all that top_k does
        kept, ids = logits.topk(min(N, top_k))
        if N >= top_k or bool(((kept - total).exp().sum(-1) >= options.top_p).all()):
            return ids, _keep_top_p(kept, total, options.top_p)
        N *= 8


def _keep_top_p(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    if top_p >= 1:
        return ordered
    probabilities = (ordered - total).exp()
    before = probabilities.cumsum(-1) - probabilities       # what the more likely tokens already add up to
    return ordered.masked_fill(before >= top_p, -torch.inf)


def _biased(logits: Tensor, options: Sampling) -> Tensor:
    logits = logits.clone()
    for token, bias in options.logit_bias.items():
        logits[:, token] += bias
    logits[:, list(options.banned)] = -torch.inf
    return logits


def _penalised(logits: Tensor, options: Sampling, seen: Seen) -> Tensor:
    written = seen.count > 0
    repeated = torch.where(logits > 0, logits / options.repetition_penalty, logits * options.repetition_penalty)
    logits = torch.where(written | seen.prompt, repeated, logits)
    return logits - options.presence_penalty * written - options.frequency_penalty * seen.count


def _require_number(name: str, value: Any, least: float, most: float, or_zero: bool = False) -> None:
    fits = isinstance(value, Real) and (least <= float(value) <= most or (or_zero and value == 0))
    _require(fits, name, f"{'0, or ' if or_zero else ''}a number from {least:g} to {most:g}", value)


def _require(fits: bool, name: str, expected: str, value: object) -> None:
    if not fits:
        raise ValueError(f"{name} is {expected}; got {value!r}")
