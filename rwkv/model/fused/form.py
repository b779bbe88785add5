"""Selects the form of the operations between the matrix products: C on a CPU, Triton on a GPU.

    form = form_for(x, dtype=dtype)
    result = form.mix(...) if form else ...              # the formulas in PyTorch's operations

A form is a module with the functions of FusedForm. Its results and gradients are those of the formulas beside the call, except
for rounding: a form computes in float32 and rounds only its results.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kernels import native
from kernels.machine import triton

FORMS = {"cpu": "rwkv.model.fused.c", "cuda": "rwkv.model.fused.triton"}         # by device type
LOSS_FORMS = {"cuda": "rwkv.model.fused.loss_triton"}
Tensors = tuple[Tensor, ...]


class FusedForm(Protocol):
    """The arguments are those of the functions of these names in __init__.py and ../rwkv7/fused.py."""

    def supports(self, *tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool: ...

    def mix(self, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
            to_previous: bool) -> tuple[tuple[Tensor | None, ...], Tensors]: ...

    def mix_backward(self, saved: Sequence[Any], grads: Tensors, to_previous: bool) -> tuple[Tensor | None, ...]: ...

    def squared_relu(self, x: Tensor, grad: Tensor | None = None) -> Tensor: ...

    def gates(self, k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors: ...

    def gates_backward(self, k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors,
                       inverse: Tensor, grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
                       ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]: ...

    def gated(self, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor: ...

    def gated_backward(self, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                       grad: Tensor) -> tuple[Tensors, Tensors]: ...


def form_for(*tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> FusedForm | None:
    """The fused form that supports these tensors, or None.

    dtype: that of the results, if it differs. N: the channels of a head, for functions with heads.
    """
    device = tensors[0].device.type
    form = cast(FusedForm, _form(FORMS[device])) if device in FORMS and why_not(device) is None else None
    return form if form is not None and form.supports(*tensors, dtype=dtype, N=N) else None


class LossForm(Protocol):
    """Cross-entropy and its gradient over the logits; the arguments are those of loss.py."""

    def supports(self, logits: Tensor) -> bool: ...

    def replace_by_gradient(self, logits: Tensor, targets: Tensor, l2_wrap: float, confidence_penalty: float,
                            ignored: int) -> Tensor: ...

    def negative_log_likelihood(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor: ...


def loss_form_for(logits: Tensor) -> LossForm | None:
    """The fused cross-entropy for these logits (rows,V), or None."""
    device = logits.device.type
    form = cast(LossForm, _form(LOSS_FORMS[device])) if device in LOSS_FORMS and why_not(device) is None else None
    return form if form is not None and form.supports(logits) else None


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
def _form(module: str) -> Any:
    return importlib.import_module(module)
