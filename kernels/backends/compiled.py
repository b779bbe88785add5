"""Calls torch's own compilers: torch.compile, with one compilation for all sizes, and torch.jit.script.

A function is compiled at its first call, never at import. Warnings that torch.jit is deprecated are hidden, because torch also
emits such warnings for its own calls, and a user cannot act on them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` under torch.compile.

    The function is compiled once for each dtype, device and combination of the sizes that any_size fixes.
    """
    @wraps(function)
    def call(*inputs: Tensor) -> Any:
        with _no_deprecation_warnings():
            return _compiled(function)(*inputs)

    return call


def any_size(tensor: Tensor, *fixed: int) -> Tensor:
    """Returns an argument for a compiled function that accepts any size of the dims, except the dims in `fixed`.

    The result is contiguous, and has unbacked symbols as sizes. With merely dynamic sizes, torch.compile would compile again
    when two sizes are equal or a size is 1.
    """
    tensor = tensor.clone() if tensor.storage_offset() else tensor       # torch.compile specialises on offsets,
    tensor = tensor.reshape(-1).view(tensor.shape).data                  # strides, and the base of a view
    for dim in set(range(tensor.dim())) - set(fixed):
        torch._dynamo.decorators.mark_unbacked(tensor, dim)
    return tensor


def scripted(function: Callable[..., Any]) -> Any:
    with _no_deprecation_warnings():
        return _scripted(function)


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles in this process, because the processes of torch's compiler pool would stay alive after a single kernel."""
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


@cache
def _scripted(function: Callable[..., Any]) -> Any:
    return torch.jit.script(function)


@contextmanager
def _no_deprecation_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.")        # a DeprecationWarning, or since torch 2.14 a FutureWarning
        yield
