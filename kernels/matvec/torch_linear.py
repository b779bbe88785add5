"""F.linear multiplies row by row, because PyTorch sums in a different order for several rows than for one row."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matvec import Packed
from kernels.registry import Requires

REQUIRES = Requires(formats=("float32", "bfloat16"))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed.weight) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]


def _product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def product(rows: Tensor) -> Tensor:
        outputs = [F.linear(row, weight) for row in rows.to(weight.dtype).split(1)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()

    return product
