"""How far an implementation is from its operator's float64 reference: what the tests and the benchmark both ask.

`timex_results` and `wkv_results` run an operator forward and backward and return everything that it computes, by name;
`errors` compares two such dictionaries, and `misses` keeps what is outside the tolerances of the operator's cases.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv import WKV, WKVState
from kernels.wkv import cases as wkv_cases

LOG_SIZE = "p + log b"                # with a/b, what is the same in all forms of one state
WKVInputs = tuple[Tensor, Tensor, Tensor, Tensor, WKVState | None]


def err_ratio(actual: Tensor, reference: Tensor) -> float:
    """RMS(actual - reference) / RMS(reference): 0 where both are empty or zero, infinite where actual is not finite."""
    error, size = rms(actual, reference), rms(reference, torch.zeros_like(reference))
    return error / size if size else float("inf") if error else 0.0


def rms(actual: Tensor, reference: Tensor) -> float:
    """RMS(actual - reference): 0 where both are empty, infinite where actual is not finite."""
    if actual.shape != reference.shape:
        raise ValueError(f"expected tensors of one shape, got {tuple(actual.shape)} and {tuple(reference.shape)}")
    difference = actual.detach().double() - reference.detach().double()
    if not difference.isfinite().all():
        return float("inf")
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0


def errors(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """The err_ratio of each result, by name; of a logarithm the RMS error, which is the err_ratio of what it is the log of."""
    return {name: (rms if name == LOG_SIZE else err_ratio)(actual[name], reference[name]) for name in reference}


def misses(found: Mapping[str, float], tolerance: Mapping[str, float]) -> dict[str, str]:
    """The results that are off by more than their tolerance, each with both numbers; empty where all is well."""
    return {name: f"{error:.1e}, allowed are {tolerance[name]:.1e}"
            for name, error in found.items() if not error <= tolerance[name]}


def timex_results(timex: TimeX, w: Tensor, k: Tensor, eps: float = 0.0) -> dict[str, Tensor]:
    """out (B,C,T), and the gradients grad_w (C,T) and grad_k (B,C,T) of cases.loss(out)."""
    w, k = w.detach().requires_grad_(), k.detach().requires_grad_()
    out = timex(w, k, eps)
    grad_w, grad_k = torch.autograd.grad(timex_cases.loss(out), (w, k))
    return {"out": out.detach(), "grad_w": grad_w, "grad_k": grad_k}


def timex_tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A half-precision gradient is rounded three times: the output that it is taken at, grad_out, and itself."""
    allowed = timex_cases.TOLERANCE[dtype]
    gradient = 3 * allowed if dtype.itemsize == 2 else allowed
    return {"out": allowed, "grad_w": gradient, "grad_k": gradient}


def wkv_results(wkv: WKV, inputs: WKVInputs, of: str = "y and state") -> dict[str, Tensor]:
    """y, the outgoing state as a/b and p + log b, and the gradients of a loss on y, on the state, or on both.

    The gradients are those of time_decay, time_first, k, v and, with a state, of its a and b.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in _differentiable(inputs).items()}
    state = None if inputs[4] is None else WKVState(leaves["a"], leaves["b"], inputs[4].p)
    y, outgoing = wkv(leaves["time_decay"], leaves["time_first"], leaves["k"], leaves["v"], state)
    ratio, size = outgoing.a / outgoing.b, outgoing.p + outgoing.b.log()
    on_y, on_state = timex_cases.loss(y), ratio.tanh().sum() + size.sin().sum()
    loss = {"y": on_y, "state": on_state, "y and state": on_y + on_state}[of]
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    results = {"y": y, "a/b": ratio, LOG_SIZE: size}
    results |= {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in results.items()}


def wkv_tolerance(dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """For k and v of `dtype`; in half precision y, grad_y and the gradient are each rounded, the state is not."""
    allowed = wkv_cases.TOLERANCE
    rounding = 3 * timex_cases.TOLERANCE[dtype] if dtype.itemsize == 2 else 0.0
    gradients = [f"grad {name}" for name in ("time_decay", "time_first", "k", "v", "a", "b")]
    return {"y": max(allowed["y"], rounding), "a/b": allowed["state"], LOG_SIZE: allowed["state"],
            **dict.fromkeys(gradients, max(allowed["gradient"], rounding))}


def double(inputs: WKVInputs) -> WKVInputs:
    """The same inputs in float64, for the reference."""
    time_decay, time_first, k, v, state = inputs
    wide = None if state is None else WKVState(*(part.double() for part in state))
    return time_decay.double(), time_first.double(), k.double(), v.double(), wide


def _differentiable(inputs: WKVInputs) -> dict[str, Tensor]:
    time_decay, time_first, k, v, state = inputs
    tensors = {"time_decay": time_decay, "time_first": time_first, "k": k, "v": v}
    return tensors if state is None else tensors | {"a": state.a, "b": state.b}
