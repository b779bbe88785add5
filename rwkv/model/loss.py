"""Cross-entropy fused with the head: only one chunk of rows of the (B*T,V) logits, with its gradient, is in memory at a time.

Forward computes the gradients together with the loss, chunk by chunk, and backward only scales them by the incoming gradient.
L2Wrap is scaled too, so its strength is right under loss scaling and gradient accumulation. Half-precision products use the
gradient of the sum over rows, whose elements are within [-1, 1], because the gradient of the mean would underflow.

The source of L2Wrap is RWKV-LM, RWKV-v4neo/src/model.py, where L2Wrap ignores the incoming gradient. The source of the
confidence penalty is Pereyra et al., "Regularizing Neural Networks by Penalizing Confident Output Distributions" (arXiv
1701.06548), section 3.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kernels.backends.torch_private import transforms_active
from rwkv.model.first_derivative import Context, require_first_derivative
from rwkv.model.fused import WIDE_PRODUCTS, product_dtype, product_in
from rwkv.model.fused.backend import loss_backend_for
from rwkv.model.weight_cache import round_weights

CHUNK_LOGITS = 2 ** 21                   # logits in one chunk on a CPU: 8 MiB
CHUNK_SHARE = 1 / 64                     # fraction of a GPU's memory for the logits of one chunk
LEAST_ROWS = 256                         # minimum rows in one chunk, for matrix products at full speed
LEAST_FROZEN = 128                       # minimum rows if the head is frozen, because a larger chunk would dominate memory
NARROW_ROWS = 2 ** 11                    # rows of W converted at a time if a frozen head has a different dtype
BLOCK_LOGITS = 2 ** 20                   # logits in one softmax call on a CPU, which stay in the CPU's cache
ARGMAX_BLOCK = 128                       # block size of the two-stage argmax
IGNORED = -100                           # the target of positions to leave out of the loss
CPU = torch.device("cpu")


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float = 0.0, confidence_penalty: float = 0.0) -> Tensor:
    """Returns the mean negative log-likelihood, in nats, of targets (N,) under softmax(hidden (N,C) @ weight (V,C).T).

    Targets of -100 are ignored. On a CPU, their rows are left out of the products. The last two arguments change the gradient,
    but not the value of the loss.

    Args:
        l2_wrap: adds l2_wrap * (largest logit) to the gradient at each row's largest logit, which keeps logits from drifting.
            Like the loss, this term is divided by the number of targets that are not ignored.
        confidence_penalty: adds the gradient of -confidence_penalty * (mean entropy of the predictions).
    """
    if targets.device.type == "cpu":     # on a GPU, nonzero() would synchronise
        counted = (targets != IGNORED).nonzero()[:, 0]
        if len(counted) < len(targets):
            hidden = hidden.index_select(0, counted)
            targets = targets[counted]
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _HeadLoss.apply(hidden, weight, targets, l2_wrap, confidence_penalty)
        return loss
    total = hidden.new_zeros((), dtype=torch.float32)
    for chunk in _chunks(hidden, weight, frozen=not weight.requires_grad):
        logits = _logits(hidden[chunk], weight)
        if backend := loss_backend_for(logits):
            total += backend.negative_log_likelihood(logits, targets[chunk], IGNORED)
            continue
        for rows, row_targets in _row_blocks(logits, targets[chunk]):
            total += cross_entropy(rows.float(), row_targets, ignore_index=IGNORED, reduction="sum")
    return total / _n_counted(targets)


def log_probabilities(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns (N,) float32: the logarithm of each target's probability under softmax(hidden (N,C) @ weight (V,C).T).

    None of the targets (N,) may be -100. Backward recomputes the logits chunk by chunk.
    """
    chunks = [checkpoint(_log_probabilities, hidden[chunk], weight, targets[chunk], use_reentrant=False,
                         preserve_rng_state=False)
              for chunk in _chunks(hidden, weight, frozen=not weight.requires_grad)]
    return torch.cat(chunks)


def _log_probabilities(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -cross_entropy(_logits(hidden, weight).float(), targets, reduction="none")


def rows_per_chunk(vocab_size: int, frozen: bool = False, device: torch.device = CPU, itemsize: int = 4) -> int:
    """Returns the number of rows of the (N,V) logits in one chunk.

    Args:
        frozen: True if the head's weight has no gradient.
        itemsize: the bytes per logit; only chunks on a GPU depend on this.
    """
    if device.type == "cuda":
        return rows_per_chunk_on_gpu(vocab_size, itemsize, torch.cuda.get_device_properties(device).total_memory)
    return max(LEAST_FROZEN if frozen else LEAST_ROWS, CHUNK_LOGITS // vocab_size)


def rows_per_chunk_on_gpu(vocab_size: int, itemsize: int, memory: int) -> int:
    """Returns the result of rows_per_chunk for a GPU with `memory` bytes."""
    return max(LEAST_ROWS, int(CHUNK_SHARE * memory) // (itemsize * vocab_size) // LEAST_ROWS * LEAST_ROWS)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float,
                confidence_penalty: float) -> Tensor:
        trained = ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if trained and weight.device.type not in WIDE_PRODUCTS else None
        weight_dtype = weight.dtype
        total, n_counted = hidden.new_zeros((), dtype=torch.float32), _n_counted(targets)
        dtype = product_dtype(hidden)
        hidden = hidden.to(dtype)
        weight = round_weights(dtype, (weight,))[0] if weight.dtype == torch.float32 else weight
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden, weight, frozen=not trained):
                grad_logits = _add_loss(total, _logits(hidden[chunk], weight), targets[chunk], l2_wrap, confidence_penalty)
                grad_hidden[chunk] = _grad_hidden(grad_logits, weight)
                if trained:
                    grad_weight = _add_product(grad_weight, grad_logits.T, hidden[chunk], weight_dtype)
                del grad_logits          # this frees memory before the next chunk's gradient is computed
        ctx.save_for_backward(grad_hidden, n_counted)
        ctx.grad_weight = grad_weight
        return total / n_counted

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative([grad])
        grad_hidden, n_counted = ctx.saved_tensors
        scale = grad / n_counted
        grad_weight, ctx.grad_weight = ctx.grad_weight, None     # without a copy, this tensor becomes the weight's .grad
        if grad_weight is None and ctx.needs_input_grad[1]:
            raise RuntimeError("head_loss supports only one backward pass, because backward scales the saved gradient in place")
        if grad_weight is not None and transforms_active():      # torch.vmap: one gradient for each sample of `grad`
            return grad_hidden * scale, grad_weight * scale, None, None, None
        return grad_hidden * scale, None if grad_weight is None else grad_weight.mul_(scale), None, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns the logits (rows,V), hidden W^T, for hidden (rows,C) and W (V,C).

    If W is frozen and has another dtype than hidden, NARROW_ROWS rows of W are converted at a time.
    """
    if weight.dtype == hidden.dtype:
        return hidden @ weight.T
    if torch.is_grad_enabled():
        return torch.cat([hidden @ part.to(hidden.dtype).T for part in weight.split(NARROW_ROWS)], 1)
    logits = hidden.new_empty(len(hidden), len(weight))
    for part, result in zip(weight.split(NARROW_ROWS), logits.split(NARROW_ROWS, 1), strict=True):
        torch.mm(hidden, part.to(hidden.dtype).T, out=result)
    return logits


def _grad_hidden(grad_logits: Tensor, weight: Tensor) -> Tensor:
    """Computes grad_logits (rows,V) W, and converts W as _logits does."""
    if weight.dtype == grad_logits.dtype:
        return grad_logits @ weight
    total = grad_logits.new_zeros(len(grad_logits), weight.shape[1])
    for grad, part in zip(grad_logits.split(NARROW_ROWS, 1), weight.split(NARROW_ROWS), strict=True):
        total.addmm_(grad, part.to(grad.dtype))
    return total


def _chunks(hidden: Tensor, weight: Tensor, frozen: bool = False) -> Iterator[slice]:
    rows = rows_per_chunk(len(weight), frozen, hidden.device, hidden.element_size())
    return (slice(start, start + rows) for start in range(0, len(hidden), rows))


def _n_counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum().clamp(min=1)


def _add_loss(total: Tensor, logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float) -> Tensor:
    """Adds the negative log-likelihood of the rows that are not ignored to `total`, and overwrites the logits (rows,V).

    Returns the gradient of that sum with respect to the logits, in their dtype.
    """
    if backend := loss_backend_for(logits):
        total += backend.replace_by_gradient(logits, targets, l2_wrap, confidence_penalty, IGNORED)
        return logits
    dtype, logits = logits.dtype, logits.float()
    for rows, row_targets in _row_blocks(logits, targets):
        total += _replace_by_gradient(rows, row_targets, l2_wrap, confidence_penalty)
    return logits.to(dtype)


def _row_blocks(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of row blocks of both tensors. On a CPU the blocks are small, so that temporaries need little memory."""
    rows = max(1, BLOCK_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return zip(logits.split(rows), targets.split(rows), strict=True)


def _replace_by_gradient(logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float) -> Tensor:
    """Returns the summed negative log-likelihood of the rows not ignored, and replaces the logits (rows,V) with its gradient.

    log(sum(exp(logits))) is computed as the largest logit minus the logarithm of its probability, which is at least 1 / V.
    """
    is_counted = (targets != IGNORED)[:, None]
    targets = targets.clamp(min=0)[:, None]
    argmax = _argmax(logits)
    largest = logits.gather(-1, argmax)
    grad = torch.softmax(logits, -1)
    nll = largest - grad.gather(-1, argmax).log_() - logits.gather(-1, targets)
    if confidence_penalty:
        _add_penalty(grad, logits, confidence_penalty)
    grad.scatter_add_(-1, targets, torch.full_like(largest, -1.0))
    if l2_wrap:
        grad.scatter_add_(-1, argmax, l2_wrap * largest)
    torch.mul(grad, is_counted, out=logits)
    return (nll * is_counted).sum()


def _add_penalty(probabilities: Tensor, logits: Tensor, strength: float) -> None:
    """Adds strength * p (log p + entropy), the gradient of the negative entropy, to `probabilities` p in place.

    For logits z, log p + entropy = z - p.z. The logits are overwritten.
    """
    logits -= (probabilities * logits).sum(-1, keepdim=True)
    probabilities.addcmul_(probabilities, logits, value=strength)


def _argmax(x: Tensor) -> Tensor:
    """Returns the index (rows,1) of the largest element of each row of x (rows,V), or of the first of several equal ones.

    On a CPU amax is 20 times faster than argmax. So amax finds the block with the largest element, and argmax searches only
    there.
    """
    if x.shape[1] <= 4 * ARGMAX_BLOCK:   # a single argmax is faster for short rows
        return x.argmax(-1, keepdim=True)
    whole = x.shape[1] // ARGMAX_BLOCK * ARGMAX_BLOCK
    maxima = [x[:, :whole].unflatten(1, (-1, ARGMAX_BLOCK)).amax(-1)]
    maxima += [x[:, whole:].amax(-1, keepdim=True)] if whole < x.shape[1] else []
    first = ARGMAX_BLOCK * torch.cat(maxima, 1).argmax(-1, keepdim=True)
    indices = (first + torch.arange(ARGMAX_BLOCK, device=x.device)).clamp_(max=x.shape[1] - 1)
    return first + x.gather(-1, indices).argmax(-1, keepdim=True)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns total + left @ right, computed in place, or left @ right in `dtype` if `total` is None."""
    if total is None:
        return product_in(dtype, left, right)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    return total.add_(product_in(dtype, left, right))
