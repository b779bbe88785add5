"""Tests that the fused parts of a block equal the formulas of its modules, in value and in every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, linear, normalize

from kernels.wkv4 import WKV4, WKVState
from rwkv.model import fused
from rwkv.model.fused import token_shift
from rwkv.model.rwkv4 import fused as rwkv4_fused
from rwkv.model.rwkv4.mix import ChannelMix, TimeMix
from rwkv.model.rwkv7 import fused as rwkv7_fused
from rwkv.model.rwkv7.fused import Parameters

B, T, H, N, A, D = 2, 5, 2, 3, 4, 4
C, F = H * N, 7
X, ROW, MU, SQUARE = (B, T, C), (B, C), (1, 1, C), (C, C)
UP, DOWN, FROM_HIDDEN, HIDDEN = (A, C), (C, A), (D, C), (B, T, D)
MIX = (X, ROW)
Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensor | Tensors]
Case = tuple[Function, Function, tuple[tuple[int, ...], ...]]


def random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def several(results: Tensor | Tensors) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


# RWKV-4


def products(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
    return fused.mixed_products(x, last_x, others[:len(others) // 2], others[len(others) // 2:])


def plain_products(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
    mus, weights = others[:len(others) // 2], others[len(others) // 2:]
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    return tuple(linear(mu * x + (1 - mu) * before, weight) for mu, weight in zip(mus, weights, strict=True))


def channel_mixing(x: Tensor, last_x: Tensor, mu_k: Tensor, mu_r: Tensor, *weights: Tensor) -> Tensor:
    return rwkv4_fused.channel_mixing(x, last_x, (mu_k, mu_r), *weights)


def plain_channel_mixing(x: Tensor, last_x: Tensor, mu_k: Tensor, mu_r: Tensor, *weights: Tensor) -> Tensor:
    k, r = plain_products(x, last_x, mu_k, mu_r, *weights[:2])
    return torch.sigmoid(r) * linear(torch.relu(k) ** 2, weights[2])


RWKV4: dict[str, Case] = {
    "three products": (products, plain_products, (*MIX, MU, MU, MU, UP, UP, UP)),
    "two products": (products, plain_products, (*MIX, MU, MU, UP, SQUARE)),
    "one step": (products, plain_products, ((B, 1, C), (B, C), MU, MU, UP, SQUARE)),
    "gate": (rwkv4_fused.gated_product, lambda gate, x, weight: linear(torch.sigmoid(gate) * x, weight), (X, X, UP)),
    "the channel mixing of RWKV-4": (channel_mixing, plain_channel_mixing, (*MIX, MU, MU, UP, SQUARE, DOWN)),
}


# RWKV-7


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
    """Wraps a function for layer 1, which takes x, last_x, v_first and all parameters as separate tensors."""
    return lambda x, last_x, v_first, *others: function(x, last_x, v_first, Parameters(*others))


def inputs_of_layer_0(function: Callable[..., Tensors]) -> Function:
    """Wraps a function for layer 0, which takes neither v_first nor the parameters of its gate."""
    def with_parameters(x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
        rest = iter(others)
        return function(x, last_x, None, Parameters(*(None if name in ("v0", "v1", "v2") else next(rest)       # type: ignore
                                                      for name in Parameters._fields)))

    return with_parameters


def fused_inputs(x: Tensor, last_x: Tensor, v_first: Tensor | None, parameters: Parameters) -> Tensors:
    return rwkv7_fused._without_none(*rwkv7_fused.inputs(x, last_x, v_first, N, parameters))


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


def plain_rwkv7_channel_mixing(x: Tensor, last_x: Tensor, x_k: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return linear(torch.relu(linear(mixes(x, last_x, x_k)[0], key)) ** 2, value)


RWKV7: dict[str, Case] = {
    "inputs": (inputs_of(fused_inputs), inputs_of(plain_with_heads),
               (X, ROW, X, *[MU] * 6, *[SQUARE] * 3, *[(C, D)] * 4, *[MU] * 5, *[FROM_HIDDEN] * 4)),
    "inputs of layer 0": (inputs_of_layer_0(fused_inputs), inputs_of_layer_0(plain_with_heads),
                          (X, ROW, *[MU] * 6, *[SQUARE] * 3, *[(C, D)] * 3, *[MU] * 4, *[FROM_HIDDEN] * 3)),
    "gates": (gates, plain_gates, (X, X, X, *[HIDDEN] * 4, *[MU] * 5, *[FROM_HIDDEN] * 4)),
    "gates of layer 0": (gates_of_layer_0, plain_gates_of_layer_0, (X, X, *[HIDDEN] * 3, *[MU] * 4, *[FROM_HIDDEN] * 3)),
    "output": (rwkv7_fused.output, plain_output, ((B, T, H, N), X, X, X, X, (H, N), (C,), (C,), SQUARE)),
    "the channel mixing of RWKV-7": (rwkv7_fused.channel_mixing, plain_rwkv7_channel_mixing, (X, ROW, MU, (F, C), (C, F))),
}
each_case = pytest.mark.parametrize("case", (RWKV4 | RWKV7).values(), ids=RWKV4 | RWKV7)


@each_case
def test_values_and_gradients(case: Case) -> None:
    fused_function, plain, shapes = case
    torch.testing.assert_close(fused_function(*random(shapes)), plain(*random(shapes)), rtol=1e-12, atol=1e-12)
    grads = []
    for function in (fused_function, plain):
        inputs = random(shapes)
        outputs = several(function(*inputs))
        total = sum((output * torch.arange(1, output.numel() + 1).view_as(output).sin()).sum() for output in outputs)
        grads.append(torch.autograd.grad(total, inputs))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@each_case
def test_a_second_derivative_is_refused(case: Case) -> None:
    fused_function, _, shapes = case
    inputs = random(shapes)
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(sum(output.sum() for output in several(fused_function(*inputs))), inputs, create_graph=True)


@each_case
def test_inputs_and_incoming_gradients_are_not_changed(case: Case) -> None:
    fused_function, _, shapes = case
    inputs = random(shapes, torch.float32)
    before = [tensor.detach().clone() for tensor in inputs]
    outputs = several(fused_function(*inputs))
    grads = [torch.ones_like(output) for output in outputs]
    for _ in range(2):
        first = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    again = torch.autograd.grad(outputs, inputs, grads)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@each_case
def test_expanded_gradients(case: Case) -> None:
    """The gradient of a sum is one expanded number, but C reads contiguous rows."""
    fused_function, _, shapes = case
    inputs = random(shapes, torch.float32)
    outputs = several(fused_function(*inputs))
    ones = [torch.ones_like(output) for output in outputs]
    expanded = [torch.ones((), dtype=output.dtype).expand_as(output) for output in outputs]
    exact, again = (torch.autograd.grad(outputs, inputs, grads, retain_graph=True) for grads in (ones, expanded))
    assert all(torch.equal(*pair) for pair in zip(exact, again, strict=True))


def test_an_output_without_gradient_counts_as_zero() -> None:
    shapes = RWKV4["two products"][2]
    inputs, plain_inputs = (random(shapes, torch.float32) for _ in range(2))
    products(*inputs)[1].sum().backward()
    plain_products(*plain_inputs)[1].sum().backward()
    for index in (0, 1, 3, 5):
        torch.testing.assert_close(inputs[index].grad, plain_inputs[index].grad)
    assert not any(inputs[index].grad.any() for index in (2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in RWKV4 if case != "gate"])
def test_under_autocast_everything_is_in_its_dtype(case: str, dtype: torch.dtype) -> None:
    """Outputs have the dtype of autocast, and gradients have that of the inputs."""
    fused_function, plain, shapes = RWKV4[case]
    inputs, plain_inputs = (random(shapes, torch.float32) for _ in range(2))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = several(fused_function(*inputs))
    expected, eps = several(plain(*plain_inputs)), torch.finfo(dtype).eps
    for output, exact in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), exact, rtol=8 * eps, atol=16 * eps)
    grads, exact_grads = (torch.autograd.grad([output.float().sum() for output in each], leaves)
                          for each, leaves in ((outputs, inputs), (expected, plain_inputs)))
    for grad, exact in zip(grads, exact_grads, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, exact, rtol=16 * eps, atol=60 * eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_in_another_dtype_computes_in_it(dtype: torch.dtype) -> None:
    """The state of such a model is still float32."""
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-6
    x, last_x, *others = random(RWKV4["three products"][2], dtype)
    for actual, exact in zip(products(x, last_x.float(), *others), plain_products(x, last_x, *others), strict=True):
        torch.testing.assert_close(actual, exact, rtol=tolerance, atol=tolerance)


def parts() -> list[tuple[nn.Module, Callable[..., Tensor], tuple[nn.Linear, ...]]]:
    """Returns both halves of a block with random weights, each with a function of x and last_x, and with its linear layers."""
    torch.manual_seed(1)
    time, channel = TimeMix(C, A, WKV4("reference")), ChannelMix(C, A)
    for parameter in (*time.parameters(), *channel.parameters()):
        nn.init.normal_(parameter, std=0.7)
    time_layers = time.key, time.value, time.receptance, time.output
    return [(time, lambda x, last_x: time(x, last_x, WKVState.empty(B, A))[0], time_layers),
            (channel, lambda x, last_x: channel(x, last_x)[0], (channel.key, channel.receptance, channel.value))]


def gradients(module: nn.Module, run: Callable[..., Tensor]) -> list[Tensor]:
    inputs = random(MIX, torch.float32)
    output = run(*inputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [*inputs, *module.parameters()])]


@pytest.mark.parametrize("index", [0, 1], ids=("time mixing", "channel mixing"))
def test_a_layer_with_a_hook_is_called(index: int) -> None:
    """The results are the same as without the hook."""
    module, run, layers = parts()[index]
    expected, called_layers = gradients(module, run), []
    for layer in layers:
        handle = layer.register_forward_hook(lambda layer, inputs, output: called_layers.append(layer))
        for actual, exact in zip(gradients(module, run), expected, strict=True):
            torch.testing.assert_close(actual, exact)
        handle.remove()
    assert called_layers == list(layers)


def test_layers_of_another_kind_are_called() -> None:
    """Adapters and quantised weights are such layers."""
    plain = nn.Linear(C, C, bias=False)
    assert fused.can_fuse(plain, plain)
    other = type("Adapter", (nn.Linear,), {})(C, C, bias=False)
    quantised = nn.Linear(C, C, bias=False)
    quantised.weight = nn.Parameter(torch.Tensor._make_subclass(type("Quantised", (Tensor,), {}), torch.ones(C, C)))
    patched = nn.Linear(C, C, bias=False)
    patched.forward = lambda x: x                                        # type: ignore[method-assign]
    assert not any(fused.can_fuse(plain, layer) for layer in (other, quantised, patched, nn.Linear(C, C), nn.Identity()))


def test_frozen_weights_are_left_to_autograd() -> None:
    frozen = nn.Linear(C, C, bias=False).requires_grad_(False)
    assert not fused.can_fuse(frozen)
    with torch.no_grad():
        assert fused.can_fuse(frozen)


def test_a_global_hook_sees_all_layers() -> None:
    for module, run, layers in parts():
        called_layers: list[nn.Module] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda layer, *_, seen=called_layers: seen.append(layer))
        run(*random(MIX, torch.float32))
        handle.remove()
        assert {*layers} <= {*called_layers}, type(module)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")     # torch.compile does so
def test_a_compiler_sees_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    module, run, _ = parts()[1]
    expected = gradients(module, run)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(rwkv4_fused, "channel_mixing", None)
    for actual, exact in zip(gradients(module, lambda *inputs: compiled(*inputs)[0]), expected, strict=True):
        assert (actual - exact).norm() <= 1e-5 * exact.norm()


def test_the_formula_of_the_token_shift() -> None:
    x, last_x, mu, other = random((*MIX, MU, MU))
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    torch.testing.assert_close(token_shift(x, last_x, mu, other), tuple(m * x + (1 - m) * before for m in (mu, other)))
    with torch.autocast("cpu", torch.bfloat16):
        assert {mix.dtype for mix in token_shift(x.float(), last_x, mu, other)} == {torch.bfloat16}


# RWKV-7 alone


def test_a_direction_of_norm_0_has_finite_gradients() -> None:
    """If k is 0, then kk is 0, and its gradient is divided by the least norm, as in torch.nn.functional.normalize."""
    inputs = random(RWKV7["gates"][2])
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
    actual = rwkv7_fused.gates(k, of_tokens, None, (of_gates,) * 3, N, (vectors,) * 4, (torch.zeros(D, C),) * 3)
    norms = actual.a.float().unflatten(-1, (H, N)).norm(dim=-1)[0]
    torch.testing.assert_close(norms, torch.tensor([[0.0], [1.0], [1.0]]).expand(3, H), rtol=0, atol=0.01)


def test_another_half_precision_than_autocasts_is_cast() -> None:
    x, mu = torch.randn(2, 3, 8), torch.rand(1, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (mixed,) = token_shift(x.half(), None, mu.half())
        _, (same,) = fused.mix(torch.bfloat16, x.half(), None, (mu.half(),))
    torch.testing.assert_close(same, mixed)


def test_autocast_computes_in_its_dtype_and_log_w_in_float32() -> None:
    inputs = random(RWKV7["inputs"][2], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inputs[2] = inputs[2].bfloat16()                 # v_first is v of layer 0, which is bfloat16 under autocast
        actual, plain = RWKV7["inputs"][0](*inputs), RWKV7["inputs"][1](*inputs)
        assert [tensor.dtype for tensor in actual] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 8]
        for mine, theirs in zip(actual, plain, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.1)
        half = [tensor.bfloat16() if i < 7 else tensor for i, tensor in enumerate(random(RWKV7["gates"][2], torch.float32))]
        outputs = rwkv7_fused.gates(*half[:3], half[3:7], N, half[7:12], half[12:])
    assert outputs.log_w.dtype == torch.float32
    assert outputs.k.dtype == outputs.v.dtype == outputs.a.dtype == outputs.b.dtype == outputs.g.dtype == torch.bfloat16
