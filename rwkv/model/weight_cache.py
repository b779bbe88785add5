"""A model's weights in the dtype of its products: converted once after each step of the optimiser, not by each product.

Training in half precision multiplies by a rounded copy of each float32 weight. A WeightCache makes a copy at its first use, and
updates all copies by one operation after the weights have changed. They take half the memory of the weights, for the whole run.
Without a cache (with trainer=fsdp, where a process does not have all weights) a function converts the weights in its forward
and again in its backward pass, and keeps no copy between the two.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

ATTRIBUTE = "_rounded"                   # of a cached weight: its _Copy
_steps = 0                               # of all optimisers of this process: torch counts no change by a fused one
_counting = False


class _Copy:
    """A rounded weight, and the state of the weight when it was rounded. A pickled or copied weight has none."""

    def __init__(self, cache: "WeightCache | None" = None) -> None:
        self.cache = cache
        self.tensor: Tensor | None = None
        self.state: tuple[int, int, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _Copy, ()


class WeightCache:
    """The copies of these weights; each weight references its copy."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        _count_steps()
        self._copied: list[tuple[Tensor, _Copy]] = []
        for weight in weights:
            setattr(weight, ATTRIBUTE, _Copy(self))

    def copy_of(self, weight: Tensor, copy: _Copy, dtype: torch.dtype) -> Tensor:
        if copy.tensor is None or copy.tensor.dtype != dtype or copy.tensor.device != weight.device:
            self._copied = [pair for pair in self._copied if pair[1] is not copy] + [(weight, copy)]
            with torch.inference_mode(False), torch.no_grad():   # backward cannot save a tensor of inference mode
                copy.tensor = weight.to(dtype)
            copy.state = _state(weight)
        elif copy.state != _state(weight):
            self._refresh()
        return copy.tensor

    def update(self) -> None:
        """Updates the copies, for a CUDA graph that reads them."""
        if any(copy.state != _state(weight) for weight, copy in self._copied):
            self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        copies = [copy.tensor for _, copy in self._copied if copy.tensor is not None]
        torch._foreach_copy_(copies, [weight for weight, _ in self._copied])
        for weight, copy in self._copied:
            copy.state = _state(weight)


def rounded(dtype: torch.dtype, weights: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The weights in dtype, from their cache if they have one."""
    return tuple(weight if weight.dtype == dtype else _rounded(weight, dtype) for weight in weights)


def to_save(weights: Iterable[Tensor], multiplied: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that a function saves for backward, which calls `rounded` on them: cached copies, or the weights.

    multiplied: the result of `rounded` for the weights.
    """
    return tuple(copy if getattr(weight, ATTRIBUTE, None) is not None else weight
                 for weight, copy in zip(weights, multiplied, strict=True))


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    copy: _Copy | None = getattr(weight, ATTRIBUTE, None)
    return weight.to(dtype) if copy is None or copy.cache is None else copy.cache.copy_of(weight, copy, dtype)


def _state(weight: Tensor) -> tuple[int, int, int]:
    return _steps, weight._version, weight.data_ptr()


def _count_steps() -> None:
    global _counting
    if not _counting:
        register_optimizer_step_post_hook(_count)
        _counting = True


def _count(*_: object) -> None:
    global _steps
    _steps += 1
