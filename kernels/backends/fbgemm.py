"""Calls FBGEMM, PyTorch's int8 matrix products on x86 CPUs, with VNNI instructions if the CPU has them.

FBGEMM reads a reordered copy of W. The integer sums are exact for any number of rows.
"""

import warnings

import torch
from torch import Tensor

ENGINES = ("x86", "fbgemm")              # torch.backends.quantized.engine, if it is FBGEMM


def why_not() -> str | None:
    """Returns why FBGEMM cannot be used, or None."""
    return None if torch.backends.quantized.engine in ENGINES else \
        "FBGEMM requires an x86 CPU and a torch that contains FBGEMM (use a different kernel)"


def pack_weight(weight: Tensor, scale: Tensor) -> torch.ScriptObject:
    """Packs W into FBGEMM's layout. `weight` contains integers (N,K), and `scale` one factor per row (N,)."""
    zeros = torch.zeros(len(weight), dtype=torch.int64, device="cpu")
    with warnings.catch_warnings():      # torch 2.13 deprecates quantized tensors, but linear_prepack accepts nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(weight.contiguous(), scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def unpack_weight(weight: torch.ScriptObject) -> tuple[Tensor, Tensor]:
    """Returns copies of the integers (N,K) and the scales (N,) of a packed weight."""
    quantized: Tensor = torch.ops.quantized.linear_unpack(weight)[0]
    return quantized.int_repr(), quantized.q_per_channel_scales().float()


def product(rows: Tensor, step: float, offset: int, weight: torch.ScriptObject) -> Tensor:
    """Returns the product rows W^T (R,N), after rounding the rows (R,K) to multiples of `step`."""
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, step, offset, weight)
    return y
