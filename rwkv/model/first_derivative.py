"""A decorator for autograd functions that have no second derivative, and the type of their ctx.

torch's once_differentiable raises an error only if the incoming gradient requires a gradient. For a constant incoming gradient,
torch would silently compute an incomplete second derivative, without the terms of the tensors saved for backward. This
decorator raises an error in that case, too.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import FunctionCtx

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


def first_derivative(backward: Callable[P, Result]) -> Callable[P, Result]:
    """Makes the backward of an autograd function raise ValueError under create_graph=True."""
    @wraps(backward)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.is_grad_enabled():
            raise ValueError("create_graph=True is not supported: the model and its loss have only first derivatives")
        return backward(*args, **kwargs)

    return wrapper
