"""The formula on the weights that the packed form stands for: one matrix product. The reference, in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.matvec import FORMS, Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), forms=tuple(FORMS))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [_product(rows, packed) for rows, packed in zip(x.unbind(), weights, strict=True)]


def _product(rows: Tensor, packed: Packed) -> Tensor:
    """Row by row, because a matrix product of several rows may add in another order than that of one."""
    if isinstance(packed, Int8):         # exact sums of integers
        return (rows.double() @ packed.weight.double().T).to(rows.dtype) * packed.scale
    weight = packed.dense(rows.dtype)
    return torch.stack([(weight * row).sum(1) for row in rows])
