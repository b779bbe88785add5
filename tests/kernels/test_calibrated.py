"""Tests the rounding of matrices to GGUF's blocks for given inputs: another reader decodes them, and errors are bounded."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernels.matvec import BLOCKS, Int4, _calibrated, calibrated_format, quantise

pytestmark = pytest.mark.thorough
FORMATS = ("q4_k", "q5_k", "q4_0", "q5_0")
each_format = pytest.mark.parametrize("format", FORMATS)
N, K = 24, 512


def matrix(seed: int = 0, rows: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, K, generator=generator) * torch.rand(rows, 1, generator=generator)


def moments(seed: int = 1) -> Tensor:
    """Returns the second moments (K,K) of 2,000 inputs that are correlated and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(K) + 0.5 * torch.randn(K, K, generator=generator) / K**0.5
    x = torch.randn(2000, K, generator=generator) @ mix * torch.rand(K, generator=generator)
    return x.T @ x / len(x)


def rounded(weight: Tensor, M: Tensor, format: str) -> Tensor:
    return quantise(weight, [M], format).dense()


def error(weight: Tensor, values: Tensor, M: Tensor) -> float:
    """Returns the mean square of the products' errors, relative to the mean square of the products with `weight`."""
    difference = weight - values
    return (((difference @ M) * difference).sum() / ((weight @ M) * weight).sum()).item()


@each_format
def test_another_reader_has_the_same_values(format: str) -> None:
    packed = quantise(matrix(), [moments()], format)
    theirs = gguf.dequantize(packed.weight.numpy(), gguf.GGMLQuantizationType[format.upper()])
    assert np.array_equal(theirs, packed.dense().numpy())
    assert packed.K == K
    assert packed.is_finite()


@each_format
def test_the_error_is_at_most_that_of_rounding_without_moments(format: str) -> None:
    """k-quants are compared with int4, which has more bits, and blocks of 32 with those of the package gguf."""
    weight, plain = matrix(), torch.eye(K)
    if format.endswith("0"):
        kind = gguf.GGMLQuantizationType[format.upper()]
        other = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    else:
        other = Int4.of(weight).dense()
    assert error(weight, rounded(weight, plain, format), plain) < 0.95 * error(weight, other, plain)


@each_format
def test_calibration_changes_products_less(format: str) -> None:
    """The mean square of each input reduces the error, and the moments of all pairs of inputs reduce it further."""
    weight, M = matrix(), moments()
    plain, by_importance, by_moments = (error(weight, rounded(weight, part, format), M)
                                        for part in (torch.eye(K), M.diagonal().diag(), M))
    assert by_moments < 0.95 * by_importance < 0.9 * plain


@pytest.mark.parametrize("format", ["q4_0", "q5_0"])
def test_blocks_of_32_are_repacked_bit_for_bit(format: str) -> None:
    """In such a block the value of the largest magnitude is the scale times the lowest integer."""
    weight = matrix()
    kind = gguf.GGMLQuantizationType[format.upper()]
    blocks = gguf.quantize(weight.numpy(), kind)
    again = quantise(torch.from_numpy(gguf.dequantize(blocks, kind)), [torch.eye(K)], format)
    assert torch.equal(again.dense(), torch.from_numpy(gguf.dequantize(blocks, kind)))


@each_format
def test_a_row_does_not_depend_on_the_others(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, M = matrix(), moments()
    together = quantise(weight, [M], format).weight
    monkeypatch.setattr(_calibrated, "ROWS", 7)
    torch.testing.assert_close(BLOCKS[format](quantise(weight, [M], format).weight).dense(), BLOCKS[format](together).dense(),
                               rtol=0, atol=0.02 * weight.abs().max().item())


@each_format
def test_windows_are_rounded_independently(format: str) -> None:
    weight, M = matrix(), moments()
    halves = [M[:256, :256], M[256:, 256:]]
    both = quantise(weight, halves, format).dense()
    for half, columns, values in zip(halves, weight.split(256, 1), both.split(256, 1), strict=True):
        assert torch.equal(quantise(columns, [half], format).dense(), values)


@each_format
def test_windows_must_be_whole_blocks_of_all_columns(format: str) -> None:
    for widths in ((256,), (250, 262), (512, 256)):
        with pytest.raises(ValueError, match="add up to 512"):
            quantise(matrix(), [torch.eye(width) for width in widths], format)


@pytest.mark.parametrize("format", [pytest.param(name, marks=pytest.mark.soak if name in ("q5_0", "q5_k") else ())
                                    for name in FORMATS])
def test_unusual_weights_and_inputs(format: str) -> None:
    """Zeros stay zeros, and errors stay small for weights of one sign, with an outlier, tiny or in bfloat16.

    Inputs may be constant, huge or tiny, and some or all of them may never occur.
    """
    half_zero = torch.cat((torch.ones(K // 2), torch.zeros(K // 2))).diag()
    outlier = matrix()
    outlier[3, 5] = 1000.0
    constant = torch.full((N, K), 0.3)
    weights = (matrix(), matrix().abs(), -matrix().abs(), outlier, 1e-5 * matrix(), matrix().bfloat16(), constant)
    for M in (torch.zeros(K, K), torch.eye(K), torch.ones(K, K), half_zero, 1e30 * moments(), 1e-30 * moments()):
        values = rounded(torch.cat((torch.zeros(N, K), *weights)), M, format)    # rows are rounded one by one
        assert values.isfinite().all()
        assert torch.equal(values[:N], torch.zeros(N, K))
        for weight, rows in zip(weights, values[N:].split(N), strict=True):
            assert error(weight.float(), rows, torch.eye(K)) < 0.2


@each_format
def test_weights_that_are_too_large_are_not_finite(format: str) -> None:
    """Weights that are too large must not become zeros, because no check would notice the zeros."""
    assert not quantise(1e8 * matrix(), [moments()], format).is_finite()


@each_format
def test_the_weight_is_not_changed(format: str) -> None:
    for rows in (1, 3):
        weight = matrix(rows=rows)
        before = weight.clone()
        quantise(nn.Parameter(weight), [moments()], format)
        assert torch.equal(weight, before)


def test_the_format_follows_from_the_length_of_rows() -> None:
    assert [calibrated_format(K, bits) for K in (256, 768, 192, 32) for bits in (4, 5)] == [
        "q4_k", "q5_k", "q4_k", "q5_k", "q4_0", "q5_0", "q4_0", "q5_0"]
