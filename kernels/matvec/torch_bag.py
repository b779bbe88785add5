"""Weighted sums of the rows of W transposed, which torch.embedding_bag adds up in order; two halves of K, one for each core.

It keeps a transposed copy of W.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.matvec import Packed
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16))


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_one(packed.weight) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]


def _one(weight: Tensor) -> Callable[[Tensor], Tensor]:
    transposed, K = weight.T.contiguous(), weight.shape[1]
    indices, halves = torch.arange(K), torch.tensor([0, K // 2])

    def product(rows: Tensor) -> Tensor:
        sums = [torch.embedding_bag(transposed, indices, halves, False, 0, False, row)[0]
                for row in rows.to(weight.dtype).unbind()]
        return torch.stack(sums).float().sum(1)

    return product
