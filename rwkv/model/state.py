"""The recurrent state of a model: everything that it remembers of the tokens it has read. A value: nothing changes it in place.

Each generation has a State of its own: a named tuple of tensors whose first two axes are layers and rows, (L,B,...). The
functions here are its methods; a state of one layer is the same named tuple without the first axis.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound=tuple[Tensor, ...])


def each(state: S, function: Callable[[Tensor], Tensor]) -> S:
    """`function` of each tensor."""
    made: Any = type(state)
    return made(*map(function, state))


def rows(state: S, chosen: Sequence[int] | Tensor | slice) -> S:
    """The state of these rows, in this order; a row may come more than once."""
    return each(state, lambda tensor: tensor[:, chosen])


def layers(state: S) -> list[S]:
    """The state of each layer, without the layer axis."""
    made: Any = type(state)
    return [made(*tensors) for tensors in zip(*state, strict=True)]


def where(state: S, mask: Tensor, other: S) -> S:
    """`other` in the rows of the mask (B,), `state` in the rest. No gradient reaches what `state` had in those rows."""
    made: Any = type(state)
    return made(*(torch.where(mask.view(1, -1, *[1] * (mine.dim() - 2)), theirs, mine)
                  for mine, theirs in zip(state, other, strict=True)))


def to(state: S, device: torch.device | str) -> S:
    """The state on `device`."""
    return each(state, lambda tensor: tensor.to(device))


def detach(state: S) -> S:
    """The state without its history of gradients."""
    return each(state, Tensor.detach)


def nbytes(state: tuple[Tensor, ...]) -> int:
    """The memory of its tensors, in bytes."""
    return sum(tensor.nbytes for tensor in state)


def cat(kind: type[S], states: Iterable[S]) -> S:
    """One state with the rows of all, in order."""
    made: Any = kind
    return made(*(torch.cat(tensors, 1) for tensors in zip(*states, strict=True)))


def stack(kind: type[S], states: Iterable[S]) -> S:
    """The state of a model from those of its layers, in float32."""
    made: Any = kind
    return made(*(torch.stack(tensors).float() for tensors in zip(*states, strict=True)))
