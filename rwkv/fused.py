"""The model's elementwise steps with few temporaries: each computes its gradient itself, in the fewest passes over memory.

On a CPU these steps are bound by memory, and autograd's general formulas read and write each tensor several times more. A long
token shift goes through the operator of kernels/ where there is one that is faster than PyTorch's operations.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import select

LONG = range(2**19, 2**29)      # elements of x: from where one pass outweighs an operator's call, to where its indices may end


def token_shift_mixes(x: Tensor, last_x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
    """mu x_t + (1 - mu) x_{t-1} for each mu (1,1,C): (B,T,C) each, of x (B,T,C) and last_x (B,C) before its first step.

    Under autocast they come in the dtype of the matrix products that read them, and short ones are computed in it.
    """
    dtype = _multiplied(x)
    long = torch.is_grad_enabled() and not torch.compiler.is_compiling() and x.numel() in LONG      # training pays for a start
    if long and (shift := select.token_shift(x.device, x.dtype)):
        return shift(x, last_x, torch.cat(mus).view(len(mus), -1), dtype)
    mixes: tuple[Tensor, ...] = _TokenShiftMixes.apply(x.to(dtype), last_x.to(dtype), *mus)
    return mixes


def _multiplied(x: Tensor) -> torch.dtype:
    """The dtype of x in a matrix product: autocast leaves float64 as it is."""
    lower = x.device.type != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if lower else x.dtype


def last(x: Tensor) -> Tensor:
    """The last step of x (B,T,C), for the next state: (B,C), not a view, which would keep all of x in memory."""
    return x[:, -1].clone()


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    squared: Tensor = _SquaredRelu.apply(x)
    return squared


def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x"""
    gated: Tensor = _SigmoidGate.apply(gate, x)
    return gated


class _TokenShiftMixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, last_x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
        before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
        change = x - before
        ctx.dtypes, mus = [mu.dtype for mu in mus], tuple(mu.to(x.dtype) for mu in mus)
        ctx.save_for_backward(change, *mus)
        return tuple(torch.addcmul(before, change, mu) for mu in mus)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        change, *mus = ctx.saved_tensors
        grad_x, grad_before = grads[0] * mus[0], grads[0].clone()
        for grad, mu in zip(grads[1:], mus[1:], strict=True):
            grad_x.addcmul_(grad, mu)
            grad_before += grad
        grad_before -= grad_x
        grad_x[:, :-1] += grad_before[:, 1:]
        wide = torch.float32 if change.dtype == torch.float16 else None      # a sum over B and T, of gradients that are scaled
        grad_mus = ((grad * change).sum((0, 1), keepdim=True, dtype=wide).to(dtype)
                    for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return grad_x, grad_before[:, 0], *grad_mus


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        positive, = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2)     # 2 grad positive in one pass


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(gate)
        ctx.save_for_backward(share, x)
        return share * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        share, x = ctx.saved_tensors
        return torch.ops.aten.sigmoid_backward(grad * x, share), grad * share
