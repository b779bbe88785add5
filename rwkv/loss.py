"""Cross-entropy fused with the head: the (B*T,V) logits exist for some rows at a time, and never as a gradient.

The gradients come out of the same pass over the chunks as the loss, and backward only scales them; so L2Wrap, whose
strength must follow loss scaling and gradient accumulation, is scaled by the incoming gradient like everything else. What
goes through products of half precision is the gradient of the sum over rows, within [-1, 1]: the mean's would vanish there.
L2Wrap source: RWKV-LM, RWKV-v4neo/src/model.py (there it ignores the incoming gradient). Confidence penalty: Pereyra et al.,
"Regularizing Neural Networks by Penalizing Confident Output Distributions" (arXiv 1701.06548), section 3.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rwkv.first_derivative import first_derivative

CHUNK, ROWS = 2 ** 21, 256               # logits at a time: 8 MiB, but rows enough for products at full speed
BLOCK = 128                              # neighbouring logits that are first known by their maximum alone
IGNORED = -100                           # a target that does not count


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float = 0.0, confidence_penalty: float = 0.0) -> Tensor:
    """Mean negative log-likelihood in nats of targets (N,) under softmax(hidden (N,C) @ weight (V,C).T).

    Targets of -100 do not count. l2_wrap adds, to the gradient alone, l2_wrap * (largest logit) at each row's largest
    logit, divided like the loss by the number of targets that count: it keeps logits from drifting. confidence_penalty adds, to
    the gradient alone, that of -confidence_penalty * the mean entropy of the predictions.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _HeadLoss.apply(hidden, weight, targets, l2_wrap, confidence_penalty)
        return loss
    total = hidden.new_zeros((), dtype=torch.float32)
    for part in _parts(hidden, weight):
        logits = (hidden[part] @ weight.T).float()
        total += torch.nn.functional.cross_entropy(logits, targets[part], ignore_index=IGNORED, reduction="sum")
    return total / _counted(targets)


def rows_at_once(vocab_size: int) -> int:
    """Of the logits: how many of the (N,V) there are at a time."""
    return max(ROWS, CHUNK // vocab_size)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, counted = hidden.new_zeros((), dtype=torch.float32), _counted(targets)
        hidden, weight = _as_multiplied(hidden), _as_multiplied(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(hidden, weight):
                logits = (hidden[part] @ weight.T).float()
                nll, grad_logits = _nll_and_gradient(logits, targets[part], l2_wrap, confidence_penalty)
                total += nll
                grad_logits = grad_logits.to(hidden.dtype)
                grad_hidden[part] = grad_logits @ weight
                _add_product(grad_weight, grad_logits.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight, counted)
        return total / counted

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, counted = ctx.saved_tensors
        scale = grad / counted
        return grad_hidden * scale, grad_weight * scale, None, None, None


def _parts(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    rows = rows_at_once(len(weight))
    return (slice(start, start + rows) for start in range(0, len(hidden), rows))


def _counted(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum().clamp(min=1)


def _as_multiplied(x: Tensor) -> Tensor:
    """In the dtype that autocast gives to products: once for all chunks."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _nll_and_gradient(logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float) -> tuple[Tensor, Tensor]:
    """The sum over the rows that count, and its gradient with respect to the logits (rows,V), which are used up.

    log(sum(exp(logits))) is the largest logit less the logarithm of its probability, which is never small.
    """
    counts, targets = (targets != IGNORED)[:, None], targets.clamp(min=0)[:, None]
    where = _argmax(logits)
    largest = logits.gather(-1, where)
    grad = torch.softmax(logits, -1)
    nll = largest - grad.gather(-1, where).log_() - logits.gather(-1, targets)
    if confidence_penalty:
        _add_penalty(grad, logits, confidence_penalty)
    grad.scatter_add_(-1, targets, torch.full_like(largest, -1.0))
    if l2_wrap:
        grad.scatter_add_(-1, where, l2_wrap * largest)
    return (nll * counts).sum(), grad.mul_(counts)


def _add_penalty(probabilities: Tensor, logits: Tensor, strength: float) -> None:
    """Adds, in place, the gradient of the negative entropy, p (log p + entropy); log p + entropy is z - p.z of the logits z."""
    logits -= (probabilities * logits).sum(-1, keepdim=True)
    probabilities.addcmul_(probabilities, logits, value=strength)


def _argmax(x: Tensor) -> Tensor:
    """Where each row of x (rows,V) has its first largest element: (rows,1). On a CPU amax is 20 times faster than argmax."""
    if x.shape[1] <= 4 * BLOCK:          # short rows: the steps below would take longer
        return x.argmax(-1, keepdim=True)
    whole = x.shape[1] // BLOCK * BLOCK
    maxima = [x[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    maxima += [x[:, whole:].amax(-1, keepdim=True)] if whole < x.shape[1] else []
    first = BLOCK * torch.cat(maxima, 1).argmax(-1, keepdim=True)
    places = (first + torch.arange(BLOCK, device=x.device)).clamp_(max=x.shape[1] - 1)
    return first + x.gather(-1, places).argmax(-1, keepdim=True)


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, in one pass where nothing has to be converted."""
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    else:
        total += one @ other
