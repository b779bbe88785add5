"""Selects a fused implementation of the operations between the matrix products: C on a CPU, Triton on a GPU.

    backend = backend_for(x, dtype=dtype)
    result = backend.mix(...) if backend else ...              # the formulas in PyTorch's operations

A backend is a module with the functions of FusedBackend. A backend computes in float32 and rounds only its results. So results
and gradients equal those of PyTorch's formulas up to rounding. RWKV-7 has additional fused functions, in rwkv7/fused_c.py and
rwkv7/fused_triton.py; module_for("rwkv.model.rwkv7.fused_", x) selects between these two modules.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import native
from kernels.backends.torch_private import dispatch_mode_active
from kernels.machine import triton
from kernels.operator import PLAIN

SUFFIXES = {"cpu": "c", "cuda": "triton"}        # device type -> suffix of the module's name
Tensors = tuple[Tensor, ...]


class FusedBackend(Protocol):
    """The functions of a fused implementation. Each has the arguments of the function of the same name in __init__.py."""

    def supports(self, *tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool: ...

    def mix(self, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
            to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]: ...

    def mix_backward(self, saved: Sequence[Tensor | None], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]: ...

    def squared_relu(self, x: Tensor, grad: Tensor | None = None) -> Tensor: ...


def backend_for(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> FusedBackend | None:
    """Returns the fused implementation for these tensors, or None if there is none.

    Args:
        dtype: the dtype of the results; the default is the tensors' dtype.
        N: the number of channels per head, for functions with heads.
    """
    backend: FusedBackend | None = module_for("rwkv.model.fused.", *tensors)
    return backend if backend is not None and backend.supports(*tensors, dtype=dtype, N=N) else None


class LossBackend(Protocol):
    """The functions of a fused cross-entropy. Their arguments are as in loss.py."""

    def supports(self, logits: Tensor) -> bool: ...

    def replace_by_gradient(self, logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float,
                            ignored: int) -> Tensor: ...

    def negative_log_likelihood(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor: ...


def loss_backend_for(logits: Tensor) -> LossBackend | None:
    """Returns the fused cross-entropy for these logits (rows,V), or None if there is none."""
    backend: LossBackend | None = module_for("rwkv.model.fused.loss_", logits)
    return backend if backend is not None and backend.supports(logits) else None


def module_for(prefix: str, *tensors: Tensor) -> Any:
    """Returns the module named `prefix` + the suffix of the tensors' device type.

    Returns None if no such module exists or can run here, or if a tensor's class is a subclass, such as FakeTensor or DTensor,
    which may not own memory. Also returns None instead of C if a dispatch mode, such as that of make_fx, must see what is
    computed.
    """
    device = tensors[0].device.type
    if device not in SUFFIXES or why_not(device) is not None or not all(type(tensor) in PLAIN for tensor in tensors):
        return None
    if SUFFIXES[device] == "c" and dispatch_mode_active():
        return None
    return _module(prefix + SUFFIXES[device])


def describe(device: str) -> str:
    """Describes in words, for the plan of a run, what computes the fused operations on this type of device."""
    reason = why_not(device)
    return {"cpu": "in C", "cuda": "in Triton"}[device] if reason is None else f"in PyTorch's operations: {reason}"


@cache
def why_not(device: str) -> str | None:
    """Returns the reason why this type of device has no fused implementation, or None if there is an implementation."""
    if device == "cpu":
        return native.why_not()
    if device == "cuda":
        return triton.why_not()
    return f"there are no fused operations for {device}"


@cache
def _module(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
