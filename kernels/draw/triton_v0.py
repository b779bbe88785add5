"""A program for each row, which sorts nothing: top_k, top_p and the draw are each a search for a logit.

The tokens that the filters can keep are first copied to a list, in the order of the vocabulary. In the order of logits, the
weight of all tokens before one is S(logit) + rank * weight, where S sums the weights of all larger logits and rank counts the
equal logits earlier in the vocabulary. S falls as the logit rises, so a search finds the logit at which S passes a bound bit
by bit: 32 sums over the list, mostly of a few hundred tokens, in float64.
"""

# mypy: disable-error-code="no-untyped-def"
import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backends.transfer import to_device
from kernels.draw import Bias, Filters
from kernels.registry import Requires

REQUIRES = Requires(packages=("triton",), devices=("cuda",))

BLOCK, LISTED = 4096, 1024               # tokens of the vocabulary, and of the list, that a program holds at a time
PART = 64                                # tokens of which the likeliest stands for all, when top_k looks for a bound
LEAST = tl.constexpr(-3.4028234663852886e38)             # the smallest finite logit: a token at -inf is never drawn


def draw(logits: Tensor, uniform: Tensor, filters: Filters, bias: Bias) -> Tensor:
    rows, V = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return drawn
    if len(bias.ids):
        logits = _biased(logits, bias)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    top_k = filters.top_k if filters.top_k < V else 0
    filtered = bool(top_k or filters.top_p < 1 or filters.min_p > 0)
    listed = V + PART if filtered else 0
    numbers = logits.new_empty(rows, listed, dtype=torch.float32)
    ids = logits.new_empty(rows, listed, dtype=torch.int32)
    block = min(BLOCK, max(PART, triton.next_power_of_2(V)))
    with torch.cuda.device_of(logits):
        _draw[(rows,)](logits, to_device(uniform.double(), logits.device), drawn, numbers, ids, logits.stride(0), V, listed,
                       _float32(1 / _float32(filters.temperature)), top_k, _float32(filters.top_p), _float32(filters.min_p),
                       FILTERED=filtered,
                       TOP_K=top_k > 0, IN_ORDER=bool(top_k or filters.top_p < 1),
                       FILTERS_FIRST=filtered and filters.filters_first, BLOCK=block,
                       PARTS=triton.next_power_of_2(triton.cdiv(V, PART)), LISTED=min(LISTED, block), PART=PART, num_warps=8,
                       enable_fp_fusion=True)
    return drawn


def _float32(value: float) -> float:
    """The value in float32, as C reads it, and as a GPU receives a kernel's float; the interpreter would keep 64 bits."""
    return ctypes.c_float(value).value


def _biased(logits: Tensor, bias: Bias) -> Tensor:
    """A copy of the logits with the bias added. Whatever depends on its values is computed on the host."""
    banned = bias.values == -torch.inf
    values = to_device(torch.where(banned, 0.0, bias.values), logits.device)
    logits = logits.float().clone()
    logits.index_add_(1, to_device(bias.ids.long(), logits.device), values.expand(len(logits), -1))
    return logits.index_fill_(1, to_device(bias.ids[banned].long(), logits.device), -torch.inf)


@triton.jit
def _weights(x, top, scale):
    """e^((x - top) scale); 0 below e^-80."""
    exponent = (x - top) * scale
    return tl.where(exponent >= -80.0, tl.exp(exponent), 0.0)


@triton.jit
def _key(x):
    """An integer in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _logits(row, first, V, BLOCK: tl.constexpr):
    """BLOCK logits of a row from `first` on; -inf after the last one."""
    c = first + tl.arange(0, BLOCK)
    return tl.load(row + c, mask=c < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _listed(numbers, ids, n, first, LISTED: tl.constexpr):
    """Part of the list: the logits, ids, and which of these exist."""
    place = first + tl.arange(0, LISTED)
    inside = place < n
    return tl.load(numbers + place, mask=inside, other=-float("inf")), tl.load(ids + place, mask=inside, other=0), inside


@triton.jit
def _chosen_weights(x, inside, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr):
    """The weights with which tokens of the list are drawn: 0 for those that min_p drops."""
    weight = _weights(x, top, scale)
    likely = inside & tl.where(min_p < 1, weight >= min_p, x == top)
    if FILTERS_FIRST:
        weight = _weights(x, top, last_scale)
    return tl.where(likely, weight, 0.0).to(tl.float64)


@triton.jit
def _summands(x, inside, top, scale, last_scale, min_p, WHAT: tl.constexpr, FILTERS_FIRST: tl.constexpr):
    """What _search sums for each token of a part of the list."""
    if WHAT == "count":
        summand = inside.to(tl.float64)
    elif WHAT == "weight":
        summand = tl.where(inside, _weights(x, top, scale), 0.0).to(tl.float64)
    else:
        summand = _chosen_weights(x, inside, top, scale, last_scale, min_p, FILTERS_FIRST)
    return summand


@triton.jit
def _search(numbers, ids, n, low, bound, top, scale, last_scale, min_p, WHAT: tl.constexpr, FILTERS_FIRST: tl.constexpr,
            LISTED: tl.constexpr):
    """The smallest key q, at least `low`, at which the sum over tokens with larger keys is below the bound, or for "draw" at
    most the bound; that sum; and the number and weight of the tokens at q.

    WHAT: "count" sums the number of tokens, "weight" their weights before the filters, "draw" those with which they are drawn.
    """
    high = tl.full([], 2147483647, tl.int64)             # q is in low .. high
    while low < high:
        middle = (low + high) >> 1
        total = tl.zeros([], tl.float64)
        for first in range(0, n, LISTED):
            x, _ids, inside = _listed(numbers, ids, n, first, LISTED)
            summand = _summands(x, inside, top, scale, last_scale, min_p, WHAT, FILTERS_FIRST)
            total += tl.sum(tl.where(_key(x).to(tl.int64) > middle, summand, 0.0), 0)
        enough = total <= bound if WHAT == "draw" else total < bound
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    above = tl.zeros([], tl.float64)
    equal = tl.zeros([], tl.float64)
    at_key = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, _ids, inside = _listed(numbers, ids, n, first, LISTED)
        summand = _summands(x, inside, top, scale, last_scale, min_p, WHAT, FILTERS_FIRST)
        above += tl.sum(tl.where(_key(x).to(tl.int64) > low, summand, 0.0), 0)
        at = inside & (_key(x).to(tl.int64) == low) & (summand > 0)
        at_key += tl.sum(at.to(tl.int32), 0)
        equal = tl.maximum(equal, tl.max(tl.where(at, summand, 0.0), 0))
    return low, above, at_key, equal


@triton.jit
def _keep(numbers, ids, n, key, ties, LISTED: tl.constexpr):
    """Leaves in the list the tokens with larger keys, and the first `ties` with this one. Returns how many these are."""
    n_kept = tl.zeros([], tl.int32)
    seen = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token, inside = _listed(numbers, ids, n, first, LISTED)
        keys = _key(x).to(tl.int64)
        tie = (inside & (keys == key)).to(tl.int32)
        stays = inside & ((keys > key) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= ties)))
        place = n_kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.debug_barrier()               # the whole part has been loaded, and may be overwritten
        tl.store(numbers + place, x, mask=stays)
        tl.store(ids + place, token, mask=stays)
        n_kept += tl.sum(stays.to(tl.int32), 0)
        seen += tl.sum(tie, 0)
        tl.debug_barrier()
    return n_kept


@triton.jit
def _logit_of_likeliest(row, numbers, V, k, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """A lower bound of the k-th largest logit: the k-th largest maximum over parts of the vocabulary."""
    for first in range(0, V, BLOCK):
        x = _logits(row, first, V, BLOCK)
        part = first // PART + tl.arange(0, BLOCK // PART)
        largest = tl.max(tl.reshape(x, (BLOCK // PART, PART)), 1)
        tl.store(numbers + part, largest, mask=part * PART < V)
    tl.debug_barrier()
    part = tl.arange(0, PARTS)
    in_parts = part * PART < V
    keys = _key(tl.load(numbers + part, mask=in_parts, other=-float("inf"))).to(tl.int64)
    tl.debug_barrier()                   # the list will use the same memory
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    while low < high:                    # the largest key that k parts reach
        middle = (low + high + 1) >> 1
        reached = tl.sum((in_parts & (keys >= middle)).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    least = tl.min(tl.where(in_parts & (keys >= low), keys, 2147483647), 0)
    key = tl.where(low == -2147483648, -2147483648, least).to(tl.int32)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    logit = bits.to(tl.float32, bitcast=True)
    return tl.where(logit >= LEAST, logit, LEAST)        # NaN for too few parts


@triton.jit
def _largest(row, V, BLOCK: tl.constexpr):
    """The largest logit of the row, and whether it is finite and no logit is NaN."""
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, BLOCK):
        x = _logits(row, first, V, BLOCK)
        wrong |= (x != x).to(tl.int32)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    return top, (tl.max(wrong, 0) == 0) & (top - top == 0)


@triton.jit
def _total_weight(row, V, top, scale, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, V, BLOCK):
        sums += _weights(_logits(row, first, V, BLOCK), top, scale).to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _list_likely(row, numbers, ids, V, least_logit, least_weight, top, scale, BLOCK: tl.constexpr):
    """Lists the tokens with at least that logit and that weight, in the order of the vocabulary. Returns their number."""
    n = tl.zeros([], tl.int32)
    for first in range(0, V, BLOCK):
        x = _logits(row, first, V, BLOCK)
        likely = (x >= least_logit) & (_weights(x, top, scale) >= least_weight)
        place = n + tl.cumsum(likely.to(tl.int32), 0) - 1
        tl.store(numbers + place, x, mask=likely)
        tl.store(ids + place, first + tl.arange(0, BLOCK), mask=likely)
        n += tl.sum(likely.to(tl.int32), 0)
    tl.debug_barrier()
    return n


@triton.jit
def _listed_weight(numbers, ids, n, top, scale, LISTED: tl.constexpr):
    sums = tl.zeros([LISTED], tl.float64)
    for first in range(0, n, LISTED):
        x, _ids, inside = _listed(numbers, ids, n, first, LISTED)
        sums += tl.where(inside, _weights(x, top, scale), 0.0).to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _keep_top_k(numbers, ids, n, top_k, top, scale, lowest, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    """Leaves the top_k likeliest tokens in the list. Returns their number."""
    key, above, _ties, _one = _search(numbers, ids, n, lowest, top_k, top, scale, 0.0, 0.0, "count", FILTERS_FIRST, LISTED)
    return _keep(numbers, ids, n, key, (top_k - above).to(tl.int32), LISTED)


@triton.jit
def _keep_top_p(numbers, ids, n, bound, top, scale, lowest, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    """Leaves the fewest likeliest tokens in the list whose weights add up to the bound. Returns their number."""
    key, above, _ties, weight = _search(numbers, ids, n, lowest, bound, top, scale, 0.0, 0.0, "weight", FILTERS_FIRST, LISTED)
    ties = tl.where(weight > 0, tl.ceil((bound - above) / tl.where(weight > 0, weight, 1.0)), 1.0)
    return _keep(numbers, ids, n, key, tl.minimum(tl.maximum(ties, 1.0), 2147483647.0).to(tl.int32), LISTED)


@triton.jit
def _draw_by_logit(numbers, ids, n, target, least, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr,
                   LISTED: tl.constexpr):
    """The token of the list at which the cumulative weight exceeds `target`, the largest logits first. least: the key of the
    last token that can be drawn, which is taken if rounding leads beyond it."""
    key, above, ties, weight = _search(numbers, ids, n, least, target, top, scale, last_scale, min_p, "draw", FILTERS_FIRST,
                                       LISTED)
    rank = tl.minimum((target - above) / tl.where(weight > 0, weight, 1.0), tl.maximum(ties, 1) - 1.0).to(tl.int32)
    token = tl.zeros([], tl.int32)
    seen = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token_ids, inside = _listed(numbers, ids, n, first, LISTED)
        tie = inside & (_key(x).to(tl.int64) == key)
        place = seen + tl.cumsum(tie.to(tl.int32), 0) - 1
        token += tl.sum(tl.where(tie & (place == rank), token_ids, 0), 0)
        seen += tl.sum(tie.to(tl.int32), 0)
    return token


@triton.jit
def _draw_by_place(numbers, ids, n, target, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    """The same in the order of the vocabulary."""
    token = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    last = tl.zeros([], tl.int32)
    done = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token_ids, inside = _listed(numbers, ids, n, first, LISTED)
        weight = _chosen_weights(x, inside, top, scale, last_scale, min_p, FILTERS_FIRST)
        past = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
        first_past = tl.min(tl.where(past, token_ids, 2147483647), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token_ids, 0), 0))
        token = tl.where((done == 0) & (first_past < 2147483647), first_past, token)
        done |= (first_past < 2147483647).to(tl.int32)
        before += tl.sum(weight, 0)
    return tl.where(done > 0, token, last)


@triton.jit
def _draw_listed(numbers, ids, n, uniform, top, scale, last_scale, min_p, IN_ORDER: tl.constexpr, FILTERS_FIRST: tl.constexpr,
                 LISTED: tl.constexpr):
    """A token of the list. IN_ORDER: of the logits, else of the vocabulary."""
    sums = tl.zeros([LISTED], tl.float64)
    least = tl.full([], 2147483647, tl.int64)            # the smallest key of a token that can be drawn
    for first in range(0, n, LISTED):
        x, _ids, inside = _listed(numbers, ids, n, first, LISTED)
        weight = _chosen_weights(x, inside, top, scale, last_scale, min_p, FILTERS_FIRST)
        least = tl.minimum(least, tl.min(tl.where(weight > 0, _key(x).to(tl.int64), 2147483647), 0))
        sums += weight
    target = uniform * tl.sum(sums, 0)
    if IN_ORDER:
        token = _draw_by_logit(numbers, ids, n, target, least, top, scale, last_scale, min_p, FILTERS_FIRST, LISTED)
    else:
        token = _draw_by_place(numbers, ids, n, target, top, scale, last_scale, min_p, FILTERS_FIRST, LISTED)
    return token


@triton.jit
def _draw_unfiltered(row, V, target, top, scale, BLOCK: tl.constexpr):
    """The token of the vocabulary at which the cumulative weight exceeds `target`: its block is found first."""
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.float64)
    start = tl.zeros([], tl.int32)       # of the block, and the sum before that block
    before_start = tl.zeros([], tl.float64)
    done = tl.zeros([], tl.int32)
    for first in range(0, V, BLOCK):
        block_weight = tl.sum(_weights(_logits(row, first, V, BLOCK), top, scale).to(tl.float64), 0)
        start = tl.where((done == 0) & (block_weight > 0), first, start)
        before_start = tl.where((done == 0) & (block_weight > 0), before, before_start)
        before += block_weight
        done |= (before > target).to(tl.int32)
    weight = _weights(_logits(row, start, V, BLOCK), top, scale).to(tl.float64)
    past = (before_start + tl.cumsum(weight, 0) > target) & (weight > 0)
    token = tl.min(tl.where(past, start + lane, 2147483647), 0)
    last = tl.max(tl.where(weight > 0, start + lane, 0), 0)
    return tl.where(token < 2147483647, token, last)


@triton.jit(do_not_specialize=["top_k"])  # 1 and multiples of 16 would be compiled on their own
def _draw(logits, uniform, drawn, numbers, ids, stride, V, listed, inverse_temperature, top_k, top_p, min_p,
          FILTERED: tl.constexpr, TOP_K: tl.constexpr, IN_ORDER: tl.constexpr, FILTERS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
          PARTS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    numbers += number * listed
    ids += number * listed
    top, finite = _largest(row, V, BLOCK)
    scale = inverse_temperature
    if FILTERS_FIRST:
        scale = 1.0
    total = _total_weight(row, V, top, scale, BLOCK)
    u = tl.load(uniform + number)
    if FILTERED:
        least_logit = tl.full([], LEAST, tl.float32)
        least_weight = tl.full([], 0.0, tl.float32)
        if TOP_K:
            least_logit = _logit_of_likeliest(row, numbers, V, top_k, BLOCK, PARTS, PART)
        else:                            # tokens with less add up to less than what top_p drops
            least_weight = tl.where(top_p < 1, 0.99 * (1 - top_p) * total / V, 1e-36).to(tl.float32)
            least_weight = tl.maximum(least_weight, min_p)
        n = _list_likely(row, numbers, ids, V, least_logit, least_weight, top, scale, BLOCK)
        lowest = tl.full([], -2147483648, tl.int64)
        if TOP_K:
            n = _keep_top_k(numbers, ids, n, top_k, top, scale, lowest, FILTERS_FIRST, LISTED)
            if not FILTERS_FIRST:        # top_p is a share of what top_k leaves
                total = _listed_weight(numbers, ids, n, top, scale, LISTED)
        if top_p < 1:
            n = _keep_top_p(numbers, ids, n, top_p * total, top, scale, lowest, FILTERS_FIRST, LISTED)
        token = _draw_listed(numbers, ids, n, u, top, scale, inverse_temperature, min_p, IN_ORDER, FILTERS_FIRST, LISTED)
    else:
        token = _draw_unfiltered(row, V, u * total, top, scale, BLOCK)
    tl.store(drawn + number, tl.where(finite, token, -1).to(tl.int64))
