"""The one place that calls torch's own compilers: torch.compile, for all sizes at once, and torch.jit.script.

Both at a function's first call, so that an import compiles nothing. torch warns that torch.jit is deprecated, even where it
uses it itself, and there is nothing that a user could do about it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through torch.compile: compiled at its first call for each dtype, device and size that is not any_size."""
    @wraps(function)
    def quiet(*inputs: Tensor) -> Any:
        with _quiet():
            return _compiled(function)(*inputs)

    return quiet


def any_size(tensor: Tensor, *fixed: int) -> Tensor:
    """`tensor`, contiguous, as an argument whose sizes, those of the dims in `fixed` aside, are no part of the program.

    Unbacked sizes, unlike dynamic ones, are not taken for equal where they happen to be, nor for 1: nothing is compiled twice.
    """
    tensor = tensor.clone() if tensor.storage_offset() else tensor       # an offset is a part of the program
    tensor = tensor.reshape(-1).view(tensor.shape).data                  # so are a dim's strides, and what it is a view of
    for dim in set(range(tensor.dim())) - set(fixed):
        torch._dynamo.decorators.mark_unbacked(tensor, dim)
    return tensor


def scripted(function: Callable[..., Any]) -> Any:
    """`function` as TorchScript."""
    with _quiet():
        return _scripted(function)


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """In this process: a pool of compiling processes would outlive the one kernel that there is to compile."""
    return torch.compile(function, dynamic=True, fullgraph=True, options={"compile_threads": 1})


@cache
def _scripted(function: Callable[..., Any]) -> Any:
    return torch.jit.script(function)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
