"""Fused operations for training all generations: the token shift, its matrix products and squared ReLU, with gradients.

Each function uses few operations and few temporaries. In a training step of a small model, a CPU spends a third of the time on
starting operations and on autograd itself. In a large model, memory bandwidth limits the operations between the matrix
products, and autograd's general formulas read and write each tensor several more times.

Under autocast all functions compute in the dtype of the matrix products. The callers also contain the plain formulas;
`can_fuse` chooses between the two.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from kernels.backends.torch_private import transforms_active
from kernels.operator import PLAIN
from rwkv.model.first_derivative import Context, first_derivative
from rwkv.model.fused.backend import backend_for
from rwkv.model.hooks import is_unmodified
from rwkv.model.weight_cache import round_weights, tensors_to_save

WIDE_PRODUCTS = ("cuda",)                # devices whose half-precision products can return float32
Tensors = tuple[Tensor, ...]


def token_shift(x: Tensor, last_x: Tensor | None, *mus: Tensor, first: Tensor | None = None) -> Tensors:
    """Returns the mix mu x_t + (1 - mu) x_{t-1} of x (B,T,C) for each mu (1,1,C), in the dtype of the matrix products.

    Backward needs x only if a mu is trained. No other large tensor is saved.

    Args:
        last_x (B,C): the step before x; None stands for zeros.
        first (B,T,1): a bool tensor that is true at steps whose previous step counts as zeros.
    """
    dtype = product_dtype(x)
    if torch.is_grad_enabled() and can_use_functions():
        mixed: Tensors = _Mixes.apply(dtype, x, last_x, first, *mus)
        return mixed
    x = x.to(dtype)
    previous = _previous_steps(x, last_x, first)
    return tuple(torch.lerp(previous, x, mu.to(dtype)) for mu in mus)


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns autocast's dtype if autocast is on and x is not float64, else the dtype of x."""
    lower = x.device.type != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if lower else x.dtype


def last_step(x: Tensor, saved: bool = False) -> Tensor:
    """Returns the last step (B,C) of x (B,T,C), for the next state.

    `saved` tells whether x is saved for backward anyway. If so, the result is a view; otherwise it is a copy, because a view
    would keep all of x in memory.
    """
    return x[:, -1] if saved and torch.is_grad_enabled() else x[:, -1].clone()


def can_fuse(*layers: nn.Module) -> bool:
    """Returns True if these layers' products may be computed without calling the layers.

    The layers must be called if torch.compile (which fuses better), torch.jit.trace, a torch.func transform or a hook must see
    the calls, if a layer is not a plain nn.Linear, or if a weight is frozen, because autograd skips a frozen weight's gradient,
    and fused code does not.
    """
    return can_use_functions() and all(map(_is_plain, layers))


def can_use_functions() -> bool:
    """Returns True unless torch.compile, torch.jit.trace or torch.func must see the formulas instead of autograd functions."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active())


def _is_plain(layer: nn.Module) -> bool:
    return (type(layer) is nn.Linear and layer.bias is None and is_unmodified(layer)
            and type(layer.weight) in (nn.Parameter, Tensor)
            and (layer.weight.requires_grad or not torch.is_grad_enabled()))


class _Mixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, first: Tensor | None,
                *mus: Tensor) -> Tensors:
        trained = any(ctx.needs_input_grad[4:])
        ctx.dtype = dtype
        ctx.save_for_backward(x if trained else None, last_x if trained else None, first, *mus)
        return _shift(dtype, x, last_x, first, mus)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, last_x, first, *mus = ctx.saved_tensors
        grad_mus: Tensors | list[None] = [None] * len(mus)
        if x is not None:
            x = x.to(ctx.dtype)
            grad_mus = _grad_mus(x - _previous_steps(x, last_x, first), grads)
        grad_x, grad_last_x = _grad_x(grads, cast(ctx.dtype, mus), first)
        return None, grad_x, grad_last_x if ctx.needs_input_grad[2] else None, None, *grad_mus


def recompute_mixes(recompute_x: Callable[[], Tensor], last_x: Tensor | None, mus: Tensors, first: Tensor | None,
                    mixes: Tensors) -> AbstractContextManager[None]:
    """Returns a context manager in which backward recomputes `mixes`, the results of token_shift, instead of saving them.

    The caller must keep `mixes` in memory until the context ends.

    Args:
        recompute_x: a function that returns the x given to token_shift.
        last_x, mus, first: the other arguments given to token_shift.
    """
    if not (torch.is_grad_enabled() and can_use_functions() and type(mixes[0]) in PLAIN):    # a subclass may have no address
        return nullcontext()
    dtype = mixes[0].dtype
    size = mixes[0].numel()              # the closures below live until the backward pass and must not refer to `mixes`
    indices = {mix.data_ptr(): index for index, mix in enumerate(mixes)}

    def pack(tensor: Tensor) -> object:
        index = indices.get(tensor.data_ptr()) if tensor.numel() == size and tensor.is_contiguous() else None
        return tensor if index is None else (mus[index], tensor.shape)

    @torch.no_grad()
    def unpack(saved: Tensor | tuple[Tensor, torch.Size]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        mu, shape = saved
        (mixed,) = _shift(dtype, recompute_x(), last_x, first, (mu,))
        return mixed.view(shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _shift(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, first: Tensor | None, mus: Sequence[Tensor]) -> Tensors:
    x = x.to(dtype)
    previous = _previous_steps(x, last_x, first)
    return _mixes(previous, x - previous, cast(dtype, mus))


def squared_relu_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Computes layer(relu(x)^2), but saves x for backward instead of the square.

    If the layer's own backward needs the layer's input, the layer must have a method squared_relu_linear, which is then called.
    """
    layer_function = getattr(layer, "squared_relu_linear", None)
    if not can_use_functions():
        product: Tensor = layer(torch.relu(x).square())
    elif layer_function is not None:
        product = layer_function(x)
    elif _is_plain(layer):
        product = _SquaredReluLinear.apply(product_dtype(x), x, layer.weight)
    else:
        product = layer(_SquaredRelu.apply(x))
    return product


class _SquaredReluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
        (multiplied,) = round_weights(dtype, (weight,))
        ctx.save_for_backward(x, *tensors_to_save((weight,), (multiplied,)))
        ctx.dtype, ctx.weight_dtype = dtype, weight.dtype
        return linear(squared_relu(x).to(dtype), multiplied)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (weight,) = round_weights(ctx.dtype, (weight,))
        grad_square, grad_weight = product_backward(grad, squared_relu(x).to(ctx.dtype), weight, ctx.weight_dtype)
        return None, squared_relu_backward(grad_square.to(x.dtype), x), grad_weight


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return squared_relu(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return squared_relu_backward(grad, x)


def mixed_products(x: Tensor, last_x: Tensor | None, mus: Tensors, weights: Tensors) -> Tensors:
    """Returns W mix(x), (B,T,O), for each pair of mu (1,1,C) and W (O,C), where mix(x) = mu x_t + (1 - mu) x_{t-1}.

    x is (B,T,C). `last_x` (B,C) is the step before x; None stands for zeros.
    """
    products: Tensors = _MixedProducts.apply(product_dtype(x), x, last_x, *mus, *weights)
    return products


class _MixedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, *others: Tensor) -> Tensors:
        mus, weights = others[:len(others) // 2], others[len(others) // 2:]
        multiplied = round_weights(dtype, weights)
        saved, mixes = mix(dtype, x, last_x, mus)
        ctx.save_for_backward(*mixes, *tensors_to_save(weights, multiplied), *saved)
        ctx.dtype, ctx.weight_dtype = dtype, weights[0].dtype
        return tuple(map(linear, mixes, multiplied))

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, saved = len(grads), ctx.saved_tensors
        weights = round_weights(ctx.dtype, saved[n:2 * n])
        products = [product_backward(grad, x, weight, ctx.weight_dtype)
                    for grad, x, weight in zip(grads, saved[:n], weights, strict=True)]
        grad_mixes, grad_weights = zip(*products, strict=True)
        grad_x, grad_last_x, *grad_mus = mix_backward(saved[2 * n:], grad_mixes)
        return None, grad_x, grad_last_x, *grad_mus, *grad_weights


def _previous_steps(x: Tensor, last_x: Tensor | None, first: Tensor | None = None) -> Tensor:
    steps = x[:, :-1]
    previous = pad(steps, (0, 0, 1, 0)) if last_x is None else torch.cat((last_x.unsqueeze(1).to(x.dtype), steps), dim=1)
    return previous if first is None else previous.masked_fill(first, 0)


def _mixes(start: Tensor, delta: Tensor, mus: Sequence[Tensor]) -> Tensors:
    return tuple(torch.addcmul(start, delta, mu) for mu in mus)


def _grad_mus(delta: Tensor, grads: Tensors) -> Tensors:
    return tuple((grad * delta).sum((0, 1), keepdim=True, dtype=wide_sum(delta)) for grad in grads)


def _grad_x(grads: Tensors, mus: Sequence[Tensor], first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    grad_x, grad_previous = grads[0] * mus[0], grads[0].clone()
    for grad, mu in zip(grads[1:], mus[1:], strict=True):
        grad_x.addcmul_(grad, mu)
        grad_previous += grad
    grad_previous -= grad_x
    if first is not None:
        grad_previous.masked_fill_(first, 0)
    grad_x[:, :-1].add_(grad_previous[:, 1:])    # the operator += would copy the slice once more
    return grad_x, grad_previous[:, 0]


def mix(dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mus: Tensors,
        to_previous: bool = False) -> tuple[tuple[Tensor | None, ...], Tensors]:
    """Returns the tensors to save for mix_backward, and the mixes mu x_t + (1 - mu) x_{t-1} in `dtype`, one for each mu.

    With to_previous=True, the mixes are (1 - mu) x_t + mu x_{t-1}, as in RWKV-7.
    """
    if backend := backend_for(x, dtype=dtype):
        return backend.mix(dtype, x, last_x, mus, to_previous)
    x, mus = x.to(dtype), cast(dtype, mus)
    previous = _previous_steps(x, last_x)
    mixes = _mixes(x, previous - x, mus) if to_previous else _mixes(previous, x - previous, mus)
    return (x, last_x, *mus), mixes


def mix_backward(saved: Sequence[Any], grads: Tensors, to_previous: bool = False) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, last_x and each mu from the gradients of the mixes."""
    x, last_x, *mus = saved
    if backend := backend_for(x, dtype=grads[0].dtype):
        return backend.mix_backward(saved, grads, to_previous)
    previous = _previous_steps(x, last_x)
    grad_x, grad_last_x = _grad_x(grads, [1 - mu for mu in mus] if to_previous else mus)
    grad_mus = _grad_mus(previous - x if to_previous else x - previous, grads)
    return grad_x, None if last_x is None else grad_last_x, *grad_mus


def squared_relu(x: Tensor) -> Tensor:
    """Returns max(x, 0)^2."""
    backend = backend_for(x)
    return backend.squared_relu(x) if backend else torch.relu(x).square_()


def squared_relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x from `grad`, the gradient of squared_relu(x)."""
    if backend := backend_for(x, grad):
        return backend.squared_relu(x, grad)
    return torch.addcmul(grad.new_zeros(()), grad, torch.relu(x), value=2)


def wide_sum(tensor: Tensor) -> torch.dtype | None:
    """Returns the dtype for sums over B and T: float32 for float16, in which sums could overflow, and otherwise None."""
    return torch.float32 if tensor.dtype == torch.float16 else None


def product_backward(grad: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (B,T,I) and W (O,I) from `grad`, the gradient of W x (B,T,O).

    `dtype` is the dtype of W's gradient. The default is the dtype of `weight`, which may be a rounded copy.
    """
    return grad @ weight, product_in(dtype or weight.dtype, grad.flatten(0, 1).T, x.flatten(0, 1))


def product_in(dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right in `dtype`, if products on this device can return a wider dtype.

    Otherwise the result has the factors' dtype, and the caller or autograd converts the result.
    """
    if left.dtype == dtype or left.device.type not in WIDE_PRODUCTS:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype)


def gate_backward(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the sigmoid's input and of x from the gradient of gate * x. `gate` is the sigmoid's output."""
    return torch.ops.aten.sigmoid_backward(grad * x, gate), grad * gate


def cast(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensors:
    """Returns the tensors in `dtype`, without the cost of Tensor.to for those that have this dtype."""
    return tuple(tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors)
