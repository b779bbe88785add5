"""The properties of every operator, for each of its implementations: results, gradients, sizes of 0, strides, registration.

An implementation is a file in the operator's folder, and is tested by being there. An operator is tested by its adapter below;
what is particular to it is in its own test file. Needs nothing but torch, pytest and the back ends.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from implementations import compiled_in_soak, implementation, in_soak, remembered
from torch import Tensor

from kernels import compare
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

Inputs = tuple[Any, ...]         # tensors, numbers last
HALF = (torch.bfloat16, torch.float16)


class OfTimeX:
    """An adapter: how this file makes the operator's inputs, calls it, and judges the results. Inputs are a flat tuple."""

    kind: type[Operator] = TimeX
    reference, file = "formula", "conv1d"        # the reference; an implementation that runs everywhere
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    differentiable = True
    shapes, empty_shapes = timex_cases.SHAPES, timex_cases.EMPTY_SHAPES
    medium: Any = (3, 32, 63)                    # not a multiple of anything, with more than one vector of channels
    small: Any = (2, 3, 9)                       # for torch.compile and what runs an operator many times
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
        """The reference's results, in float64."""
        return self.results(self.kind(self.reference), each_tensor(Tensor.double, inputs))

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return timex_cases.tolerance(dtype)

    def allowed(self, operator: Any, dtype: torch.dtype) -> dict[str, float]:
        """The tolerance of this implementation, which may have a form of its own in the dtype."""
        return self.tolerance(dtype)

    def refused(self) -> list[Inputs]:
        w, k = torch.ones(3, 4), torch.ones(2, 3, 4)
        return [(w, w), (w, torch.ones(2, 3, 5)), (w.t(), k), (w, k.long()), (w.to("meta"), k)]


class OfWKV(OfTimeX):
    kind, reference, file = WKV4, "reference", "torch_scan"
    shapes, empty_shapes, medium = wkv_cases.SHAPES, wkv_cases.EMPTY_SHAPES, (3, 63, 20)
    time, long, value = (("k", 1), ("v", 1)), (3, 192, 4), "v"

    def names(self) -> Iterable[str]:
        return selectable("wkv4")

    def make(self, name: str, device: str) -> Any:
        return select("wkv4", name, device) if name in self.names() else WKV4(name)

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        """Only k and v are ever in half precision."""
        wide = torch.float32 if dtype in HALF else dtype
        time_decay, time_first, k, v, state = wkv_cases.inputs(*shape, dtype=wide, device=device, seed=seed)
        return time_decay, time_first, k.to(dtype), v.to(dtype), *state

    def call(self, operator: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """a/b and p + log b: a and b are at a scale, p, that has no gradient."""
        y, (a, b, p) = operator(*inputs[:4], WKVState(*inputs[4:]))
        return y, a / b, p + b.log()

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        of = "y and state" if inputs[2].numel() else "state"
        return wkv_cases.results(operator, (*inputs[:4], WKVState(*inputs[4:])), of)

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return wkv_cases.tolerance(dtype) if dtype != torch.float64 else dict.fromkeys(wkv_cases.tolerance(), 1e-12)

    def refused(self) -> list[Inputs]:
        good = self.inputs((2, 4, 3), torch.float32, "cpu")
        wrong = {0: (4,), 1: (4,), 2: (2, 5, 3), 3: (2, 4), 4: (1, 3), 5: (2, 4), 6: (3, 2, 3)}
        shaped = [(*good[:i], torch.ones(shape), *good[i + 1:]) for i, shape in wrong.items()]
        return [*shaped, (*good[:2], good[2].long(), *good[3:]), (good[0].to("meta"), *good[1:])]


class OfWKV7(OfTimeX):
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

    def allowed(self, operator: Any, dtype: torch.dtype) -> dict[str, float]:
        return compare.tolerance(operator, dtype)

    def refused(self) -> list[Inputs]:
        good = self.inputs((2, 4, 3, 8), torch.float32, "cpu")
        shaped = [(*good[:i], torch.ones(2, 4, 3, 7), *good[i + 1:]) for i in range(6)]
        return [*shaped, (*good[:6], torch.ones(2, 3, 8, 7)), (*good[:2], good[2].long(), *good[3:]),
                (good[0].to("meta"), *good[1:]), tuple(tensor[0] for tensor in good)]


class OfSoftmax(OfTimeX):
    kind, reference, file = Softmax, "formula", "torch_native"
    shapes, empty_shapes, medium = softmax_cases.SHAPES, softmax_cases.EMPTY_SHAPES, (3, 4, 63)
    time = ()

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return (softmax_cases.inputs(*shape, dtype=dtype, device=device, seed=seed),)

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return softmax_cases.results(operator, *inputs)

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return softmax_cases.tolerance(dtype)

    def refused(self) -> list[Inputs]:
        return [(torch.tensor(1.0),), (torch.ones(2, 3, dtype=torch.int64),)]


class OfPad(OfTimeX):
    kind, reference, file = BrickPadding, "formula", "torch_strips"
    dtypes, differentiable = pad_cases.DTYPES, False
    shapes, empty_shapes, medium, time = pad_cases.CASES, pad_cases.EMPTY, pad_cases.Case((3, 5, 31), 7, (9, 4, 11, 3)), ()

    def inputs(self, shape: Any, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
        return pad_cases.tile(shape.tile, dtype, device, seed), shape.offset, shape.padding

    def results(self, operator: Any, inputs: Inputs) -> dict[str, Tensor]:
        return {"out": operator(*inputs)}

    def expected(self, inputs: Inputs) -> dict[str, Tensor]:
        """The formula in one line of PyTorch: formula.py would take minutes."""
        (tile, offset, (left, top, right, bottom)), (h, w) = inputs, inputs[0].shape[-2:]
        return {"out": pad_cases.one_line(tile, offset, top, left, top + h + bottom, left + w + right)}

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        return {"out": 0.0}

    def refused(self) -> list[Inputs]:
        return [(torch.ones(3), 1, 1), (torch.ones(3, 4, dtype=torch.float64), 1, 1), (torch.ones(0, 4), 1, 1),
                (torch.ones(3, 4, requires_grad=True), 1, 1), (torch.ones(3, 4), 1, -1), (torch.ones(3, 4), 1, 1.5)]


class OfMatVec(OfTimeX):
    """In float32; tests/kernels/test_matvec.py has the other formats."""

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

    def refused(self) -> list[Inputs]:
        x, weight = self.inputs((2, 3, 8), torch.float32, "cpu")
        return [(x[:, :7], weight), (x.long(), weight), (x.to("meta"), weight), (x.requires_grad_(), weight)]


ADAPTERS = {adapter.kind.folder: adapter for adapter in (OfTimeX(), OfWKV(), OfWKV7(), OfSoftmax(), OfPad(), OfMatVec())}
each_operator = pytest.mark.parametrize("of", ADAPTERS.values(), ids=ADAPTERS)


CASES = [implementation(op, name, (of, name)) for op, of in ADAPTERS.items() for name in of.names()]
# Registration is the same for every file, but for the tensors that a file keeps for its backward: c_v0, cuda_ and triton_
REGISTERED = [one for each in CASES for of, name in each.values
              for one in ([each] if name in (of.reference, of.file) or name.startswith(("c_", "cuda_", "triton_"))
                          else in_soak(each))]
SCANS_IN_SOAK = [one for each in CASES for one in (in_soak(each) if "compile_scan" in each.id else [each])]


@pytest.fixture(params=compiled_in_soak(CASES))
def case(request: pytest.FixtureRequest, device: str) -> tuple[Any, Any]:
    """An adapter and one implementation of its operator."""
    of, name = request.param
    return of, of.make(name, device)


def wrong(of: Any, operator: Any, inputs: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return misses(errors(of.results(operator, inputs), expected(of, inputs)), of.allowed(operator, dtype))


@remembered
def expected(of: Any, inputs: Inputs) -> dict[str, Tensor]:
    return of.expected(inputs)


def each_tensor(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    return tuple(function(value) if isinstance(value, Tensor) else value for value in inputs)


def leaves_of(of: Any, inputs: Inputs) -> tuple[list[Tensor], Inputs]:
    """The inputs that have a gradient as leaves of autograd, and all inputs with those among them."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs[:len(of.kind.gradients)]]
    return leaves, (*leaves, *inputs[len(leaves):])


def along(axis: int, values: Tensor, like: Tensor) -> Tensor:
    """The values (T,) in the shape that multiplies `like` along its axis of time."""
    return values.to(like).view([-1 if i == axis % like.dim() else 1 for i in range(like.dim())])


def by_step(of: Any, operator: Any, inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of what has an axis of time (w aside, a row of lags), as (T,...).

    weights (T,): those of the steps of the output in the loss.
    """
    axes = {name: axis for name, axis in of.time if name != "w"}
    leaves, given = leaves_of(of, inputs)
    output = of.call(operator, *given)[0]
    random = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    seen = random * along(axes["k"], weights, output)
    grads = torch.autograd.grad(output, [leaves[of.kind._names.index(name)] for name in axes], seen)
    found = {"output": output.detach()} | {f"grad {name}": grad for name, grad in zip(axes, grads, strict=True)}
    return {name: tensor.movedim(axes["k"], 0) for name, tensor in found.items()}


@remembered
def exact_by_step(of: Any, inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
    return by_step(of, of.kind(of.reference), each_tensor(Tensor.double, inputs), weights)


def wrong_steps(of: Any, operator: Any, inputs: Inputs, scale: Tensor, weights: Tensor) -> dict[str, float]:
    """The largest error of a step, relative to that step's size, of each result where one is above 1e-4.

    scale (T,): what the value is multiplied by; weights as of by_step. Where the reference is 0, any error is infinite.
    """
    i, axis = of.kind._names.index(of.value), dict(of.time)[of.value]
    scaled = *inputs[:i], inputs[i] * along(axis, scale, inputs[i]), *inputs[i + 1:]
    found = by_step(of, operator, scaled, weights)
    exact = exact_by_step(of, scaled, weights)
    worst = {}
    for name in exact:
        size, error = (tensor.flatten(1).norm(dim=1) for tensor in (exact[name], found[name] - exact[name]))
        worst[name] = float(torch.where(error > 0, error / size, 0.0).max())
    return {name: error for name, error in worst.items() if not error <= 1e-4}


def scales(T: int) -> dict[str, Tensor]:
    """(T,) each: loud steps are a million times louder than quiet ones."""
    step = torch.arange(T)
    island = (step >= T // 3) & (step < T // 3 + 7)
    first = step < T // 2
    return {name: torch.where(loud, 1e6, 1.0) for name, loud in (
        ("loud, quiet", first), ("quiet, loud", ~first), ("a loud island", island), ("a quiet island", ~island))}


def profiles(T: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Scales of the value, and weights of the steps in the loss."""
    step, steady = torch.arange(T), torch.ones(T)
    of_both = {f"{what}: {name}": (scale if "value" in what else steady, scale if "loss" in what else steady)
               for name, scale in scales(T).items() for what in ("value", "loss", "value and loss")}
    read, parts = step < T * 3 // 4, (step < T // 5) | ((step >= T // 2) & (step < T * 3 // 4))
    return of_both | {"the end is not read": (steady, read.float()), "two parts are read": (steady, parts.float()),
                      "loud, quiet, not read": (scales(T)["loud, quiet"], read * scales(T)["loud, quiet"])}


def skip_without_steps(of: Any, operator: Any) -> None:
    """Skips what has no axis of time, and implementations whose error is that of the largest number of a row."""
    if not of.time:
        pytest.skip("no time")
    if not operator.requires.wkv:
        pytest.skip(f"{operator.name} declares wkv=False")


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_operator_has_an_adapter() -> None:
    assert set(operators()) <= set(ADAPTERS)


@pytest.mark.parametrize("case", SCANS_IN_SOAK, indirect=True)
def test_results_at_every_shape(case: tuple[Any, Any], device: str) -> None:
    """Outputs and gradients, in the operator's first dtype."""
    of, operator = case
    for shape in of.shapes:
        assert not wrong(of, operator, of.inputs(shape, of.dtypes[0], device), of.dtypes[0]), shape


@pytest.mark.compiles
@pytest.mark.parametrize("case", [each for each in CASES if "compile_scan" in each.id], indirect=True)
def test_results_of_a_compiled_scan_at_one_shape(case: tuple[Any, Any], device: str) -> None:
    """Each shape takes seconds to compile: the others wait for make soak."""
    of, operator = case
    assert not wrong(of, operator, of.inputs(of.shapes[0], of.dtypes[0], device), of.dtypes[0])


@pytest.mark.parametrize("case", SCANS_IN_SOAK, indirect=True)
@pytest.mark.parametrize("shapes", [pytest.param(slice(1, None, 3), id="some", marks=pytest.mark.thorough),
                                    pytest.param(slice(None), id="every", marks=pytest.mark.soak)])
def test_results_in_every_dtype(case: tuple[Any, Any], shapes: slice, device: str) -> None:
    of, operator = case
    for dtype in of.dtypes[1:]:
        for shape in of.shapes[shapes]:
            assert not wrong(of, operator, of.inputs(shape, dtype, device), dtype), (shape, dtype)


def test_dtypes_are_those_of_the_inputs(case: tuple[Any, Any], device: str) -> None:
    of, operator = case
    for dtype in of.dtypes:
        leaves, inputs = leaves_of(of, of.inputs(of.shapes[1], dtype, device))
        outputs = of.call(operator, *inputs)
        assert outputs[0].dtype == dtype
        if leaves:
            grads = torch.autograd.grad(sum(output.sum() for output in outputs), leaves)
            assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]


def test_float64_is_exact_or_refused(case: tuple[Any, Any], device: str) -> None:
    """Never computed in float32 unasked."""
    of, operator = case
    inputs = of.inputs(of.medium, torch.float64, device)
    if torch.float64 in operator.requires.dtypes:
        assert not wrong(of, operator, inputs, torch.float64)
    else:
        with pytest.raises(ValueError, match="float64"):
            of.results(operator, inputs)


@pytest.mark.thorough
@pytest.mark.parametrize("of", [of for of in ADAPTERS.values() if of.differentiable], ids=lambda of: of.kind.folder)
def test_gradcheck_of_the_reference(of: Any, device: str) -> None:
    """The other gradients are compared with its own."""
    operator = of.kind(of.reference)
    _, inputs = leaves_of(of, of.inputs(of.small, torch.float64, device))
    assert torch.autograd.gradcheck(lambda *given: of.call(operator, *given), inputs, fast_mode=False)


def test_a_size_of_0_gives_an_empty_tensor(case: tuple[Any, Any], device: str) -> None:
    """And gradients as of the reference: zeros, and the state's as they came."""
    of, operator = case
    for shape in of.empty_shapes:
        inputs = of.inputs(shape, torch.float32, device)
        results, right = of.results(operator, inputs), of.results(of.kind(of.reference), inputs)
        assert same_bits(results, right)
        assert next(iter(results.values())).numel() == 0


def test_the_same_bits_twice(case: tuple[Any, Any], device: str) -> None:
    of, operator = case
    inputs = of.inputs(of.shapes[-1], torch.float32, device)
    assert same_bits(of.results(operator, inputs), of.results(operator, inputs))


def test_inputs_are_left_as_they_were_and_are_not_the_outputs(case: tuple[Any, Any], device: str) -> None:
    of, operator = case
    inputs = of.inputs(of.medium, torch.float32, device)
    before = each_tensor(torch.clone, inputs)
    of.results(operator, inputs)
    output = of.call(operator, *inputs)[0]
    output += 1
    tensors = [pair for pair in zip(inputs, before, strict=True) if isinstance(pair[0], Tensor)]
    assert all(torch.equal(*pair) for pair in tensors)


def test_strided_inputs(case: tuple[Any, Any], device: str) -> None:
    of, operator = case
    inputs = of.inputs(of.medium, torch.float32, device)
    strided = each_tensor(lambda tensor: torch.stack((tensor, tensor), -1)[..., 0], inputs)
    turned = each_tensor(lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1), inputs)
    contiguous = of.results(operator, inputs)
    assert same_bits(contiguous, of.results(operator, strided))
    assert same_bits(contiguous, of.results(operator, turned))


def test_inputs_inside_a_larger_buffer(case: tuple[Any, Any], device: str) -> None:
    """Nothing beside the inputs is read (it is NaN), and an address that vector loads do not take is no trouble."""
    def inside(tensor: Tensor, offset: int) -> Tensor:
        buffer = tensor.new_full((tensor.numel() + 2 * offset,), float("nan"))
        return buffer[offset:offset + tensor.numel()].view(tensor.shape).copy_(tensor)

    of, operator = case
    inputs = of.inputs(of.medium, torch.float32, device)
    for offset in (1, 64):
        assert not wrong(of, operator, each_tensor(partial(inside, offset=offset), inputs)), offset


def test_an_expanded_gradient(case: tuple[Any, Any], device: str) -> None:
    """output.sum() sends back a single number with strides of 0."""
    of, operator = case
    if not of.differentiable:
        pytest.skip("no gradient")
    inputs = of.inputs(of.medium, torch.float32, device)
    leaves, given = leaves_of(of, inputs)
    exact, wide = leaves_of(of, each_tensor(Tensor.double, inputs))
    grads = torch.autograd.grad(of.call(operator, *given)[0].sum(), leaves)
    right = torch.autograd.grad(of.call(of.kind(of.reference), *wide)[0].sum(), exact)
    scale = max(float(grad.abs().max()) for grad in right) + 1
    assert all((grad - other).abs().max() <= 3e-5 * scale for grad, other in zip(grads, right, strict=True))


def test_causality(case: tuple[Any, Any], device: str) -> None:
    """Neither a later input nor a longer lag reaches an earlier step: not one bit, where the sum is over time.

    An implementation that declares wkv=False may be off by rounding of the largest product, here 7e3 beside results of about
    8; the convolution form shares a scale within a block of 64 steps, so its earlier steps there are off by rounding.
    """
    of, operator = case
    if not of.time:
        pytest.skip("no time")
    t, T = 128, 192
    inputs = of.inputs(of.long, torch.float32, device)
    value, allowed = (1e3, 0.0) if operator.requires.wkv else (10.0, 1e-6 * t * 100)
    changed = list(inputs)
    for name, axis in of.time:
        i = of.kind._names.index(name)
        changed[i] = inputs[i].clone()
        later = changed[i].narrow(axis, t, T - t) if name != "w" else changed[i].narrow(axis, 0, T - t)
        later.fill_(value if of.kind is TimeX else 3.0) if name != "log_w" else later.mul_(0.5)
    axis = dict(of.time)["k"]
    y, other = (of.call(operator, *given)[0].narrow(axis, 0, t) for given in (inputs, changed))
    assert (y - other).abs().max() <= allowed


@pytest.mark.thorough
def test_a_scale_that_changes_along_time(case: tuple[Any, Any], device: str) -> None:
    """Each step's error is small beside that step's own size, and 0 where the reference is; also where a loss reads a part."""
    of, operator = case
    skip_without_steps(of, operator)
    inputs = of.inputs(of.medium, torch.float32, device)
    for name, profile in profiles(inputs[of.kind._names.index("k")].shape[dict(of.time)["k"]]).items():
        assert not wrong_steps(of, operator, inputs, *profile), name


def test_no_later_step_reaches_a_gradient(case: tuple[Any, Any], device: str) -> None:
    """Where the loss reads the first steps alone, what comes after has a gradient of 0, and changes no bit before.

    So texts that share a row stay apart. (WKV4's k is left as it is: the convolution form shares its scale within a block of 64
    steps.)
    """
    of, operator = case
    skip_without_steps(of, operator)
    t, T = 100, 192
    inputs = of.inputs(of.long, torch.float32, device)
    weights, changed = (torch.arange(T) < t).float(), list(inputs)
    for name, axis in of.time:
        if name == of.value or of.kind is WKV7:
            i = of.kind._names.index(name)
            changed[i] = inputs[i].clone()
            changed[i].narrow(axis, t, T - t).mul_(1e6 if name == of.value else 0.5)
    found, other = (by_step(of, operator, tuple(given), weights) for given in (inputs, changed))
    for name in found:
        assert torch.equal(found[name][:t], other[name][:t]), name
        assert name == "output" or not (found[name][t:].any() or other[name][t:].any()), name


@pytest.mark.compiles
@pytest.mark.parametrize("case", REGISTERED, indirect=True)
def test_opcheck(case: tuple[Any, Any], device: str) -> None:
    """Schema, fake and autograd registration: torch.compile relies on them."""
    of, operator = case
    registered = operator._function._registered
    inputs = of.inputs(of.small if of.differentiable else of.medium, torch.float32, device)
    if of.differentiable:
        _, inputs = leaves_of(of, inputs)
    elif of.kind is BrickPadding:
        inputs = inputs[0], 1, 2, 2, 7, 8
    elif of.kind is MatVec:
        inputs = inputs[0], "float32", [inputs[1]], []
    torch.library.opcheck(registered, inputs)


@pytest.mark.compiles
@pytest.mark.parametrize("case", REGISTERED, indirect=True)
def test_compiles_without_a_graph_break(case: tuple[Any, Any], device: str) -> None:
    torch.compiler.reset()               # it compiles one function a limited number of times, and here comes each kernel
    of, operator = case
    leaves, given = leaves_of(of, of.inputs(of.small if of.differentiable else of.medium, torch.float32, device))
    rest = given[len(leaves):]

    def function(*inputs: Any) -> Tensor:
        return sum(compare.loss(output) for output in of.call(operator, 2 * inputs[0], *inputs[1:]))

    plain = function(*leaves, *rest)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves, *rest)
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
    if leaves:
        grads = [torch.autograd.grad(found, leaves) for found in (compiled, plain)]
        assert all(compare.err_ratio(*pair) <= 1e-6 for pair in zip(*grads, strict=True))


def test_autocast_does_not_reach_inside(case: tuple[Any, Any], device: str) -> None:
    """Float32 inputs are computed in float32 whatever dtype products outside are in; backward inside of autocast, too."""
    of, operator = case
    inputs = of.inputs(of.medium, torch.float32, device)
    plain = of.results(operator, inputs)
    with torch.autocast(device, torch.bfloat16):
        found = of.results(operator, inputs)
    found.pop(compare.LOG_SIZE, None)    # the test computes that one itself
    assert same_bits(found, plain)


@each_operator
def test_wrong_inputs_are_refused(of: Any) -> None:
    for inputs in of.refused():
        with pytest.raises(ValueError):                          # noqa: PT011  the operator's own
            of.call(of.kind(of.reference), *inputs)


@each_operator
def test_an_unknown_name_lists_the_known_ones(of: Any) -> None:
    with pytest.raises(UnknownKernel, match=of.reference):
        of.kind("nonsense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in ADAPTERS for name in names(op) if name.startswith("cuda")])
def test_a_kernel_that_cannot_run_names_its_device_and_what_does_run(op: str, name: str) -> None:
    of = ADAPTERS[op]
    try:
        operator = of.kind(name)
    except KernelUnavailable:
        pytest.skip("its package is not installed")
    with pytest.raises(KernelUnavailable, match=f"{name}.*cuda.*{of.reference}"):
        of.call(operator, *of.inputs(of.medium, torch.float32, "cpu"))


@each_operator
def test_copies_are_the_same_operator(of: Any) -> None:
    """A model is deep-copied and pickled with the operator inside."""
    operator = of.kind(of.file)
    for again in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert repr(again) == repr(operator) == f"{of.kind.__name__}({of.file!r})"
        assert again._function is operator._function
