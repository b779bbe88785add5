"""Calls torch's own compilers: torch.compile, with one compilation for all sizes, and torch.jit.script.

A function is compiled at its first call, never at import. Warnings that torch.jit is deprecated are hidden: torch also emits
them for its own calls, and a user cannot act on them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile, compiled once for each dtype, device and combination of sizes that any_size fixes."""
    @wraps(function)
    def quiet(*inputs: Tensor) -> Any:
        with _quiet():
            return _compiled(function)(*inputs)

    return quiet


def any_size(tensor: Tensor, *fixed: int) -> Tensor:
    """Prepares an argument of a compiled function, which then accepts any size of its dims, except those in `fixed`.

    The result is contiguous, and its sizes are unbacked symbols: with merely dynamic sizes, torch.compile would compile again
    when two sizes are equal or a size is 1.
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
    """Compiles in this process: torch's pool of compiler processes would not be needed for one kernel, but stay alive."""
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


@cache
def _scripted(function: Callable[..., Any]) -> Any:
    return torch.jit.script(function)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
