"""An operator called past PyTorch's dispatcher where only autograd has to know of it: 0.1 to 0.2 ms less a call on a CPU.

What torch.compile, export, torch.jit.trace, profilers, dispatch modes and subclasses of Tensor see is the registered operator;
both run the same two functions. Function transforms take the direct form: grad, vjp and jacrev as they are, vmap by a call for
each sample. There is one derivative, in reverse mode: a second one and forward mode (jvp, jacfwd) raise ValueError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Direct:
    """registered(*inputs), shorter where possible: its forward(*inputs), and backward(*saved(inputs, outputs), *gradients).

    The inputs are tensors, and numbers, which have no gradient. registered_backward: the same as backward, for who computes
    gradients without autograd.
    """

    registered: Callable[..., Tensors]
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    saved: Callable[[tuple[Any, ...], Tensors], Tensors]
    registered_backward: Callable[..., Tensors] | None = None

    def __call__(self, *inputs: Any) -> Tensors:
        transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        if _watched(inputs) and not transformed:
            return self.registered(*inputs)
        outputs: Tensors = (_Transformed if transformed else _Forward).apply(self, *inputs)
        return outputs

    def gradients(self, *saved_and_gradients: Tensor) -> Tensors:
        watched = self.registered_backward if _watched(saved_and_gradients) else None
        return (watched or self.backward)(*saved_and_gradients)


class _ReverseOnly(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ValueError("the operators of kernels/ have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode "
                         "(grad, vjp, jacrev)")

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        """A call for each sample."""
        operator, *others = inputs
        rows = [other if dim is None else other.movedim(dim, 0) for other, dim in zip(others, in_dims[1:], strict=True)]
        samples = [cls.apply(operator, *(row if dim is None else row[i] for row, dim in zip(rows, in_dims[1:], strict=True)))
                   for i in range(info.batch_size)]
        outputs = tuple(torch.stack(output) for output in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)


class _Forward(_ReverseOnly):
    @staticmethod
    def forward(ctx: Any, operator: Direct, *inputs: Any) -> Tensors:
        outputs = operator.forward(*inputs)
        _save(ctx, operator, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        backward = partial(_Backward.apply, ctx.operator) if torch.is_grad_enabled() else ctx.operator.backward
        return _padded(ctx, backward(*ctx.saved_tensors, *grads))


class _Transformed(_ReverseOnly):
    """The same as function transforms ask for it, which costs 50 us more a call."""

    @staticmethod
    def forward(operator: Direct, *inputs: Any) -> Tensors:
        return operator.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        _save(ctx, inputs[0], inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _padded(ctx, _Backward.apply(ctx.operator, *ctx.saved_tensors, *grads))


def _save(ctx: Any, operator: Direct, inputs: tuple[Any, ...], outputs: Tensors) -> None:
    ctx.operator, ctx.others = operator, len(inputs)
    ctx.save_for_backward(*operator.saved(inputs, outputs))


def _padded(ctx: Any, found: Tensors) -> tuple[Tensor | None, ...]:
    """For the operator itself, and for the inputs that have no gradient."""
    return None, *found, *[None] * (ctx.others - len(found))


class _Backward(_ReverseOnly):
    """The gradient as an operator of its own, so that to differentiate it raises, whatever the incoming gradient depends on."""

    @staticmethod
    def forward(operator: Direct, *saved_and_gradients: Tensor) -> Tensors:
        return operator.backward(*saved_and_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ValueError("the operators of kernels/ can be differentiated once, and this is a second derivative: compute it "
                         "with a formula in PyTorch's own operations")


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Whether somebody has to see an operator, and not what it does inside."""
    return (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
            or any(isinstance(value, Tensor) and type(value) not in PLAIN for value in inputs)
            or torch._C._autograd._profiler_enabled())
