"""Several texts in one row, each read from an empty state: the token shift and the operator must not cross their bounds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv.model.first_derivative import first_derivative


class _Group:
    """Texts of similar lengths, padded to p texts of t steps. places (p t,): the place of each step in the joined rows.

    inside (n,): the indices of the steps that are no padding; None if there is no padding.
    """

    def __init__(self, places: Tensor, inside: Tensor) -> None:
        self.shape = places.shape
        self.places = places.flatten()
        self.inside = None if inside.all() else inside.flatten().nonzero()[:, 0]

    def own(self, steps: Tensor) -> Tensor:
        """The steps (p t,...) of the texts alone: (n,...)."""
        return steps if self.inside is None else steps.index_select(0, self.inside)

    def padded(self, own: Tensor) -> Tensor:
        """The inverse of own, with zeros in the padding: (p t,...)."""
        return own if self.inside is None else own.new_zeros(len(self.places), *own.shape[1:]).index_copy_(0, self.inside, own)


class Packing:
    """Rows (B,T) of texts. starts (B,T) bool: where a text begins; the first position of each row always begins one.

    shift_mask (B,T,1) bool: positions with no step before them.
    """

    def __init__(self, starts: Tensor) -> None:
        starts = starts.clone()
        starts[:, 0] = True
        self.shift_mask = starts.unsqueeze(-1)
        begins = starts.flatten().nonzero()[:, 0]                                # (P,), of each text in the joined rows
        lengths = torch.diff(begins, append=begins.new_tensor([starts.numel()]))
        self.groups: list[_Group] = []
        sizes = torch.frexp(lengths.float()).exponent            # texts of one group differ in length by a factor of 2 at most
        for size in sizes.unique().tolist():
            first, length = begins[sizes == size], lengths[sizes == size]
            step = torch.arange(int(length.max()), device=starts.device)
            places = (first.unsqueeze(1) + step).clamp(max=starts.numel() - 1)
            self.groups.append(_Group(places, step < length.unsqueeze(1)))
        self.order = torch.cat([group.own(group.places) for group in self.groups])       # places of the groups' steps
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order), device=starts.device)

    def each_text(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """function applied to each text: tensors (B,T,...) -> (B,T,...).

        It is called with (p,t,...) for p texts at once. They are padded at their ends to t steps with values of other texts;
        results there are dropped. So function must be causal.
        """
        B, T = tensors[0].shape[:2]
        texts = [_Divided.apply(self, tensor.flatten(0, 1)) for tensor in tensors]
        found = [function(*(part.view(*group.shape, *part.shape[1:]) for part in of_group)).flatten(0, 1)
                 for group, of_group in zip(self.groups, zip(*texts, strict=True), strict=True)]
        joined: Tensor = _Joined.apply(self, *found)
        return joined.view(B, T, *joined.shape[1:])


class _Divided(torch.autograd.Function):
    """From the steps (B T,...) of the rows to those of each group. The padding has no gradient, since its results are dropped.
    """

    @staticmethod
    def forward(ctx: Any, packing: Packing, steps: Tensor) -> tuple[Tensor, ...]:
        ctx.packing = packing
        return tuple(steps.index_select(0, group.places) for group in packing.groups)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _join(ctx.packing, grads)


class _Joined(torch.autograd.Function):
    """The inverse of _Divided."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, *steps: Tensor) -> Tensor:
        ctx.packing = packing
        return _join(packing, steps)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        groups = ctx.packing.groups
        own = ctx.packing.order.split([len(group.places if group.inside is None else group.inside) for group in groups])
        return None, *(group.padded(grad.index_select(0, places)) for group, places in zip(groups, own, strict=True))


def _join(packing: Packing, steps: Sequence[Tensor]) -> Tensor:
    return torch.cat([group.own(part) for group, part in zip(packing.groups, steps, strict=True)]).index_select(0, packing.back)
