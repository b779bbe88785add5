"""Several texts in one row, each read from an empty state: what mixes steps of time must not reach over their bounds."""

from collections.abc import Callable

import torch
from torch import Tensor


class Packing:
    """Rows (B,T) of texts. starts (B,T) bool: where a text begins; the first position of each row does in any case.

    shift_mask (B,T,1) bool: positions with no step before them.
    """

    def __init__(self, starts: Tensor) -> None:
        starts = starts.clone()
        starts[:, 0] = True
        self.shift_mask = starts.unsqueeze(-1)
        begins = starts.flatten().nonzero()[:, 0]                                # (P,), of each text in the joined rows
        lengths = torch.diff(begins, append=begins.new_tensor([starts.numel()]))
        self._groups: list[tuple[Tensor, Tensor]] = []           # places (p,t) in the joined rows, and which are in the text
        sizes = torch.frexp(lengths.float()).exponent            # texts of one group differ in length by a factor of 2 at most
        for size in sizes.unique().tolist():
            first, length = begins[sizes == size], lengths[sizes == size]
            step = torch.arange(int(length.max()), device=starts.device)
            inside = step < length.unsqueeze(1)
            self._groups.append(((first.unsqueeze(1) + step).clamp(max=starts.numel() - 1), inside))
        order = torch.cat([places[inside] for places, inside in self._groups])
        self._back = torch.empty_like(order)
        self._back[order] = torch.arange(len(order), device=order.device)

    def each_text(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """function applied to each text: tensors (B,T,...) -> (B,T,...).

        It is called with (p,t,...) for p texts at once, padded at their ends to t steps with other texts' values: it is causal,
        and what it gives there is dropped.
        """
        B, T = tensors[0].shape[:2]
        rows = [tensor.flatten(0, 1).flatten(1) for tensor in tensors]
        found = []
        for places, inside in self._groups:
            texts = [row.index_select(0, places.flatten()).view(*places.shape, *tensor.shape[2:])
                     for row, tensor in zip(rows, tensors, strict=True)]
            result = function(*texts)
            found.append(result.flatten(0, 1)[inside.flatten()])
        joined = torch.cat(found)
        return joined.index_select(0, self._back).view(B, T, *joined.shape[1:])
