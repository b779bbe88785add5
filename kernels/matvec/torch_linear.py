"""PyTorch's own products: F.linear row by row, because several rows add in another order than one, and FBGEMM's in int8.

FBGEMM (x86 CPUs) keeps a copy of W in an order of its own, and its sums of integers are exact for any number of rows.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matvec import Int8, Packed
from kernels.registry import KernelUnavailable, Requires

REQUIRES = Requires(forms=("float32", "bfloat16", "int8"))
ENGINES = ("x86", "fbgemm")


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_fbgemm(packed) if isinstance(packed, Int8) else _linear(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]


def _linear(packed: Packed) -> Callable[[Tensor], Tensor]:
    weight = packed.weight

    def product(rows: Tensor) -> Tensor:
        rows = rows.to(weight.dtype)
        outputs = [F.linear(row, weight) for row in rows.split(1)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()

    return product


def ordered(packed: Int8) -> torch.ScriptObject:
    """W in FBGEMM's order. Raises KernelUnavailable where there is none."""
    if torch.backends.quantized.engine not in ENGINES:
        raise KernelUnavailable("torch_linear in int8 needs a torch with FBGEMM, which is there for x86 CPUs: use "
                                "another kernel")
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(packed.weight, packed.scale.double(),
                                                             torch.zeros(len(packed.weight), dtype=torch.int64), 0)
    found: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return found


def product_of(rows: Tensor, step: float, offset: int, weight: torch.ScriptObject) -> Tensor:
    """FBGEMM's product of rows, which it rounds to multiples of step, and an ordered W."""
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, step, offset, weight)
    return y


def _fbgemm(packed: Int8) -> Callable[[Tensor], Tensor]:
    return partial(product_of, step=1.0, offset=packed.rounding.offset, weight=ordered(packed))
