"""The fused parts of an RWKV-7 block are what the plain formulas compute, in value and in every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import group_norm, linear, normalize

from rwkv.model import rwkv7_fused

B, T, H, N, D = 2, 5, 2, 3, 4
C, F = H * N, 7
X, ROW, VECTOR, SQUARE = (B, T, C), (B, C), (1, 1, C), (C, C)
DOWN, UP, HIDDEN = (C, D), (D, C), (B, T, D)
Tensors = tuple[Tensor, ...]


def mixes(x: Tensor, last_x: Tensor, *x_n: Tensor) -> list[Tensor]:
    change = torch.cat((last_x.unsqueeze(1), x[:, :-1]), 1) - x
    return [x + change * mu for mu in x_n]


def plain_products(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
    (r, w, k, v, a, g), (R, K, V, w1, a1, g1, *v1) = mixes(x, last_x, *others[:6]), others[6:]
    return linear(r, R), linear(k, K), linear(v, V), w @ w1, a @ a1, g @ g1, *(v @ matrix for matrix in v1)


def products(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
    return rwkv7_fused.mixed_products(x, last_x, others[:6], others[6:9], others[9:])


def plain_gates(k: Tensor, v: Tensor, v_first: Tensor, w: Tensor, a: Tensor, g: Tensor, m_v: Tensor, k_k: Tensor, k_a: Tensor,
                w0: Tensor, a0: Tensor, v0: Tensor, w2: Tensor, a2: Tensor, g2: Tensor, v2: Tensor) -> Tensors:
    log_w = -torch.exp(torch.tensor(-0.5, dtype=torch.float64)) * torch.sigmoid(w0 + torch.tanh(w) @ w2)
    rate = torch.sigmoid(a0 + a @ a2)
    kk = normalize((k * k_k).unflatten(-1, (H, N)), dim=-1).flatten(2)
    v = v + (v_first - v) * torch.sigmoid(v0 + m_v @ v2)
    return log_w, k * (1 + (rate - 1) * k_a), v, -kk, kk * rate, torch.sigmoid(g) @ g2


def gates(k: Tensor, v: Tensor, v_first: Tensor, *others: Tensor) -> Tensors:
    return tuple(rwkv7_fused.gates(k, v, v_first, others[:4], N, others[4:9], others[9:]))


def plain_gates_of_layer_0(k: Tensor, v: Tensor, w: Tensor, a: Tensor, g: Tensor, k_k: Tensor, k_a: Tensor, w0: Tensor,
                           a0: Tensor, w2: Tensor, a2: Tensor, g2: Tensor) -> Tensors:
    zero = torch.zeros_like(v)
    log_w, k, _, kk, b, g = plain_gates(k, v, zero, w, a, g, zero, k_k, k_a, w0, a0, zero, w2, a2, g2, zero[0, 0].diag())
    return log_w, k, v, kk, b, g


def gates_of_layer_0(k: Tensor, v: Tensor, *others: Tensor) -> Tensors:
    return tuple(rwkv7_fused.gates(k, v, None, others[:3], N, others[3:7], others[7:]))


def plain_output(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
                 matrix: Tensor) -> Tensor:
    normal = group_norm(y.reshape(B * T, C), H, weight, bias, eps=64e-5).view(B, T, C)
    share = (r.unflatten(-1, (H, N)) * k.unflatten(-1, (H, N)) * r_k).sum(-1, keepdim=True)
    return linear((normal + (share * v.unflatten(-1, (H, N))).flatten(2)) * g, matrix)


def plain_channel_mixing(x: Tensor, last_x: Tensor, x_k: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return linear(torch.relu(linear(mixes(x, last_x, x_k)[0], key)) ** 2, value)


CASES = {
    "products": (products, plain_products, (X, ROW, *[VECTOR] * 6, *[SQUARE] * 3, *[DOWN] * 4)),
    "products of layer 0": (products, plain_products, (X, ROW, *[VECTOR] * 6, *[SQUARE] * 3, *[DOWN] * 3)),
    "gates": (gates, plain_gates, (X, X, X, *[HIDDEN] * 4, *[VECTOR] * 5, *[UP] * 4)),
    "gates of layer 0": (gates_of_layer_0, plain_gates_of_layer_0, (X, X, *[HIDDEN] * 3, *[VECTOR] * 4, *[UP] * 3)),
    "output": (rwkv7_fused.output, plain_output, ((B, T, H, N), X, X, X, X, (H, N), (C,), (C,), SQUARE)),
    "channel mixing": (rwkv7_fused.channel_mixing, plain_channel_mixing, (X, ROW, VECTOR, (F, C), (C, F))),
}
Function = Callable[..., Tensor | Tensors]
Case = tuple[Function, Function, tuple[tuple[int, ...], ...]]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def several(results: Tensor | Tensors) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


@each_case
def test_values_and_gradients(case: Case) -> None:
    found, plain, shapes = case
    torch.testing.assert_close(found(*random(shapes)), plain(*random(shapes)), rtol=1e-12, atol=1e-12)
    grads = []
    for function in (found, plain):
        inputs = random(shapes)
        outputs = several(function(*inputs))
        total = sum((output * torch.arange(1, output.numel() + 1).view_as(output).sin()).sum() for output in outputs)
        grads.append(torch.autograd.grad(total, inputs))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@each_case
def test_a_second_derivative_is_refused(case: Case) -> None:
    found, _, shapes = case
    inputs = random(shapes)
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(sum(output.sum() for output in several(found(*inputs))), inputs, create_graph=True)


@each_case
def test_inputs_and_incoming_gradients_are_left_alone(case: Case) -> None:
    found, _, shapes = case
    inputs = random(shapes, torch.float32)
    before = [tensor.detach().clone() for tensor in inputs]
    outputs = several(found(*inputs))
    grads = [torch.ones_like(output) for output in outputs]
    for _ in range(2):
        first = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    again = torch.autograd.grad(outputs, inputs, grads)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_a_direction_of_norm_0_has_finite_gradients() -> None:
    """k = 0: kk is 0, and its gradient is divided by the least norm, as in torch.nn.functional.normalize."""
    inputs = random(CASES["gates"][2])
    with torch.no_grad():
        inputs[0][0, 0] = 0
    outputs = gates(*inputs)
    grads = torch.autograd.grad(sum(output.sum() for output in outputs), inputs)
    assert all(output.isfinite().all() for output in outputs)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_direction_in_half_precision_has_norm_1_or_0(dtype: torch.dtype) -> None:
    k = torch.tensor([0.0, 1e-6, 1.0], dtype=dtype).view(1, 3, 1).expand(1, 3, C).contiguous()
    of_tokens, of_gates, vectors = torch.zeros(1, 3, C, dtype=dtype), torch.zeros(1, 3, D, dtype=dtype), torch.ones(1, 1, C)
    found = rwkv7_fused.gates(k, of_tokens, None, (of_gates,) * 3, N, (vectors,) * 4, (torch.zeros(D, C),) * 3)
    norms = found.a.float().unflatten(-1, (H, N)).norm(dim=-1)[0]
    torch.testing.assert_close(norms, torch.tensor([[0.0], [1.0], [1.0]]).expand(3, H), rtol=0, atol=0.01)


def test_autocast_computes_in_its_dtype_and_log_w_in_float32() -> None:
    inputs = random(CASES["products"][2], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = products(*inputs), plain_products(*inputs)
        assert all(tensor.dtype == torch.bfloat16 for tensor in found)
        for mine, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.1)
        half = [tensor.bfloat16() if i < 7 else tensor for i, tensor in enumerate(random(CASES["gates"][2], torch.float32))]
        made = rwkv7_fused.gates(*half[:3], half[3:7], N, half[7:12], half[12:])
    assert made.log_w.dtype == torch.float32
    assert made.k.dtype == made.v.dtype == made.a.dtype == made.b.dtype == made.g.dtype == torch.bfloat16
