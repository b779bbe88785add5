"""FBGEMM, PyTorch's matrix products in int8 on x86 CPUs, which use VNNI where the CPU has it.

FBGEMM keeps a reordered copy of W, and its integer sums are exact for any number of rows.
"""

import warnings

import torch
from torch import Tensor

ENGINES = ("x86", "fbgemm")              # torch's names of the quantised engine that is FBGEMM


def why_not() -> str | None:
    """None if torch has FBGEMM, otherwise the reason."""
    return None if torch.backends.quantized.engine in ENGINES else \
        "it requires a torch with FBGEMM, which exists for x86 CPUs (use another kernel)"


def ordered(weight: Tensor, scale: Tensor) -> torch.ScriptObject:
    """W, integers (N,K) with a scale (N,) for each row, in FBGEMM's order."""
    zeros = torch.zeros(len(weight), dtype=torch.int64, device="cpu")
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def unordered(weight: torch.ScriptObject) -> tuple[Tensor, Tensor]:
    """The integers (N,K) and their scales (N,), copied."""
    quantized: Tensor = torch.ops.quantized.linear_unpack(weight)[0]
    return quantized.int_repr(), quantized.q_per_channel_scales().float()


def product(rows: Tensor, step: float, offset: int, weight: torch.ScriptObject) -> Tensor:
    """y (R,N) of rows (R,K), which are rounded to multiples of step."""
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, step, offset, weight)
    return y
