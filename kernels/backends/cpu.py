"""What the instructions of this CPU multiply by themselves, where others convert to float32 first."""

from functools import cache

import torch

INSTRUCTIONS = {torch.bfloat16: "_is_avx512_bf16_supported", torch.int8: "_is_vnni_supported"}         # private names of torch


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether it has instructions for products of bfloat16 (AVX-512 BF16) or int8 (VNNI); False where torch does not say."""
    supported = getattr(torch.cpu, INSTRUCTIONS[dtype], None)
    return supported is not None and bool(supported())
