"""Packing: one row holds several texts, each of which starts from an empty state.

Neither the token shift nor the operator may mix steps of different sequences.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv.model.first_derivative import Context, first_derivative


class _Group:
    """A group of p sequences of similar lengths, padded to t steps.

    The attribute `places` (p t,) has the index of each step in the flattened rows (B T). The attribute `real_steps` (n,)
    has the indices in `places` of the steps that are not padding, or is None if there is no padding.
    """

    def __init__(self, places: Tensor, real_steps: Tensor) -> None:
        self.shape = places.shape
        self.places = places.flatten()
        self.real_steps = None if real_steps.all() else real_steps.flatten().nonzero()[:, 0]

    def remove_padding(self, steps: Tensor) -> Tensor:
        """Removes the padding from steps (p t,...). The result is (n,...)."""
        return steps if self.real_steps is None else steps.index_select(0, self.real_steps)

    def add_padding(self, steps: Tensor) -> Tensor:
        """Inserts zeros as padding into steps (n,...). The result is (p t,...)."""
        if self.real_steps is None:
            return steps
        return steps.new_zeros(len(self.places), *steps.shape[1:]).index_copy_(0, self.real_steps, steps)


class Packing:
    """The division of rows (B,T) into sequences.

    `starts` (B,T) is a bool tensor with the first step of each sequence. Its column 0 counts as true. The attribute
    `shift_mask` (B,T,1) marks the steps that have no previous step.
    """

    def __init__(self, starts: Tensor) -> None:
        starts = starts.clone()
        starts[:, 0] = True
        self.shift_mask = starts.unsqueeze(-1)
        begins = starts.flatten().nonzero()[:, 0]                                # (P,): indices in the flattened rows
        lengths = torch.diff(begins, append=begins.new_tensor([starts.numel()]))
        self.groups: list[_Group] = []
        sizes = torch.frexp(lengths.float()).exponent            # lengths in one group differ by a factor of 2 at most
        for size in sizes.unique().tolist():
            first, length = begins[sizes == size], lengths[sizes == size]
            step = torch.arange(int(length.max()), device=starts.device)
            places = (first.unsqueeze(1) + step).clamp(max=starts.numel() - 1)
            self.groups.append(_Group(places, step < length.unsqueeze(1)))
        self.order = torch.cat([group.remove_padding(group.places) for group in self.groups])    # the groups' steps in order
        self.inverse_order = torch.empty_like(self.order)
        self.inverse_order[self.order] = torch.arange(len(self.order), device=starts.device)

    def apply_per_sequence(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Applies `function` to each sequence of tensors (B,T,...). The result is (B,T,...).

        `function` is called once for each group of p sequences, with tensors (p,t,...). Shorter sequences are padded at the end
        with steps of other sequences. Results of padding are dropped, so `function` must be causal.
        """
        B, T = tensors[0].shape[:2]
        by_tensor = [_SplitIntoGroups.apply(self, tensor.flatten(0, 1)) for tensor in tensors]
        results = [function(*(steps.view(*group.shape, *steps.shape[1:]) for steps in arguments)).flatten(0, 1)
                   for group, arguments in zip(self.groups, zip(*by_tensor, strict=True), strict=True)]
        joined: Tensor = _JoinGroups.apply(self, *results)
        return joined.view(B, T, *joined.shape[1:])


class _SplitIntoGroups(torch.autograd.Function):
    """Gathers each group's steps from the flattened rows (B T,...). Padding gets no gradient, since its results are dropped."""

    @staticmethod
    def forward(ctx: Context, packing: Packing, steps: Tensor) -> tuple[Tensor, ...]:
        ctx.packing = packing
        return tuple(steps.index_select(0, group.places) for group in packing.groups)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _join(ctx.packing, grads)


class _JoinGroups(torch.autograd.Function):
    """Joins the groups' steps into the flattened rows (B T,...). This is the inverse of _SplitIntoGroups."""

    @staticmethod
    def forward(ctx: Context, packing: Packing, *steps: Tensor) -> Tensor:
        ctx.packing = packing
        return _join(packing, steps)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        groups = ctx.packing.groups
        sizes = [len(group.places if group.real_steps is None else group.real_steps) for group in groups]
        return None, *(group.add_padding(grad.index_select(0, places))
                       for group, places in zip(groups, ctx.packing.order.split(sizes), strict=True))


def _join(packing: Packing, steps: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([group.remove_padding(group_steps) for group, group_steps in zip(packing.groups, steps, strict=True)])
    return joined.index_select(0, packing.inverse_order)
