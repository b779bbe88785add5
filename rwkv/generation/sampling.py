"""Sampling applies penalties and filters to the logits, and then draws one token per row with the row's own random number.

With order=hf (as in Hugging Face's transformers) the steps are: logit bias and banned tokens; repetition, presence and
frequency penalties; temperature; top_k; top_p, as a fraction of the probability that top_k has left; min_p; the draw. With
order=rwkv (as in ChatRWKV) top_p, top_k and min_p come before the temperature, which then applies to the remaining tokens.

A row's penalties change the logit of each token in the prompt or the generated text:

    logit = logit / repetition_penalty if logit > 0, else logit * repetition_penalty
    logit = logit - presence_penalty - count * frequency_penalty                only for generated tokens

Here, count is the number of times that the token has been generated. After each draw all counts are multiplied by
penalty_decay, and then 1 is added to the count of the token drawn. BlinkDL's ChatRWKV, API_DEMO_CHAT.py, does the same with
`occurrence`, and presence_penalty does not decay there either. The tokens of no_penalty are exempt.

Legend: B rows, V vocabulary, N candidates after the filters. The options are the fields of rwkv.config.Sampling.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from kernels import registry
from kernels.backends.transfer import to_device
from kernels.draw import NO_BIAS, Bias, Draw, Filters, penalize
from kernels.select import AUTO, resolve
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.model.decoding.c_step import token_sampler

BLOCK = 512                              # tokens per partial sum of probabilities
PENALTY_BYTES = 2 * 9                    # per row and token in a PenaltyTable, which has up to twice as many rows
GPU_BYTES = 4 * 4 + 8 + PENALTY_BYTES    # per row and token on a GPU, with 4 copies of the logits and triton_v0's list
SHORTLIST = 256                          # candidates sorted first, because sorting a whole vocabulary takes milliseconds


@cache
def draw_function_on(device: torch.device, in_c: bool) -> tuple[Draw | None, torch.device]:
    """Returns the function that draws tokens from logits on `device`, and the device on which that function draws.

    The function comes from kernels/draw, or is None, which stands for PyTorch. Without Triton, tokens are drawn on the CPU even
    if the logits are on a GPU. `in_c` says whether a CDecoder computes the logits.
    """
    name = resolve("draw", AUTO, device)
    if device.type == "cuda" and registry.why_not("draw", name, "cuda") is None:
        return registry.load("draw", name).draw, device
    return token_sampler() if in_c or device.type != "cpu" else None, torch.device("cpu")


def draw_filters(options: Sampling) -> Filters:
    """Returns the filter options in the format of kernels/draw. The temperature must be above 0."""
    fields = {name: getattr(options, name) for name in Filters._fields if name != "filters_first"}
    return Filters(**fields, filters_first=options.order == "rwkv")


@lru_cache(maxsize=64)
def draw_bias(options: Sampling) -> Bias:
    """Returns the biases of logit_bias, and -inf for banned tokens, in the format of kernels/draw."""
    values = [*options.logit_bias.items(), *((token, -math.inf) for token in options.banned)]
    ids = torch.tensor([token for token, _ in values], dtype=torch.int32, device="cpu")
    return Bias(ids, torch.tensor([bias for _, bias in values], dtype=torch.float32, device="cpu"))


class Penalties:
    """Counts the tokens of one row, and applies the row's penalties to its logits on the CPU.

    Memory and time grow with the number of different tokens in the prompt and the generated text. No penalty changes the logits
    of the ids in `exempt`.
    """

    def __init__(self, options: Sampling, prompt: Collection[int] = (), exempt: Collection[int] = ()) -> None:
        self._options = options
        self._exempt_ids = frozenset(exempt)
        in_prompt = {*prompt} - self._exempt_ids if options.repetition_penalty != 1 else ()
        self._ids = torch.tensor([*in_prompt], dtype=torch.int64, device="cpu")    # (n) distinct ids, new ones last
        self._counts = torch.zeros(len(self._ids), dtype=torch.float64, device="cpu")
        self._generated = torch.zeros_like(self._counts)                           # 1 if generated, else 0
        self._index_of = {token: index for index, token in enumerate(self._ids.tolist())}

    def add(self, token: int) -> None:
        self._counts *= self._options.penalty_decay
        if token in self._exempt_ids:
            return
        index = self._index_of.setdefault(token, len(self._ids))
        if index == len(self._ids):
            self._ids = torch.cat((self._ids, self._ids.new_tensor([token])))
            self._counts = torch.cat((self._counts, self._counts.new_zeros(1)))
            self._generated = torch.cat((self._generated, self._generated.new_zeros(1)))
        self._counts[index] += 1
        self._generated[index] = 1

    def apply(self, logits: Tensor) -> None:
        """Applies the penalties to the row's float32 logits (V), in place."""
        if not len(self._ids):
            return
        options = self._options
        values = logits[self._ids].double()
        if options.repetition_penalty != 1:
            values = torch.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
        values = values - options.presence_penalty * self._generated - options.frequency_penalty * self._counts
        logits.index_copy_(0, self._ids, values.float())

    @staticmethod
    def apply_all(logits: Tensor, rows: Sequence["Penalties"]) -> Tensor:
        """Applies each row's penalties to the float32 logits (B,V) in place, and returns the logits."""
        for row, penalties in enumerate(rows):
            penalties.apply(logits[row])
        return logits


class PenaltyTable:
    """Holds the penalties of all rows whose logits are on a GPU, in the format of kernels/draw.

    Each row has a slot with V counts in float64 and V flags in uint8, which together take 9 V bytes. A slot is taken at the
    row's first draw and freed when the row is deleted.
    """

    def __init__(self, V: int, device: torch.device) -> None:
        self._counts = torch.zeros(0, V, dtype=torch.float64, device=device)
        self._flags = torch.zeros(0, V, dtype=torch.uint8, device=device)
        self._free: list[int] = []
        self._rows: list[TablePenalties] = []            # the rows of the last call of apply()
        self._options = torch.empty(0)

    def row(self, options: Sampling, prompt: Collection[int] = (), exempt: Collection[int] = ()) -> "TablePenalties":
        """Returns the penalties of a new row. The arguments are those of Penalties."""
        return TablePenalties(self, options, prompt, exempt)

    def slot(self) -> int:
        """Takes a free slot, sets its counts and flags to 0, and returns its index."""
        if not self._free:
            n = len(self._counts)
            more = max(1, n)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._counts.shape[1])))
            self._flags = torch.cat((self._flags, self._flags.new_zeros(more, self._flags.shape[1])))
            self._free = list(range(n, n + more))
        slot = self._free.pop()
        self._counts[slot] = 0
        self._flags[slot] = 0
        return slot

    def mark(self, slot: int, ids: Collection[int], flag: int) -> None:
        self._flags[slot, to_device(torch.tensor([*ids], dtype=torch.int64), self._flags.device)] |= flag

    def release(self, slot: int) -> None:
        """Frees a slot without a kernel launch, because the garbage collector may call this during a CUDA graph capture."""
        self._free.append(slot)

    def forget_rows(self) -> None:
        """Drops the references to the rows of the last call of apply()."""
        self._rows = []

    def apply(self, logits: Tensor, rows: Sequence["TablePenalties"]) -> Tensor:
        """Applies each row's penalties, and returns the changed logits (B,V) in float32."""
        slots, last = to_device(torch.tensor([[row.slot for row in rows], [row.pop_last() for row in rows]]), logits.device)
        if [*rows] != self._rows:
            self._rows = [*rows]
            self._options = to_device(torch.tensor([row.options for row in rows], dtype=torch.float64), logits.device)
        return penalize(logits, self._counts, self._flags, slots, last, self._options)


class TablePenalties:
    """Applies the penalties of one row, whose counts are in a PenaltyTable."""

    def __init__(self, table: PenaltyTable, options: Sampling, prompt: Collection[int], exempt: Collection[int]) -> None:
        self.table = table
        self.options = (options.repetition_penalty, options.presence_penalty, options.frequency_penalty, options.penalty_decay)
        self._prompt_ids = prompt
        self._exempt_ids = exempt
        self._uncounted_token = -1

    @cached_property
    def slot(self) -> int:
        slot = self.table.slot()
        self.table.mark(slot, self._prompt_ids, 1)
        self.table.mark(slot, self._exempt_ids, 4)
        weakref.finalize(self, self.table.release, slot)
        return slot

    def add(self, token: int) -> None:
        self._uncounted_token = token

    def pop_last(self) -> int:
        """Returns the token that add() has received since the last call, or -1 if there was no token."""
        last = self._uncounted_token
        self._uncounted_token = -1
        return last

    @staticmethod
    def apply_all(logits: Tensor, rows: Sequence["TablePenalties"]) -> Tensor:
        """Applies each row's penalties, and returns the changed logits (B,V) in float32."""
        return rows[0].table.apply(logits, rows)


AllPenalties = Sequence[Penalties] | Sequence[TablePenalties]


def next_tokens(logits: Tensor, uniform: Tensor, options: Sampling,
                penalties: AllPenalties | None = None, draw: Draw | None = None) -> Tensor:
    """Draws the next token of each row, and returns the tokens (B,) as int64 on the CPU.

    Raises UserError if the logits are not finite.

    Args:
        logits (B,V): the model's logits.
        uniform (B,): one random number in [0, 1) per row.
        penalties: one element per row, or None if `options` has no penalties.
        draw: the kernels/draw function for the device of the logits; None draws with PyTorch on the CPU.
    """
    tokens = to_host([queue_tokens(logits, uniform, options, penalties, draw)])
    if bool((tokens < 0).any()):
        raise not_finite_error()
    return tokens


def queue_tokens(logits: Tensor, uniform: Tensor, options: Sampling,
                 penalties: AllPenalties | None = None, draw: Draw | None = None) -> Tensor:
    """Draws as next_tokens does, but without synchronising with the GPU. The tokens stay on the device where they were drawn.

    A row gets the token -1 if its logits are not finite.
    """
    logits = logits.float()
    if options.temperature == 0:
        logits = adjust_logits(logits, options, penalties)
        return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    if draw is None:
        logits = adjust_logits(logits.cpu(), options, penalties)
        finite = logits.amax(-1).isfinite()
        ids, probabilities = distribution(torch.where(finite.unsqueeze(-1), logits, 0.0), options)
        drawn = pick(probabilities, uniform)
        return torch.where(finite, drawn if ids is None else ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), -1)
    if penalties is not None:            # adjust_logits adds the bias, too, because the bias must precede the penalties
        return draw(adjust_logits(logits, options, penalties), uniform, draw_filters(options), NO_BIAS)
    return draw(logits, uniform, draw_filters(options), draw_bias(options))


def to_host(drawn: Sequence[Tensor]) -> Tensor:
    """Concatenates results of queue_tokens and copies them to the CPU. Sampling waits for a GPU only here."""
    return torch.cat([*drawn]).cpu()


def adjust_logits(logits: Tensor, options: Sampling, penalties: AllPenalties | None) -> Tensor:
    """Returns the logits (B,V) with logit_bias, banned tokens and penalties applied. The argument is not changed."""
    if options.logit_bias or options.banned or penalties is not None:
        logits = logits.clone()
    if options.logit_bias:               # in one operation, because a request may bias every token of the vocabulary
        bias = draw_bias(options)
        logits.index_add_(1, to_device(bias.ids, logits.device), to_device(bias.values, logits.device).expand(len(logits), -1))
    if options.banned:
        logits.index_fill_(1, to_device(torch.tensor([*options.banned]), logits.device), -torch.inf)
    if not penalties:
        return logits
    return cast(Any, type(penalties[0])).apply_all(logits, penalties)    # all penalties are of one class


def distribution(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """Returns the ids (B,N) and the probabilities (B,N) of the tokens that the filters leave.

    The ids are None if the filters leave the whole vocabulary, whose ids are then in order.
    """
    ids, candidates = _filter_candidates(logits, options)
    if options.min_p > 0:
        threshold = candidates.amax(-1, keepdim=True) + math.log(options.min_p)
        candidates = candidates.masked_fill(candidates < threshold, -torch.inf)
    if options.order == "rwkv":
        candidates = candidates / options.temperature
    return ids, torch.softmax(candidates, -1)


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Returns the index (B,) at which the cumulative probability of each row (B,N) first exceeds `uniform` (B,).

    The block that contains the index is found first, because a cumulative sum over a whole vocabulary takes ten times as long.
    """
    N = probabilities.shape[-1]
    full = N // BLOCK * BLOCK
    sums = torch.cat((probabilities[:, :full].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64),
                      probabilities[:, full:].sum(-1, keepdim=True, dtype=torch.float64)), 1)
    ends = sums.cumsum(-1)
    target = uniform.double().unsqueeze(-1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)
    ids = block * BLOCK + torch.arange(min(BLOCK, N), device=block.device)
    cumulative = probabilities.gather(-1, ids.clamp(max=N - 1)).double().masked_fill(ids >= N, 0).cumsum(-1)
    upper_limit = cumulative[:, -1:].nextafter(cumulative.new_zeros(1))  # keeps every index below the end
    target_in_block = torch.minimum(target - (ends - sums).gather(-1, block), upper_limit)
    return ids.gather(-1, torch.searchsorted(cumulative, target_in_block, right=True)).squeeze(-1)


def _filter_candidates(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """Returns the ids (B,N) and the logits (B,N) of the tokens that top_k keeps, with the likeliest token first.

    A logit is -inf if top_p removes the token. Each row's maximum is subtracted from the logits. If both filters are off, the
    ids are None and the logits are not sorted.
    """
    V = logits.shape[-1]
    largest = logits.amax(-1, keepdim=True)
    top_k = min(options.top_k or V, V)

    def scale(logits: Tensor) -> Tensor:
        return (logits - largest) / (options.temperature if options.order == "hf" else 1)

    if top_k == V and options.top_p >= 1:
        return None, scale(logits)
    if options.order == "hf" and top_k < V:
        values, ids = _top_logits(logits, top_k)
        return ids, _filter_top_p(scale(values), _sum_exp(scale(values)), options.top_p)
    total = _sum_exp(scale(logits))
    N = SHORTLIST if options.top_p < 1 else top_k
    while True:                          # ends when the N likeliest tokens include all that top_p or top_k keeps
        values, ids = _top_logits(logits, min(N, top_k))
        if N >= top_k or bool((_sum_exp(scale(values)) >= options.top_p * total).all()):
            return ids, _filter_top_p(scale(values), total, options.top_p)
        N *= 8


def _top_logits(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns the n largest logits (B,n) of each row, and their ids (B,n). Among equal logits, the lowest id comes first.

    The temperature must not have been applied yet, because the division may round different logits to the same number.
    """
    values, ids = logits.topk(n)
    least = values[:, -1:].clamp(min=torch.finfo(logits.dtype).min)          # tokens with -inf are never drawn
    most = int((logits >= least).sum(-1).max())
    if most > n:                         # topk may have picked any of the equal logits
        _, ids = logits.topk(most)
    ids = ids.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[:, :n], ids.gather(-1, order)[:, :n]


def _sum_exp(logits: Tensor) -> Tensor:
    return logits.exp().sum(-1, keepdim=True, dtype=torch.float64)


def _filter_top_p(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    """Returns the logits (B,N), which must be in descending order, with -inf for the tokens that top_p removes."""
    if top_p >= 1:
        return ordered
    weights = ordered.exp().double()
    before = weights.cumsum(-1) - weights
    return ordered.masked_fill(before >= top_p * total, -torch.inf)


def not_finite_error() -> UserError:
    return UserError("the model's logits are not finite: the weights are damaged, or too large for this dtype")
