"""Cross-entropy fused with the head: the (B*T,V) logits exist for some rows at a time, and never as a gradient.

The gradients come out of the same pass over the chunks as the loss, and backward only scales them; so L2Wrap, whose
strength must follow loss scaling and gradient accumulation, is scaled by the incoming gradient like everything else.
L2Wrap source: RWKV-LM, RWKV-v4neo/src/model.py (there it ignores the incoming gradient).
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 2 ** 21                          # logits at a time: 8 MiB
IGNORED = -100                           # a target that does not count


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float = 0.0) -> Tensor:
    """Mean negative log-likelihood in nats of targets (N,) under softmax(hidden (N,C) @ weight (V,C).T).

    Targets of -100 do not count. l2_wrap adds, to the gradient alone, l2_wrap * (largest logit) at each row's largest
    logit, divided like the loss by the number of targets that count: it keeps logits from drifting.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, targets, l2_wrap)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, l2_wrap: float) -> Tensor:
        counted, wanted = (targets != IGNORED).sum().clamp(min=1), any(ctx.needs_input_grad)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, CHUNK // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight.T).float()
            total += _sum_nll(logits, targets[part])
            if wanted:
                grad_logits = (_grad_logits(logits, targets[part], l2_wrap) / counted).to(hidden.dtype)
                grad_hidden[part] = grad_logits @ weight
                grad_weight += grad_logits.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None


def _sum_nll(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _grad_logits(logits: Tensor, targets: Tensor, l2_wrap: float) -> Tensor:
    """Of the sum over the rows; the logits are used up."""
    largest, where = logits.max(-1, keepdim=True)
    grad = torch.softmax(logits, -1)
    rows = torch.arange(len(targets), device=targets.device)
    grad[rows, targets.clamp(min=0)] -= 1
    if l2_wrap:
        grad.scatter_add_(-1, where, l2_wrap * largest)
    return grad.mul_((targets != IGNORED)[:, None])
