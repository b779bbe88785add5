"""Contains the shapes, inputs and tolerances of matvec for the tests and the benchmark."""

import torch
from torch import Tensor

from kernels.matvec import BLOCKS, Blocks, MatVec, Packed, pack

# (R,N,K): incomplete vectors and tiles, several groups of int4, and int8 sums above 2^24, the last exact integer of float32
SHAPES = ((1, 1, 1), (1, 7, 13), (2, 5, 64), (3, 33, 100), (8, 64, 96), (5, 9, 4100), (17, 12, 40))
EMPTY_SHAPES = ((0, 3, 4), (2, 0, 4))
# (N,K,R): matrices of the released small models
MATRICES = ((768, 768), (3072, 768), (768, 3072), (50304, 768), (65536, 768))
BENCH_SHAPES = {"cpu": tuple((N, K, R) for N, K in MATRICES for R in (1, 8)), "cuda": ()}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}   # largest err_ratio
ROUNDS_INPUTS = 6e-3                     # for PyTorch's bfloat16 products, which round x and y


def inputs(R: int, N: int, K: int, format: str = "float32", dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> tuple[Tensor, Packed]:
    """Returns a normal x (R,K) and a packed W (N,K) for which y is about as large as x. K is rounded up to whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    K = width(format, K)
    x = torch.randn(R, K, generator=generator, dtype=torch.float64).to(dtype)
    packed = (random_blocks(format, N, K, generator) if format in BLOCKS else
              pack(torch.randn(N, K, generator=generator) / max(K, 1) ** 0.5, format))
    return x.to(device), packed.map(lambda tensor: tensor.to(device))


def width(format: str, K: int) -> int:
    """Returns K, rounded up to whole blocks for the formats of GGUF."""
    return -(-K // BLOCKS[format].elements) * BLOCKS[format].elements if format in BLOCKS else K


def random_blocks(format: str, N: int, K: int, generator: torch.Generator) -> Blocks:
    """Returns a W (N,K) in blocks of random bytes with a root mean square of about K^-0.5."""
    kind = BLOCKS[format]
    blocks = torch.randint(0, 256, (N * K // kind.elements, kind.bytes_per_block), generator=generator, dtype=torch.uint8)
    scale = 1.0
    for _ in range(2):                   # multiplying all scales multiplies all values
        for place in kind.halves:
            spread = torch.rand(len(blocks), generator=generator) + 0.5
            spread[::2] *= -1
            blocks[:, place:place + 2] = (scale * spread).half().view(torch.uint8).view(-1, 2)
        packed = kind(blocks.view(N, K // kind.elements * kind.bytes_per_block))
        if blocks.numel():
            scale /= (packed.dense(torch.float64).square().mean().item() * K) ** 0.5
    return packed


def expected(x: Tensor, packed: Packed) -> Tensor:
    """Returns y, computed by the formula in float64."""
    return MatVec("reference")(x.double(), packed)


def tolerance(name: str, format: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Returns the largest allowed err_ratio of an implementation for x of `dtype`, by name."""
    rounded = ROUNDS_INPUTS if name.startswith("torch") and format == "bfloat16" else 0.0
    return {"y": max(TOLERANCE[dtype], rounded)}
