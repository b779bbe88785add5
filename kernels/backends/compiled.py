"""The one place that calls torch's own compilers: torch.compile, for all sizes at once, and torch.jit.script.

A function is compiled at its first call, never at import. torch's warnings that torch.jit is deprecated are hidden: torch
raises them for its own calls too, and a user cannot act on them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile, which compiles it once for each dtype, device, and size that any_size leaves fixed."""
    @wraps(function)
    def quiet(*inputs: Tensor) -> Any:
        with _quiet():
            return _compiled(function)(*inputs)

    return quiet


def any_size(tensor: Tensor, *fixed: int) -> Tensor:
    """`tensor`, contiguous, as an argument of a compiled function that accepts any size, except of the dims in `fixed`.

    Its sizes are unbacked. With dynamic sizes torch.compile would compile again for sizes that are equal or 1.
    """
    tensor = tensor.clone() if tensor.storage_offset() else tensor       # torch.compile specialises on an offset,
    tensor = tensor.reshape(-1).view(tensor.shape).data                  # on strides, and on the base of a view
    for dim in set(range(tensor.dim())) - set(fixed):
        torch._dynamo.decorators.mark_unbacked(tensor, dim)
    return tensor


def scripted(function: Callable[..., Any]) -> Any:
    with _quiet():
        return _scripted(function)


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles in this process: a pool of compiler processes would stay alive after the only kernel is compiled."""
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


@cache
def _scripted(function: Callable[..., Any]) -> Any:
    return torch.jit.script(function)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
