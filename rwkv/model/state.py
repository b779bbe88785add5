"""The recurrent state of a model: everything that the model remembers of the tokens read so far. States are immutable.

Each generation has its own subclass of State, a named tuple of tensors (L,B,...). The first two axes are layers and rows. The
state of one layer is the same named tuple without the first axis.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar, cast

import torch
from torch import Tensor

S = TypeVar("S", bound="State")


class State(tuple[Tensor, ...]):
    """The methods of a state. Each generation's State inherits from a named tuple and from this class."""

    __slots__ = ()

    def named(self) -> dict[str, Tensor]:
        fields: tuple[str, ...] = getattr(self, "_fields")       # noqa: B009  the named tuple defines this
        return dict(zip(fields, self, strict=True))

    def with_wkv(self, wkv: Tensor) -> Self:
        """Returns a copy with the operator state `wkv` (L,B,...). The generation's operator state must be a single tensor."""
        return cast(Callable[..., Self], type(self))(**self.named() | {"wkv": wkv})

    def each(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Applies `function` to each tensor, and returns the new state."""
        return self._of(map(function, self))

    def rows(self, indices: Sequence[int] | Tensor | slice) -> Self:
        """Returns the state of these rows, in this order. Indices may repeat."""
        return self.each(lambda tensor: tensor[:, indices])

    def layers(self) -> list[Self]:
        """Returns the state of each layer, without the layer axis."""
        return [self._of(tensors) for tensors in zip(*self, strict=True)]

    def where(self, mask: Tensor, other: Self) -> Self:
        """Returns the state with rows of `other` where the mask (B,) is true. Replaced rows get no gradient."""
        return self._of(torch.where(mask.view(1, -1, *[1] * (tensor.dim() - 2)), replacement, tensor)
                        for tensor, replacement in zip(self, other, strict=True))

    def to(self, device: torch.device | str) -> Self:
        return self.each(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        return self.each(Tensor.detach)

    def nbytes(self) -> int:
        """Returns the memory of the state's tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self)

    @staticmethod
    def cat(states: Sequence[S]) -> S:
        """Joins states into one with the rows of all of them, in order. `states` must not be empty."""
        return states[0]._of(torch.cat(tensors, 1) for tensors in zip(*states, strict=True))

    @staticmethod
    def stack(layers: Sequence[S]) -> S:
        """Joins the states of the layers into a model's state, in float32."""
        return layers[0]._of(torch.stack(tensors).float() for tensors in zip(*layers, strict=True))

    @classmethod
    def _of(cls, tensors: Iterable[Tensor]) -> Self:
        return cast(Callable[..., Self], cls)(*tensors)
