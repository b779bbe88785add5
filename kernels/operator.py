"""What all operators share: checks, casts, sizes of 0, autograd, and registration with torch.library.

An Operator is one implementation of one operator, chosen by name. It holds no tensors, can be copied and pickled, and can be
differentiated once, in reverse mode: a second derivative and forward mode (jvp, jacfwd) raise ValueError.

A call takes the shorter of two ways, which run the same two functions, forward and backward, and give the same bits:
- a torch.autograd.Function, which saves 0.1 to 0.2 ms of PyTorch's dispatcher a call on a CPU. Function transforms take it,
  too: grad, vjp and jacrev as they are, vmap by a call for each sample;
- the registered operator timemix::OPERATOR_NAME, where torch.compile, export, torch.jit.trace, a profiler, a dispatch mode or a
  subclass of Tensor must see one operator, and nothing of what it does inside.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from kernels.backends.torch_private import dispatch_mode_active, profiler_active, transforms_active
from kernels.machine.threads import one_thread_in_forks
from kernels.registry import Requires, check, check_dtype, load

PLAIN = (Tensor, torch.nn.Parameter)
Tensors = tuple[Tensor, ...]


class Operator:
    """Base class of TimeX, WKV, Softmax and BrickPadding: a subclass describes its operator in these attributes.

    folder: the folder of its implementations.
    inputs: its parameters in torch's schema language, those that have a gradient first.
    outputs: each output, and the input that has its shape and dtype. An output that is named like an input is a state: a size
        of 0 leaves it as it is.
    gradients: the inputs that have a gradient, in the order of inputs. None: the operator has no derivative.
    differentiable: the outputs whose gradients backward takes, in the order of outputs, which begin with them.
    saved: the inputs and outputs that backward takes before those gradients.

    Its __call__ checks the inputs and returns self._function(*inputs), a tuple of outputs. For sizes other than 0 it implements
    _forward(*inputs, *kept) -> outputs and _backward(*saved, *kept, *gradients) -> gradients: a tuple, or a tensor where there
    is one. kept are tensors that its forward fills for its own backward, where a gradient is wanted: those that keep(*inputs)
    makes, n_kept in number.
    """

    folder: ClassVar[str]
    inputs: ClassVar[str]
    outputs: ClassVar[tuple[tuple[str, str], ...]]
    gradients: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[tuple[str, ...]] = ()

    # The same as places in the tuples that forward and backward take and return:
    _names: ClassVar[tuple[str, ...]]        # of the inputs
    _output_like: ClassVar[list[int]]        # of each output, the input of its shape; of the first, whose size may be 0
    _saved_at: ClassVar[list[int]]           # of each saved tensor, in (*inputs, *outputs)
    _gradient_like: ClassVar[list[int]]      # of each gradient, the saved tensor of its shape
    _sized_saved: ClassVar[int]              # the saved tensor of the first output's shape

    def __init_subclass__(cls) -> None:
        cls._names = tuple(declared.split()[-1] for declared in cls.inputs.split(", "))
        cls._output_like = [cls._names.index(like) for _, like in cls.outputs]
        cls._saved_at = [(*cls._names, *dict(cls.outputs)).index(name) for name in cls.saved]
        shapes = [name if name in cls._names else dict(cls.outputs)[name] for name in cls.saved]
        cls._gradient_like = [shapes.index(name) for name in cls.gradients]
        cls._sized_saved = shapes.index(cls.outputs[0][1]) if cls.saved else 0

    def __init__(self, name: str, **options: str | int) -> None:
        one_thread_in_forks()
        self.name = name
        self._options = options
        self._implementation = load(self.folder, name)
        self.requires: Requires = self._implementation.requires(**options) if options else self._implementation.REQUIRES
        self._file = (self.folder, name)         # the file that decides where this runs
        self._checked: str | None = None         # the device type that check_device has last found to be right
        self.n_kept = self._n_kept()
        self._function = _function_of(self)      # not in __call__: torch.compile would trace the registration

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        name = self._implementation.__name__.rpartition(".")[2]
        return partial(type(self), name, **self._options), ()

    def forward(self, *inputs: Any) -> Any:
        """The outputs, without checks and without autograd: for operators built on this one. inputs: with or without kept."""
        sized = inputs[self._output_like[0]]
        if sized.numel() == 0:
            return _one_or_all(self._empty_outputs(*inputs))
        with _no_autocast(sized):
            return self._forward(*inputs)

    def keep(self, *inputs: Any) -> Tensors:
        """Empty tensors that forward fills for backward; none unless a subclass says so."""
        return ()

    def backward(self, *saved_and_gradients: Tensor) -> Any:
        """The gradients of the inputs, without checks."""
        sized = saved_and_gradients[self._sized_saved]
        if sized.numel() == 0:
            return _one_or_all(self._empty_gradients(*saved_and_gradients))
        with _no_autocast(sized):
            return self._backward(*saved_and_gradients)

    def check_device(self, device: torch.device) -> None:
        """Raises KernelUnavailable, with the reason and the remedy, where this cannot run on `device`."""
        if not torch.compiler.is_compiling() and device.type != self._checked:
            check(*self._file, device)
            self._checked = device.type

    def check_dtype(self, *dtypes: torch.dtype) -> None:
        """Raises ValueError where one is float64 and the implementation would silently compute in float32."""
        if torch.float64 in dtypes:
            check_dtype(*self._file, self.requires, *dtypes)

    def _n_kept(self) -> int:
        """The number of tensors that keep makes."""
        return 0

    def _forward(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def _backward(self, *saved_and_gradients: Tensor) -> Any:
        raise NotImplementedError

    def _empty_outputs(self, *inputs: Any) -> list[Tensor]:
        """The outputs for a size of 0; and for any size what torch calls fake: the right shapes, dtypes and strides."""
        return [_copy(inputs[i]) if name in self._names else inputs[i].new_empty(inputs[i].shape)
                for (name, _), i in zip(self.outputs, self._output_like, strict=True)]

    def _empty_gradients(self, *saved_and_gradients: Tensor) -> list[Tensor]:
        """The gradients for a size of 0, and fake ones: zeros, and the gradient of a state as it came."""
        came = dict(zip(self.differentiable, saved_and_gradients[-len(self.differentiable):], strict=True))
        like = [saved_and_gradients[i] for i in self._gradient_like]
        return [_copy(came[name]) if name in came else tensor.new_zeros(tensor.shape)
                for name, tensor in zip(self.gradients, like, strict=True)]


def contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor`, or a contiguous copy in dtype; looking first is cheaper than a conversion that finds nothing to do."""
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def contiguous_like(outputs: Tensors, like: Tensors) -> Tensors:
    """Each output, contiguous and in the dtype of its tensor in `like`."""
    return tuple(contiguous(output, tensor.dtype) for output, tensor in zip(outputs, like, strict=True))


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast would reach into an implementation's own operations."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _one_or_all(outputs: list[Tensor] | Tensors) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Function:
    """An operator as a function of tensors, and numbers, which returns a tuple and is differentiable in the two ways above."""

    def __init__(self, operator: Operator, name: str) -> None:
        self.operator = operator
        self.n_gradients, self.n_outputs = len(operator.differentiable), len(operator.outputs)
        self._registered = self._register(f"timemix::{name}")

    def __call__(self, *inputs: Any) -> Tensors:
        if torch.compiler.is_compiling() or not self.operator.gradients:
            return self.registered(*inputs)
        transformed = transforms_active()
        if not transformed and _operator_must_be_seen(inputs):
            return self.registered(*inputs)
        outputs: Tensors = (_Transformed if transformed else _Direct).apply(self, *inputs)
        return outputs[:self.n_outputs]

    def registered(self, *inputs: Any) -> Tensors:
        return _tuple(self._registered(*inputs))[:self.n_outputs]

    def outputs_and_kept(self, *inputs: Any) -> Tensors:
        kept = self.operator.keep(*inputs)
        return *_tuple(self.operator.forward(*inputs, *kept)), *kept

    def save(self, ctx: Any, inputs: tuple[Any, ...], outputs_and_kept: Tensors) -> None:
        values, kept = inputs + outputs_and_kept, outputs_and_kept[self.n_outputs:]
        ctx.save_for_backward(*[values[i] for i in self.operator._saved_at], *kept)

    def _register(self, name: str) -> Any:
        operator = self.operator
        kept = [f"kept_{i}" for i in range(operator.n_kept)]
        forward = torch.library.custom_op(name, lambda *inputs: _one_or_all(self.outputs_and_kept(*inputs)), mutates_args=(),
                                          schema=f"({operator.inputs}) -> {_tensors(self.n_outputs + len(kept))}")
        forward.register_fake(lambda *inputs: _one_or_all([*operator._empty_outputs(*inputs), *operator.keep(*inputs)]))
        if not operator.gradients:
            return forward
        taken = [*operator.saved, *kept, *(f"grad_{output}" for output in operator.differentiable)]
        backward = torch.library.custom_op(
            f"{name}_backward", lambda *tensors: operator.backward(*tensors), mutates_args=(),
            schema=f"({', '.join(f'Tensor {tensor}' for tensor in taken)}) -> {_tensors(len(operator.gradients))}")
        backward.register_fake(lambda *tensors: _one_or_all(operator._empty_gradients(*tensors)))
        without_gradient = (None,) * (len(operator._names) - len(operator.gradients))
        forward.register_autograd(
            lambda ctx, *grads: _tuple(backward(*ctx.saved_tensors, *grads[:self.n_gradients])) + without_gradient,
            setup_context=lambda ctx, inputs, output: self.save(ctx, inputs, _tuple(output)))
        return forward


def _tensors(n: int) -> str:
    """n results, in torch's schema language."""
    return "Tensor" if n == 1 else f"({', '.join(['Tensor'] * n)})"


_functions: dict[str, Function] = {}


def _function_of(operator: Operator) -> Function:
    """The operator's Function: torch registers a name once in a process, so operators of one name share it."""
    name = "_".join(map(str, (*operator._file, *(value for _, value in sorted(operator._options.items())))))
    if name not in _functions:
        _functions[name] = Function(operator, name)
    return _functions[name]


def _operator_must_be_seen(inputs: tuple[Any, ...]) -> bool:
    return (torch.jit.is_tracing() or dispatch_mode_active()
            or any(isinstance(value, Tensor) and type(value) not in PLAIN for value in inputs) or profiler_active())


class _ReverseOnly(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise ValueError("the operators of kernels/ have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode "
                         "(grad, vjp, jacrev)")

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        """A call for each sample."""
        function, *others = inputs
        rows = [other if dim is None else other.movedim(dim, 0) for other, dim in zip(others, in_dims[1:], strict=True)]
        samples = [cls.apply(function, *(row if dim is None else row[i] for row, dim in zip(rows, in_dims[1:], strict=True)))
                   for i in range(info.batch_size)]
        outputs = tuple(torch.stack(output) for output in zip(*samples, strict=True))
        return outputs, (0,) * len(outputs)


class _Direct(_ReverseOnly):
    """(function, *inputs) -> outputs"""

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Any) -> Tensors:
        if not any(ctx.needs_input_grad):
            return _tuple(function.operator.forward(*inputs))
        found = function.outputs_and_kept(*inputs)
        ctx.function, ctx.n_inputs = function, len(inputs)
        function.save(ctx, inputs, found)
        return found[:function.n_outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        taken = *ctx.saved_tensors, *grads[:ctx.function.n_gradients]
        if torch.is_grad_enabled():                      # create_graph=True, or a function transform
            found = _Backward.apply(ctx.function, *taken)
        else:
            found = _tuple(ctx.function.operator.backward(*taken))
        return None, *found, *[None] * (ctx.n_inputs - len(found))


class _Transformed(_ReverseOnly):
    """_Direct in the form that function transforms need, which costs 50 us more a call."""

    @staticmethod
    def forward(function: Function, *inputs: Any) -> Tensors:
        return function.outputs_and_kept(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function, ctx.n_inputs = inputs[0], len(inputs) - 1
        ctx.function.save(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _Backward.apply(ctx.function, *ctx.saved_tensors, *grads[:ctx.function.n_gradients])
        return None, *found, *[None] * (ctx.n_inputs - len(found))


class _Backward(_ReverseOnly):
    """The gradients as a function of their own, whose derivative raises, whatever the incoming gradient depends on."""

    @staticmethod
    def forward(function: Function, *saved_and_gradients: Tensor) -> Tensors:
        return _tuple(function.operator.backward(*saved_and_gradients))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ValueError("the operators of kernels/ can be differentiated once, and this is a second derivative: compute it "
                         "with a formula in PyTorch's own operations")
