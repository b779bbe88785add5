"""Tests what all operators have in common, for each implementation: results, gradients, sizes of 0, strides, registration.

Every implementation in an operator's folder is tested automatically. Each operator has an adapter below; properties of a single
operator are tested in the operator's own file. The tests require only torch, pytest and the back ends.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
from implementations import cache_results, compiled_in_soak, implementation, in_soak
from torch import Tensor
from torch._dynamo.utils import counters

from kernels import compare
from kernels.backends import compiled
from kernels.compare import errors, misses
from kernels.matvec import Float32, MatVec
from kernels.matvec import cases as matvec_cases
from kernels.operator import Operator
from kernels.pad import BrickPadding
from kernels.pad import cases as pad_cases
from kernels.registry import KernelUnavailable, UnknownKernel, load, names, operators
from kernels.select import select, selectable
from kernels.softmax import Softmax
from kernels.softmax import cases as softmax_cases
from kernels.timex import TimeX
from kernels.timex import cases as timex_cases
from kernels.wkv4 import WKV4, WKVState
from kernels.wkv4 import cases as wkv_cases
from kernels.wkv7 import WKV7
from kernels.wkv7 import cases as wkv7_cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Inputs = tuple[Any, ...]         # tensors first, then numbers
HALF = (torch.bfloat16, torch.float16)


class TimeXAdapter:
    """Makes the inputs of TimeX, calls it and sets its tolerances; the adapters of other operators override what differs.

    Inputs are a flat tuple.
    """

    kind: type[Operator] = TimeX
    reference, file = "formula", "conv1d"        # `file` names an implementation that runs everywhere
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    differentiable = True
    shapes, empty_shapes = timex_cases.SHAPES, timex_cases.EMPTY_SHAPES
    medium: Any = (3, 32, 63)                    # not a multiple of anything, with more than one vector of channels
    small: Any = (2, 3, 9)                       # for torch.compile, and for tests that run an operator many times
    time: Any = (("w", -1), ("k", -1))            # the axis of time of each input that has one
    long: Any = (3, 4, 192)                      # with 192 steps
    value = "k"                                  # the input that the output is proportional to

    def names(self) -> Iterable[str]:
        return names(self.kind.folder)

    def make(self, name: str, device: str) -> Any:
        return self.kind(name)

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return *timex_cases.inputs(*shape, dtype=dtype, device=device, seed=seed), 0.25

    def call(self, operator: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return (operator(*inputs),)

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return timex_cases.results(operator, *inputs)

    def expected(self, inputs: Inputs) -> dict[str, Tensor]:
        """Returns the reference's results in float64."""
        return self.results(self.kind(self.reference), each_tensor(Tensor.double, inputs))

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return timex_cases.tolerance(dtype)

    def allowed_errors(self, operator: Any, dtype: torch.dtype) -> dict[str, float]:
        """Returns the tolerances of this implementation, which may be larger than the operator's in some dtypes."""
        return self.tolerance(dtype)

    def invalid_inputs(self) -> list[Inputs]:
        w, k = torch.ones(3, 4), torch.ones(2, 3, 4)
        return [(w, w), (w, torch.ones(2, 3, 5)), (w.t(), k), (w, k.long()), (w.to("meta"), k)]


class WKV4Adapter(TimeXAdapter):
    kind, reference, file = WKV4, "reference", "torch_scan"
    shapes, empty_shapes, medium = wkv_cases.SHAPES, wkv_cases.EMPTY_SHAPES, (3, 63, 20)
    time, long, value = (("k", 1), ("v", 1)), (3, 192, 4), "v"

    def names(self) -> Iterable[str]:
        return selectable("wkv4")

    def make(self, name: str, device: str) -> Any:
        return select("wkv4", name, device) if name in self.names() else WKV4(name)

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        """Makes inputs of which only k and v may be in half precision."""
        wide = torch.float32 if dtype in HALF else dtype
        time_decay, time_first, k, v, state = wkv_cases.inputs(*shape, dtype=wide, device=device, seed=seed)
        return time_decay, time_first, k.to(dtype), v.to(dtype), *state

    def call(self, operator: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns y, a/b and p + log b, because a and b depend on the scale p, which has no gradient."""
        y, (a, b, p) = operator(*inputs[:4], WKVState(*inputs[4:]))
        return y, a / b, p + b.log()

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        loss_of = "y and state" if inputs[2].numel() else "state"
        return wkv_cases.results(operator, (*inputs[:4], WKVState(*inputs[4:])), loss_of)

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return wkv_cases.tolerance(dtype) if dtype != torch.float64 else dict.fromkeys(wkv_cases.tolerance(), 1e-12)

    def invalid_inputs(self) -> list[Inputs]:
        good = self.inputs((2, 4, 3), torch.float32, "cpu")
        wrong = {0: (4,), 1: (4,), 2: (2, 5, 3), 3: (2, 4), 4: (1, 3), 5: (2, 4), 6: (3, 2, 3)}
        shaped = [(*good[:i], torch.ones(shape), *good[i + 1:]) for i, shape in wrong.items()]
        states = [(*good[:4], *each_tensor(change, good[4:])) for change in (Tensor.long, Tensor.double)]
        return [*shaped, *states, (*good[:2], good[2].long(), *good[3:]), (good[0].to("meta"), *good[1:])]


class WKV7Adapter(TimeXAdapter):
    kind, reference, file = WKV7, "reference", "reference"
    shapes, empty_shapes = wkv7_cases.SHAPES, wkv7_cases.EMPTY_SHAPES
    medium, small = (2, 37, 3, 20), (1, 3, 2, 4)
    time, long, value = tuple((name, 1) for name in wkv7_cases.NAMES[:6]), (2, 192, 2, 8), "v"

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return wkv7_cases.inputs(*shape, dtype=dtype, device=device, seed=seed)

    def call(self, operator: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return operator(*inputs)

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return wkv7_cases.results(operator, inputs)

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return wkv7_cases.tolerance(dtype)

    def allowed_errors(self, operator: Any, dtype: torch.dtype) -> dict[str, float]:
        return compare.tolerance(operator, dtype)

    def invalid_inputs(self) -> list[Inputs]:
        good = self.inputs((2, 4, 3, 8), torch.float32, "cpu")
        shaped = [(*good[:i], torch.ones(2, 4, 3, 7), *good[i + 1:]) for i in range(6)]
        states = [torch.ones(2, 3, 8, 7), good[6].long(), good[6].double(), good[6].to(torch.complex64)]
        return [*shaped, *((*good[:6], state) for state in states), (*good[:2], good[2].long(), *good[3:]),
                (good[0].to("meta"), *good[1:]), tuple(tensor[0] for tensor in good)]


class SoftmaxAdapter(TimeXAdapter):
    kind, reference, file = Softmax, "formula", "torch_native"
    shapes, empty_shapes, medium = softmax_cases.SHAPES, softmax_cases.EMPTY_SHAPES, (3, 4, 63)
    time = ()

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return (softmax_cases.inputs(*shape, dtype=dtype, device=device, seed=seed),)

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return softmax_cases.results(operator, *inputs)

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return softmax_cases.tolerance(dtype)

    def invalid_inputs(self) -> list[Inputs]:
        return [(torch.tensor(1.0),), (torch.ones(2, 3, dtype=torch.int64),)]


class PadAdapter(TimeXAdapter):
    kind, reference, file = BrickPadding, "formula", "torch_strips"
    dtypes, differentiable = pad_cases.DTYPES, False
    shapes, empty_shapes, medium, time = pad_cases.CASES, pad_cases.EMPTY, pad_cases.Case((3, 5, 31), 7, (9, 4, 11, 3)), ()

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return pad_cases.tile(shape.tile, dtype, device, seed), shape.offset, shape.padding

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return {"out": operator(*inputs)}

    def expected(self, inputs: Inputs) -> dict[str, Tensor]:
        """Computes the formula in one line of PyTorch, because formula.py would take minutes."""
        (tile, offset, (left, top, right, bottom)), (h, w) = inputs, inputs[0].shape[-2:]
        return {"out": pad_cases.one_line(tile, offset, top, left, top + h + bottom, left + w + right)}

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return {"out": 0.0}

    def invalid_inputs(self) -> list[Inputs]:
        return [(torch.ones(3), 1, 1), (torch.ones(3, 4, dtype=torch.float64), 1, 1), (torch.ones(0, 4), 1, 1),
                (torch.ones(3, 4, requires_grad=True), 1, 1), (torch.ones(3, 4), 1, -1), (torch.ones(3, 4), 1, 1.5)]


class MatVecAdapter(TimeXAdapter):
    """Tests matvec in float32 only; tests/kernels/test_matvec.py tests the other formats."""

    kind, reference, file = MatVec, "reference", "torch_linear"
    differentiable = False
    shapes, empty_shapes, medium, time = matvec_cases.SHAPES, matvec_cases.EMPTY_SHAPES, (3, 20, 63), ()

    def names(self) -> Iterable[str]:
        return [name for name in names("matvec") if "float32" in load("matvec", name).REQUIRES.formats]

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        x, packed = matvec_cases.inputs(*shape, dtype=dtype, device=device, seed=seed)
        return x, packed.weight

    def call(self, operator: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return (operator(inputs[0], Float32(inputs[1])),)

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return {"y": operator(inputs[0], Float32(inputs[1]))}

    def expected(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"y": matvec_cases.expected(inputs[0], Float32(inputs[1]))}

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return matvec_cases.tolerance("c_v0", "float32", dtype)

    def invalid_inputs(self) -> list[Inputs]:
        x, weight = self.inputs((2, 3, 8), torch.float32, "cpu")
        return [(x[:, :7], weight), (x.long(), weight), (x.to("meta"), weight), (x.requires_grad_(), weight)]


ADAPTERS = {item.kind.folder: item for item in (TimeXAdapter(), WKV4Adapter(), WKV7Adapter(), SoftmaxAdapter(), PadAdapter(),
                                                MatVecAdapter())}
each_operator = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)


CASES = [implementation(op, name, (adapter, name)) for op, adapter in ADAPTERS.items() for name in adapter.names()]
# Registrations differ only where c_, cuda_ and triton_ kernels save tensors of their own, so make soak tests most of the others
REGISTRATION_CASES = [
    one for each in CASES for adapter, name in each.values
    for one in ([each] if name in (adapter.reference, adapter.file) or name.startswith(("c_", "cuda_", "triton_"))
                else in_soak(each))]
COMPILED = [each for each in CASES if "compile_scan" in each.id or "torch_compile" in each.id]
EARLIER = [each for each in CASES if each.id in ("wkv7-taichi_v1", "wkv7-taichi_v2")]        # users run taichi_v3
DEEP_IN_SOAK = [one for each in CASES for one in (in_soak(each) if each in COMPILED + EARLIER else [each])]


@pytest.fixture(params=compiled_in_soak(CASES))
def case(request: pytest.FixtureRequest, device: str) -> tuple[Any, Any]:
    """Returns an adapter and one implementation of its operator."""
    adapter, name = request.param
    return adapter, adapter.make(name, device)


def wrong(adapter: Any, operator: Any, inputs: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return misses(errors(adapter.results(operator, inputs), expected(adapter, inputs)), adapter.allowed_errors(operator, dtype))


@cache_results
def expected(adapter: Any, inputs: Inputs) -> dict[str, Tensor]:
    return adapter.expected(inputs)


def each_tensor(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    return tuple(function(value) if isinstance(value, Tensor) else value for value in inputs)


def leaves_of(adapter: Any, inputs: Inputs) -> tuple[list[Tensor], Inputs]:
    """Returns the inputs that have a gradient as leaves of autograd, and all inputs with these leaves in their places."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs[:len(adapter.kind.gradients)]]
    return leaves, (*leaves, *inputs[len(leaves):])


def along(axis: int, values: Tensor, like: Tensor) -> Tensor:
    """Reshapes `values` (T,) so that they multiply `like` along its time axis."""
    return values.to(like).view([-1 if i == axis % like.dim() else 1 for i in range(like.dim())])


def by_step(adapter: Any, operator: Any, inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
    """Returns the output and the gradients of the inputs that have a time axis, all of them as (T,...).

    The gradient of w is left out, because its axis counts lags. `weights` (T,) are those of the output's steps in the loss.
    """
    axes = {name: axis for name, axis in adapter.time if name != "w"}
    leaves, arguments = leaves_of(adapter, inputs)
    output = adapter.call(operator, *arguments)[0]
    random = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    grad_output = random * along(axes["k"], weights, output)
    grads = torch.autograd.grad(output, [leaves[adapter.kind._names.index(name)] for name in axes], grad_output)
    actual = {"output": output.detach()} | {f"grad {name}": grad for name, grad in zip(axes, grads, strict=True)}
    return {name: tensor.movedim(axes["k"], 0) for name, tensor in actual.items()}


@cache_results
def exact_by_step(adapter: Any, inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
    return by_step(adapter, adapter.kind(adapter.reference), each_tensor(Tensor.double, inputs), weights)


def wrong_steps(adapter: Any, operator: Any, inputs: Inputs, scale: Tensor, weights: Tensor) -> dict[str, float]:
    """Returns the largest relative error of any step, for each result in which that error exceeds 1e-4.

    An error is relative to the norm of its step in the reference; if the norm is 0, any error is infinite.

    Args:
        scale (T,): factors of the input `adapter.value`.
        weights (T,): weights of the output's steps in the loss.
    """
    i, axis = adapter.kind._names.index(adapter.value), dict(adapter.time)[adapter.value]
    scaled = *inputs[:i], inputs[i] * along(axis, scale, inputs[i]), *inputs[i + 1:]
    actual = by_step(adapter, operator, scaled, weights)
    exact = exact_by_step(adapter, scaled, weights)
    worst = {}
    for name in exact:
        size, error = (tensor.flatten(1).norm(dim=1) for tensor in (exact[name], actual[name] - exact[name]))
        worst[name] = float(torch.where(error > 0, error / size, 0.0).max())
    return {name: error for name, error in worst.items() if not error <= 1e-4}


def scales(T: int) -> dict[str, Tensor]:
    """Returns scales (T,) by name, in which loud steps are a million times as large as quiet ones."""
    step = torch.arange(T)
    island = (step >= T // 3) & (step < T // 3 + 7)
    first = step < T // 2
    return {name: torch.where(loud, 1e6, 1.0) for name, loud in (
        ("loud, quiet", first), ("quiet, loud", ~first), ("a loud island", island), ("a quiet island", ~island))}


def profiles(T: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns pairs by name: scales of the value (T,), and weights of the steps in the loss (T,)."""
    step, steady = torch.arange(T), torch.ones(T)
    by_name = {f"{what}: {name}": (scale if "value" in what else steady, scale if "loss" in what else steady)
               for name, scale in scales(T).items() for what in ("value", "loss", "value and loss")}
    read, parts = step < T * 3 // 4, (step < T // 5) | ((step >= T // 2) & (step < T * 3 // 4))
    return by_name | {"the end is not read": (steady, read.float()), "two parts are read": (steady, parts.float()),
                      "loud, quiet, not read": (scales(T)["loud, quiet"], read * scales(T)["loud, quiet"])}


def skip_without_steps(adapter: Any, operator: Any) -> None:
    """Skips operators without a time axis, and implementations whose errors are relative to the largest number of a row."""
    if not adapter.time:
        pytest.skip("no time")
    if not operator.requires.wkv:
        pytest.skip(f"{operator.name} declares wkv=False")


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_operator_has_an_adapter() -> None:
    assert set(operators()) <= set(ADAPTERS)


@pytest.mark.parametrize("case", DEEP_IN_SOAK, indirect=True)
def test_results_at_every_shape(case: tuple[Any, Any], device: str) -> None:
    """Outputs and gradients are compared in the operator's first dtype."""
    adapter, operator = case
    for shape in adapter.shapes:
        assert not wrong(adapter, operator, adapter.inputs(shape, adapter.dtypes[0], device), adapter.dtypes[0]), shape


@pytest.mark.compiles
@pytest.mark.parametrize("case", [one for each in COMPILED for one in (
    in_soak(each) if each.id.endswith("-torch_compile") else [each])], indirect=True)
def test_results_of_what_torch_compiles_at_one_shape(case: tuple[Any, Any], device: str) -> None:
    """Each variant of a kernel takes seconds to compile, so make soak tests the other shapes and dtypes.

    timex-torch_compile, whose kernels wkv4-torch_compile uses, has its own test.
    """
    adapter, operator = case
    assert not wrong(adapter, operator, adapter.inputs(adapter.shapes[0], adapter.dtypes[0], device), adapter.dtypes[0])


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects what torch.compile does with a traced function: it runs its operations, or make soak compiles them as C++."""
    def compile_for_backend(function: Any, options: dict[str, Any], **arguments: Any) -> Any:
        return torch_compile(function, backend=request.param, **arguments)

    torch.compiler.reset()               # another test may have compiled the same function
    torch_compile = torch.compile
    if request.param != "inductor":
        monkeypatch.setattr(torch, "compile", compile_for_backend)
        monkeypatch.setattr(compiled, "_compiled", cache(compiled._compiled.__wrapped__))
    return str(request.param)


@pytest.mark.implementation("timex", "torch_compile")
def test_one_compilation_of_timex_serves_every_size(backend: str, device: str) -> None:
    """By default torch.compile would compile again for a size of 1 and for sizes that are equal."""
    adapter, graphs = ADAPTERS["timex"], set()
    counters.clear()
    for shape in ((3, 5, 11), (1, 1, 1), (1, 4, 9), (5, 5, 5), (2, 1, 64), (5, 3, 129)):
        assert not wrong(adapter, TimeX("torch_compile"), adapter.inputs(shape, torch.float32, device)), shape
        graphs.add(counters["stats"]["unique_graphs"])
    assert graphs == {2}, backend


@pytest.mark.parametrize("case", [one for each in DEEP_IN_SOAK for one in (in_soak(each) if "taichi" in each.id else [each])],
                         indirect=True)              # Taichi compiles a kernel anew for each dtype
@pytest.mark.parametrize("shapes", [pytest.param(slice(1, None, 3), id="some", marks=pytest.mark.thorough),
                                    pytest.param(slice(None), id="every", marks=pytest.mark.soak)])
def test_results_in_every_dtype(case: tuple[Any, Any], shapes: slice, device: str) -> None:
    adapter, operator = case
    for dtype in adapter.dtypes[1:]:
        for shape in adapter.shapes[shapes]:
            assert not wrong(adapter, operator, adapter.inputs(shape, dtype, device), dtype), (shape, dtype)


@pytest.mark.parametrize("case", DEEP_IN_SOAK, indirect=True)
def test_dtypes_are_those_of_the_inputs(case: tuple[Any, Any], device: str) -> None:
    adapter, operator = case
    for dtype in adapter.dtypes:
        leaves, inputs = leaves_of(adapter, adapter.inputs(adapter.shapes[1], dtype, device))
        outputs = adapter.call(operator, *inputs)
        assert outputs[0].dtype == dtype
        if leaves:
            grads = torch.autograd.grad(sum(output.sum() for output in outputs), leaves)
            assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]


def test_float64_is_exact_or_refused(case: tuple[Any, Any], device: str) -> None:
    """No implementation silently computes in float32."""
    adapter, operator = case
    inputs = adapter.inputs(adapter.medium, torch.float64, device)
    if torch.float64 in operator.requires.dtypes:
        assert not wrong(adapter, operator, inputs, torch.float64)
    else:
        with pytest.raises(ValueError, match="float64"):
            adapter.results(operator, inputs)


@pytest.mark.thorough
@pytest.mark.parametrize("adapter", [adapter for adapter in ADAPTERS.values() if adapter.differentiable],
                         ids=lambda adapter: adapter.kind.folder)
def test_gradcheck_of_the_reference(adapter: Any, device: str) -> None:
    """The gradients of all other implementations are compared with those of the reference."""
    operator = adapter.kind(adapter.reference)
    _, inputs = leaves_of(adapter, adapter.inputs(adapter.small, torch.float64, device))
    assert torch.autograd.gradcheck(lambda *arguments: adapter.call(operator, *arguments), inputs, fast_mode=False)


def test_a_size_of_0_gives_an_empty_tensor(case: tuple[Any, Any], device: str) -> None:
    """Gradients equal those of the reference: they are zeros, except that the state's gradient is passed through."""
    adapter, operator = case
    for shape in adapter.empty_shapes:
        inputs = adapter.inputs(shape, torch.float32, device)
        results, right = adapter.results(operator, inputs), adapter.results(adapter.kind(adapter.reference), inputs)
        assert same_bits(results, right)
        assert next(iter(results.values())).numel() == 0


def test_the_same_bits_twice(case: tuple[Any, Any], device: str) -> None:
    adapter, operator = case
    inputs = adapter.inputs(adapter.shapes[-1], torch.float32, device)
    assert same_bits(adapter.results(operator, inputs), adapter.results(operator, inputs))


def test_inputs_are_not_changed_and_are_not_the_outputs(case: tuple[Any, Any], device: str) -> None:
    adapter, operator = case
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    before = each_tensor(torch.clone, inputs)
    adapter.results(operator, inputs)
    output = adapter.call(operator, *inputs)[0]
    output += 1
    tensors = [pair for pair in zip(inputs, before, strict=True) if isinstance(pair[0], Tensor)]
    assert all(torch.equal(*pair) for pair in tensors)


def test_strided_inputs(case: tuple[Any, Any], device: str) -> None:
    adapter, operator = case
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    strided = each_tensor(lambda tensor: torch.stack((tensor, tensor), -1)[..., 0], inputs)
    turned = each_tensor(lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1), inputs)
    contiguous = adapter.results(operator, inputs)
    assert same_bits(contiguous, adapter.results(operator, strided))
    assert same_bits(contiguous, adapter.results(operator, turned))


def test_inputs_inside_a_larger_buffer(case: tuple[Any, Any], device: str) -> None:
    """The NaN around the inputs is not read, and addresses that are not aligned for vector loads cause no error."""
    def inside(tensor: Tensor, offset: int) -> Tensor:
        buffer = tensor.new_full((tensor.numel() + 2 * offset,), float("nan"))
        return buffer[offset:offset + tensor.numel()].view(tensor.shape).copy_(tensor)

    adapter, operator = case
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    for offset in (1, 64):
        assert not wrong(adapter, operator, each_tensor(partial(inside, offset=offset), inputs)), offset


def test_an_expanded_gradient(case: tuple[Any, Any], device: str) -> None:
    """The gradient of output.sum() is a single number that is expanded with strides of 0."""
    adapter, operator = case
    if not adapter.differentiable:
        pytest.skip("no gradient")
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    leaves, arguments = leaves_of(adapter, inputs)
    exact, wide = leaves_of(adapter, each_tensor(Tensor.double, inputs))
    grads = torch.autograd.grad(adapter.call(operator, *arguments)[0].sum(), leaves)
    right = torch.autograd.grad(adapter.call(adapter.kind(adapter.reference), *wide)[0].sum(), exact)
    scale = max(float(grad.abs().max()) for grad in right) + 1
    assert all((grad - other).abs().max() <= 3e-5 * scale for grad, other in zip(grads, right, strict=True))


def test_causality(case: tuple[Any, Any], device: str) -> None:
    """No later input and no longer lag changes a bit of an earlier step.

    An implementation that declares wkv=False may be off by the rounding of the largest product, which is 7e3 here beside
    results of about 8. The change begins at a multiple of 64 steps, because the convolution form shares one scale within a
    block of 64: earlier steps of the same block would be off by rounding.
    """
    adapter, operator = case
    if not adapter.time:
        pytest.skip("no time")
    t, T = 128, 192
    inputs = adapter.inputs(adapter.long, torch.float32, device)
    value, allowed = (1e3, 0.0) if operator.requires.wkv else (10.0, 1e-6 * t * 100)
    changed = list(inputs)
    for name, axis in adapter.time:
        i = adapter.kind._names.index(name)
        changed[i] = inputs[i].clone()
        later = changed[i].narrow(axis, t, T - t) if name != "w" else changed[i].narrow(axis, 0, T - t)
        later.fill_(value if adapter.kind is TimeX else 3.0) if name != "log_w" else later.mul_(0.5)
    axis = dict(adapter.time)["k"]
    y, other = (adapter.call(operator, *arguments)[0].narrow(axis, 0, t) for arguments in (inputs, changed))
    assert (y - other).abs().max() <= allowed


@pytest.mark.thorough
def test_a_scale_that_changes_along_time(case: tuple[Any, Any], device: str) -> None:
    """Each step's error is small relative to that step, and 0 where the reference is 0, even if the loss reads few steps."""
    adapter, operator = case
    skip_without_steps(adapter, operator)
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    for name, profile in profiles(inputs[adapter.kind._names.index("k")].shape[dict(adapter.time)["k"]]).items():
        assert not wrong_steps(adapter, operator, inputs, *profile), name


def test_no_later_step_reaches_a_gradient(case: tuple[Any, Any], device: str) -> None:
    """If the loss reads only the first steps, later inputs have a gradient of 0 and change no bit of earlier steps.

    Texts that share a row therefore do not affect each other. WKV4's k is not changed, because the convolution form shares one
    scale within a block of 64 steps.
    """
    adapter, operator = case
    skip_without_steps(adapter, operator)
    t, T = 100, 192
    inputs = adapter.inputs(adapter.long, torch.float32, device)
    weights, changed = (torch.arange(T) < t).float(), list(inputs)
    for name, axis in adapter.time:
        if name == adapter.value or adapter.kind is WKV7:
            i = adapter.kind._names.index(name)
            changed[i] = inputs[i].clone()
            changed[i].narrow(axis, t, T - t).mul_(1e6 if name == adapter.value else 0.5)
    actual, other = (by_step(adapter, operator, tuple(arguments), weights) for arguments in (inputs, changed))
    for name in actual:
        assert torch.equal(actual[name][:t], other[name][:t]), name
        assert name == "output" or not (actual[name][t:].any() or other[name][t:].any()), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")   # torch 2.14 causes it itself
@pytest.mark.compiles
@pytest.mark.parametrize("case", REGISTRATION_CASES, indirect=True)
def test_opcheck(case: tuple[Any, Any], device: str) -> None:
    """torch.compile relies on the schema and on the fake and autograd registrations that opcheck tests."""
    adapter, operator = case
    registered = operator._function._registered
    inputs = adapter.inputs(adapter.small if adapter.differentiable else adapter.medium, torch.float32, device)
    if adapter.differentiable:
        _, inputs = leaves_of(adapter, inputs)
    elif adapter.kind is BrickPadding:
        inputs = inputs[0], 1, 2, 2, 7, 8
    elif adapter.kind is MatVec:
        inputs = inputs[0], "float32", [inputs[1]], []
    torch.library.opcheck(registered, inputs)


@pytest.mark.compiles
@pytest.mark.parametrize("case", REGISTRATION_CASES, indirect=True)
def test_compiles_without_a_graph_break(case: tuple[Any, Any], device: str) -> None:
    torch.compiler.reset()               # torch.compile limits the compilations of one function, and each kernel needs one
    adapter, operator = case
    leaves, arguments = leaves_of(
        adapter, adapter.inputs(adapter.small if adapter.differentiable else adapter.medium, torch.float32, device))
    rest = arguments[len(leaves):]

    def function(*inputs: Any) -> Tensor:
        return sum(compare.loss(output) for output in adapter.call(operator, 2 * inputs[0], *inputs[1:]))

    plain = function(*leaves, *rest)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves, *rest)
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
    if leaves:
        grads = [torch.autograd.grad(actual, leaves) for actual in (compiled, plain)]
        assert all(compare.err_ratio(*pair) <= 1e-6 for pair in zip(*grads, strict=True))


def test_autocast_does_not_affect_the_operator(case: tuple[Any, Any], device: str) -> None:
    """Float32 inputs are computed in float32 under autocast, in the backward pass as well."""
    adapter, operator = case
    inputs = adapter.inputs(adapter.medium, torch.float32, device)
    plain = adapter.results(operator, inputs)
    with torch.autocast(device, torch.bfloat16):
        actual = adapter.results(operator, inputs)
    actual.pop(compare.LOG_SIZE, None)    # cases.results computes it outside the operator
    assert same_bits(actual, plain)


@each_operator
def test_wrong_inputs_are_refused(adapter: Any) -> None:
    for inputs in adapter.invalid_inputs():
        with pytest.raises(ValueError):                          # noqa: PT011  each operator has its own message
            adapter.call(adapter.kind(adapter.reference), *inputs)


@each_operator
def test_an_unknown_name_lists_the_known_ones(adapter: Any) -> None:
    with pytest.raises(UnknownKernel, match=adapter.reference):
        adapter.kind("nonsense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in ADAPTERS for name in names(op) if name.startswith("cuda")])
def test_a_kernel_that_cannot_run_names_its_device_and_what_does_run(op: str, name: str) -> None:
    adapter = ADAPTERS[op]
    try:
        operator = adapter.kind(name)
    except KernelUnavailable:
        pytest.skip("its package is not installed")
    with pytest.raises(KernelUnavailable, match=f"{name}.*cuda.*{adapter.reference}"):
        adapter.call(operator, *adapter.inputs(adapter.medium, torch.float32, "cpu"))


@each_operator
def test_copies_are_the_same_operator(adapter: Any) -> None:
    """Deep-copying or pickling a model copies the operators inside."""
    operator = adapter.kind(adapter.file)
    for again in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert repr(again) == repr(operator) == f"{adapter.kind.__name__}({adapter.file!r})"
        assert again._function is operator._function
