"""PyTorch computes chunks of 16 steps as matrix products, and passes the state from chunk to chunk.

Let W_t be the product of w from the first step of a chunk to step t, S the state before the chunk, and c its number of steps.
Let queries be the 2c rows a_t W_{t-1} and r_t W_t, keys the 2c rows b_t / W_t and k_t / W_t, values the 2c rows sa_t and v_t:

    products = queries keys^T, or 0 for a key at or after the step of a, or after the step of r    (blocks aa ak; ra rk)
    sa = (I - aa)^-1 (a W S^T + ak v)        y = r W S^T + (ra rk) values        S <- (S + values^T keys) diag(W_c)

Forward saves the state before each segment of several chunks. Backward processes the segments from last to first. The segment
is recomputed. Then backward computes the gradient of the state before each chunk, and `grads`, the 2c rows (I - aa)^-T grad_sa
and grad_y. All gradients except log_w's are products of these gradients with queries, keys and values.

With S' = S / W and G' = W dL/dS, the gradient of log_w is gl_t = sum_i (S'_{t-1})_ij (G'_t)_ij. Within a chunk, S'_{t-1} is S
plus the outer products values_s keys_s^T of all steps s < t. G'_t is the gradient of S + values^T keys plus the outer products
grads_u queries_u^T of all reads of the states after steps u >= t. Hence gl_t contains a sum over the pairs s < t <= u. A
running sum over r, a, b, k and their gradients would also give gl, but as a difference of two large sums, which is inexact if
gl is small compared with a different step's gl, and not exactly 0 if gl is 0. So the pairs with s in the first half of the
chunk and u in the second are summed first over u for each s, then over s < t for each t of the first half, and the other way
round for each t of the second half. The pairs within a half are treated in the same way, and pairs within blocks of 4 steps one
by one. Nothing is ever subtracted.

W is computed as a running product of w, which is more accurate than exp of a running sum. 1 / W is at most e^16 for log_w >=
-1. Products that must not be used, and may be huge, are replaced by 0. (I - aa)^-1 is computed by substitution, not as the sum
of the powers of aa, because these can be 1e3 times larger than their sum. If an input is NaN or infinite, forward runs a second
time with 0 in its place, because 0 * NaN would reach earlier steps of the chunk.
Source: the WY representation of DeltaNet (arXiv 2406.06484, section 3), here with the decays of RWKV-7 (arXiv 2503.14456).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64))

CHUNK, BLOCK = 16, 4
IN_CACHE = 2**19             # largest number of elements of an input in a segment of several chunks
Sequences = tuple[Tensor, ...]
Segment = tuple[slice, int]  # a segment's steps, and the number of steps per chunk


class Chunks(NamedTuple):
    """The n chunks of a segment, one after another. Each chunk consists of B*H matrices."""

    W: Tensor            # (n*B*H, c, N)
    queries: Tensor      # (n*B*H, 2c, N)
    keys: Tensor
    values: Tensor       # _states fills in sa
    products: Tensor     # (n*B*H, 2c, 2c)
    inverse: Tensor      # (n*B*H, c, c)


def activation_shapes(B: int, T: int, H: int, N: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of the states before each segment."""
    return ((len(_segments(B, T, H, N)), B * H, N, N),)


def forward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
            *activations: Tensor) -> tuple[Tensor, Tensor]:
    sequences = r, log_w, k, v, a, b
    y, after = _forward(sequences, state, *activations)
    if not y.sum().isfinite():
        y, after = _forward(tuple(sequence.nan_to_num(0.0, 0.0, 0.0) for sequence in sequences), state)
        _spread_nan(sequences, y, after)
    return y, after


def backward(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, activations: Tensor,
             grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    gradients = tuple(torch.empty_like(v) for _ in range(6))
    grad_state = grad_state.flatten(0, 1)
    for (steps, c), before in reversed([*zip(_segments(*v.shape), activations, strict=True)]):
        chunk = _by_chunk((r, log_w, k, v, a, b, grad_y), steps, c)
        grad_state = _backward_segment(chunk[:6], chunk[6], before, grad_state, _by_chunk(gradients, steps, c))
    return *gradients, grad_state.view(state.shape)


def _forward(sequences: Sequences, state: Tensor, activations: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(sequences[3])
    after = state.flatten(0, 1)
    for i, (steps, c) in enumerate(_segments(*y.shape)):
        if activations is not None:
            activations[i] = after
        chunks = _chunks(_by_chunk(sequences, steps, c))
        before, after = _states(chunks, after)
        y_chunk = torch.bmm(chunks.queries[:, c:], before.mT).baddbmm_(chunks.products[:, c:], chunks.values)
        target, = _by_chunk((y,), steps, c)
        target.copy_(y_chunk.view(target.shape))
    return y, after.view(state.shape)


def _spread_nan(sequences: Sequences, y: Tensor, state: Tensor) -> None:
    """Sets all results that depend on a nonfinite input to NaN.

    r affects y of the same step, number i of v affects row i of the state and number i of y, and the other inputs affect the
    whole head.
    """
    r, log_w, k, v, a, b = (0 * sequence for sequence in sequences)
    since = (v + (log_w + k + a + b).sum(-1, keepdim=True)).cumsum(1)
    y += since + r.sum(-1, keepdim=True)
    state += since[:, -1].unsqueeze(-1)


def _segments(B: int, T: int, H: int, N: int) -> list[Segment]:
    """Returns segments of as many whole chunks as fit into the cache, then a last, shorter chunk as a separate segment."""
    whole = T - T % CHUNK
    length = CHUNK * max(1, IN_CACHE // max(1, B * H * N * CHUNK))
    segments = [(slice(start, min(start + length, whole)), CHUNK) for start in range(0, whole, length)]
    return segments + ([(slice(whole, T), T - whole)] if whole < T else [])


def _by_chunk(sequences: Sequences, steps: slice, c: int) -> Sequences:
    """Returns views (n,B,H,c,N) of a segment's steps in each of the tensors (B,T,H,N)."""
    return tuple(sequence[:, steps].unflatten(1, (-1, c)).permute(1, 0, 3, 2, 4) for sequence in sequences)


def _chunks(sequences: Sequences) -> Chunks:
    """Returns the chunks of a segment, in which `values` do not contain sa yet."""
    r, log_w, k, v, a, b = sequences
    *batch, c, N = v.shape
    W = torch.exp(log_w, out=v.new_empty(v.shape)).cumprod(-2)
    queries, keys, values = (v.new_empty(*batch, 2 * c, N) for _ in range(3))
    queries[..., 0, :] = a[..., 0, :]
    torch.mul(a[..., 1:, :], W[..., :-1, :], out=queries[..., 1:c, :])
    torch.mul(r, W, out=queries[..., c:, :])
    torch.div(b, W, out=keys[..., :c, :])
    torch.div(k, W, out=keys[..., c:, :])
    values[..., c:, :] = v
    W, queries, keys, values = (stack.flatten(0, 2) for stack in (W, queries, keys, values))
    products = torch.bmm(queries, keys.mT).masked_fill_(_mask(c, v.device), 0)
    return Chunks(W, queries, keys, values, products, _inverse(products[:, :c, :c]))


def _mask(c: int, device: torch.device) -> Tensor:
    """Returns a mask (2c,2c) that is true where `products` are 0: for keys at or after the step of a, or after that of r."""
    step = torch.arange(c, device=device)
    late_for_a = step[:, None] <= step
    late_for_r = step[:, None] < step
    return torch.cat((late_for_a, late_for_r)).repeat(1, 2)


def _inverse(aa: Tensor) -> Tensor:
    """Returns (I - aa)^-1 for a lower triangular aa with zeros on the diagonal."""
    identity = torch.eye(aa.shape[-1], dtype=aa.dtype, device=aa.device)
    return torch.linalg.solve_triangular(identity - aa, identity.expand_as(aa), upper=False, unitriangular=True)


def _states(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states before each chunk (n*B*H,N,N), and the state after the last. Stores sa in chunks.values."""
    W, queries, keys, values, products, inverse = chunks
    c = W.shape[1]
    n = len(W) // len(state)
    from_v = torch.bmm(products[:, :c, c:], values[:, c:])
    before = state.new_empty(len(W), *state.shape[1:])
    parts = (part.chunk(n) for part in (W, queries, keys, values, inverse, from_v, before))
    for W_i, queries_i, keys_i, values_i, inverse_i, from_v_i, before_i in zip(*parts, strict=True):
        before_i.copy_(state)
        values_i[:, :c] = torch.bmm(inverse_i, torch.baddbmm(from_v_i, queries_i[:, :c], state.mT))
        state = torch.baddbmm(state, values_i.mT, keys_i).mul_(W_i[:, -1:])
    return before, state


def _backward_segment(sequences: Sequences, grad_y: Tensor, before: Tensor, grad_state: Tensor, gradients: Sequences) -> Tensor:
    """Stores the inputs' gradients in `gradients` (n,B,H,c,N). Returns the gradient of the segment's first state (B*H,N,N)."""
    chunks = _chunks(sequences)
    states, _ = _states(chunks, before)
    grads = chunks.values.new_empty(chunks.values.shape)
    c = grad_y.shape[3]
    shape = grad_y.shape
    grads.view(*shape[:3], 2 * c, -1)[..., c:, :] = grad_y
    grad_sums, grad_state = _grad_states(chunks, grads, grad_state)
    W, queries, keys, values, products, _ = chunks
    grad_queries = torch.bmm(grads, states)
    grad_keys = torch.bmm(values, grad_sums)
    grad_products = torch.bmm(grads, values.mT).masked_fill_(_mask(c, grads.device), 0)
    grad_log_w = _boundary_terms(queries * grad_queries, keys * grad_keys).add_((states * grad_sums).sum(-2, keepdim=True))
    grad_log_w += _inner_terms(grad_products, queries, keys)
    grad_queries.baddbmm_(grad_products, keys)
    grad_keys.baddbmm_(grad_products.mT, queries)
    grad_v = torch.bmm(products[:, :, c:].mT, grads).baddbmm_(keys[:, c:], grad_sums.mT)
    _store_input_gradients(W, grad_queries, grad_keys, grad_v, grad_log_w, gradients)
    return grad_state


def _grad_states(chunks: Chunks, grads: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of S + values^T keys (n*B*H,N,N), and of the segment's first state.

    The first c rows of `grads` are stored.
    """
    W, queries, keys, _, products, inverse = chunks
    c = W.shape[1]
    n = len(W) // len(grad_state)
    from_y = torch.bmm(products[:, c:, :c].mT, grads[:, c:])
    grad_sums = W.new_empty(len(W), *grad_state.shape[1:])
    parts = (part.chunk(n) for part in (W, queries, keys, inverse, from_y, grads, grad_sums))
    for W_i, queries_i, keys_i, inverse_i, from_y_i, grads_i, grad_sum_i in reversed([*zip(*parts, strict=True)]):
        torch.mul(grad_state, W_i[:, -1:], out=grad_sum_i)
        grad_sa = torch.baddbmm(from_y_i, keys_i[:, :c], grad_sum_i.mT)
        grads_i[:, :c] = torch.bmm(inverse_i.mT, grad_sa)
        grad_state = torch.baddbmm(grad_sum_i, grads_i.mT, queries_i)
    return grad_sums, grad_state


def _boundary_terms(query_terms: Tensor, key_terms: Tensor) -> Tensor:
    """Returns the part of gl (n*B*H,c,N) that contains the state before the chunk or the gradient of the state after the chunk.

    For each step t, that part is the sum of key_terms of earlier steps and of query_terms that read a later state.
    """
    c = key_terms.shape[1] // 2
    after, before = _windows(c, key_terms)
    after_a = F.pad(after[:, :-1], (1, 0))            # a reads the state after the previous step
    return (torch.cat((after_a, after), 1) @ query_terms).add_(torch.cat((before, before), 1) @ key_terms)


def _inner_terms(grad_products: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the part of gl (n*B*H,c,N) that the pairs of steps s < t <= u in the same chunk contribute at t."""
    c = keys.shape[1] // 2
    products_k = grad_products[:, :, c:]
    products_b = grad_products[:, :, :c]
    columns = _interleave(products_b.mT, products_k.mT).mT              # this puts the two columns of a step side by side
    products = _interleave(columns[:, 1:c], columns[:, c:])
    queries = _interleave(queries[:, 1:c], queries[:, c:])
    keys = _interleave(keys[:, :c], keys[:, c:])
    grad_log_w = keys.new_zeros(len(keys), CHUNK, keys.shape[2])
    _add_block_terms(products, queries, keys, grad_log_w)
    half = BLOCK
    while half < c:
        after, before = (window.repeat_interleave(2, 1) for window in _windows(half, grad_log_w))
        for middle in range(half, c, 2 * half):
            s = slice(2 * (middle - half), 2 * middle)
            u = slice(2 * middle, 2 * (middle + half))
            grad_log_w[:, middle:middle + half] += after @ torch.bmm(products[:, u, s], keys[:, s]).mul_(queries[:, u])
            grad_log_w[:, middle - half:middle] += before @ torch.bmm(products[:, u, s].mT, queries[:, u]).mul_(keys[:, s])
        half *= 2
    return grad_log_w[:, :c]


def _add_block_terms(products: Tensor, queries: Tensor, keys: Tensor, grad_log_w: Tensor) -> None:
    """Adds the contribution of the pairs within a block of BLOCK steps, one pair at a time, for all blocks together."""
    blocks = CHUNK // BLOCK
    diagonal = products.unflatten(1, (blocks, -1)).unflatten(3, (blocks, -1)).diagonal(dim1=1, dim2=3).unsqueeze(-1)
    queries, keys = (rows.unflatten(1, (blocks, -1)) for rows in (queries, keys))
    grad_blocks = grad_log_w.unflatten(1, (blocks, -1))
    for u in range(1, BLOCK):
        for row in (2 * u, 2 * u + 1):
            key_sum = torch.zeros_like(keys[:, :, 0])
            for s in range(u):
                for column in (2 * s, 2 * s + 1):
                    key_sum.addcmul_(diagonal[:, row, column], keys[:, :, column])
                grad_blocks[:, :, s + 1].addcmul_(key_sum, queries[:, :, row])


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """Returns the interleaved rows (n*B*H,2*CHUNK,N) of `first` and `second`, each zero-padded to CHUNK steps."""
    rows = second.new_empty(len(second), CHUNK, 2, second.shape[2])
    for i, tensor in enumerate((first, second)):
        rows[:, :tensor.shape[1], i] = tensor
        rows[:, tensor.shape[1]:, i] = 0
    return rows.flatten(1, 2)


def _windows(c: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two matrices (c,c). The first is 1 where the column's step is at or after the row's, the second elsewhere."""
    ones = torch.ones(c, c, dtype=like.dtype, device=like.device)
    return ones.triu(), ones.tril(-1)


def _store_input_gradients(W: Tensor, grad_queries: Tensor, grad_keys: Tensor, grad_v: Tensor, grad_log_w: Tensor,
                           gradients: Sequences) -> None:
    grad_r, grad_log_w_rows, grad_k, grad_v_rows, grad_a, grad_b = gradients
    *batch, c, _ = grad_r.shape
    W, grad_queries, grad_keys = (stack.unflatten(0, batch) for stack in (W, grad_queries, grad_keys))
    grad_v_rows.copy_(grad_v.view(grad_r.shape))
    grad_log_w_rows.copy_(grad_log_w.view(grad_r.shape))
    torch.mul(grad_queries[..., c:, :], W, out=grad_r)
    torch.div(grad_keys[..., c:, :], W, out=grad_k)
    torch.div(grad_keys[..., :c, :], W, out=grad_b)
    grad_a[..., 0, :] = grad_queries[..., 0, :]
    torch.mul(grad_queries[..., 1:c, :], W[..., :-1, :], out=grad_a[..., 1:, :])
