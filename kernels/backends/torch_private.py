"""Calls private functions of torch, and looks up each of them at its first use.

If a later torch lacks a private function, the public function here returns a result that is safe but slow: callers then always
use the registered operators and the plain formulas. Only function transforms fail, with torch's own error about setup_context.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import Tensor


def transforms_active() -> bool:
    """Returns True if the caller runs inside a function transform of torch.func, such as grad, vjp or vmap."""
    return bool(_lookup("torch._C", "_are_functorch_transforms_active", False)())


def has_legacy_batch(tensors: Iterable[object]) -> bool:
    """Returns True if a tensor is batched by torch's first vmap, as with is_grads_batched=True and vectorize=True."""
    is_batched = _lookup("torch._C._functorch", "is_legacy_batchedtensor", False)
    return any(is_batched(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def dispatch_mode_active() -> bool:
    """Returns True if a TorchDispatchMode, such as FakeTensorMode, intercepts every operator."""
    return bool(_lookup("torch._C", "_len_torch_dispatch_stack", True)())


def profiler_active() -> bool:
    return bool(_lookup("torch._C._autograd", "_profiler_enabled", True)())


def module_hooks_active() -> bool:
    """Returns True if a global hook is registered, which every nn.Module calls."""
    return bool(_lookup("torch.nn.modules.module", "_has_any_global_hook", True)())


@cache
def _lookup(module: str, name: str, default: bool) -> Callable[..., Any]:
    """Returns the function `name` of `module`, or a function that returns `default` if this torch has no such function."""
    parent, _, last = module.rpartition(".")
    owner = getattr(importlib.import_module(parent), last, None)         # torch._C._autograd cannot be imported
    function: Callable[..., Any] = getattr(owner, name, lambda *_: default)
    return function
