"""Contains `Operator`, the base class of all operators.

`Operator` disables autocast, handles sizes of 0, and connects an implementation to autograd and torch.library. An instance
computes one operator by one implementation, which is chosen by name. Instances contain no tensors, and can be copied and
pickled. First derivatives work in reverse mode; second derivatives and forward mode (jvp, jacfwd) raise ValueError.

A call takes one of two paths. Both run the same functions, forward and backward, and give the same bits:
- Most calls run a torch.autograd.Function, which on a CPU avoids 0.1 to 0.2 ms in PyTorch's dispatcher per call. Function
  transforms also take this path: grad, vjp and jacrev directly, and vmap by one call per sample.
- The registered operator timemix::OPERATOR_NAME is called if torch.compile, export, torch.jit.trace, a profiler, a dispatch
  mode or a subclass of Tensor must see a single operator without its internal operations.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import Signature, signature
from threading import RLock
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernels.backends.torch_private import dispatch_mode_active, has_legacy_batch, profiler_active, transforms_active
from kernels.machine.threads import one_thread_in_forks
from kernels.registry import Requires, check, check_dtype, load

PLAIN = (Tensor, torch.nn.Parameter)
Tensors = tuple[Tensor, ...]
NO_FORWARD_MODE = ("the operators of kernels/ have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (grad, "
                   "vjp, jacrev)")


class Operator:
    """The base class of the operators. A subclass describes its operator in class attributes.

    Attributes:
        folder: the folder of kernels/ with the implementations.
        inputs: the parameters in torch's schema language. Parameters with a gradient come first.
        outputs: pairs of an output's name and the input with the same shape and dtype. An output with the name of an input is a
            state: if a size is 0, the input is returned unchanged.
        gradients: the inputs with a gradient, in the order of `inputs`. The tuple is empty if the operator has no derivative.
        differentiable: the outputs whose gradients are arguments of backward. These outputs come first in `outputs`.
        saved: the inputs and outputs that are arguments of backward, before the outputs' gradients.
        parts: the functions that an implementation must define besides REQUIRES, as one tuple for each alternative set.

    The subclass's __call__ checks the inputs and returns self._function(*inputs), a tuple of outputs. For sizes other than 0, a
    subclass implements _forward(*inputs, *activations) -> outputs and _backward(*saved, *activations, *gradients) -> gradients,
    each of which returns a tuple or a single tensor. The activations are the tensors of empty_activations(*inputs), which
    forward fills for backward. Without a gradient, no activations are passed.
    """

    folder: ClassVar[str]
    inputs: ClassVar[str]
    outputs: ClassVar[tuple[tuple[str, str], ...]]
    gradients: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[tuple[str, ...], ...]] = (("forward", "backward"),)

    _names: ClassVar[tuple[str, ...]]        # names of the inputs

    def __init_subclass__(cls) -> None:
        cls._names = tuple(declared.split()[-1] for declared in cls.inputs.split(", "))

    def __init__(self, name: str, **options: str | int) -> None:
        one_thread_in_forks()
        self.name = name
        self._options = options
        self._implementation = load(self.folder, name)
        self.requires = self._requirements()
        self._file = (self.folder, name)         # the file whose REQUIRES are checked
        self._checked: str | None = None         # the device type that was checked last
        self._function = _function_of(self)      # in __call__, torch.compile would trace the registration

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        name = self._implementation.__name__.rpartition(".")[2]
        return partial(type(self), name, **self._options), ()

    def _requirements(self) -> Requires:
        """Returns the implementation's Requires for these options. Raises TypeError if an option is unknown or missing."""
        requires: Any = getattr(self._implementation, "requires", None)
        try:
            (signature(requires) if requires else Signature()).bind(**self._options)
        except TypeError as error:
            raise TypeError(f"{self!r}: {error}") from None
        result: Requires = requires(**self._options) if requires else self._implementation.REQUIRES
        return result

    def forward(self, *inputs: Any) -> Any:
        """Returns the outputs without checks and autograd, for calls by other operators. `inputs` may end with activations."""
        sized = inputs[self._names.index(self.outputs[0][1])]
        if sized.numel() == 0:
            return _one_or_all(self._empty_outputs(*inputs))
        with _no_autocast(sized):
            return self._forward(*inputs)

    @property
    def n_activations(self) -> int:
        """Returns the number of tensors that empty_activations returns."""
        return 0

    def empty_activations(self, *inputs: Any) -> Tensors:
        """Returns uninitialised tensors, which forward fills for backward."""
        return ()

    def backward(self, *saved_and_gradients: Tensor) -> Any:
        """Returns the gradients of the inputs, without checks."""
        sized = self._by_input(saved_and_gradients)[self.outputs[0][1]]
        if sized.numel() == 0:
            return _one_or_all(self._empty_gradients(*saved_and_gradients))
        with _no_autocast(sized):
            return self._backward(*saved_and_gradients)

    def check_device(self, device: torch.device) -> None:
        """Raises KernelUnavailable if the implementation cannot run on `device`, and states the reason and the remedy."""
        if not torch.compiler.is_compiling() and device.type != self._checked:
            check(*self._file, device)
            self._checked = device.type

    def check_dtype(self, *dtypes: torch.dtype) -> None:
        """Raises ValueError if a dtype is float64 and the implementation would silently compute in float32."""
        if torch.float64 in dtypes:
            check_dtype(*self._file, self.requires, *dtypes)

    def _require_tensors(self, *values: object) -> None:
        """Raises ValueError if one of `values`, the first inputs, is not a tensor but, for example, a list or a NumPy array."""
        for name, value in zip(self._names, values, strict=False):
            require_tensor(f"{type(self).__name__}: {name}", value)

    def _forward(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def _backward(self, *saved_and_gradients: Tensor) -> Any:
        raise NotImplementedError

    def _outputs_of(self, results: Any, like: Sequence[Tensor]) -> Tensors:
        """Returns the outputs of an implementation's forward as a tuple. The outputs must have the shapes of `like`."""
        return self._with_shapes("forward", [name for name, _ in self.outputs], results, like)

    def _gradients_of(self, results: Any, like: Sequence[Tensor]) -> Tensors:
        """Returns the gradients of an implementation's backward as a tuple. The gradients must have the shapes of `like`."""
        return self._with_shapes("backward", [f"grad_{name}" for name in self.gradients], results, like)

    def _with_shapes(self, part: str, names: Sequence[str], results: Any, like: Sequence[Tensor]) -> Tensors:
        tensors = _tuple(results)
        actual = [tensor.shape if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in tensors]
        assert actual == [tensor.shape for tensor in like], (
            f"{part} of {self._implementation.__name__} must return "
            f"{', '.join(f'{name} {tuple(tensor.shape)}' for name, tensor in zip(names, like, strict=True))}; "
            f"got {', '.join(item if isinstance(item, str) else str(tuple(item)) for item in actual)}")
        return tensors

    def _by_input(self, saved: Tensors) -> dict[str, Tensor]:
        """Returns the saved tensors by the name of the input that has the same shape and dtype."""
        like = dict(self.outputs)
        return {like.get(name, name): tensor for name, tensor in zip(self.saved, saved, strict=False)}

    def _empty_outputs(self, *inputs: Any) -> list[Tensor]:
        """Returns outputs with the right shapes, dtypes and strides, as results for a size of 0 and as torch's fake outputs."""
        by_name = dict(zip(self._names, inputs, strict=False))
        return [_copy(by_name[name]) if name in by_name else by_name[like].new_empty(by_name[like].shape)
                for name, like in self.outputs]

    def _empty_gradients(self, *saved_and_gradients: Tensor) -> list[Tensor]:
        """Returns zeros, or a state's incoming gradient, as gradients for a size of 0 and as torch's fake gradients."""
        saved = self._by_input(saved_and_gradients)
        incoming = dict(zip(self.differentiable, saved_and_gradients[-len(self.differentiable):], strict=True))
        return [_copy(incoming[name]) if name in incoming else saved[name].new_zeros(saved[name].shape)
                for name in self.gradients]


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor; got a {type(value).__name__}: convert it with torch.as_tensor")


def contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor` if it is contiguous and has `dtype`, otherwise a converted copy.

    The test is cheaper than a conversion that does nothing.
    """
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def contiguous_like(outputs: Tensors, like: Tensors) -> Tensors:
    """Returns the outputs, contiguous and in the dtypes of the tensors in `like`."""
    return tuple(contiguous(output, tensor.dtype) for output, tensor in zip(outputs, like, strict=True))


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast, which would change the dtypes of an implementation's internal operations."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _one_or_all(outputs: list[Tensor] | Tensors) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def require_no_legacy_batch(grads: Sequence[Tensor | None]) -> None:
    """Raises ValueError in the backward pass of torch.autograd.grad(is_grads_batched=True), whose tensors have no memory."""
    if has_legacy_batch(grads):
        raise ValueError("is_grads_batched=True and vectorize=True are not supported: use torch.vmap of torch.autograd.grad, "
                         "or torch.func.jacrev")


class Function:
    """Calls an operator by one of the two paths that the module describes, and returns a tuple of outputs."""

    def __init__(self, operator: Operator, name: str) -> None:
        self.operator = operator
        self.n_gradients = len(operator.differentiable)
        self.n_outputs = len(operator.outputs)
        self.without_gradient = (None,) * (len(operator._names) - len(operator.gradients))       # inputs without a gradient
        self._registered = self._register(f"timemix::{name}")

    def __call__(self, *inputs: Any) -> Tensors:
        if torch.compiler.is_compiling() or not self.operator.gradients:
            return self.registered(*inputs)
        if transforms_active():
            return _Transformed.apply(self, *inputs)[:self.n_outputs]
        if _requires_registered_operator(inputs):
            return self.registered(*inputs)
        outputs: Tensors = _Direct.apply(self, *inputs)
        return outputs

    def registered(self, *inputs: Any) -> Tensors:
        if any(unpack_dual(value).tangent is not None for value in inputs if isinstance(value, Tensor)):
            raise ValueError(NO_FORWARD_MODE)            # torch's custom operators would drop the tangents
        return _tuple(self._registered(*inputs))[:self.n_outputs]

    def outputs_and_activations(self, *inputs: Any) -> Tensors:
        activations = self.operator.empty_activations(*inputs)
        return *_tuple(self.operator.forward(*inputs, *activations)), *activations

    def save(self, ctx: Any, inputs: tuple[Any, ...], outputs_and_activations: Tensors) -> None:
        outputs = zip(dict(self.operator.outputs), outputs_and_activations, strict=False)
        named = dict(outputs) | dict(zip(self.operator._names, inputs, strict=True))       # a state's name stands for the input
        ctx.save_for_backward(*(named[name] for name in self.operator.saved), *outputs_and_activations[self.n_outputs:])

    def _register(self, name: str) -> Any:
        operator = self.operator
        activations = [f"activation_{i}" for i in range(operator.n_activations)]
        forward = torch.library.custom_op(name, lambda *inputs: _one_or_all(self.outputs_and_activations(*inputs)),
                                          mutates_args=(),
                                          schema=f"({operator.inputs}) -> {_result_types(self.n_outputs + len(activations))}")
        forward.register_fake(
            lambda *inputs: _one_or_all([*operator._empty_outputs(*inputs), *operator.empty_activations(*inputs)]))
        if not operator.gradients:
            return forward
        arguments = [*operator.saved, *activations, *(f"grad_{output}" for output in operator.differentiable)]
        backward = torch.library.custom_op(
            f"{name}_backward", lambda *tensors: operator.backward(*tensors), mutates_args=(),
            schema=f"({', '.join(f'Tensor {argument}' for argument in arguments)}) -> {_result_types(len(operator.gradients))}")
        backward.register_fake(lambda *tensors: _one_or_all(operator._empty_gradients(*tensors)))
        forward.register_autograd(
            lambda ctx, *grads: _tuple(backward(*ctx.saved_tensors, *grads[:self.n_gradients])) + self.without_gradient,
            setup_context=lambda ctx, inputs, output: self.save(ctx, inputs, _tuple(output)))
        return forward


def _result_types(n: int) -> str:
    return "Tensor" if n == 1 else f"({', '.join(['Tensor'] * n)})"


_functions: dict[str, Function] = {}
_registering = RLock()                   # torch destroys the registration of a name if another thread registers it again


def _function_of(operator: Operator) -> Function:
    """Returns the Function that all operators of this name share, because torch registers a name only once per process."""
    name = "_".join(map(str, (*operator._file, *(value for _, value in sorted(operator._options.items())))))
    if name not in _functions:
        with _registering:
            if name not in _functions:
                _functions[name] = Function(operator, name)
    return _functions[name]


def _requires_registered_operator(inputs: tuple[Any, ...]) -> bool:
    return (torch.jit.is_tracing() or dispatch_mode_active()
            or any(isinstance(value, Tensor) and type(value) not in PLAIN for value in inputs) or profiler_active())


class ReverseOnly(torch.autograd.Function):
    """An autograd.Function that has no forward-mode derivatives, but works under vmap.

    Per-sample gradients therefore work too: torch.func.vmap(torch.func.grad(loss)).
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ValueError(NO_FORWARD_MODE)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        function, *others = inputs
        rows = [other if dim is None else other.movedim(dim, 0) for other, dim in zip(others, in_dims[1:], strict=True)]
        if info.batch_size == 0:         # zeros stand for a sample, whose outputs have the right shapes
            rows = [row if dim is None else row.new_zeros(1, *row.shape[1:])
                    for row, dim in zip(rows, in_dims[1:], strict=True)]
        samples = [cls.apply(function, *(row if dim is None else row[i] for row, dim in zip(rows, in_dims[1:], strict=True)))
                   for i in range(max(1, info.batch_size))]
        outputs = tuple(torch.stack(output)[:info.batch_size] for output in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)


class _Direct(ReverseOnly):
    """Maps (function, *inputs) to outputs in calls outside torch.func's transforms."""

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Any) -> Tensors:
        if not any(ctx.needs_input_grad):
            return _tuple(function.operator.forward(*inputs))
        results = function.outputs_and_activations(*inputs)
        ctx.function = function
        function.save(ctx, inputs, results)
        return results[:function.n_outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_no_legacy_batch(grads)
        tensors = (*ctx.saved_tensors, *grads[:ctx.function.n_gradients])
        if torch.is_grad_enabled() or transforms_active():             # under create_graph=True, or vmap of torch.autograd.grad
            gradients = _Backward.apply(ctx.function, *tensors)
        else:
            gradients = _tuple(ctx.function.operator.backward(*tensors))
        return None, *gradients, *ctx.function.without_gradient


class _Transformed(_Direct):
    """A _Direct with the separate setup_context that torch.func's transforms require. A call takes 50 us longer."""

    @staticmethod
    def forward(function: Function, *inputs: Any) -> Tensors:      # type: ignore[override]
        return function.outputs_and_activations(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function = inputs[0]
        ctx.function.save(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Always calls _Backward, because torch.func.vjp may call this method while gradients are disabled."""
        gradients = _Backward.apply(ctx.function, *ctx.saved_tensors, *grads[:ctx.function.n_gradients])
        return None, *gradients, *ctx.function.without_gradient


class _Backward(ReverseOnly):
    """Computes the gradients, and raises ValueError if they are differentiated.

    Without the error, a gradient penalty would silently lack terms. torch's once_differentiable is not sufficient, because it
    raises an error only if the incoming gradient requires a gradient.
    """

    @staticmethod
    def forward(function: Function, *saved_and_gradients: Tensor) -> Tensors:
        return _tuple(function.operator.backward(*saved_and_gradients))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Saves nothing, because there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ValueError("the operators of kernels/ have no second derivative: write the formula with PyTorch's own "
                         "operations")
