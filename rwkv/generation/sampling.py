"""From logits to the next token: the filters, and one draw per row with the row's own random number.

The steps with order=hf (as in Hugging Face's transformers): logit bias and banned tokens; repetition, presence and frequency
penalties; temperature; top_k; top_p, as a share of the probability that top_k has left; min_p; the draw. With order=rwkv (as in
ChatRWKV) top_p, top_k and min_p come before the temperature, which then acts on the remaining tokens.

The penalties of a row, for a token that is in its prompt or its text:

    logit = logit / repetition_penalty where it is above 0, else logit * repetition_penalty
    logit = logit - presence_penalty - count * frequency_penalty                where it is in the text

After each draw all counts are multiplied by penalty_decay, and then 1 is added to the count of the token drawn. BlinkDL's
ChatRWKV, API_DEMO_CHAT.py, does the same with `occurrence`; presence_penalty does not fade there either. Penalties leave out
the tokens of no_penalty.

Legend: B rows, V vocabulary, N candidates after the filters. The options: rwkv.config.Sampling.
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
from rwkv.model.decoding.c_step import drawing

BLOCK = 512                              # tokens of a block, whose probabilities are added up first
SHORTLIST = 256                          # candidates sorted at first: sorting a whole vocabulary takes milliseconds


@cache
def drawing_on(device: torch.device, in_c: bool) -> tuple[Draw | None, torch.device]:
    """The function of kernels/draw for logits on this device, None for PyTorch, and the device on which tokens are drawn.

    in_c: the decoding step is C. A GPU without Triton has its tokens drawn on the CPU.
    """
    name = resolve("draw", AUTO, device)
    if device.type == "cuda" and registry.why_not("draw", name, "cuda") is None:
        return registry.load("draw", name).draw, device
    return drawing() if in_c or device.type != "cpu" else None, torch.device("cpu")


def filters_of(options: Sampling) -> Filters:
    """The options for kernels/draw, at a temperature above 0."""
    same = {name: getattr(options, name) for name in Filters._fields if name != "filters_first"}
    return Filters(**same, filters_first=options.order == "rwkv")


@lru_cache(maxsize=64)
def bias_of(options: Sampling) -> Bias:
    """logit_bias and the banned tokens, for kernels/draw."""
    values = [*options.logit_bias.items(), *((token, -math.inf) for token in options.banned)]
    ids = torch.tensor([token for token, _ in values], dtype=torch.int32, device="cpu")
    return Bias(ids, torch.tensor([bias for _, bias in values], dtype=torch.float32, device="cpu"))


class Penalties:
    """The penalties of one row. Memory and time grow with the number of different tokens in its prompt and its text.

    without: ids that no penalty changes.
    """

    def __init__(self, options: Sampling, prompt: Collection[int] = (), without: Collection[int] = ()) -> None:
        self._options = options
        self._without = frozenset(without)
        in_prompt = {*prompt} - self._without if options.repetition_penalty != 1 else ()
        self._ids = torch.tensor([*in_prompt], dtype=torch.int64, device="cpu")    # (n) different tokens, new ones last
        self._counts = torch.zeros(len(self._ids), dtype=torch.float64, device="cpu")
        self._in_text = torch.zeros_like(self._counts)   # 0 or 1
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def add(self, token: int) -> None:
        self._counts *= self._options.penalty_decay
        if token in self._without:
            return
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, self._ids.new_tensor([token])))
            self._counts = torch.cat((self._counts, self._counts.new_zeros(1)))
            self._in_text = torch.cat((self._in_text, self._in_text.new_zeros(1)))
        self._counts[place] += 1
        self._in_text[place] = 1

    def apply(self, logits: Tensor) -> None:
        """Changes the row's logits (V) float32 in place."""
        if not len(self._ids):
            return
        options = self._options
        own = logits[self._ids].double()
        if options.repetition_penalty != 1:
            own = torch.where(own > 0, own / options.repetition_penalty, own * options.repetition_penalty)
        own = own - options.presence_penalty * self._in_text - options.frequency_penalty * self._counts
        logits.index_copy_(0, self._ids, own.float())

    @staticmethod
    def apply_all(logits: Tensor, rows: Sequence["Penalties"]) -> Tensor:
        """The logits (B,V) float32 after the penalties of each row, which may be the same tensor, changed."""
        for number, penalties in enumerate(rows):
            penalties.apply(logits[number])
        return logits


class PenaltyTable:
    """The penalties of rows whose logits are on a GPU: counts of V tokens for each, in float64, as in kernels/draw.

    A row has a slot from its first logits on, until it is deleted. A slot takes 9 V bytes.
    """

    def __init__(self, V: int, device: torch.device) -> None:
        self._counts = torch.zeros(0, V, dtype=torch.float64, device=device)
        self._flags = torch.zeros(0, V, dtype=torch.uint8, device=device)
        self._free: list[int] = []
        self._rows: list[TablePenalties] = []            # of the last call
        self._options = torch.empty(0)

    def row(self, options: Sampling, prompt: Collection[int] = (), without: Collection[int] = ()) -> "TablePenalties":
        """As Penalties."""
        return TablePenalties(self, options, prompt, without)

    def slot(self) -> int:
        """A free slot, with zeros."""
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
        """Launches nothing: the garbage collector may call it in any thread, and while a CUDA graph is captured."""
        self._free.append(slot)

    def forget(self) -> None:
        """Lets go of the rows of the last call."""
        self._rows = []

    def apply(self, logits: Tensor, rows: Sequence["TablePenalties"]) -> Tensor:
        """The logits (B,V) float32 after the penalties of each row."""
        slots, last = to_device(torch.tensor([[row.slot for row in rows], [row.take_last() for row in rows]]), logits.device)
        if [*rows] != self._rows:
            self._rows = [*rows]
            self._options = to_device(torch.tensor([row.numbers for row in rows], dtype=torch.float64), logits.device)
        return penalize(logits, self._counts, self._flags, slots, last, self._options)


class TablePenalties:
    """The penalties of one row in a PenaltyTable."""

    def __init__(self, table: PenaltyTable, options: Sampling, prompt: Collection[int], without: Collection[int]) -> None:
        self.table = table
        self.numbers = (options.repetition_penalty, options.presence_penalty, options.frequency_penalty, options.penalty_decay)
        self._prompt = prompt
        self._without = without
        self._last = -1

    @cached_property
    def slot(self) -> int:
        slot = self.table.slot()
        self.table.mark(slot, self._prompt, 1)
        self.table.mark(slot, self._without, 4)
        weakref.finalize(self, self.table.release, slot)
        return slot

    def add(self, token: int) -> None:
        self._last = token

    def take_last(self) -> int:
        """The token added last, which is counted once; -1 for none."""
        last = self._last
        self._last = -1
        return last

    @staticmethod
    def apply_all(logits: Tensor, rows: Sequence["TablePenalties"]) -> Tensor:
        """As Penalties.apply_all."""
        return rows[0].table.apply(logits, rows)


AllPenalties = Sequence[Penalties] | Sequence[TablePenalties]


def next_tokens(logits: Tensor, uniform: Tensor, options: Sampling,
                penalties: AllPenalties | None = None, draw: Draw | None = None) -> Tensor:
    """The next token of each row, (B,) int64 on the CPU, from logits (B,V) and uniform (B,), random numbers from [0, 1).

    penalties: of each row; None if the options have none. draw: a function of kernels/draw for the device of the logits; None
    for PyTorch, which draws on the CPU. Raises UserError where the logits are not finite.
    """
    tokens = on_host([queued_tokens(logits, uniform, options, penalties, draw)])
    if bool((tokens < 0).any()):
        raise not_finite()
    return tokens


def queued_tokens(logits: Tensor, uniform: Tensor, options: Sampling,
                  penalties: AllPenalties | None = None, draw: Draw | None = None) -> Tensor:
    """next_tokens on the device of the logits, without waiting for it: -1 for a row whose logits are not finite."""
    logits = logits.float()
    if options.temperature == 0:
        logits = changed(logits, options, penalties)
        return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    if draw is None:
        logits = changed(logits.cpu(), options, penalties)
        finite = logits.amax(-1).isfinite()
        ids, probabilities = distribution(torch.where(finite.unsqueeze(-1), logits, 0.0), options)
        drawn = pick(probabilities, uniform)
        return torch.where(finite, drawn if ids is None else ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), -1)
    if penalties is not None:            # they act on biased logits
        return draw(changed(logits, options, penalties), uniform, filters_of(options), NO_BIAS)
    return draw(logits, uniform, filters_of(options), bias_of(options))


def on_host(drawn: Sequence[Tensor]) -> Tensor:
    """The results of several calls of queued_tokens, one after the other, on the CPU: the one point at which the host waits for
    a GPU."""
    return torch.cat([*drawn]).cpu()


def changed(logits: Tensor, options: Sampling, penalties: AllPenalties | None) -> Tensor:
    """The logits (B,V) after bias, bans and penalties. The tensor that is given does not change."""
    if options.logit_bias or options.banned or penalties is not None:
        logits = logits.clone()
    for token, bias in options.logit_bias.items():
        logits[:, token] += bias
    if options.banned:
        logits.index_fill_(1, to_device(torch.tensor([*options.banned]), logits.device), -torch.inf)
    if not penalties:
        return logits
    return cast(Any, type(penalties[0])).apply_all(logits, penalties)    # all rows of a group are of one class


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

    The block with this index is found first: a cumulative sum over a whole vocabulary takes ten times as long.
    """
    N = probabilities.shape[-1]
    whole = N // BLOCK * BLOCK
    sums = torch.cat((probabilities[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64),
                      probabilities[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), 1)
    ends = sums.cumsum(-1)
    wanted = uniform.double().unsqueeze(-1) * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp(max=ends.shape[-1] - 1)
    ids = block * BLOCK + torch.arange(min(BLOCK, N), device=block.device)
    cumulative = probabilities.gather(-1, ids.clamp(max=N - 1)).double().masked_fill(ids >= N, 0).cumsum(-1)
    below_all = cumulative[:, -1:].nextafter(cumulative.new_zeros(1))     # so that no index is past the end
    inside = torch.minimum(wanted - (ends - sums).gather(-1, block), below_all)
    return ids.gather(-1, torch.searchsorted(cumulative, inside, right=True)).squeeze(-1)


def _keep_likeliest(logits: Tensor, options: Sampling) -> tuple[Tensor | None, Tensor]:
    """The ids and logits (B,N) that top_k and top_p leave, the likeliest first; -inf marks a token that top_p drops.

    The logits are those that the filters act on, minus their row's largest. The ids are None if both options are off.
    """
    V = logits.shape[-1]
    largest = logits.amax(-1, keepdim=True)
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
    """The n largest logits of each row and their ids, both (B,n). Among equal ones, those with lower ids come first.

    They are found before the logits are changed, because rounding may make different logits equal.
    """
    values, ids = logits.topk(n)
    least = values[:, -1:].clamp(min=torch.finfo(logits.dtype).min)          # -inf marks tokens that are not drawn
    most = int((logits >= least).sum(-1).max())
    if most > n:                         # topk has chosen among equal logits
        _, ids = logits.topk(most)
    ids = ids.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[:, :n], ids.gather(-1, order)[:, :n]


def _weight(logits: Tensor) -> Tensor:
    """The sum of the exponentials of each row, (B,1) float64. No logit is above 0."""
    return logits.exp().sum(-1, keepdim=True, dtype=torch.float64)


def _keep_top_p(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    """The logits (B,N), the likeliest first, with -inf where the tokens before already have the share top_p of `total`."""
    if top_p >= 1:
        return ordered
    weights = ordered.exp().double()
    before = weights.cumsum(-1) - weights
    return ordered.masked_fill(before >= top_p * total, -torch.inf)


def not_finite() -> UserError:
    return UserError("the model's logits are not finite: its weights are damaged, or too large for this dtype")
