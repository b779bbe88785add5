"""Compares the C forms with the PyTorch forms in float64, at every level of instructions and for any shape.

The number of threads must not change a bit.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import native
from rwkv.model import fused
from rwkv.model.fused import c as fused_c
from rwkv.model.rwkv7 import fused as rwkv7_fused

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
Tensors = tuple[Tensor, ...]
Function = Callable[..., tuple[Tensor | None, ...]]


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def mixing(n: int, to_previous: bool = False) -> Function:
    """Returns a function that computes n mixes and all gradients."""
    def mixed(x: Tensor, last_x: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        saved, mixes = fused.mix(others[-1].dtype, x, last_x, others[:n], to_previous)
        return *mixes, *fused.mix_backward(saved, tuple(grad.clone() for grad in others[n:]), to_previous)

    return mixed


def gating(N: int, n: int, n_more: int) -> Function:
    """Returns a function that computes the gates of n low-rank products and all gradients.

    With n = 3 the gates use v_first. `n_more` is the number of additional gradients of k and v, 0 or 2.
    """
    def gated(k: Tensor, v: Tensor, v_first: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        z, vectors, grads, more = others[:n], others[n:2 * n + 2], others[2 * n + 2:2 * n + 7], others[2 * n + 7:]
        first, more = v_first if n == 3 else None, more[:n_more] or (None, None)
        *gates, inverse = rwkv7_fused._gates(k, v, first, z, N, vectors)
        grads_of_inputs, grads_of_z, grads_of_vectors = rwkv7_fused._gates_backward(
            k, v, first, z, N, vectors, inverse, grads, more)
        return *gates, *grads_of_inputs, *grads_of_z, *grads_of_vectors

    return gated


def reading(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    *vectors, grad = others
    grads_of_inputs, grads_of_vectors = rwkv7_fused._gated_backward(y, r, k, v, g, tuple(vectors), grad)
    return rwkv7_fused._gated(y, r, k, v, g, tuple(vectors)), *grads_of_inputs, *grads_of_vectors


def squaring(x: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    return fused.squared_relu(x), fused.squared_relu_backward(grad, x)


def cases(dtype: torch.dtype, B: int, T: int, H: int, N: int) -> dict[str, tuple[Function, list[Tensor]]]:
    """Returns functions with inputs of the shape, by name; vectors and the gradient of log_w are in float32."""
    wide, C = torch.float32, H * N
    x, row, vector = (B, T, C), (B, C), (1, 1, C)
    by_name: dict[str, tuple[Function, list[Tensor]]] = {
        f"{n} mixes of {source}": (mixing(n, source == "before"), [*tensors(dtype, x, row), *tensors(wide, *[vector] * n),
                                                                   *tensors(dtype, *[x] * n)])
        for n, source in ((1, "before"), (2, "x"), (3, "x"), (6, "before"))}
    for n, n_more in itertools.product((2, 3), (0, 2)):
        by_name[f"{n} gates, {n_more} more gradients"] = gating(N, n, n_more), [
            *tensors(dtype, *[x] * (3 + n)), *tensors(wide, *[vector] * (n + 2), x), *tensors(dtype, *[x] * 6)]
    by_name["output"] = reading, [*tensors(dtype, (B, T, H, N), x, x, x, x), *tensors(wide, (H, N), (C,), (C,)),
                                  *tensors(dtype, x)]
    by_name["squared ReLU"] = squaring, tensors(dtype, x, x)
    return by_name


def in_float64(function: Function, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    return function(*(tensor.double() for tensor in inputs))


def check(dtype: torch.dtype, actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...], name: str) -> None:
    assert len(actual) == len(expected)
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one.double().flatten(), other.flatten(), rtol=TOLERANCE[dtype],
                                       atol=TOLERANCE[dtype] * scale, msg=lambda text, i=i: f"{name}, result {i}: {text}")


@DTYPES
def test_every_level_computes_the_formulas(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for name, (function, inputs) in cases(dtype, 2, 40, 2, 64).items():
        check(dtype, function(*inputs), in_float64(function, inputs), name)


@pytest.mark.thorough
@DTYPES
@settings(deadline=None, max_examples=15)
@given(B=st.integers(1, 3), T=st.integers(1, 70), H=st.integers(1, 3), N=st.integers(1, 40))
def test_any_shape(dtype: torch.dtype, B: int, T: int, H: int, N: int) -> None:
    torch.manual_seed(N)
    for name, (function, inputs) in cases(dtype, B, T, H, N + 1).items():
        check(dtype, function(*inputs), in_float64(function, inputs), name)


def test_autocast_mixes_float32_into_bfloat16() -> None:
    x, last_x, mu = tensors(torch.float32, (2, 5, 20), (2, 20), (1, 1, 20))
    (grad,) = tensors(torch.bfloat16, (2, 5, 20))
    saved, (mixed,) = fused.mix(torch.bfloat16, x, last_x, (mu,))
    grad_x, grad_last_x, grad_mu = fused.mix_backward(saved, (grad,))
    assert (mixed.dtype, grad_x is not None and grad_x.dtype) == (torch.bfloat16, torch.float32)
    expected = in_float64(mixing(1), [x, last_x, mu, grad])
    check(torch.bfloat16, (mixed, grad_x, grad_last_x, grad_mu), expected, "autocast")


@DTYPES
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        for name, (function, inputs) in cases(dtype, 3, 100, 2, 64).items():
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(function(*inputs))
            for other in results[1:]:
                assert all(a is b or torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), name   # type: ignore
    finally:
        torch.set_num_threads(before)


def test_nonfinite_values_stay_nonfinite() -> None:
    x = torch.tensor([[[float("nan"), float("inf"), -float("inf"), 2.0]]])
    assert str(fused_c.squared_relu(x).flatten().tolist()) == "[nan, inf, 0.0, 4.0]"
    assert str(fused_c.squared_relu(x, torch.ones_like(x)).flatten().tolist()) == "[nan, inf, 0.0, 4.0]"
