"""A cache of rounded weights for half-precision training. Each weight is rounded once per optimiser step, not in every product.

Half-precision products need a rounded copy of each float32 weight. A WeightCache makes the copy at its first use. After the
weights have changed, the cache updates all copies in one operation. The copies take half as much memory as the weights, for the
whole run.

With trainer=fsdp there is no cache, because no process has all weights. Instead, an autograd function converts its weights in
forward and again in backward, and frees the copies in between.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

ATTRIBUTE = "_rounded"                   # the attribute in which a cached weight refers to its _Copy
_steps = 0                               # optimiser steps are counted, because fused ones do not increase Tensor._version
_counting = False


class _Copy:
    """A weight's rounded copy, and the weight's state when it was copied. A pickled or copied weight gets an empty _Copy."""

    def __init__(self, cache: "WeightCache | None" = None) -> None:
        self.cache = cache
        self.tensor: Tensor | None = None
        self.state: tuple[int, int, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _Copy, ()


class WeightCache:
    """Holds the rounded copies of `weights`. Each weight refers to its own copy in the attribute `_rounded`."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        _register_step_counter()
        self._copied: list[tuple[Tensor, _Copy]] = []
        for weight in weights:
            setattr(weight, ATTRIBUTE, _Copy(self))

    def copy_of(self, weight: Tensor, copy: _Copy, dtype: torch.dtype) -> Tensor:
        if copy.tensor is None or copy.tensor.dtype != dtype or copy.tensor.device != weight.device:
            self._copied = [pair for pair in self._copied if pair[1] is not copy] + [(weight, copy)]
            with torch.inference_mode(False), torch.no_grad():   # autograd cannot save inference tensors
                copy.tensor = weight.to(dtype)
            copy.state = _state(weight)
        elif copy.state != _state(weight):
            self._refresh()
        return copy.tensor

    def update(self) -> None:
        """Updates the copies if the weights have changed. CUDA graphs require this, because they do not call copy_of."""
        if any(copy.state != _state(weight) for weight, copy in self._copied):
            self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        copies = [copy.tensor for _, copy in self._copied if copy.tensor is not None]
        torch._foreach_copy_(copies, [weight for weight, _ in self._copied])
        for weight, copy in self._copied:
            copy.state = _state(weight)


def round_weights(dtype: torch.dtype, weights: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the weights in `dtype`: the cached copy where there is one, and a new conversion otherwise."""
    return tuple(weight if weight.dtype == dtype else _convert(weight, dtype) for weight in weights)


def tensors_to_save(weights: Iterable[Tensor], multiplied: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors that an autograd function saves: each weight's cached copy, or the weight if there is no copy.

    `multiplied` is the result of `round_weights` for the weights. Backward must call `round_weights` on the saved tensors.
    """
    return tuple(copy if getattr(weight, ATTRIBUTE, None) is not None else weight
                 for weight, copy in zip(weights, multiplied, strict=True))


def _convert(weight: Tensor, dtype: torch.dtype) -> Tensor:
    copy: _Copy | None = getattr(weight, ATTRIBUTE, None)
    return weight.to(dtype) if copy is None or copy.cache is None else copy.cache.copy_of(weight, copy, dtype)


def _state(weight: Tensor) -> tuple[int, int, int]:
    return _steps, weight._version, weight.data_ptr()


def _register_step_counter() -> None:
    global _counting
    if not _counting:
        register_optimizer_step_post_hook(_count_step)
        _counting = True


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1
