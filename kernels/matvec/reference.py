"""The formula on the weights that the packed form stands for: one matrix product. The reference, in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.matvec import Packed, unpacked
from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float64))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    def product(x: Tensor) -> list[Tensor]:
        return [row_by_row(rows, unpacked(packed, x.dtype)) for rows, packed in zip(x.unbind(), weights, strict=True)]

    return product


def row_by_row(rows: Tensor, weight: Tensor) -> Tensor:
    """A product for each row: a matrix product of several rows may add in another order than that of one."""
    return torch.stack([(weight * row).sum(1) for row in rows])
