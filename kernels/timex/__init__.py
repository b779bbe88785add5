"""TimeX, the depthwise causal convolution over time of RWKV-2, -3 and -4.

    out[b,c,t] = eps + sum_{u=0..t} w[c,(T-1)-(t-u)] * k[b,c,u]            w (C,T), k (B,C,T), out (B,C,T)

What is not finite in w or k is not finite in out wherever it enters, in no other row (b,c); in an implementation that works in
tiles or by FFT it may show at earlier steps of its row, too.
In one line of PyTorch: eps + F.conv1d(F.pad(k, (T-1, 0)), w.unsqueeze(1), groups=C). The last column of w is lag 0.
Source: RWKV-CUDA, depthwise_conv1d; Taichi documentation, "Accelerate PyTorch with Taichi".

What all implementations share lives here, once: checks, casts, padding, autograd. A file beside this one holds
REQUIRES, forward(w, k, eps) and backward(w, k, grad_out), and nothing but its algorithm.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._direct import Direct
from kernels.registry import Requires, check, check_dtype, load


class TimeX:
    """One implementation of the operator, by name: `TimeX("taichi_v3")(w, k, eps=0.0) -> out`.

    Differentiable in w and k (once); holds no tensors; any B, C, T, a size of 0 included. Half-precision inputs are
    computed in float32 and come back in their own dtype. Raises ValueError for an unknown name or inputs of the wrong
    shape, dtype or length, and KernelUnavailable where the implementation cannot run on the inputs' device.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._implementation = load("timex", name)
        self.requires: Requires = self._implementation.REQUIRES
        self._operator = _operator(name)     # not in __call__: torch.compile would trace the registration

    def __call__(self, w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
        self._check(w, k)
        out: Tensor
        out, = self._operator(w, k, float(eps))
        return out

    def __repr__(self) -> str:
        return f"TimeX({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TimeX, (self.name,)

    def forward(self, w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
        """The same, without checks and without autograd: for operators built on this one."""
        if k.numel() == 0:
            return k.new_empty(k.shape)
        inside = self._compute_dtype(w, k)
        with torch.autocast(k.device.type, enabled=False):   # which would reach into the file's own operations
            out = self._implementation.forward(self._pad(w, inside), self._pad(k, inside), eps)
        return _crop(out, like=k)

    def backward(self, w: Tensor, k: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        """(grad_w (C,T) summed over B, grad_k (B,C,T)) for grad_out (B,C,T), without checks."""
        if k.numel() == 0:
            return w.new_zeros(w.shape), k.new_empty(k.shape)
        inside = self._compute_dtype(w, k)
        padded = (self._pad(tensor, inside) for tensor in (w, k, grad_out))
        with torch.autocast(k.device.type, enabled=False):
            grad_w, grad_k = self._implementation.backward(*padded)
        return _crop(grad_w, like=w), _crop(grad_k, like=k)

    def _check(self, w: Tensor, k: Tensor) -> None:
        if w.dim() != 2 or k.dim() != 3 or tuple(w.shape) != tuple(k.shape[1:]):
            raise ValueError(f"TimeX expects w (C,T) and k (B,C,T), got w {tuple(w.shape)} and k {tuple(k.shape)}")
        if not (w.is_floating_point() and k.is_floating_point()):
            raise ValueError(f"TimeX expects floating-point w and k, got {w.dtype} and {k.dtype}")
        if w.device != k.device:
            raise ValueError(f"TimeX expects w and k on one device, got {w.device} and {k.device}")
        check_dtype("timex", self.name, self.requires, w.dtype, k.dtype)
        T, T_max = k.shape[-1], self.requires.T_max
        if T_max is not None and T > T_max:
            raise ValueError(f"{self.name} takes T up to {T_max}, got T = {T}: use another implementation")
        if not torch.compiler.is_compiling():
            check("timex", self.name, k.device)

    def _compute_dtype(self, w: Tensor, k: Tensor) -> torch.dtype:
        wanted = torch.promote_types(w.dtype, k.dtype)
        return wanted if wanted in self.requires.dtypes else torch.float32

    def _pad(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros on the left of T are exact, because the last column of w is lag 0; zeros after B are further rows."""
        left = -tensor.shape[-1] % self.requires.T_multiple
        rows = -tensor.shape[0] % self.requires.B_multiple if tensor.dim() == 3 else 0
        tensor = tensor.detach().to(dtype)
        if left or rows:
            tensor = F.pad(tensor, (left, 0, 0, 0, 0, rows) if tensor.dim() == 3 else (left, 0))
        return tensor.contiguous()


def _crop(padded: Tensor, like: Tensor) -> Tensor:
    cropped = padded[..., padded.shape[-1] - like.shape[-1]:]
    return cropped[:like.shape[0]].to(like.dtype).contiguous()


@cache
def _operator(name: str) -> Direct:
    """The implementation as a differentiable torch operator, registered at first use as timemix::timex_NAME."""
    operator = torch.library.custom_op(
        f"timemix::timex_{name}", lambda *inputs: TimeX(name).forward(*inputs), mutates_args=(),
        schema="(Tensor w, Tensor k, float eps) -> Tensor")
    gradient = torch.library.custom_op(
        f"timemix::timex_{name}_backward", lambda *inputs: TimeX(name).backward(*inputs), mutates_args=(),
        schema="(Tensor w, Tensor k, Tensor grad_out) -> (Tensor, Tensor)")
    operator.register_fake(lambda w, k, eps: k.new_empty(k.shape))
    gradient.register_fake(lambda w, k, grad_out: (w.new_empty(w.shape), k.new_empty(k.shape)))
    operator.register_autograd(lambda ctx, grad_out: (*gradient(*ctx.saved_tensors, grad_out), None),
                               setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
    return Direct(registered=lambda *inputs: (operator(*inputs),), forward=lambda *inputs: (TimeX(name).forward(*inputs),),
                  backward=lambda *tensors: TimeX(name).backward(*tensors), saved=lambda inputs, outputs: inputs[:2])
