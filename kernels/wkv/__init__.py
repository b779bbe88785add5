"""WKV, the time mixing of RWKV-4: a weighted average of v whose weights decay exponentially with the lag.

With w = -exp(time_decay) < 0 and u = time_first, per channel:

    y_t = (a_{t-1} + e^(u+k_t) v_t) / (b_{t-1} + e^(u+k_t))
    a_t = e^w a_{t-1} + e^(k_t) v_t                  b_t = e^w b_{t-1} + e^(k_t)

time_decay, time_first (C,); k, v, y (B,T,C). The state (a, b, p), each (B,C), stands for (a e^p, b e^p): many triples are
one state, so compare a/b and p + log b. It starts at a = b = 0, p = -1e38; p carries no gradient.

From the step on where k is NaN or infinity, or v is NaN or infinite, y and the state are not finite, in that row (b,c) alone
and never before; a NaN in the parameters or the state is never hidden. A k of -infinity weighs nothing. Beyond the range that
the convolution form is exact for (timex.py: 60), a later k may change its earlier y.
Source: the RWKV-4 paper (arXiv 2305.13048), equations 16 to 18 and appendix D for the scaled state.

What all implementations share lives here, once: checks, casts, autograd, the single step. A file beside this one holds
REQUIRES, forward(time_decay, time_first, k, v, a, b, p) -> (y, a, b, p) and
backward(time_decay, time_first, k, v, a, b, p, y, grad_y, grad_a, grad_b) -> gradients of the first four, a and b. Where
REQUIRES has bfloat16, k, v, y and grad_y come in it as they are, and the gradients of k and v go back in it; all else is
float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels._direct import Direct
from kernels.registry import Requires, check, check_dtype, load

EMPTY = -1e38            # p of a state that has seen nothing
FASTEST_DECAY = 50.0     # exp(-exp(50)) is 0 in every dtype, and exp(50) is still finite


class WKVState(NamedTuple):
    """The numerator a e^p and the denominator b e^p of everything seen so far: (B,C) each, float32 (or float64)."""

    a: Tensor
    b: Tensor
    p: Tensor

    @staticmethod
    def empty(B: int, C: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "WKVState":
        zeros = partial(torch.zeros, B, C, device=device, dtype=dtype)
        return WKVState(zeros(), zeros(), zeros().fill_(EMPTY))


class WKV:
    """One implementation, by name: `WKV("reference")(time_decay, time_first, k, v, state=None) -> (y, state)`.

    The convolution form takes a TimeX inside: `WKV("timex", timex="taichi_v3")`. Differentiable (once) in everything
    but p; holds no tensors; any B, T, C, a size of 0 included. Half-precision k and v are computed in float32 and y comes
    back in their dtype. Raises ValueError for an unknown name or wrong inputs, KernelUnavailable where the
    implementation cannot run on the inputs' device.
    """

    def __init__(self, name: str, **options: str | int) -> None:
        self.name = str(options.get("timex", name))
        self._implementation, self._options = load("wkv", name), tuple(sorted(options.items()))
        self._operator_name = "_".join(str(part) for part in ("wkv", name, *(value for _, value in self._options)))
        self.requires: Requires = _requires(self._implementation, options)
        self._operator = _operator(self._operator_name, self._implementation.__name__, self._options)
        self._registry_key = ("timex", str(options["timex"])) if "timex" in options else ("wkv", name)

    def __call__(self, time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
                 state: WKVState | None = None) -> tuple[Tensor, WKVState]:
        self._check(time_decay, time_first, k, v, state)
        a, b, p = state if state is not None else self._empty_state(k)
        y, *new_state = self._operator(time_decay, time_first, k, v, a, b, p)
        return y, WKVState(*new_state)

    def __repr__(self) -> str:
        return f"WKV({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        name = self._implementation.__name__.rpartition(".")[2]
        return partial(WKV, name, **dict(self._options)), ()

    def check(self, device: torch.device) -> None:
        """Raises KernelUnavailable, with the reason and the remedy, where this cannot run on `device`."""
        check(*self._registry_key, device)

    def _empty_state(self, k: Tensor) -> WKVState:
        return WKVState.empty(k.shape[0], k.shape[2], k.device, _compute_dtype(k))

    def _check(self, time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, state: WKVState | None) -> None:
        if k.dim() != 3 or k.shape != v.shape or not time_decay.shape == time_first.shape == k.shape[2:]:
            raise ValueError(
                "WKV expects time_decay and time_first (C,), k and v (B,T,C), got "
                f"{tuple(time_decay.shape)}, {tuple(time_first.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
        if not (k.is_floating_point() and v.is_floating_point()):
            raise ValueError(f"WKV expects floating-point k and v, got {k.dtype} and {v.dtype}")
        if any(tensor.device != k.device for tensor in (time_decay, time_first, v, *(state or ()))):
            raise ValueError("WKV expects all tensors and the state on one device, that of k, which is "
                             f"{k.device}: move the others there")
        if state is not None and any(part.shape != (k.shape[0], k.shape[2]) for part in state):
            raise ValueError(f"WKV expects a state of three (B,C) = {(k.shape[0], k.shape[2])}, "
                             f"got {', '.join(str(tuple(part.shape)) for part in state)}")
        check_dtype(self._registry_key[0], self.name, self.requires, time_decay.dtype, time_first.dtype, k.dtype, v.dtype)
        if not torch.compiler.is_compiling():
            self.check(k.device)

    @staticmethod
    def step(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
             state: WKVState) -> tuple[Tensor, WKVState]:
        """One time step, k and v (B,C), the same torch formula whatever the implementation: decoding launches no kernel."""
        a, b, p = state
        dtype, k, v, w = k.dtype, k.to(a.dtype), v.to(a.dtype), decay_exponent(time_decay.to(a.dtype))
        here = time_first.to(a.dtype) + k
        top = torch.maximum(p, here)
        past, now = torch.exp(p - top), torch.exp(here - top)
        y = (past * a + now * v) / (past * b + now)
        decayed = p + w
        p = torch.maximum(decayed, k)
        past, now = torch.exp(decayed - p), torch.exp(k - p)
        return y.to(dtype), WKVState(past * a + now * v, past * b + now, p)


def decay_exponent(time_decay: Tensor) -> Tensor:
    """w = -exp(time_decay), finite for any finite time_decay."""
    return -torch.exp(time_decay.clamp(max=FASTEST_DECAY))


def _requires(implementation: Any, options: dict[str, str | int]) -> Requires:
    return implementation.requires(**options) if options else implementation.REQUIRES


def _compute_dtype(k: Tensor) -> torch.dtype:
    return torch.float64 if k.dtype == torch.float64 else torch.float32


@cache
def _operator(operator_name: str, module: str, options: tuple[tuple[str, str | int], ...]) -> Any:
    """The implementation as a differentiable torch operator, registered at first use as timemix::OPERATOR_NAME."""
    implementation = load("wkv", module.rpartition(".")[2])
    dtypes = _requires(implementation, dict(options)).dtypes
    forward = partial(_forward, partial(implementation.forward, **dict(options)), dtypes)
    backward = partial(_backward, partial(implementation.backward, **dict(options)), dtypes)
    inputs = "Tensor time_decay, Tensor time_first, Tensor k, Tensor v, Tensor a, Tensor b, Tensor p"
    operator = torch.library.custom_op(f"timemix::{operator_name}", forward, mutates_args=(),
                                       schema=f"({inputs}) -> (Tensor, Tensor, Tensor, Tensor)")
    gradient = torch.library.custom_op(f"timemix::{operator_name}_backward", backward, mutates_args=(),
                                       schema=f"({inputs}, Tensor y, Tensor grad_y, Tensor grad_a, Tensor grad_b) -> "
                                              "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
    operator.register_fake(lambda *inputs: (_empty_like(inputs[2]), *map(_empty_like, inputs[4:])))
    gradient.register_fake(lambda *inputs: tuple(map(_empty_like, inputs[:6])))
    operator.register_autograd(
        lambda ctx, grad_y, grad_a, grad_b, grad_p: (*gradient(*ctx.saved_tensors, grad_y, grad_a, grad_b), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*_saved(inputs, output)))
    return Direct(operator, forward, lambda *tensors: backward(*tensors[:-1]), _saved)      # the last: p's, which has none


def _saved(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *inputs, outputs[0]


def _empty_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _forward(implementation: Callable[..., tuple[Tensor, ...]], dtypes: tuple[torch.dtype, ...],
             *inputs: Tensor) -> tuple[Tensor, ...]:
    k, state = inputs[2], inputs[4:7]
    if k.numel() == 0:
        return (k.new_empty(k.shape), *(part.clone() for part in state))
    with _no_autocast(k):
        return _cast(implementation(*_inside(dtypes, inputs)), like=(k, *state))


def _backward(implementation: Callable[..., tuple[Tensor, ...]], dtypes: tuple[torch.dtype, ...],
              *inputs: Tensor) -> tuple[Tensor, ...]:
    k, (grad_a, grad_b) = inputs[2], inputs[9:]
    if k.numel() == 0:
        return (*(part.new_zeros(part.shape) for part in inputs[:4]), grad_a.clone(), grad_b.clone())
    with _no_autocast(k):
        return _cast(implementation(*_inside(dtypes, inputs)), like=inputs[:6])


def _no_autocast(k: Tensor) -> AbstractContextManager[Any]:
    """It would reach into a file's own operations."""
    kind = k.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _inside(dtypes: tuple[torch.dtype, ...], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """As the file takes them: k, v, y and grad_y as they are where it knows their dtype; everything else is never half."""
    k, v = inputs[2:4]
    dtype = _compute_dtype(k)
    of_sequences = k.dtype if k.dtype == v.dtype and k.dtype in dtypes else dtype
    return [_as(tensor.detach(), of_sequences if tensor.dim() == 3 else dtype) for tensor in inputs]


def _cast(outputs: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(_as(output, tensor.dtype) for output, tensor in zip(outputs, like, strict=True))


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in dtype; looking first is cheaper than asking for what is there."""
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
