"""The dtypes that this CPU multiplies natively; other dtypes are converted to float32 first."""

from functools import cache

import torch

CAPABILITIES = {torch.bfloat16: ("avx512_bf16", "bf16"), torch.float16: ("avx512_fp16", "fp16_arith"),
                torch.int8: ("avx512_vnni",)}            # in torch's list


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions for products of bfloat16 (AVX-512 BF16, ARM's bf16), float16 or int8 (VNNI), and torch a
    library that uses them.
    """
    has_library = dtype == torch.int8 or torch.backends.mkldnn.is_available()          # FBGEMM, or oneDNN
    capabilities = torch.cpu.get_capabilities()
    return has_library and any(capabilities.get(name) for name in CAPABILITIES.get(dtype, ()))


def matrix_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the device multiplies matrices fastest, for results that need no more digits than bfloat16 has."""
    return torch.float32 if device.type == "cpu" and not multiplies(torch.bfloat16) else torch.bfloat16


def why_slow(dtype: torch.dtype, device: torch.device) -> str | None:
    """A sentence for the user if the device is a CPU without products of dtype; otherwise None."""
    if device.type != "cpu" or dtype == torch.float32 or multiplies(dtype):
        return None
    name = str(dtype).removeprefix("torch.")
    return (f"this CPU has no instructions for products of {name}: they may take hundreds of times as long as those of "
            "float32")
