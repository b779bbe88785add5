"""The token shift: every step of a sequence mixed with the one before it, in n ways, by weights of each channel.

    out_i[b,t,c] = mu_i[c] x[b,t,c] + (1 - mu_i[c]) x[b,t-1,c]          x[b,-1,c] = last_x[b,c]

x (B,T,C), last_x (B,C), mus (n,C); the n results (B,T,C). In PyTorch: before = torch.cat((last_x[:, None], x[:, :-1]), 1),
then [mu * x + (1 - mu) * before for mu in mus]. Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1; RWKV-LM's time_mix_k,
time_mix_v and time_mix_r are three such mu.

What all implementations share lives here, once: checks, casts, autograd. A file beside this one holds REQUIRES,
forward(x, last_x, mus, dtype) -> the n results, in dtype or in x's, and backward(x, last_x, mus, *grads) -> grad_x,
grad_last_x, grad_mus, where the grads come in forward's dtype; no size is 0, and all tensors are contiguous.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels._direct import Direct
from kernels.registry import Requires, check, check_dtype, load

RESULTS = (torch.float32, torch.bfloat16, torch.float16)     # and float64, of an x in float64
Tensors = tuple[Tensor, ...]


class TokenShift:
    """One implementation, by name: `TokenShift("taichi_v0")(x, last_x, mus, dtype=None) -> n tensors (B,T,C)`.

    dtype: of the results, x's own unless given; float32, or bfloat16 or float16 for products that take them. Computed in
    float32, or in float64 where x is, and rounded once. Differentiable (once) in x, last_x and mus; holds no tensors; any
    B, T and C, a size of 0 included, and any n >= 1. Raises ValueError for an unknown name or wrong inputs, and
    KernelUnavailable where the implementation cannot run on their device.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requires: Requires = load("shift", name).REQUIRES
        self._operators = _operators(name)   # not in __call__: torch.compile would trace the registration

    def __call__(self, x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype | None = None) -> Tensors:
        dtype = x.dtype if dtype is None else dtype
        self._check(x, last_x, mus, dtype)
        return self._operators[dtype](x, last_x, mus)

    def gradients(self, x: Tensor, last_x: Tensor, mus: Tensor, grads: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Of x, last_x and mus, from those of the results: what backward computes, for an autograd function of one's own."""
        of_x, of_last_x, of_mus = self._operators[grads[0].dtype].gradients(x, last_x, mus, *grads)
        return of_x, of_last_x, of_mus

    def __repr__(self) -> str:
        return f"TokenShift({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShift, (self.name,)

    def _check(self, x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> None:
        if not _fit(x.shape, last_x.shape, mus.shape):
            raise ValueError("TokenShift expects x (B,T,C), last_x (B,C) and mus (n,C) with n at least 1, got "
                             f"{tuple(x.shape)}, {tuple(last_x.shape)}, {tuple(mus.shape)}")
        if not (x.is_floating_point() and last_x.is_floating_point() and mus.is_floating_point()):
            raise ValueError(f"TokenShift expects floating-point tensors, got {x.dtype}, {last_x.dtype}, {mus.dtype}")
        if not x.device == last_x.device == mus.device:
            raise ValueError(f"TokenShift expects tensors on one device, got {x.device}, {last_x.device}, {mus.device}")
        if dtype not in RESULTS and not dtype == x.dtype == torch.float64:
            raise ValueError(f"TokenShift gives {', '.join(map(str, RESULTS))}, or torch.float64 of such an x, not {dtype}")
        check_dtype("shift", self.name, self.requires, x.dtype)
        if not torch.compiler.is_compiling():
            check("shift", self.name, x.device)


def _fit(x: torch.Size, last_x: torch.Size, mus: torch.Size) -> bool:
    """(B,T,C), (B,C), (n,C)"""
    return len(x) == 3 and len(mus) == 2 and mus[0] > 0 and mus[1] == x[2] and tuple(last_x) == (x[0], x[2])


@cache
def _operators(name: str) -> dict[torch.dtype, Direct]:
    """For each dtype of results; behind them one torch operator, registered at first use as timemix::shift_NAME."""
    forward, backward = partial(_forward, name), partial(_backward, name)
    inputs = "Tensor x, Tensor last_x, Tensor mus"
    operator = torch.library.custom_op(f"timemix::shift_{name}", forward, mutates_args=(),
                                       schema=f"({inputs}, ScalarType dtype) -> Tensor[]")
    gradient = torch.library.custom_op(f"timemix::shift_{name}_backward", backward, mutates_args=(),
                                       schema=f"({inputs}, Tensor[] grads) -> (Tensor, Tensor, Tensor)")
    operator.register_fake(_empty)
    gradient.register_fake(lambda x, last_x, mus, grads: tuple(like.new_empty(like.shape) for like in (x, last_x, mus)))
    operator.register_autograd(lambda ctx, grads: (*gradient(*ctx.saved_tensors, grads), None),
                               setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]))
    return {dtype: _direct(operator, gradient, forward, backward, dtype) for dtype in (*RESULTS, torch.float64)}


def _direct(operator: Any, gradient: Any, forward: Any, backward: Any, dtype: torch.dtype) -> Direct:
    return Direct(registered=lambda x, last_x, mus: tuple(operator(x, last_x, mus, dtype)),
                  forward=lambda x, last_x, mus: tuple(forward(x, last_x, mus, dtype)),
                  backward=lambda x, last_x, mus, *grads: backward(x, last_x, mus, grads),
                  saved=lambda inputs, outputs: inputs,
                  registered_backward=lambda x, last_x, mus, *grads: gradient(x, last_x, mus, list(grads)))


def _forward(name: str, x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> list[Tensor]:
    if x.numel() == 0:
        return _empty(x, last_x, mus, dtype)
    results = load("shift", name).forward(*_inside(x, last_x, mus), dtype)
    return [result.to(dtype).contiguous() for result in results]


def _backward(name: str, x: Tensor, last_x: Tensor, mus: Tensor, grads: Iterable[Tensor]) -> Tensors:
    inputs = x, last_x, mus
    if x.numel() == 0:
        return tuple(tensor.new_zeros(tensor.shape) for tensor in inputs)
    found = load("shift", name).backward(*_inside(*inputs), *(grad.detach().contiguous() for grad in grads))
    return tuple(grad.to(tensor.dtype).contiguous() for grad, tensor in zip(found, inputs, strict=True))


def _empty(x: Tensor, last_x: Tensor, mus: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=dtype) for _ in range(mus.shape[0])]


def _inside(x: Tensor, last_x: Tensor, mus: Tensor) -> list[Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return [tensor.detach().to(dtype).contiguous() for tensor in (x, last_x, mus)]
