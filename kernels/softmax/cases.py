"""Contains the shapes, inputs and tolerances of softmax for the tests and the benchmark."""

import torch
from torch import Tensor

from kernels.softmax import Softmax

LONGEST = 262_144
# (..., M): one or several dimensions; rows shorter than a vector, of whole vectors, or of several blocks of threads
SHAPES = ((1,), (7,), (1, 1), (3, 16), (5, 63), (2, 3, 129), (33, 1000), (2, 4100))
EMPTY_SHAPES = ((0,), (0, 4), (3, 0), (2, 0, 5))
# (rows, columns); the last two occur in sampling: a vocabulary, and a shortlist
BENCH_SHAPES = {"cpu": ((4096, 4096), (65536, 64), (4096, 1000), (16, 65536), (1, 50277), (1, 256)),
                "cuda": ((4096, 4096), (65536, 64), (8192, 1000), (1024, 65536), (64, 262144), (1, 50277), (1, 256))}
SWEEP = {"cpu": (256, 1024, 16384), "cuda": (256, 1024, 16384, 65536)}        # columns, for the rows of a shape above
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}   # largest err_ratio


def inputs(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, spread: float = 3.0) -> Tensor:
    """Returns a normally distributed x. With a standard deviation of 3, a few elements make up most of a row's sum."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype)


def special_rows(M: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns rows (11,M), M >= 8, with one edge case (inf, NaN, huge, tiny) per row, each in a different column."""
    inf = float("inf")
    huge = torch.finfo(dtype).max
    x = inputs(11, M, dtype=dtype)
    x[0] = -inf
    x[1, 1:] = -inf                          # the only finite element is the first, then the last
    x[2, :-1] = -inf
    x[3, ::2] = -inf
    x[4, M // 2] = inf
    x[5, -1] = float("nan")
    x[6, 0] = float("nan")
    x[6, -1] = inf
    x[7, M // 3] = huge
    x[7, M // 2] = -huge
    x[8] = -huge
    x[9] = huge
    x[10] += 1e4
    return x.to(device)


def loss(y: Tensor) -> Tensor:
    """Returns sum((M y)^2 - tanh(M y)) / M, a loss whose gradient differs at every element, and does not shrink with M."""
    scaled = y.shape[-1] * y
    return (scaled.square() - scaled.tanh()).sum() / max(1, y.shape[-1])


def results(softmax: Softmax, x: Tensor) -> dict[str, Tensor]:
    """Returns y, and the gradient of loss(y) with respect to x."""
    x = x.detach().requires_grad_()
    y = softmax(x)
    (grad_x,) = torch.autograd.grad(loss(y), x)
    return {"y": y.detach(), "grad_x": grad_x}


def tolerance(dtype: torch.dtype, M: int = 1) -> dict[str, float]:
    """Returns the tolerances for x of `dtype`. In half precision, y, grad_y and the gradients are each rounded.

    On a CPU, PyTorch itself sums M columns as M / 16 terms in sequence, with an error of 1e-5 for the longest rows.
    """
    allowed = TOLERANCE[dtype] + 1e-10 * M * (dtype == torch.float32)
    return {"y": allowed, "grad_x": 4 * allowed if dtype.itemsize == 2 else 2 * allowed}
