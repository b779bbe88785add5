"""For autograd functions without a second derivative: computing one raises an error. And the type of their ctx.

torch's once_differentiable raises only where the incoming gradient requires a gradient. Where it is constant, the second
derivative would silently be incomplete: it would lack the terms of the tensors that the backward itself reads.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    class Context(FunctionCtx):
        """ctx of an autograd function, to which forward may add any attribute for backward."""

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
    """A decorator for a backward, which then raises ValueError under create_graph=True."""
    @wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.is_grad_enabled():
            raise ValueError("the model and its loss have first derivatives only; create_graph=True is not supported")
        return backward(*args, **kwargs)

    return checked
