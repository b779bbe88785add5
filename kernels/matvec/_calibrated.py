"""Quantises a matrix W (N,K) to GGUF's blocks so that products with inputs x change little.

The expected squared change of the products is

    E = sum_n (w_n - q_n) M (w_n - q_n)^T          M = E[x x^T], (K,K)

The blocks are processed from left to right. A block's scales are chosen by least squares weighted by the diagonal of M. Then
the block's columns are rounded one by one. After column j, each later column k is changed by -(w_j - q_j) U_jk / U_jj. The
change compensates for the error of column j as far as M allows. U is the upper Cholesky factor of the inverse of M.

M may be given as one matrix for each window of consecutive columns. Inputs of different windows then count as uncorrelated.

Sources: Frantar et al. 2022, GPTQ (arXiv:2210.17323), for the order and the Cholesky factor; ggml, src/ggml-common.h, for the
layouts, which csrc/blocks.c describes. Legend: n rows of W at a time, g groups of a block, 32 elements in a group.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GROUP = 32
BLOCK = 256                              # elements of a k-quant's block, each of whose groups has a scale
MAX_CODE = 63                            # the largest 6-bit number for a group's scale or minimum in a k-quant
DAMPING = 0.01                           # this fraction of the diagonal's mean is added to M's diagonal: M may be singular
ROWS = 2048                              # rows of W that are quantised at a time
RANGES = (0.9, 0.93, 0.96, 0.98, 1.0, 1.02, 1.05, 1.08, 1.12)         # ranges tried, relative to that of a group
REFINEMENTS = 3                          # least-squares refinements of a block's two float16 numbers
SMALLEST_HALF = 2.0**-24                 # the smallest positive float16
SOLVABLE = 1e-6                          # smallest relative determinant for which least squares are numerically sound


class Scales(NamedTuple):
    """The scales and shifts of a block's columns, and the bytes `header` that encode both: W[n,k] is about scale q + shift."""

    scale: Tensor                        # (n,elements)
    shift: Tensor
    header: Tensor                       # (n,bytes) uint8


class Layout(Protocol):
    """A format of blocks with `elements` elements each, in which `max_q` is the largest integer."""

    elements: int
    max_q: int

    def fit(self, weight: Tensor, importance: Tensor) -> Scales:
        """Returns the scales of `weight` (n,elements) by least squares, in which column i has the factor importance[i]."""

    def pack(self, header: Tensor, q: Tensor) -> Tensor:
        """Returns the bytes of blocks, which are `header` and the packed integers q (n,elements) uint8."""


class WithMinimum:
    """The layout of Q4_K and Q5_K. Each of eight groups has a scale and a minimum, 6-bit multiples of two float16 numbers."""

    elements = BLOCK

    def __init__(self, bits: int) -> None:
        self.max_q = 2**bits - 1

    def fit(self, weight: Tensor, importance: Tensor) -> Scales:
        groups, importance = weight.unflatten(1, (-1, GROUP)), importance.view(-1, GROUP)
        scale, minimum = _affine(groups, importance, self.max_q)
        d, m = _half(scale.amax(1, keepdim=True) / MAX_CODE), _half(minimum.amax(1, keepdim=True) / MAX_CODE)
        least = torch.full_like(d, torch.inf)
        best = [torch.full_like(part, torch.nan) for part in (d, m, scale, minimum)]       # where W is too large, the NaN stays
        for _ in range(REFINEMENTS):
            s, t = _codes(scale, d), _codes(minimum, m)
            q = _integers(groups, (d * s).unsqueeze(2), -(m * t).unsqueeze(2), self.max_q)
            a, b = s.unsqueeze(2) * q, -t.unsqueeze(2).expand_as(q)      # W is about d a + m b
            error = (importance * (d.unsqueeze(2) * a + m.unsqueeze(2) * b - groups).square_()).sum((1, 2)).unsqueeze(1)
            best = [torch.where(error < least, new, old) for new, old in zip((d, m, s, t), best, strict=True)]
            least = torch.minimum(error, least)
            d, m = _two_factors(groups, importance, a, b, d, m)
        d, m, s, t = best
        return Scales((d * s).repeat_interleave(GROUP, 1), -(m * t).repeat_interleave(GROUP, 1), _header(d, m, s, t))

    def pack(self, header: Tensor, q: Tensor) -> Tensor:
        nibbles = _nibbles(q, GROUP)
        if self.max_q == 15:
            return torch.cat((header, nibbles), 1)
        shifts = torch.arange(8, dtype=torch.uint8, device=q.device).unsqueeze(1)
        fifths = ((q >> 4).unflatten(1, (8, GROUP)) << shifts).sum(1, dtype=torch.uint8)
        return torch.cat((header, fifths, nibbles), 1)


class Symmetric:
    """The layout of Q4_0 and Q5_0, in which the middle integer stands for 0. The scale may be negative."""

    elements = GROUP

    def __init__(self, bits: int) -> None:
        self.max_q, self.middle = 2**bits - 1, 2**(bits - 1)

    def fit(self, weight: Tensor, importance: Tensor) -> Scales:
        largest = weight.gather(1, weight.abs().argmax(1, keepdim=True))         # maps to -middle: +middle does not exist
        least, best = torch.full_like(largest, torch.inf), torch.full_like(largest, torch.nan)    # NaN: W is too large
        for factor in (sign * factor for factor in RANGES for sign in (1, -1)):
            q = self._integers(weight, -largest * (factor / self.middle))
            squares = (importance * q * q).sum(1, keepdim=True).clamp_(min=1e-30)
            d = _half((importance * q * weight).sum(1, keepdim=True) / squares)
            error = (importance * (d * self._integers(weight, d) - weight).square_()).sum(1, keepdim=True)
            best = torch.where(error < least, d, best)
            least = torch.minimum(error, least)
        scale = best.expand_as(weight)
        return Scales(scale, -self.middle * scale, _bytes_of_half(best))

    def _integers(self, weight: Tensor, scale: Tensor) -> Tensor:
        return _integers(weight, scale, -self.middle * scale, self.max_q) - self.middle

    def pack(self, header: Tensor, q: Tensor) -> Tensor:
        nibbles = _nibbles(q, GROUP // 2)
        if self.max_q == 15:
            return torch.cat((header, nibbles), 1)
        shifts = torch.arange(8, dtype=torch.uint8, device=q.device)
        return torch.cat((header, ((q >> 4).unflatten(1, (4, 8)) << shifts).sum(2, dtype=torch.uint8), nibbles), 1)


LAYOUTS: dict[str, Layout] = {"q4_k": WithMinimum(4), "q5_k": WithMinimum(5), "q4_0": Symmetric(4), "q5_0": Symmetric(5)}


def quantise(weight: Tensor, moments: Sequence[Tensor], format: str) -> Tensor:
    """Quantises a finite, floating-point W (N,K), and returns the blocks (N, bytes of a row) uint8.

    Args:
        moments: a matrix M (k,k) for each window of k consecutive columns of W. k is a multiple of the elements of a block.
        format: a key of LAYOUTS.
    """
    layout = LAYOUTS[format]
    damped = [_damp(moment) for moment in moments]
    factors = [_factor(moment) for moment in damped]
    widths = [len(moment) for moment in moments]
    rows = []
    for part in weight.split(ROWS):
        windows = zip(part.float().split(widths, 1), damped, factors, strict=True)
        rows.append(torch.cat([_window(columns, moment.diagonal(), factor, layout) for columns, moment, factor in windows], 1))
    return torch.cat(rows)


def _damp(moments: Tensor) -> Tensor:
    """Returns M scaled to a mean diagonal of 1, plus DAMPING, which is positive definite, or the identity if M is 0."""
    mean = moments.diagonal().mean().item()
    identity = torch.eye(len(moments), device=moments.device)
    return moments.float() / mean + DAMPING * identity if mean > 0 else identity


def _factor(moments: Tensor) -> Tensor:
    """Returns the upper triangular U with M^-1 = U^T U, as the inverse of the upper triangular R with M = R R^T."""
    root = torch.linalg.cholesky(moments.double().flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(moments), dtype=torch.float64, device=moments.device)
    return torch.linalg.solve_triangular(root, identity, upper=True).float()


def _window(weight: Tensor, importance: Tensor, factor: Tensor, layout: Layout) -> Tensor:
    """Quantises the window weight (n,k), and returns the blocks (n, bytes). factor (k,k) is U."""
    columns = weight.T.clone(memory_format=torch.contiguous_format)      # a copy, because _round overwrites the columns
    blocks = []
    for start in range(0, len(columns), layout.elements):
        stop = start + layout.elements
        scales = layout.fit(columns[start:stop].T, importance[start:stop])
        q, errors = _round(columns[start:stop], scales, factor[start:stop, start:stop], layout.max_q)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        blocks.append(layout.pack(scales.header, q.T.to(torch.uint8)))
    return torch.cat(blocks, 1)


def _round(columns: Tensor, scales: Scales, factor: Tensor, max_q: int) -> tuple[Tensor, Tensor]:
    """Returns the integers of a block's columns (k,n), and the error of each column j divided by U_jj. Overwrites `columns`."""
    q, errors = torch.empty_like(columns), torch.empty_like(columns)
    scale, shift = scales.scale.T.contiguous(), scales.shift.T.contiguous()
    inverse = torch.where(scale == 0, 0, 1 / scale)
    for j in range(len(columns)):
        torch.round(torch.sub(columns[j], shift[j]).mul_(inverse[j]), out=q[j]).clamp_(0, max_q)
        torch.sub(columns[j], torch.addcmul(shift[j], scale[j], q[j]), out=errors[j]).div_(factor[j, j])
        columns[j + 1:].addr_(factor[j, j + 1:], errors[j], alpha=-1)
    return q, errors


def _affine(groups: Tensor, importance: Tensor, max_q: int) -> tuple[Tensor, Tensor]:
    """Returns the scale and minimum, (n,g) each and at least 0, with which scale q - minimum is nearest to W over RANGES."""
    low = groups.amin(2).clamp_(max=0)
    step = (groups.amax(2) - low).clamp_(min=0) / max_q
    least, best_scale, best_minimum = torch.full_like(low, torch.inf), step, -low
    total, weighted = importance.sum(1), (importance * groups).sum(2)
    for factor in RANGES:
        q = _integers(groups, (step * factor).unsqueeze(2), low.unsqueeze(2), max_q)
        pq = importance * q
        one, two, product = pq.sum(2), (pq * q).sum(2), (pq * groups).sum(2)
        determinant = total * two - one * one
        solvable = determinant > SOLVABLE * total * two                  # this is false if all q are equal
        scale = torch.where(solvable, (total * product - one * weighted) / determinant, step)
        minimum = torch.where(solvable, (scale * one - weighted) / total, -low)
        scale = torch.where(minimum < 0, product / two.clamp(min=1e-30), scale).clamp_(min=0)
        minimum.clamp_(min=0)
        q = _integers(groups, scale.unsqueeze(2), -minimum.unsqueeze(2), max_q)
        error = (importance * (scale.unsqueeze(2) * q - minimum.unsqueeze(2) - groups).square_()).sum(2)
        better = error < least
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
        least = torch.minimum(error, least)
    return best_scale, best_minimum


def _two_factors(groups: Tensor, importance: Tensor, a: Tensor, b: Tensor, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the d and m (n,1), rounded to float16, that minimise (d a + m b - groups)^2.

    d and m stay unchanged where no positive solution exists.
    """
    pa, pb = importance * a, importance * b
    aa, ab, bb = (pa * a).sum((1, 2)), (pa * b).sum((1, 2)), (pb * b).sum((1, 2))
    aw, bw = (pa * groups).sum((1, 2)), (pb * groups).sum((1, 2))
    determinant = aa * bb - ab * ab
    solvable = determinant > SOLVABLE * aa * bb
    divisor = torch.where(solvable, determinant, 1)
    new_d, new_m = _half((aw * bb - bw * ab) / divisor).unsqueeze(1), _half((bw * aa - aw * ab) / divisor).unsqueeze(1)
    solvable = solvable.unsqueeze(1)
    return torch.where(solvable & (new_d > 0), new_d, d), torch.where(solvable & (new_m > 0), new_m, m)


def _integers(values: Tensor, scale: Tensor, shift: Tensor, max_q: int) -> Tensor:
    """Returns the integers q, as floats, with which scale q + shift is nearest to `values`."""
    return ((values - shift) / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(0, max_q)


def _codes(values: Tensor, unit: Tensor) -> Tensor:
    return _integers(values, unit, torch.zeros_like(unit), MAX_CODE)


def _half(values: Tensor) -> Tensor:
    """Returns the values rounded to float16, but in float32. Nonzero values stay nonzero."""
    return torch.where(values == 0, values, values.sign() * values.abs().clamp(min=SMALLEST_HALF)).half().float()


def _bytes_of_half(values: Tensor) -> Tensor:
    return values.half().view(torch.uint8)


def _header(d: Tensor, m: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Returns the first 16 bytes of a k-quant's block: d and m in float16, then scales s (n,8) and minima t (n,8) in 6 bits."""
    s, t = s.to(torch.uint8), t.to(torch.uint8)
    low, high = (codes[:, :4] | (codes[:, 4:] & 48) << 2 for codes in (s, t))
    return torch.cat((_bytes_of_half(d), _bytes_of_half(m), low, high, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4), 1)


def _nibbles(q: Tensor, length: int) -> Tensor:
    """Packs the low four bits of q. Two neighbouring runs of `length` integers share `length` bytes."""
    parts = (q & 15).unflatten(1, (-1, 2, length))
    return (parts[:, :, 0] | parts[:, :, 1] << 4).flatten(1)
