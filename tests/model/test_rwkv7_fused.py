"""The fused parts of an RWKV-7 block are what the plain formulas compute, in value and in every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import group_norm, linear, normalize

from rwkv.model import rwkv7_fused
from rwkv.model.rwkv7_fused import Parameters

B, T, H, N, D = 2, 5, 2, 3, 4
C, F = H * N, 7
X, ROW, VECTOR, SQUARE = (B, T, C), (B, C), (1, 1, C), (C, C)
DOWN, UP, HIDDEN = (C, D), (D, C), (B, T, D)
Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensor | Tensors]


def mixes(x: Tensor, last_x: Tensor, *x_n: Tensor) -> list[Tensor]:
    change = torch.cat((last_x.unsqueeze(1), x[:, :-1]), 1) - x
    return [x + change * mu for mu in x_n]


def plain_inputs(x: Tensor, last_x: Tensor, v_first: Tensor | None, p: Parameters) -> Tensors:
    m_r, m_w, m_k, m_v, m_a, m_g = mixes(x, last_x, *p[:6])
    r, k, v = linear(m_r, p.receptance), linear(m_k, p.key), linear(m_v, p.value)
    hidden, vectors, matrices = [m_w @ p.w1, m_a @ p.a1, m_g @ p.g1], [p.k_k, p.k_a, p.w0, p.a0], [p.w2, p.a2, p.g2]
    if v_first is None:
        log_w, new_k, _, a, b, g = plain_gates_of_layer_0(k, v, *hidden, *vectors, *matrices)
        return r, log_w, new_k, v, a, b, r, new_k, v, g, v
    log_w, k, v, a, b, g = plain_gates(k, v, v_first, *hidden, m_v @ p.v1, *vectors, p.v0, *matrices, p.v2)
    return r, log_w, k, v, a, b, r, k, v, g


def plain_with_heads(*inputs: Any) -> Tensors:
    tensors = plain_inputs(*inputs)
    return *(tensor.unflatten(-1, (H, N)) for tensor in tensors[:6]), *tensors[6:]


def inputs_of(function: Callable[..., Tensors]) -> Function:
    """Of layer 1: x, last_x, v_first and all parameters."""
    return lambda x, last_x, v_first, *others: function(x, last_x, v_first, Parameters(*others))


def inputs_of_layer_0(function: Callable[..., Tensors]) -> Function:
    """The same without v_first and the parameters of its gate."""
    def found(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
        given = iter(others)
        return function(x, last_x, None, Parameters(*(None if name in ("v0", "v1", "v2") else next(given)       # type: ignore
                                                      for name in Parameters._fields)))

    return found


def fused_inputs(x: Tensor, last_x: Tensor, v_first: Tensor | None, parameters: Parameters) -> Tensors:
    return rwkv7_fused._given(*rwkv7_fused.inputs(x, last_x, v_first, N, parameters))


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
    "inputs": (inputs_of(fused_inputs), inputs_of(plain_with_heads),
               (X, ROW, X, *[VECTOR] * 6, *[SQUARE] * 3, *[DOWN] * 4, *[VECTOR] * 5, *[UP] * 4)),
    "inputs of layer 0": (inputs_of_layer_0(fused_inputs), inputs_of_layer_0(plain_with_heads),
                          (X, ROW, *[VECTOR] * 6, *[SQUARE] * 3, *[DOWN] * 3, *[VECTOR] * 4, *[UP] * 3)),
    "gates": (gates, plain_gates, (X, X, X, *[HIDDEN] * 4, *[VECTOR] * 5, *[UP] * 4)),
    "gates of layer 0": (gates_of_layer_0, plain_gates_of_layer_0, (X, X, *[HIDDEN] * 3, *[VECTOR] * 4, *[UP] * 3)),
    "output": (rwkv7_fused.output, plain_output, ((B, T, H, N), X, X, X, X, (H, N), (C,), (C,), SQUARE)),
    "channel mixing": (rwkv7_fused.channel_mixing, plain_channel_mixing, (X, ROW, VECTOR, (F, C), (C, F))),
}
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
    inputs = random(CASES["inputs"][2], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inputs[2] = inputs[2].bfloat16()                 # v_first, which is v of layer 0
        found, plain = CASES["inputs"][0](*inputs), CASES["inputs"][1](*inputs)
        assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 8]
        for mine, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.1)
        half = [tensor.bfloat16() if i < 7 else tensor for i, tensor in enumerate(random(CASES["gates"][2], torch.float32))]
        made = rwkv7_fused.gates(*half[:3], half[3:7], N, half[7:12], half[12:])
    assert made.log_w.dtype == torch.float32
    assert made.k.dtype == made.v.dtype == made.a.dtype == made.b.dtype == made.g.dtype == torch.bfloat16
