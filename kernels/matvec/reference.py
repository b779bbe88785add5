"""The reference multiplies by the weights that the packed matrix represents, in float64 or float32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.matvec import FORMATS, Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.float64), formats=tuple(FORMATS))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [_product(rows, packed) for rows, packed in zip(x.unbind(), weights, strict=True)]


def _product(rows: Tensor, packed: Packed) -> Tensor:
    """Returns the product row by row, because a product of several rows may sum in another order than that of one row."""
    if isinstance(packed, Int8):         # in float64 the sums of integers are exact
        return (rows.double() @ packed.weight.double().T).to(rows.dtype) * packed.scale
    weight = packed.dense(rows.dtype)
    return torch.stack([(weight * row).sum(1) for row in rows])
