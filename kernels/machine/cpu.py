"""Finds the dtypes that the CPU multiplies natively. Other dtypes are converted to float32 first."""

from functools import cache

import torch

CAPABILITIES = {torch.bfloat16: ("avx512_bf16", "bf16"), torch.float16: ("avx512_fp16", "fp16_arith"),
                torch.int8: ("avx512_vnni",)}            # names in torch.cpu.get_capabilities()


@cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Returns True if the CPU has instructions for products of `dtype`, and torch has a library that uses the instructions.

    Some CPUs multiply bfloat16 (AVX-512 BF16, ARM's bf16), float16 or int8 (VNNI).
    """
    has_library = dtype == torch.int8 or torch.backends.mkldnn.is_available()          # FBGEMM multiplies int8, oneDNN others
    capabilities = torch.cpu.get_capabilities()
    return has_library and any(capabilities.get(name) for name in CAPABILITIES.get(dtype, ()))


def matrix_dtype(device: torch.device) -> torch.dtype:
    """Returns float32 or bfloat16, whichever is faster for matrix products for which bfloat16 is precise enough."""
    return torch.float32 if device.type == "cpu" and not multiplies_natively(torch.bfloat16) else torch.bfloat16


def why_slow(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns a warning for the user if the device is a CPU without instructions for products of `dtype`, otherwise None."""
    if device.type != "cpu" or dtype == torch.float32 or multiplies_natively(dtype):
        return None
    name = str(dtype).removeprefix("torch.")
    return (f"this CPU has no instructions for {name} products, which may take hundreds of times as long as float32 products")
