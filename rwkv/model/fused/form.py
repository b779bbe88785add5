"""Selects the form of the operations between the matrix products: C on a CPU, Triton on a GPU.

    form = form_for(x, dtype=dtype)
    result = form.mix(...) if form else ...              # the formulas in PyTorch's operations

A form is a module with the functions of FusedForm. Its results and gradients are those of the formulas beside the call, except
for rounding: a form computes in float32 and rounds only its results. A generation's own forms are selected in the same way:
rwkv7/fused_c.py and fused_triton.py by module_for("rwkv.model.rwkv7.fused_", device).
"""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import native
from kernels.machine import triton

SUFFIXES = {"cpu": "c", "cuda": "triton"}        # of the names of forms, by device type
Tensors = tuple[Tensor, ...]


class FusedForm(Protocol):
    """The arguments are those of the functions of these names in __init__.py."""

    def supports(self, *tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool: ...

    def mix(self, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
            to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]: ...

    def mix_backward(self, saved: Sequence[Tensor | None], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]: ...

    def squared_relu(self, x: Tensor, grad: Tensor | None = None) -> Tensor: ...


def form_for(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> FusedForm | None:
    """The fused form that supports these tensors, or None.

    dtype: that of the results, if it differs. N: the channels of a head, for functions with heads.
    """
    form: FusedForm | None = module_for("rwkv.model.fused.", tensors[0].device.type)
    return form if form is not None and form.supports(*tensors, dtype=dtype, N=N) else None


class LossForm(Protocol):
    """Cross-entropy and its gradient over the logits; the arguments are those of loss.py."""

    def supports(self, logits: Tensor) -> bool: ...

    def replace_by_gradient(self, logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float,
                            ignored: int) -> Tensor: ...

    def negative_log_likelihood(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor: ...


def loss_form_for(logits: Tensor) -> LossForm | None:
    """The fused cross-entropy for these logits (rows,V), or None."""
    form: LossForm | None = module_for("rwkv.model.fused.loss_", logits.device.type)
    return form if form is not None and form.supports(logits) else None


def module_for(prefix: str, device: str) -> Any:
    """The module of that name and the suffix of the type of device, if there is one and it can run here; otherwise None."""
    return _module(prefix + SUFFIXES[device]) if device in SUFFIXES and why_not(device) is None else None


def describe(device: str) -> str:
    """The form on this type of device, in words for the plan of a run."""
    reason = why_not(device)
    return {"cpu": "in C", "cuda": "in Triton"}[device] if reason is None else f"in PyTorch's operations: {reason}"


@cache
def why_not(device: str) -> str | None:
    """Why there is no fused form on this type of device, or None."""
    if device == "cpu":
        return native.why_not()
    if device == "cuda":
        return triton.why_not()
    return f"there are none for {device}"


@cache
def _module(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
