"""Computes y_t = e^(-e^decay) y_{t-1} + k_t from decay (C,) and k (B,T,C). The state is the last y (B,C)."""

from torch import Tensor

from kernels.operator import Operator, contiguous_like


class WKV9(Operator):
    folder = "wkv9"
    inputs = "Tensor decay, Tensor k, Tensor state"
    outputs = (("y", "k"), ("state", "state"))
    gradients = ("decay", "k", "state")
    differentiable = ("y", "state")
    saved = ("decay", "k", "state", "y")

    def __call__(self, decay: Tensor, k: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.check_device(k.device)
        return self._function(decay, k, k.new_zeros(k.shape[0], k.shape[2]) if state is None else state)

    def _forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return contiguous_like(self._implementation.forward(*inputs), inputs[1:])

    def _backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return contiguous_like(self._implementation.backward(*inputs), inputs[:3])


OPERATOR = WKV9
