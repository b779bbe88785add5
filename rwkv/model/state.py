"""The recurrent state of a model: everything that it remembers of the tokens it has read. A value: nothing changes it in place.

Each generation has a State of its own: a named tuple of tensors whose first two axes are layers and rows, (L,B,...), with the
methods that stand here. The state of one layer is the same named tuple without the first axis.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class StateMethods(tuple[Tensor, ...]):
    """The methods of a State; a generation's State derives from this and from a named tuple."""

    __slots__ = ()

    def each(self, function: Callable[[Tensor], Tensor]) -> Self:
        """`function` of each tensor."""
        return self._of(map(function, self))

    def rows(self, chosen: Sequence[int] | Tensor | slice) -> Self:
        """The state of these rows, in this order; a row may come more than once."""
        return self.each(lambda tensor: tensor[:, chosen])

    def layers(self) -> list[Self]:
        """The state of each layer, without the layer axis."""
        return [self._of(tensors) for tensors in zip(*self, strict=True)]

    def where(self, mask: Tensor, other: Self) -> Self:
        """`other` in the rows of the mask (B,), this state in the rest. What those rows had gets no gradient."""
        return self._of(torch.where(mask.view(1, -1, *[1] * (mine.dim() - 2)), theirs, mine)
                        for mine, theirs in zip(self, other, strict=True))

    def to(self, device: torch.device | str) -> Self:
        """The state on `device`."""
        return self.each(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        """The state without its history of gradients."""
        return self.each(Tensor.detach)

    def nbytes(self) -> int:
        """The memory of its tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self)

    @classmethod
    def cat(cls, states: Iterable[Self]) -> Self:
        """One state with the rows of all, in order."""
        return cls._of(torch.cat(tensors, 1) for tensors in zip(*states, strict=True))

    @classmethod
    def stack(cls, states: Iterable[Self]) -> Self:
        """The state of a model from those of its layers, in float32."""
        return cls._of(torch.stack(tensors).float() for tensors in zip(*states, strict=True))

    @classmethod
    def _of(cls, tensors: Iterable[Tensor]) -> Self:
        made: Any = cls
        state: Self = made(*tensors)
        return state
