"""A program samples one row without sorting, because top_k, top_p and the draw are each a binary search for a logit.

The tokens that may pass the filters are first copied to a list, in the order of the vocabulary. In descending order of logits,
the cumulative weight before a token is S(logit) + rank * weight. S(logit) is the sum of the weights of all larger logits, and
rank is the number of equal logits earlier in the vocabulary. S falls as the logit rises, so a binary search over the 32 bits of
a float finds the logit at which S passes a bound. The search computes 32 float64 sums over the list, which usually contains a
few hundred tokens.
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

BLOCK, LISTED = 4096, 1024               # tokens of the vocabulary, and of the list, that a program loads at a time
PART = 64                                # tokens per maximum in the lower bound for top_k
LEAST = tl.constexpr(-3.4028234663852886e38)             # the smallest finite logit; tokens at -inf are never drawn


def draw(logits: Tensor, uniform: Tensor, filters: Filters, bias: Bias) -> Tensor:
    rows, V = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return drawn
    if len(bias.ids):
        logits = _add_bias(logits, bias)
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
                       FILTERED=filtered, TOP_K=top_k > 0, IN_ORDER=bool(top_k or filters.top_p < 1),
                       FILTERS_FIRST=filtered and filters.filters_first, ALIGNED=V % 16 == logits.stride(0) % 16 == 0,
                       BLOCK=block, PARTS=triton.next_power_of_2(triton.cdiv(V, PART)), LISTED=min(LISTED, block), PART=PART,
                       num_warps=8, enable_fp_fusion=True)
    return drawn


def _float32(value: float) -> float:
    """Returns the value rounded to float32, as on a GPU. Triton's interpreter would keep 64 bits."""
    return ctypes.c_float(value).value


def _add_bias(logits: Tensor, bias: Bias) -> Tensor:
    """Returns a copy of the logits plus the bias. The host finds banned tokens (a bias of -inf) without waiting for the GPU."""
    banned = bias.values == -torch.inf
    values = to_device(torch.where(banned, 0.0, bias.values), logits.device)
    logits = logits.float().clone()
    logits.index_add_(1, to_device(bias.ids.long(), logits.device), values.expand(len(logits), -1))
    return logits.index_fill_(1, to_device(bias.ids[banned].long(), logits.device), -torch.inf)


@triton.jit
def _weights(x, top, scale):
    """Returns the weights e^((x - top) scale), or 0 for weights below e^-80."""
    exponent = (x - top) * scale
    return tl.where(exponent >= -80.0, tl.exp(exponent), 0.0)


@triton.jit
def _key(x):
    """Returns the int32 keys of floats, which have the same order as the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _logits(row, first, V, BLOCK: tl.constexpr):
    """Returns BLOCK logits of a row, starting at `first`, with -inf beyond the vocabulary."""
    c = first + tl.arange(0, BLOCK)
    return tl.load(row + c, mask=c < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _load_listed(numbers, ids, n, first, LISTED: tl.constexpr):
    """Returns the logits, token ids and mask of LISTED entries of the list, starting at `first`."""
    place = first + tl.arange(0, LISTED)
    inside = place < n
    return tl.load(numbers + place, mask=inside, other=-float("inf")), tl.load(ids + place, mask=inside, other=0), inside


@triton.jit
def _chosen_weights(x, inside, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr):
    """Returns the weights by which tokens are drawn, which are 0 for tokens that min_p drops."""
    weight = _weights(x, top, scale)
    likely = inside & tl.where(min_p < 1, weight >= min_p, x == top)
    if FILTERS_FIRST:
        weight = _weights(x, top, last_scale)
    return tl.where(likely, weight, 0.0).to(tl.float64)


@triton.jit
def _summands(x, inside, top, scale, last_scale, min_p, WHAT: tl.constexpr, FILTERS_FIRST: tl.constexpr):
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
    """Finds the smallest key q >= low for which the sum over tokens with larger keys is below (for "draw": at most) `bound`.

    WHAT names a token's summand: "count" is 1, "weight" is the weight before the filters, and "draw" is the weight by which the
    token is drawn. Returns q, the sum over larger keys, the number of tokens with key q, and the summand of such a token.
    """
    high = tl.full([], 2147483647, tl.int64)             # low <= q <= high
    while low < high:
        middle = (low + high) >> 1
        total = tl.zeros([], tl.float64)
        for first in range(0, n, LISTED):
            x, _ids, inside = _load_listed(numbers, ids, n, first, LISTED)
            summand = _summands(x, inside, top, scale, last_scale, min_p, WHAT, FILTERS_FIRST)
            total += tl.sum(tl.where(_key(x).to(tl.int64) > middle, summand, 0.0), 0)
        enough = total <= bound if WHAT == "draw" else total < bound
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    above = tl.zeros([], tl.float64)
    equal = tl.zeros([], tl.float64)
    at_key = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, _ids, inside = _load_listed(numbers, ids, n, first, LISTED)
        summand = _summands(x, inside, top, scale, last_scale, min_p, WHAT, FILTERS_FIRST)
        above += tl.sum(tl.where(_key(x).to(tl.int64) > low, summand, 0.0), 0)
        at = inside & (_key(x).to(tl.int64) == low) & (summand > 0)
        at_key += tl.sum(at.to(tl.int32), 0)
        equal = tl.maximum(equal, tl.max(tl.where(at, summand, 0.0), 0))
    return low, above, at_key, equal


@triton.jit
def _keep(numbers, ids, n, key, ties, LISTED: tl.constexpr):
    """Keeps in the list only tokens with keys above `key` and the first `ties` tokens with that key. Returns the new length."""
    n_kept = tl.zeros([], tl.int32)
    n_ties = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token, inside = _load_listed(numbers, ids, n, first, LISTED)
        keys = _key(x).to(tl.int64)
        tie = (inside & (keys == key)).to(tl.int32)
        stays = inside & ((keys > key) | ((tie > 0) & (n_ties + tl.cumsum(tie, 0) <= ties)))
        place = n_kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.debug_barrier()               # all threads have loaded these entries, which may now be overwritten
        tl.store(numbers + place, x, mask=stays)
        tl.store(ids + place, token, mask=stays)
        n_kept += tl.sum(stays.to(tl.int32), 0)
        n_ties += tl.sum(tie, 0)
        tl.debug_barrier()
    return n_kept


@triton.jit
def _logit_of_likeliest(row, numbers, V, k, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """Returns a lower bound of the k-th largest logit: the k-th largest of the maxima over parts of the vocabulary."""
    for first in range(0, V, BLOCK):
        x = _logits(row, first, V, BLOCK)
        part = first // PART + tl.arange(0, BLOCK // PART)
        largest = tl.max(tl.reshape(x, (BLOCK // PART, PART)), 1)
        tl.store(numbers + part, largest, mask=part * PART < V)
    tl.debug_barrier()
    part = tl.arange(0, PARTS)
    in_parts = part * PART < V
    keys = _key(tl.load(numbers + part, mask=in_parts, other=-float("inf"))).to(tl.int64)
    tl.debug_barrier()                   # waits until all threads have read this memory, which the list overwrites
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    while low < high:                    # binary search: the largest key with k part maxima at or above
        middle = (low + high + 1) >> 1
        reached = tl.sum((in_parts & (keys >= middle)).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    least = tl.min(tl.where(in_parts & (keys >= low), keys, 2147483647), 0)
    key = tl.where(low == -2147483648, -2147483648, least).to(tl.int32)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    logit = bits.to(tl.float32, bitcast=True)
    return tl.where(logit >= LEAST, logit, LEAST)        # with fewer than k parts `logit` is NaN


@triton.jit
def _largest(row, V, BLOCK: tl.constexpr):
    """Returns the row's largest logit, and whether the logit is finite and the row contains no NaN."""
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
    """Lists the tokens with logits >= least_logit and weights >= least_weight, in vocabulary order. Returns the length."""
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
        x, _ids, inside = _load_listed(numbers, ids, n, first, LISTED)
        sums += tl.where(inside, _weights(x, top, scale), 0.0).to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _keep_top_k(numbers, ids, n, top_k, top, scale, lowest, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    key, above, _ties, _one = _search(numbers, ids, n, lowest, top_k, top, scale, 0.0, 0.0, "count", FILTERS_FIRST, LISTED)
    return _keep(numbers, ids, n, key, (top_k - above).to(tl.int32), LISTED)


@triton.jit
def _keep_top_p(numbers, ids, n, bound, top, scale, lowest, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    key, above, _ties, weight = _search(numbers, ids, n, lowest, bound, top, scale, 0.0, 0.0, "weight", FILTERS_FIRST, LISTED)
    ties = tl.where(weight > 0, tl.ceil((bound - above) / tl.where(weight > 0, weight, 1.0)), 1.0)
    return _keep(numbers, ids, n, key, tl.minimum(tl.maximum(ties, 1.0), 2147483647.0).to(tl.int32), LISTED)


@triton.jit
def _draw_by_logit(numbers, ids, n, target, least, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr,
                   LISTED: tl.constexpr):
    """Returns the token at which the cumulative weight, in descending order of logits, exceeds `target`.

    `least` is the smallest key of a token that can be drawn. The result has that key if, due to rounding, no sum exceeds
    `target`.
    """
    key, above, ties, weight = _search(numbers, ids, n, least, target, top, scale, last_scale, min_p, "draw", FILTERS_FIRST,
                                       LISTED)
    rank = tl.minimum((target - above) / tl.where(weight > 0, weight, 1.0), tl.maximum(ties, 1) - 1.0).to(tl.int32)
    token = tl.zeros([], tl.int32)
    n_ties = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token_ids, inside = _load_listed(numbers, ids, n, first, LISTED)
        tie = inside & (_key(x).to(tl.int64) == key)
        place = n_ties + tl.cumsum(tie.to(tl.int32), 0) - 1
        token += tl.sum(tl.where(tie & (place == rank), token_ids, 0), 0)
        n_ties += tl.sum(tie.to(tl.int32), 0)
    return token


@triton.jit
def _draw_by_place(numbers, ids, n, target, top, scale, last_scale, min_p, FILTERS_FIRST: tl.constexpr, LISTED: tl.constexpr):
    """Returns the token at which the cumulative weight, in vocabulary order, exceeds `target`."""
    token = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    last = tl.zeros([], tl.int32)
    done = tl.zeros([], tl.int32)
    for first in range(0, n, LISTED):
        x, token_ids, inside = _load_listed(numbers, ids, n, first, LISTED)
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
    """Draws a token of the list. IN_ORDER cumulates weights in descending order of logits instead of vocabulary order."""
    sums = tl.zeros([LISTED], tl.float64)
    least = tl.full([], 2147483647, tl.int64)            # the smallest key of a token that can be drawn
    for first in range(0, n, LISTED):
        x, _ids, inside = _load_listed(numbers, ids, n, first, LISTED)
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
    """Finds first the block, then the token of the whole vocabulary at which the cumulative weight exceeds `target`."""
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.float64)
    start = tl.zeros([], tl.int32)       # the start of the token's block; before_start is the sum before that
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


@triton.jit(do_not_specialize=["top_k", "stride"])       # 1 and multiples of 16 would be compiled separately
def _draw(logits, uniform, drawn, numbers, ids, stride, V, listed, inverse_temperature, top_k, top_p, min_p,
          FILTERED: tl.constexpr, TOP_K: tl.constexpr, IN_ORDER: tl.constexpr, FILTERS_FIRST: tl.constexpr,
          ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr):
    """Draws one token. ALIGNED means that V and stride are multiples of 16.

    Without ALIGNED, one compilation serves a slice of wider logits and copies of the slice, which have different strides.
    """
    number = tl.program_id(0).to(tl.int64)
    if ALIGNED:
        stride = tl.multiple_of(stride, 16)
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
        else:                            # tokens below this weight together weigh less than top_p drops
            least_weight = tl.where(top_p < 1, 0.99 * (1 - top_p) * total / V, 1e-36).to(tl.float32)
            least_weight = tl.maximum(least_weight, min_p)
        n = _list_likely(row, numbers, ids, V, least_logit, least_weight, top, scale, BLOCK)
        lowest = tl.full([], -2147483648, tl.int64)
        if TOP_K:
            n = _keep_top_k(numbers, ids, n, top_k, top, scale, lowest, FILTERS_FIRST, LISTED)
            if not FILTERS_FIRST:        # top_p is a fraction of what top_k keeps
                total = _listed_weight(numbers, ids, n, top, scale, LISTED)
        if top_p < 1:
            n = _keep_top_p(numbers, ids, n, top_p * total, top, scale, lowest, FILTERS_FIRST, LISTED)
        token = _draw_listed(numbers, ids, n, u, top, scale, inverse_temperature, min_p, IN_ORDER, FILTERS_FIRST, LISTED)
    else:
        token = _draw_unfiltered(row, V, u * total, top, scale, BLOCK)
    tl.store(drawn + number, tl.where(finite, token, -1).to(tl.int64))
