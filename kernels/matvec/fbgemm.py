"""FBGEMM (kernels/backends/fbgemm.py) computes PyTorch's own int8 products."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kernels.backends import fbgemm
from kernels.matvec import Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), formats=("int8",), why_not=fbgemm.why_not)


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [partial(fbgemm.product, step=1.0, offset=packed.rounding.offset,
                        weight=fbgemm.pack_weight(packed.weight, packed.scale))
                for packed in weights if isinstance(packed, Int8)]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]
