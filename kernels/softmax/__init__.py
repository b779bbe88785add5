"""Softmax over the last dimension.

    y[n,i] = e^(x[n,i] - m[n]) / sum_j e^(x[n,j] - m[n])          m[n] = max_j x[n,j];  x, y (..., M)

In one line of PyTorch: torch.softmax(x, -1). A -inf has the share 0; a row that holds a NaN or a +inf, or nothing but -inf,
becomes NaN. Source of the online form: Milakov and Gimelshein, arXiv 1805.02867.

What all implementations share lives here, once: checks, casts, rows, autograd. A file beside this one holds REQUIRES,
forward(x) -> y and backward(y, grad_y) -> grad_x, all (N,M) and contiguous, and nothing but its algorithm.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.registry import Requires, check, check_dtype, load


class Softmax:
    """One implementation of the operator, by name: `Softmax("taichi_v0")(x) -> y`, of the shape and dtype of x (..., M).

    Differentiable (once); holds no tensors; any leading shape and any M, a size of 0 included. Half precision is computed in
    float32. Raises ValueError for an unknown name or an x of the wrong dtype or without a dimension, and KernelUnavailable
    where the implementation cannot run on its device.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._implementation = load("softmax", name)
        self.requires: Requires = self._implementation.REQUIRES
        self._operator = _operator(name)     # not in __call__: torch.compile would trace the registration

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        return self._operator(x)

    def __repr__(self) -> str:
        return f"Softmax({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Softmax, (self.name,)

    def forward(self, x: Tensor) -> Tensor:
        """The same, without checks and without autograd: for those who call it a token at a time."""
        if x.numel() == 0:
            return x.new_empty(x.shape)
        return self._like(x, self._implementation.forward(self._rows(x)))

    def backward(self, y: Tensor, grad_y: Tensor) -> Tensor:
        """grad_x for y = softmax(x) and grad_y, all of one shape, without checks."""
        if y.numel() == 0:
            return y.new_empty(y.shape)
        return self._like(y, self._implementation.backward(self._rows(y), self._rows(grad_y)))

    def _check(self, x: Tensor) -> None:
        if x.dim() == 0 or not x.is_floating_point():
            raise ValueError(f"Softmax expects a floating-point x (..., M), got {x.dtype} of shape {tuple(x.shape)}")
        check_dtype("softmax", self.name, self.requires, x.dtype)
        if not torch.compiler.is_compiling():
            check("softmax", self.name, x.device)

    def _rows(self, x: Tensor) -> Tensor:
        """(N,M), contiguous, in a dtype that the file computes in."""
        dtype = x.dtype if x.dtype in self.requires.dtypes else torch.float32
        rows = x.detach().to(dtype).contiguous()
        return rows if rows.dim() == 2 else rows.view(-1, x.shape[-1])

    @staticmethod
    def _like(x: Tensor, rows: Tensor) -> Tensor:
        """In place, because autograd refuses to let a user write into an operator's result that is a view."""
        rows = rows.to(x.dtype)
        return rows if x.dim() == 2 else rows.resize_(x.shape)


@cache
def _operator(name: str) -> Any:
    """The implementation as a differentiable torch operator, registered at first use as timemix::softmax_NAME."""
    operator = torch.library.custom_op(
        f"timemix::softmax_{name}", lambda x: Softmax(name).forward(x), mutates_args=(), schema="(Tensor x) -> Tensor")
    gradient = torch.library.custom_op(
        f"timemix::softmax_{name}_backward", lambda y, grad_y: Softmax(name).backward(y, grad_y), mutates_args=(),
        schema="(Tensor y, Tensor grad_y) -> Tensor")
    operator.register_fake(lambda x: x.new_empty(x.shape))
    gradient.register_fake(lambda y, grad_y: y.new_empty(y.shape))
    operator.register_autograd(lambda ctx, grad_y: gradient(*ctx.saved_tensors, grad_y),
                               setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
    return operator
