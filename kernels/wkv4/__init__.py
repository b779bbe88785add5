"""Computes WKV, the operator of RWKV-4's time mixing: an average of v with weights that decay with the lag.

With w = -exp(time_decay) < 0 and u = time_first, in each channel:

    y_t = (a_{t-1} + e^(u+k_t) v_t) / (b_{t-1} + e^(u+k_t))
    a_t = e^w a_{t-1} + e^(k_t) v_t                  b_t = e^w b_{t-1} + e^(k_t)

time_decay and time_first are (C,); k, v and y are (B,T,C). The state (a, b, p), each (B,C), represents the sums a e^p and b
e^p. Different triples can represent the same state, so compare a/b and p + log b. Initially a = b = 0 and p = -1e38. p has no
gradient.

If k is NaN or +infinity, or v is not finite, y and the state of that row (b,c) are not finite from that step on. Other rows are
not affected. A NaN in the parameters or the state always appears in y. A k of -infinity has weight 0. The convolution formula
is exact only if all k of a row lie within 60 of each other (timex.py). With a larger spread, a later k may change an earlier y.
Source: the RWKV-4 paper (arXiv 2305.13048), equations 16 to 18 and appendix D for the scaled state.

An implementation is a file in this folder with REQUIRES, forward(time_decay, time_first, k, v, a, b, p) -> (y, a, b, p) and
backward(time_decay, time_first, k, v, a, b, p, y, grad_y, grad_a, grad_b) -> the gradients of all inputs except p. If
REQUIRES.dtypes includes bfloat16, k, v, y, grad_y and the gradients of k and v may be bfloat16. All other tensors are float32.
`step` below computes single steps for every implementation.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.operator import Operator, contiguous, contiguous_like

EMPTY = -1e38            # p of the empty state
FASTEST_DECAY = 50.0     # exp(-exp(50)) is 0 in every dtype, and exp(50) is still finite


class WKVState(NamedTuple):
    """The sums over all steps so far: the numerator is a e^p, and the denominator b e^p. a, b, p (B,C), float32 or float64."""

    a: Tensor
    b: Tensor
    p: Tensor

    @staticmethod
    def empty(B: int, C: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "WKVState":
        zeros = partial(torch.zeros, B, C, device=device, dtype=dtype)
        return WKVState(zeros(), zeros(), zeros().fill_(EMPTY))


class WKV4(Operator):
    """Computes WKV by the named implementation: `WKV4("reference")(time_decay, time_first, k, v, state=None) -> (y, state)`.

    The convolution formula also needs the name of a TimeX: `WKV4("timex", timex="taichi_v3")`. WKV can be differentiated once,
    with respect to all inputs except p. B, T and C may have any size, including 0. Half-precision k and v are computed in
    float32, and y has the dtype of k. Raises ValueError for an unknown name or wrong inputs, and KernelUnavailable if the
    implementation cannot run on the inputs' device.
    """

    folder = "wkv4"
    inputs = "Tensor time_decay, Tensor time_first, Tensor k, Tensor v, Tensor a, Tensor b, Tensor p"
    outputs = (("y", "k"), ("a", "a"), ("b", "b"), ("p", "p"))
    gradients = ("time_decay", "time_first", "k", "v", "a", "b")
    differentiable = ("y", "a", "b")
    saved = (*gradients, "p", "y")

    def __init__(self, name: str, **options: str | int) -> None:
        super().__init__(name, **options)
        if "timex" in options:                   # check_device then checks the TimeX's REQUIRES
            self.name = str(options["timex"])
            self._file = ("timex", self.name)

    def __call__(self, time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
                 state: WKVState | None = None) -> tuple[Tensor, WKVState]:
        self._check(time_decay, time_first, k, v, state)
        if state is None:
            state = WKVState.empty(k.shape[0], k.shape[2], k.device, _compute_dtype(k))
        y, a, b, p = self._function(time_decay, time_first, k, v, *state)
        return y, WKVState(a, b, p)

    def _forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        supported = self._supported_inputs(inputs)
        outputs = self._implementation.forward(*supported, **self._options)
        return contiguous_like(self._outputs_of(outputs, (supported[2], *supported[4:])), (inputs[2], *inputs[4:]))

    def _backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        supported = self._supported_inputs(inputs)
        gradients = self._implementation.backward(*supported, **self._options)
        return contiguous_like(self._gradients_of(gradients, supported[:6]), inputs[:6])

    def _supported_inputs(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Returns the inputs, contiguous and in supported dtypes.

        k, v, y and grad_y keep a dtype that the implementation supports. The other inputs are float32 or float64.
        """
        k, v = inputs[2:4]
        dtype = _compute_dtype(k)
        sequence_dtype = k.dtype if k.dtype == v.dtype and k.dtype in self.requires.dtypes else dtype
        return [contiguous(tensor.detach(), sequence_dtype if tensor.dim() == 3 else dtype) for tensor in inputs]

    def _check(self, time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor, state: WKVState | None) -> None:
        self._require_tensors(time_decay, time_first, k, v)
        if k.dim() != 3 or k.shape != v.shape or not time_decay.shape == time_first.shape == k.shape[2:]:
            raise ValueError(
                "WKV4: time_decay and time_first must be (C,), and k and v must be (B,T,C); got "
                f"{tuple(time_decay.shape)}, {tuple(time_first.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
        if state is not None and not _is_state(state, (k.shape[0], k.shape[2])):
            raise ValueError(f"WKV4: the state must be three tensors with the shape (B,C) = {(k.shape[0], k.shape[2])}; "
                             f"got {_describe(state)}")
        tensors = time_decay, time_first, k, v, *(state or ())
        dtypes = [tensor.dtype for tensor in tensors]
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"WKV4: tensors must be floating-point; got {', '.join(map(str, dtypes))}")
        if any(tensor.device != k.device for tensor in tensors):
            raise ValueError("WKV4: all tensors and the state must be on the device of k, "
                             f"{k.device}: move the other tensors to that device")
        self.check_dtype(*dtypes)
        if k.dtype != torch.float64 and torch.float64 in dtypes:
            raise ValueError(f"WKV4 computes in float64 only if k is float64, but k is {k.dtype}: cast all inputs to "
                             "the same dtype")
        self.check_device(k.device)

    @staticmethod
    def step(time_decay: Tensor, time_first: Tensor, k: Tensor, v: Tensor,
             state: WKVState) -> tuple[Tensor, WKVState]:
        """Returns y and the state after a time step with k and v (B,C). All implementations share this code."""
        a, b, p = state
        dtype = k.dtype
        w = decay_exponent(time_decay.to(a.dtype))
        k = k.to(a.dtype)
        v = v.to(a.dtype)
        here = time_first.to(a.dtype) + k
        top = torch.maximum(p, here)
        past = torch.exp(p - top)
        now = torch.exp(here - top)
        y = (past * a + now * v) / (past * b + now)
        decayed = p + w
        p = torch.maximum(decayed, k)
        past = torch.exp(decayed - p)
        now = torch.exp(k - p)
        return y.to(dtype), WKVState(past * a + now * v, past * b + now, p)


def decay_exponent(time_decay: Tensor, fastest: float = FASTEST_DECAY) -> Tensor:       # TorchScript cannot read globals
    """Returns w = -exp(time_decay), which is finite for any finite time_decay."""
    return -torch.exp(time_decay.clamp(max=fastest))


def _is_state(state: object, shape: tuple[int, int]) -> bool:
    return (isinstance(state, tuple | list) and len(state) == 3
            and all(isinstance(part, Tensor) and part.shape == shape for part in state))


def _describe(state: object) -> str:
    """Returns the shapes of the tensors in a tuple or a list, and the types of anything else."""
    if not isinstance(state, tuple | list):
        return f"a {type(state).__name__}"
    return ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in state)


def _compute_dtype(k: Tensor) -> torch.dtype:
    return torch.float64 if k.dtype == torch.float64 else torch.float32


OPERATOR = WKV4
