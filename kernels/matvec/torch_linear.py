"""PyTorch's own products: F.linear row by row, because several rows add in another order than one, and FBGEMM's in int8.

FBGEMM (x86 CPUs) keeps a copy of W in an order of its own, and its sums of integers are exact for any number of rows.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matvec import Packed
from kernels.registry import KernelUnavailable, Requires

REQUIRES = Requires(dtypes=(torch.float32, torch.bfloat16, torch.int8))
ENGINES = ("x86", "fbgemm")


def bind(weights: Sequence[Packed]) -> Callable[[Tensor], list[Tensor]]:
    one = _fbgemm if weights[0].form == "int8" else _linear
    products = [one(packed) for packed in weights]
    return lambda x: [product(rows) for product, rows in zip(products, x.unbind(), strict=True)]


def _linear(packed: Packed) -> Callable[[Tensor], Tensor]:
    weight = packed.weight

    def product(rows: Tensor) -> Tensor:
        rows = rows.to(weight.dtype)
        outputs = [F.linear(row, weight) for row in rows.split(1)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()

    return product


def _fbgemm(packed: Packed) -> Callable[[Tensor], Tensor]:
    if torch.backends.quantized.engine not in ENGINES:
        raise KernelUnavailable("torch_linear in int8 needs a torch with FBGEMM, which is there for x86 CPUs: use "
                                "another kernel")
    N, signed = len(packed.weight), bool(packed.shift[1])
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(packed.weight, packed.scale.double(),
                                                             torch.zeros(N, dtype=torch.int64), 0)
    ordered = torch.ops.quantized.linear_prepack(quantized, None)
    zero = 64 if signed else 0           # the integer that stands for 0, in 8 bits without a sign

    def product(rows: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, zero, ordered)
        return y

    return product
