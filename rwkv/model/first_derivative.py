"""A decorator for autograd functions that have no second derivative, and the type of their ctx.

torch's once_differentiable raises an error only if the incoming gradient requires a gradient. For a constant incoming gradient,
torch would silently compute an incomplete second derivative, without the terms of the tensors saved for backward. This
decorator raises an error in that case, too.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.backends.torch_private import transforms_active
from kernels.operator import ReverseOnly, require_no_legacy_batch

if TYPE_CHECKING:
    class Context(FunctionCtx):
        """The type of ctx in an autograd function. Forward may set any attribute for backward to read."""

        saved_tensors: tuple[torch.Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
else:
    Context = FunctionCtx

P = ParamSpec("P")
Result = TypeVar("Result")


def require_first_derivative(args: Sequence[Any]) -> None:
    """Raises ValueError if create_graph=True or is_grads_batched=True. `args` are the arguments of a function's backward."""
    if torch.is_grad_enabled():
        raise ValueError("create_graph=True is not supported: the model and its loss have only first derivatives")
    require_no_legacy_batch(args)


def first_derivative(backward: Callable[P, Result]) -> Callable[P, Result]:
    """Makes the backward of an autograd function raise ValueError under create_graph=True, and run under vmap.

    torch.vmap of torch.autograd.grad runs it under vmap, to compute the gradients of several outputs at once.
    """
    @wraps(backward)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
        require_first_derivative(args)
        if transforms_active():
            ctx, *grads = args
            return cast(Result, _for_each_sample(partial(cast(Any, backward), ctx), grads))
        return backward(*args, **kwargs)

    return wrapper


class _ForEachSample(ReverseOnly):
    """Calls a function once for each sample of a vmap, because C cannot read batched tensors."""

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *grads: Any) -> tuple[Tensor, ...]:
        return function(*grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing, because there is no second derivative."""


def _for_each_sample(backward: Callable[..., Any], grads: list[Any]) -> tuple[Tensor | None, ...]:
    """Returns backward(*grads), which may contain None, for grads that vmap has batched."""
    is_tensor: list[bool] = []

    def tensors(*grads: Any) -> tuple[Tensor, ...]:
        results = backward(*grads)
        results = results if isinstance(results, tuple) else (results,)
        is_tensor[:] = [result is not None for result in results]
        return tuple(result for result in results if result is not None)

    batched = iter(_ForEachSample.apply(tensors, *grads))
    return tuple(next(batched) if present else None for present in is_tensor)
