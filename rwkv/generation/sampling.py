"""From logits to the next token: the filters, and one draw per row with a random number of its own.

The steps with order=hf (as in Hugging Face's transformers): logit bias and banned tokens; repetition, presence and frequency
penalties; temperature; top_k; top_p, as a share of the probability that top_k left; min_p; the draw. With order=rwkv (as in
ChatRWKV) top_p, top_k and min_p filter the probabilities before the temperature, which then acts on the tokens left.

Legend: B rows, V vocabulary, N candidates after the filters.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kernels.draw import NO_BIAS, Bias, Draw, Filters
from kernels.registry import KernelUnavailable
from rwkv.config import whole_number, whole_numbers
from rwkv.errors import UserError

ORDERS = ("hf", "rwkv")
SMALL, LARGE = 1e-30, 1e30               # limits of options, so that logits stay within float32
BLOCK = 512                              # tokens whose probabilities are added up first
SHORTLIST = 256                          # candidates sorted at first: sorting a whole vocabulary takes milliseconds


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises UserError for a value out of range or of another type; integers may be NumPy's or torch's.

    temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0
    are off. top_p keeps the fewest most likely tokens whose probabilities add up to it, at least one. min_p keeps the tokens
    with at least that share of the largest probability. repetition_penalty (CTRL, arXiv 1909.05858) divides positive and
    multiplies negative logits of tokens in the prompt or the text. presence_penalty and frequency_penalty (OpenAI's API) are
    subtracted from the logits of tokens in the text, once and once per occurrence. logit_bias is added by token id. Tokens in
    `banned` are never drawn. order: hf | rwkv, as above.
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
            raise UserError(f"logit_bias is a dict of token ids and numbers; got {self.logit_bias!r}")
        for bias in self.logit_bias.values():
            _require_number("logit_bias", bias, -LARGE, LARGE)
        _require(self.order in ORDERS, "order", f"one of {', '.join(ORDERS)}", self.order)
        tokens = whole_numbers("logit_bias", self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(zip(tokens, self.logit_bias.values(), strict=True)))
        object.__setattr__(self, "banned", whole_numbers("banned", self.banned))
        object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal options: what a dictionary can hold."""
        values = [getattr(self, option.name) for option in fields(self)]
        return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)

    @property
    def filters(self) -> Filters:
        """What kernels/draw takes, at a temperature above 0."""
        return Filters(float(self.temperature), self.top_k, float(self.top_p), float(self.min_p), self.order == "rwkv")

    @cached_property
    def bias(self) -> Bias:
        """logit_bias and the banned tokens, as kernels/draw takes them."""
        values = [*self.logit_bias.items(), *((token, -math.inf) for token in self.banned)]
        ids, biases = [token for token, _ in values], [bias for _, bias in values]
        return Bias(torch.tensor(ids, dtype=torch.int32), torch.tensor(biases, dtype=torch.float32))

    @property
    def needs_counts(self) -> bool:
        """Whether a penalty is on, which needs TokenCounts."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError where a biased or banned token is outside the vocabulary, or all tokens are banned."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned", self.banned)):
            for token in ids:
                _require(0 <= token < vocab_size, name, f"token ids from 0 to {vocab_size - 1}", token)
        _require(len(set(self.banned)) < vocab_size, "banned", "fewer tokens than the vocabulary has", len(self.banned))


class TokenCounts:
    """For the penalties: whether each token is in the prompt of each of B rows, and how often it is in the row's text."""

    def __init__(self, prompts: list[list[int]], vocab_size: int) -> None:
        self.in_prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)       # (B,V)
        self.in_text = torch.zeros(len(prompts), vocab_size)                            # (B,V)
        for row, ids in enumerate(prompts):
            self.in_prompt[row, ids] = True

    def add(self, tokens: Tensor) -> None:
        """Counts one more token (B,) in each row's text."""
        self.in_text[torch.arange(len(tokens)), tokens] += 1

    @staticmethod
    def cat(counts: "Sequence[TokenCounts]") -> "TokenCounts":
        """The rows of all, in order, as copies."""
        together = TokenCounts([], 0)
        together.in_prompt = torch.cat([each.in_prompt for each in counts])
        together.in_text = torch.cat([each.in_text for each in counts])
        return together


def next_tokens(logits: Tensor, uniform: Tensor, options: Sampling, counts: TokenCounts | None = None,
                draw: Draw | None = None) -> Tensor:
    """The next token of each row, (B,) int64, from logits (B,V) and uniform (B,), random numbers from [0, 1).

    draw: a function of kernels/draw, for logits on a CPU; by default tokens are drawn by PyTorch. Raises UserError where the
    logits are not finite.
    """
    if draw is not None and options.temperature > 0:
        with suppress(KernelUnavailable):                # as after Taichi was started for a GPU
            if counts is not None and options.needs_counts:              # penalties act on biased logits
                drawn = draw(changed(logits.float(), options, counts), uniform, options.filters, NO_BIAS)
            else:
                drawn = draw(logits.float(), uniform, options.filters, options.bias)
            _require_finite(bool((drawn >= 0).all()))
            return drawn
    logits = changed(logits.float().cpu(), options, counts)
    _require_finite(bool(logits.amax(-1).isfinite().all()))
    if options.temperature == 0:
        return logits.argmax(-1)
    ids, probabilities = distribution(logits, options)
    drawn = pick(probabilities, uniform)
    return drawn if ids is None else ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def changed(logits: Tensor, options: Sampling, counts: TokenCounts | None) -> Tensor:
    """The logits (B,V) after bias, bans and penalties."""
    if options.logit_bias or options.banned:
        logits = _biased(logits, options)
    if counts is not None and options.needs_counts:
        logits = _penalised(logits, options, counts)
    return logits


def adjusted(logits: Tensor, options: Sampling, counts: TokenCounts | None) -> Tensor:
    """The same, minus the largest of their row, so that none is above 0."""
    logits = changed(logits, options, counts)
    largest = logits.amax(-1, keepdim=True)
    _require_finite(bool(largest.isfinite().all()))
    return logits - largest


def distribution(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """The candidates' ids (B,N), or None for the whole vocabulary in its order, and their probabilities (B,N)."""
    ids, kept = _keep_likeliest(logits, options)
    if options.min_p > 0:
        kept = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + math.log(options.min_p), -torch.inf)
    if options.order == "rwkv":
        kept = kept / options.temperature
    return ids, torch.softmax(kept, -1)


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The index (B,) at which the cumulative probability of each row (B,N) first exceeds uniform (B,).

    The block of BLOCK tokens in which it does is found first: a cumulative sum over a whole vocabulary takes ten times as long.
    """
    N = probabilities.shape[-1]
    whole = N // BLOCK * BLOCK
    sums = torch.cat((probabilities[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64),
                      probabilities[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), 1)
    ends = sums.cumsum(-1)
    wanted = uniform.double().unsqueeze(-1) * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp(max=ends.shape[-1] - 1)
    ids = block * BLOCK + torch.arange(min(BLOCK, N))
    cumulative = probabilities.gather(-1, ids.clamp(max=N - 1)).double().masked_fill(ids >= N, 0).cumsum(-1)
    below_all = cumulative[:, -1:].nextafter(torch.zeros(1, dtype=torch.float64))     # rounding leads to no token after them
    inside = torch.minimum(wanted - (ends - sums).gather(-1, block), below_all)
    return ids.gather(-1, torch.searchsorted(cumulative, inside, right=True)).squeeze(-1)


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities before any option: those of tokens (B,); the ids (B,n) of the n likeliest, and theirs (B,n)."""
    every = torch.log_softmax(logits.float().cpu(), -1)
    likeliest = every.topk(min(n, every.shape[-1]))
    of_tokens = every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return of_tokens, likeliest.indices, likeliest.values


def _keep_likeliest(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """The ids and logits (B,N) that top_k and top_p leave, most likely first; -inf marks a token that top_p drops.

    The logits are those that the filters see, minus the largest of their row. The ids are None where both options are off.
    """
    V, largest = logits.shape[-1], logits.amax(-1, keepdim=True)
    top_k = min(options.top_k or V, V)

    def seen(logits: Tensor) -> Tensor:
        return (logits - largest) / (options.temperature if options.order == "hf" else 1)

    if top_k == V and options.top_p >= 1:
        return None, seen(logits)
    if options.order == "hf" and top_k < V:
        kept, ids = _likeliest(logits, top_k)
        return ids, _keep_top_p(seen(kept), _weight(seen(kept)), options.top_p)
    total = _weight(seen(logits))
    N = SHORTLIST if options.top_p < 1 else top_k
    while True:                          # until the N likeliest hold all tokens that top_p or top_k keeps
        kept, ids = _likeliest(logits, min(N, top_k))
        if N >= top_k or bool((_weight(seen(kept)) >= options.top_p * total).all()):
            return ids, _keep_top_p(seen(kept), total, options.top_p)
        N *= 8


def _likeliest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest logits of each row and their ids, (B,n) both; of equal ones the first in the vocabulary come first.

    They are found before anything is computed from the logits, which may make different ones equal.
    """
    values, ids = logits.topk(n)
    most = int((logits >= values[:, -1:]).sum(-1).max())
    if most > n:                         # topk takes any of equal ones
        _, ids = logits.topk(most)
    ids = ids.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[:, :n], ids.gather(-1, order)[:, :n]


def _weight(logits: Tensor) -> Tensor:
    """The sum of the exponentials of each row, (B,1) float64; no logit is above 0."""
    return logits.exp().sum(-1, keepdim=True, dtype=torch.float64)


def _keep_top_p(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    """The logits (B,N), most likely first, with -inf where the tokens before have a share of top_p of the total already."""
    if top_p >= 1:
        return ordered
    weights = ordered.exp().double()
    before = weights.cumsum(-1) - weights
    return ordered.masked_fill(before >= top_p * total, -torch.inf)


def _biased(logits: Tensor, options: Sampling) -> Tensor:
    logits = logits.clone()
    for token, bias in options.logit_bias.items():
        logits[:, token] += bias
    logits[:, list(options.banned)] = -torch.inf
    return logits


def _penalised(logits: Tensor, options: Sampling, counts: TokenCounts) -> Tensor:
    in_text = counts.in_text > 0
    repeated = torch.where(logits > 0, logits / options.repetition_penalty, logits * options.repetition_penalty)
    logits = torch.where(in_text | counts.in_prompt, repeated, logits)
    return logits - options.presence_penalty * in_text - options.frequency_penalty * counts.in_text


def _require_finite(finite: bool) -> None:
    if not finite:
        raise UserError("the model's logits are not finite: its weights are damaged, or too large for this dtype")


def _require_number(name: str, value: Any, least: float, most: float, or_zero: bool = False) -> None:
    fits = isinstance(value, Real) and (least <= float(value) <= most or (or_zero and value == 0))
    _require(fits, name, f"{'0, or ' if or_zero else ''}a number from {least:g} to {most:g}", value)


def _require(fits: bool, name: str, expected: str, value: object) -> None:
    if not fits:
        raise UserError(f"{name} is {expected}; got {value!r}")
