"""Packs a matrix W (N,K) in int8 or int4, copies W to bfloat16 if the copy is exact, and checks GGUF's blocks.

C code (csrc/pack.c) does the work if the C library can run here, otherwise PyTorch. Both give the same numbers in int8. For
int4 C and PyTorch may choose different fractions of a group's range when two errors differ only by rounding.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import native
from kernels.native.dtypes import DTYPES

GROUP = 32                               # int4: neighbours in a row of W that share a scale
SMALLEST = 1e-30                         # lower bound of the largest magnitude, so that a row of zeros gets a nonzero scale
FRACTIONS = torch.tensor([1.0, 0.95, 0.9, 0.85, 0.8], dtype=torch.float32, device="cpu")   # parts of a range, tried by int4
ROWS = 1024                              # rows that PyTorch rounds at a time; its temporaries are up to eight times as large
PIECE, SIDE = 2**14, 64                  # numbers copied, and columns transposed, per task, as in pack.c
Groups = tuple[Tensor, Tensor, Tensor]


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q (N,K) int8, |q| <= 127, and scale (N,) float32, with W = q scale."""
    N, K = weight.shape
    q = torch.empty(N, K, dtype=torch.int8, device="cpu")
    scale = torch.empty(N, dtype=torch.float32, device="cpu")
    exact = _convert_for_c(weight)
    if exact is not None:
        native.run(f"matvec_int8_{DTYPES[exact.dtype]}", native.threads_for(N), N, K, exact, q, scale)
        return q, scale
    for start in range(0, N, ROWS):
        rows = slice(start, start + ROWS)
        q[rows], scale[rows] = int8_in_torch(weight[rows].detach().float())
    return q, scale


def int8_in_torch(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result of `int8` for a few rows of W in float32, computed by PyTorch."""
    largest = exact.abs().amax(1) if exact.shape[1] else exact.new_zeros(len(exact))
    scale = largest.clamp_(min=SMALLEST) / 127
    return (exact / scale.unsqueeze(1)).round_().to(torch.int8), scale


def transpose(q: Tensor) -> Tensor:
    """Returns the transpose (K,N) of q (N,K) int8, contiguous; without a copy if q is stored as (K,N)."""
    if native.why_not() is not None or not q.is_contiguous():
        return q.T.contiguous()
    N, K = q.shape
    transposed = torch.empty(K, N, dtype=torch.int8, device="cpu")
    native.run("matvec_transpose", native.threads_for(-(-K // SIDE)), N, K, q, transposed)
    return transposed


def int4(weight: Tensor, symmetric: bool) -> Groups:
    """Returns q (N,G,16) uint8, with elements i and i + 16 of a group in a byte, and scale and shift (N,G) bfloat16.

    W = q scale + shift, 0 <= q <= 15. The 16 steps cover a fraction of a group's range, the fraction in FRACTIONS with the
    least squared error. If `symmetric`, shift is -8 scale.
    """
    N = len(weight)
    G = -(-weight.shape[1] // GROUP)
    q = torch.empty(N, G, GROUP // 2, dtype=torch.uint8, device="cpu")
    scale = torch.empty(N, G, dtype=torch.bfloat16, device="cpu")
    shift = torch.empty_like(scale)
    exact = _convert_for_c(weight)
    if exact is not None:
        native.run(f"matvec_int4_{DTYPES[exact.dtype]}", native.threads_for(N), *weight.shape, symmetric, len(FRACTIONS),
                   exact, FRACTIONS, q, scale, shift)
        return q, scale, shift
    for start in range(0, N, ROWS):
        rows = slice(start, start + ROWS)
        q[rows], scale[rows], shift[rows] = int4_in_torch(weight[rows].detach().float(), symmetric)
    return q, scale, shift


def int4_in_torch(exact: Tensor, symmetric: bool) -> Groups:
    """Returns the result of `int4` for a few rows of W in float32, computed by PyTorch."""
    groups = pad(exact, (0, -exact.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    if symmetric:                        # the range is -8 to 7 steps
        high = groups.abs().amax(2)
        low = -high
    else:
        low = groups.amin(2)
        high = groups.amax(2)
    least = torch.full_like(low, torch.inf)
    best_scale = best_shift = torch.full_like(low, torch.nan)        # these stay NaN where W is not finite
    for fraction in FRACTIONS:
        scale = _round_to_bfloat16(((high - low) * fraction / 15).clamp_(min=SMALLEST))
        shift = -8 * scale if symmetric else _round_to_bfloat16((low + high) / 2 - 7.5 * scale)
        q, shifted = _steps(groups, scale, shift)
        error = shifted.addcmul_(q, scale.unsqueeze(2), value=-1).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        best_shift = torch.where(better, shift, best_shift)
    q = _steps(groups, best_scale, best_shift)[0].to(torch.uint8)
    return q[:, :, :GROUP // 2] | q[:, :, GROUP // 2:] << 4, best_scale.bfloat16(), best_shift.bfloat16()


def _steps(groups: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the groups' integers, as float32, and groups - shift."""
    shifted = groups - shift.unsqueeze(2)
    return (shifted / scale.unsqueeze(2)).round_().clamp_(0, 15), shifted


def _round_to_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def exact_copy(weight: Tensor) -> Tensor | None:
    """Returns a bfloat16 copy of W (float32, on a CPU) if the copy is exact, otherwise None. Requires the C library."""
    weight = weight.detach().contiguous()
    copy = torch.empty(weight.shape, dtype=torch.bfloat16, device="cpu")
    inexact = torch.zeros(1, dtype=torch.int64, device="cpu")
    native.run("matvec_exact_copy", native.threads_for(-(-weight.numel() // PIECE)), weight.numel(), weight, copy, inexact)
    return None if inexact.item() else copy


def finite_scales(weight: Tensor, nbytes: int, halves: tuple[int, ...]) -> bool:
    """Returns True if the float16 numbers at the one or two byte offsets `halves` of each block are finite.

    weight (N, bytes per row) contains blocks of `nbytes` bytes.
    """
    if native.why_not() is None and weight.is_contiguous():
        infinite = torch.zeros(1, dtype=torch.int64, device="cpu")
        first, second = (*halves, -1)[:2]
        native.run("matvec_check_scales", native.threads_for(len(weight)), len(weight), weight.shape[1] // nbytes, nbytes,
                   first, second, weight, infinite)
        return not infinite.item()
    blocks = weight.reshape(-1, nbytes)
    return not any(bool((blocks[:, at + 1] & 0x7C == 0x7C).any()) for at in halves)      # the second byte contains the exponent


def _convert_for_c(weight: Tensor) -> Tensor | None:
    """Returns W in a dtype and layout that C supports, or None if PyTorch must pack W."""
    if native.why_not() is not None or weight.device.type != "cpu":
        return None
    weight = weight.detach()
    return (weight if weight.dtype in DTYPES else weight.float()).contiguous()
