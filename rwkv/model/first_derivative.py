"""For autograd functions without a second derivative: computing one raises an error.

torch's once_differentiable raises only where the incoming gradient requires a gradient. Where it is constant, the second
derivative would silently be incomplete: it would lack the terms of the tensors that the backward itself reads.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for a backward, which then raises ValueError under create_graph=True."""
    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError("the model and its loss have first derivatives only; create_graph=True is not supported")
        return backward(ctx, *grads)

    return checked
