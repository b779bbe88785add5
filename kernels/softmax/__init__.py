"""Computes softmax over the last dimension.

    y[n,i] = e^(x[n,i] - m[n]) / sum_j e^(x[n,j] - m[n])          m[n] = max_j x[n,j];  x, y (..., M)

In one line of PyTorch: torch.softmax(x, -1). If x is -inf, y is 0; a row that contains NaN or +inf, or only -inf, becomes NaN.
Source of the online algorithm: Milakov and Gimelshein, arXiv 1805.02867.

An implementation is a file in this folder with REQUIRES, forward(x) -> y and backward(y, grad_y) -> grad_x, where all tensors
are (N,M) and contiguous.
"""

import torch
from torch import Tensor

from kernels.operator import Operator


class Softmax(Operator):
    """Computes softmax by the named implementation: `Softmax("taichi_v0")(x) -> y`. y has the shape and dtype of x (..., M).

    The result can be differentiated once. All dimensions of x may have any size, including 0. Half precision is computed in
    float32. Raises ValueError for an unknown name, or if x has a wrong dtype or no dimension. Raises KernelUnavailable if the
    implementation cannot run on the device of x.
    """

    folder = "softmax"
    inputs = "Tensor x"
    outputs = (("y", "x"),)
    gradients = ("x",)
    differentiable = ("y",)
    saved = ("y",)

    def __call__(self, x: Tensor) -> Tensor:
        self._require_tensors(x)
        if x.dim() == 0 or not x.is_floating_point():
            raise ValueError(f"Softmax: x must be a floating-point tensor (..., M); got {x.dtype} {tuple(x.shape)}")
        self.check_dtype(x.dtype)
        self.check_device(x.device)
        y, = self._function(x)
        return y

    def _forward(self, x: Tensor) -> Tensor:
        rows = self._supported_rows(x)
        return _as_in(x, *self._outputs_of(self._implementation.forward(rows), [rows]))

    def _backward(self, *saved_and_gradients: Tensor) -> Tensor:
        y, grad_y = saved_and_gradients
        rows = self._supported_rows(y)
        return _as_in(y, *self._gradients_of(self._implementation.backward(rows, self._supported_rows(grad_y)), [rows]))

    def _supported_rows(self, x: Tensor) -> Tensor:
        dtype = x.dtype if x.dtype in self.requires.dtypes else torch.float32
        rows = x.detach().to(dtype).contiguous()
        return rows if rows.dim() == 2 else rows.view(-1, x.shape[-1])


def _as_in(x: Tensor, rows: Tensor) -> Tensor:
    """Returns `rows` in the dtype and shape of x.

    The rows are resized in place, because a view would prevent in-place writes under autograd.
    """
    rows = rows.to(x.dtype)
    return rows if x.dim() == 2 else rows.resize_(x.shape)


OPERATOR = Softmax
