"""Several sequences in one row, each from an empty state: neither the token shift nor the operator may cross a boundary."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv.model.first_derivative import Context, first_derivative


class _Group:
    """p sequences of similar lengths, padded to t steps. places (p t,): the index of each step in the flattened rows (B T).

    inside (n,): the indices in `places` of the steps that are not padding; None if there is no padding.
    """

    def __init__(self, places: Tensor, inside: Tensor) -> None:
        self.shape = places.shape
        self.places = places.flatten()
        self.inside = None if inside.all() else inside.flatten().nonzero()[:, 0]

    def unpadded(self, steps: Tensor) -> Tensor:
        """Removes the padding from steps (p t,...): (n,...)."""
        return steps if self.inside is None else steps.index_select(0, self.inside)

    def padded(self, steps: Tensor) -> Tensor:
        """The inverse of unpadded, with zeros in the padding: (p t,...)."""
        if self.inside is None:
            return steps
        return steps.new_zeros(len(self.places), *steps.shape[1:]).index_copy_(0, self.inside, steps)


class Packing:
    """The division of rows (B,T) into sequences. starts (B,T) bool: the first step of each sequence; column 0 is taken as true.

    shift_mask (B,T,1) bool: steps without a previous step.
    """

    def __init__(self, starts: Tensor) -> None:
        starts = starts.clone()
        starts[:, 0] = True
        self.shift_mask = starts.unsqueeze(-1)
        begins = starts.flatten().nonzero()[:, 0]                                # (P,) in the flattened rows
        lengths = torch.diff(begins, append=begins.new_tensor([starts.numel()]))
        self.groups: list[_Group] = []
        sizes = torch.frexp(lengths.float()).exponent            # lengths in one group differ by a factor of 2 at most
        for size in sizes.unique().tolist():
            first, length = begins[sizes == size], lengths[sizes == size]
            step = torch.arange(int(length.max()), device=starts.device)
            places = (first.unsqueeze(1) + step).clamp(max=starts.numel() - 1)
            self.groups.append(_Group(places, step < length.unsqueeze(1)))
        self.order = torch.cat([group.unpadded(group.places) for group in self.groups])  # the groups' steps, one after another
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order), device=starts.device)

    def each_sequence(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Applies `function` to each sequence: tensors (B,T,...) -> (B,T,...).

        `function` is called once for each group of p sequences, with tensors (p,t,...). Shorter sequences are padded at the end
        with steps of other sequences. The results of padding are dropped, so `function` must be causal.
        """
        B, T = tensors[0].shape[:2]
        by_tensor = [_Divide.apply(self, tensor.flatten(0, 1)) for tensor in tensors]
        results = [function(*(steps.view(*group.shape, *steps.shape[1:]) for steps in arguments)).flatten(0, 1)
                   for group, arguments in zip(self.groups, zip(*by_tensor, strict=True), strict=True)]
        joined: Tensor = _Join.apply(self, *results)
        return joined.view(B, T, *joined.shape[1:])


class _Divide(torch.autograd.Function):
    """Gathers each group's steps from the flattened rows (B T,...). Padding gets no gradient, since its results are dropped."""

    @staticmethod
    def forward(ctx: Context, packing: Packing, steps: Tensor) -> tuple[Tensor, ...]:
        ctx.packing = packing
        return tuple(steps.index_select(0, group.places) for group in packing.groups)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _join(ctx.packing, grads)


class _Join(torch.autograd.Function):
    """The inverse of _Divide: the flattened rows (B T,...) from the groups' steps."""

    @staticmethod
    def forward(ctx: Context, packing: Packing, *steps: Tensor) -> Tensor:
        ctx.packing = packing
        return _join(packing, steps)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        groups = ctx.packing.groups
        sizes = [len(group.places if group.inside is None else group.inside) for group in groups]
        return None, *(group.padded(grad.index_select(0, places))
                       for group, places in zip(groups, ctx.packing.order.split(sizes), strict=True))


def _join(packing: Packing, steps: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([group.unpadded(group_steps) for group, group_steps in zip(packing.groups, steps, strict=True)])
    return joined.index_select(0, packing.back)
