"""PyTorch's products in int8, of x86 CPUs (FBGEMM): with VNNI where the CPU has it, for all rows at once.

FBGEMM keeps a copy of W in an order of its own, and its sums of integers are exact for any number of rows.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.matvec import Int8, Packed
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), forms=("int8",), fbgemm=True)


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    products = [_product(packed) for packed in weights if isinstance(packed, Int8)]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]


def _product(packed: Int8) -> Callable[[Tensor], Tensor]:
    return partial(product, step=1.0, offset=packed.rounding.offset, weight=ordered(packed))


def ordered(packed: Int8) -> torch.ScriptObject:
    """W in FBGEMM's order."""
    zeros = torch.zeros(len(packed.weight), dtype=torch.int64)
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(packed.weight, packed.scale.double(), zeros, 0)
    weight: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return weight


def unordered(weight: torch.ScriptObject) -> tuple[Tensor, Tensor]:
    """The integers (N,K) and their scales (N,), copied."""
    quantized: Tensor = torch.ops.quantized.linear_unpack(weight)[0]
    return quantized.int_repr(), quantized.q_per_channel_scales().float()


def product(rows: Tensor, step: float, offset: int, weight: torch.ScriptObject) -> Tensor:
    """y (R,N) of rows (R,K), which are rounded to multiples of step."""
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, step, offset, weight)
    return y
