"""Computes TimeX, the depthwise causal convolution over time of RWKV-2, -3 and -4.

    out[b,c,t] = eps + sum_{u=0..t} w[c,(T-1)-(t-u)] * k[b,c,u]            w (C,T), k (B,C,T), out (B,C,T)

In one line of PyTorch: eps + F.conv1d(F.pad(k, (T-1, 0)), w.unsqueeze(1), groups=C). The last column of w is lag 0. If a number
in w or k is not finite, all elements of out that depend on the number are not finite, and no other row (b,c) is affected. With
tiles or the FFT, earlier steps of the same row may also change.
Source: RWKV-CUDA, depthwise_conv1d; Taichi documentation, "Accelerate PyTorch with Taichi".

An implementation is a file in this folder with REQUIRES, forward(w, k, eps) -> out and backward(w, k, grad_out) -> (grad_w,
grad_k). The file may define grad_w(k, grad_out) and grad_k(w, grad_out) instead of backward. The benchmark then times the two
functions separately. The inputs are contiguous, in a supported dtype, and padded to supported sizes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operator import Operator


class TimeX(Operator):
    """Computes TimeX by the named implementation: `TimeX("taichi_v3")(w, k, eps=0.0) -> out`.

    The result can be differentiated once, with respect to w and k. B, C and T may have any size, including 0. Half-precision
    inputs are computed in float32, and the result has the dtype of k. Raises ValueError for an unknown name or for inputs of
    the wrong shape or dtype, and KernelUnavailable if the implementation cannot run on the inputs' device.
    """

    folder = "timex"
    inputs = "Tensor w, Tensor k, float eps"
    outputs = (("out", "k"),)
    gradients = ("w", "k")
    differentiable = ("out",)
    saved = ("w", "k")
    parts = (("forward", "backward"), ("forward", "grad_w", "grad_k"))

    def __call__(self, w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
        self._check(w, k)
        out, = self._function(w, k, float(eps))
        return out

    def _forward(self, w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
        dtype = self._compute_dtype(w, k)
        padded = self._pad(k, dtype)
        out, = self._outputs_of(self._implementation.forward(self._pad(w, dtype), padded, eps), [padded])
        return _crop(out, like=k)

    def _backward(self, *saved_and_gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns grad_w (C,T), summed over the batch, and grad_k (B,C,T), given w, k and grad_out (B,C,T)."""
        w, k, _ = saved_and_gradients
        dtype = self._compute_dtype(w, k)
        padded = [self._pad(tensor, dtype) for tensor in saved_and_gradients]
        gradients = getattr(self._implementation, "backward", self._both_gradients)(*padded)
        grad_w, grad_k = self._gradients_of(gradients, padded[:2])
        return _crop(grad_w, like=w), _crop(grad_k, like=k)

    def _both_gradients(self, w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        return self._implementation.grad_w(k, grad_out), self._implementation.grad_k(w, grad_out)

    def _check(self, w: Tensor, k: Tensor) -> None:
        self._require_tensors(w, k)
        if w.dim() != 2 or k.dim() != 3 or tuple(w.shape) != tuple(k.shape[1:]):
            raise ValueError(f"TimeX: w must be (C,T) and k must be (B,C,T); got w {tuple(w.shape)} and k {tuple(k.shape)}")
        if not (w.is_floating_point() and k.is_floating_point()):
            raise ValueError(f"TimeX: w and k must be floating-point tensors; got {w.dtype} and {k.dtype}")
        if w.device != k.device:
            raise ValueError(f"TimeX: w and k must be on the same device; got {w.device} and {k.device}")
        self.check_dtype(w.dtype, k.dtype)
        self.check_device(k.device)

    def _compute_dtype(self, w: Tensor, k: Tensor) -> torch.dtype:
        dtype = torch.promote_types(w.dtype, k.dtype)
        return dtype if dtype in self.requires.dtypes else torch.float32

    def _pad(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Pads T on the left with zeros, which change no result, because the last column of w is lag 0."""
        left = -tensor.shape[-1] % self.requires.T_multiple
        tensor = tensor.detach().to(dtype)
        return (F.pad(tensor, (left, 0)) if left else tensor).contiguous()


def _crop(padded: Tensor, like: Tensor) -> Tensor:
    return padded[..., padded.shape[-1] - like.shape[-1]:].to(like.dtype).contiguous()


OPERATOR = TimeX
