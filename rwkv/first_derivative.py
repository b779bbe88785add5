"""For autograd functions whose backward keeps no graph: a second derivative through them raises, and is never half of one.

torch's once_differentiable notices only what comes in with the gradient: of a gradient that is constant there, what the
backward itself depends on would be dropped without a word.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises ValueError where its own graph is asked for."""
    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError("the model and its loss have first derivatives only, and create_graph=True asks for the graph of "
                             "a second one: leave it out")
        return backward(ctx, *grads)

    return checked
