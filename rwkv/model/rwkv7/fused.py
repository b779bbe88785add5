"""RWKV-7's time and channel mixing as fused autograd functions, with hand-written gradients (see ../fused).

    time mixing:     inputs -> the operator wkv7 -> output
    channel mixing:  channel_mixing

`gates` and `gated` are `inputs` and `output` without the large matrix products, for layers that must be called as modules.

The letters are B for rows, T for steps, C for channels in H heads of N, and d for the rank of a low-rank gate. mix.py has the
formulas.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from rwkv.model.first_derivative import Context, first_derivative
from rwkv.model.fused import (
    Tensors,
    cast,
    mix,
    mix_backward,
    product_backward,
    product_dtype,
    product_in,
    squared_relu,
    squared_relu_backward,
    wide_sum,
)
from rwkv.model.fused.backend import module_for
from rwkv.model.rwkv7.architecture import EPS, FASTEST_LOG_W, GATES, LEAST_NORM, MIXES
from rwkv.model.weight_cache import round_weights, tensors_to_save

SQUARES = {"r": "receptance", "k": "key", "v": "value"}          # names of mixes, and of the (C,C) matrices that multiply them


class _Backend(Protocol):
    """The functions of fused_c.py and fused_triton.py, with the arguments of _gates, _gated and their backward functions."""

    def supports(self, *tensors: Tensor, dtype: torch.dtype | None = None, N: int = 1) -> bool: ...

    def gates(self, k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors: ...

    def gates_backward(self, k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors,
                       inverse: Tensor, grads: Tensors, extra: tuple[Tensor | None, Tensor | None],
                       ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]: ...

    def gated(self, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors) -> Tensor: ...

    def gated_backward(self, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, N: int, vectors: Tensors,
                       grad: Tensor) -> tuple[Tensors, Tensors]: ...


def _backend_for(*tensors: Tensor, N: int) -> _Backend | None:
    backend: _Backend | None = module_for("rwkv.model.rwkv7.fused_", *tensors)
    return backend if backend is not None and backend.supports(*tensors, N=N) else None


class Parameters(NamedTuple):
    """The weights that `inputs` reads. In layer 0, v0, v1 and v2 are None."""

    x_r: Tensor                          # all x_n are (1,1,C)
    x_w: Tensor
    x_k: Tensor
    x_v: Tensor
    x_a: Tensor
    x_g: Tensor
    receptance: Tensor                   # these three are (C,C)
    key: Tensor
    value: Tensor
    w1: Tensor                           # these four are (C,d)
    a1: Tensor
    g1: Tensor
    v1: Tensor | None
    k_k: Tensor                          # these five are (1,1,C)
    k_a: Tensor
    w0: Tensor
    a0: Tensor
    v0: Tensor | None
    w2: Tensor                           # these four are (d,C)
    a2: Tensor
    g2: Tensor
    v2: Tensor | None


class Inputs(NamedTuple):
    """The results of `inputs`. r, k and v are returned twice, and backward adds both gradients of each."""

    r: Tensor                            # these six are for the operator: (B,T,H,N)
    log_w: Tensor                        # float32 or wider
    k: Tensor
    v: Tensor
    a: Tensor                            # -kk
    b: Tensor                            # kk * rate
    output_r: Tensor                     # these four are for `output`: (B,T,C)
    output_k: Tensor
    output_v: Tensor
    output_g: Tensor
    v_first: Tensor | None               # (B,T,C), for the next layers; None except in layer 0


class Gates(NamedTuple):
    """The results of `gates`, each (B,T,C): log_w (float32 or wider), k, v, a = -kk, b = kk * rate and g."""

    log_w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    g: Tensor


def inputs(x: Tensor, last_x: Tensor | None, v_first: Tensor | None, N: int, parameters: Parameters) -> Inputs:
    """Computes the inputs of the operator and of `output` from x (B,T,C).

    `last_x` (B,C) is the step before x; None stands for zeros. `v_first` (B,T,C) is None in layer 0.
    """
    return Inputs(*_Inputs.apply(product_dtype(x), N, x, last_x, v_first, *parameters))


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, hidden: Tensors, N: int, vectors: Tensors, matrices: Tensors) -> Gates:
    """Computes the operator's inputs and g from k, v and the hidden layers of the low-rank gates.

    In layer 0 v_first is None, and the values in brackets are absent.

    Args:
        k, v, v_first (B,T,C): the key, the value, and the value of layer 0.
        hidden (B,T,d): m_w w1, m_a a1, m_g g1[, m_v v1].
        vectors (1,1,C): k_k, k_a, w0, a0[, v0].
        matrices (d,C): w2, a2, g2[, v2].
    """
    return Gates(*_Gates.apply(N, k, v, v_first, len(hidden), *hidden, *vectors, *matrices))


def output(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
           matrix: Tensor) -> Tensor:
    """Returns the (B,T,C) result of time mixing: O ((GroupNorm(y) + (sum over the head of r k r_k) v) g).

    The shapes are y (B,T,H,N); r, k, v, g (B,T,C); r_k (H,N); the normalisation's weight and bias (C,); the matrix O (C,C).
    """
    product: Tensor = _Output.apply(y, r, k, v, g, r_k, weight, bias, matrix)
    return product


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the input of O in `output`, for an O that must be called as a module."""
    product: Tensor = _Gated.apply(y, r, k, v, g, r_k, weight, bias)
    return product


def channel_mixing(x: Tensor, last_x: Tensor | None, x_k: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns V max(K mix(x), 0)^2, (B,T,C), where mix(x) = x_t + (x_{t-1} - x_t) x_k. x and last_x are as in `inputs`."""
    mixed: Tensor = _ChannelMixing.apply(product_dtype(x), x, last_x, x_k, key, value)
    return mixed


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, N: int, x: Tensor, last_x: Tensor | None, v_first: Tensor | None,
                *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
        p = dict(zip(Parameters._fields, parameters, strict=True))
        names = GATES[:-1] if v_first is None else GATES
        weights = _select(p, (*SQUARES.values(), *_matrix_names(1, names)))
        multiplied = round_weights(dtype, weights)
        squares, downs = multiplied[:len(SQUARES)], multiplied[len(SQUARES):]
        saved_x, mixes = mix(dtype, x, last_x, _select(p, [f"x_{name}" for name in MIXES]), to_previous=True)
        m = dict(zip(MIXES, mixes, strict=True))
        r, k, v = (linear(m[name], square) for name, square in zip(SQUARES, squares, strict=True))
        hidden = tuple(m[name] @ down for name, down in zip(names, downs, strict=True))
        gates, saved_gates = _low_rank_gates(k, v, v_first, hidden, N, _select(p, _vector_names(names)),
                                             _select(p, _matrix_names(2, names)))
        ctx.N, ctx.names, ctx.sizes = N, names, _save(ctx, mixes, saved_x, tensors_to_save(weights, multiplied), *saved_gates)
        ctx.dtype, ctx.weight_dtype = dtype, weights[0].dtype
        operator_inputs = (_split_heads(tensor, N) for tensor in (r, *gates[:5]))
        return *operator_inputs, r, gates.k.detach(), gates.v.detach(), gates.g, v.detach() if v_first is None else None

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixes, saved_x, weights, *saved_gates = _saved_groups(ctx)
        weights = round_weights(ctx.dtype, weights)
        squares, downs = weights[:len(SQUARES)], weights[len(SQUARES):]
        grad = Inputs(*grads)
        gates = Gates(log_w=grad.log_w.flatten(2), k=grad.k.flatten(2), v=grad.v.flatten(2), a=grad.a.flatten(2),
                      b=grad.b.flatten(2), g=grad.output_g)
        gate_grads = _low_rank_gates_backward(SavedGates(*saved_gates), ctx.N, gates, (grad.output_k, grad.output_v),
                                              ctx.weight_dtype)
        grad_r, grad_v = grad.r.flatten(2) + grad.output_r, gate_grads.v
        if grad.v_first is not None:
            grad_v = grad_v + grad.v_first
        m = dict(zip(MIXES, mixes, strict=True))
        grad_m: dict[str, Tensor] = {}
        by_name: dict[str, Tensor | None] = {}           # the gradients of the parameters
        for name, grad_product, square in zip(SQUARES, (grad_r, gate_grads.k, grad_v), squares, strict=True):
            grad_m[name], by_name[SQUARES[name]] = product_backward(grad_product, m[name], square, ctx.weight_dtype)
        for name, grad_hidden, down in zip(ctx.names, gate_grads.hidden, downs, strict=True):
            grad_mix, by_name[f"{name}1"] = _row_product_backward(grad_hidden, m[name], down, ctx.weight_dtype)
            if name in grad_m:           # the mix of v is an input of V and of v's gate
                grad_m[name] += grad_mix
            else:
                grad_m[name] = grad_mix
        grad_x, grad_last_x, *grad_mus = mix_backward(saved_x, tuple(grad_m[name] for name in MIXES), to_previous=True)
        by_name |= zip([f"x_{name}" for name in MIXES], grad_mus, strict=True)
        by_name |= zip(_vector_names(ctx.names), gate_grads.vectors, strict=True)
        by_name |= zip(_matrix_names(2, ctx.names), gate_grads.matrices, strict=True)
        return None, None, grad_x, grad_last_x, gate_grads.v_first, *map(by_name.get, Parameters._fields)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, N: int, k: Tensor, v: Tensor, v_first: Tensor | None, n: int, *others: Tensor) -> Tensors:
        hidden, vectors, matrices = others[:n], others[n:2 * n + 1], others[2 * n + 1:]
        gates, saved = _low_rank_gates(k, v, v_first, hidden, N, vectors, matrices)
        ctx.N, ctx.sizes, ctx.weight_dtype = N, _save(ctx, *saved), matrices[0].dtype
        return gates

    @staticmethod
    @first_derivative
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = _low_rank_gates_backward(SavedGates(*_saved_groups(ctx)), ctx.N, Gates(*grads), (None, None), ctx.weight_dtype)
        return None, grad.k, grad.v, grad.v_first, None, *grad.hidden, *grad.vectors, *grad.matrices


class SavedGates(NamedTuple):
    tokens: tuple[Tensor | None, ...]    # k, v, v_first, and 1 / |k k_k|
    sigmoid: Tensors                     # sigmoid(m_g g1)
    up: Tensors                          # tanh(m_w w1), m_a a1[, m_v v1]
    z: Tensors                           # products of `up` with w2, a2[, v2]
    vectors: Tensors                     # k_k, k_a, w0, a0[, v0]
    matrices: Tensors                    # w2, a2, g2[, v2]


class GateGrads(NamedTuple):
    k: Tensor
    v: Tensor
    v_first: Tensor | None
    hidden: Tensors                      # the gates' hidden layers: w, a, g[, v]
    vectors: Tensors                     # k_k, k_a, w0, a0[, v0], (1,1,C) each
    matrices: Tensors                    # w2, a2, g2[, v2], each (d,C)


def _low_rank_gates(k: Tensor, v: Tensor, v_first: Tensor | None, hidden: Tensors, N: int, vectors: Tensors,
                    matrices: Tensors) -> tuple[Gates, SavedGates]:
    w2, a2, g2, *v2 = multiplied = round_weights(k.dtype, matrices)
    tanh, hidden_a, sigmoid, *hidden_v = torch.tanh(hidden[0]), hidden[1], torch.sigmoid(hidden[2]), *hidden[3:]
    up = tanh, hidden_a, *hidden_v
    z = tuple(part @ matrix for part, matrix in zip(up, (w2, a2, *v2), strict=True))
    log_w, new_k, new_v, a, b, inverse = _gates(k, v, v_first, z, N, vectors)
    saved = SavedGates((k, v, v_first, inverse), (sigmoid,), up, z, vectors, tensors_to_save(matrices, multiplied))
    return Gates(log_w, new_k, new_v, a, b, sigmoid @ g2), saved


def _low_rank_gates_backward(saved: SavedGates, N: int, grads: Gates, extra: tuple[Tensor | None, Tensor | None],
                             dtype: torch.dtype) -> GateGrads:
    """Returns the gradients of all arguments of `gates`.

    Args:
        extra: further gradients of the results k and v, or None.
        dtype: the unrounded matrices' dtype.
    """
    k, v, v_first, inverse = saved.tokens
    assert k is not None
    assert v is not None
    assert inverse is not None
    (grad_k, grad_v, grad_first), grad_z, grad_vectors = _gates_backward(k, v, v_first, saved.z, N, saved.vectors, inverse,
                                                                         grads[:5], extra)
    w2, a2, g2, *v2 = round_weights(k.dtype, saved.matrices)
    product = partial(_row_product_backward, dtype=dtype)
    (tanh, *_), (sigmoid,) = saved.up, saved.sigmoid
    (grad_tanh, grad_w2), (grad_hidden_a, grad_a2), *v_gate = map(product, grad_z, saved.up, (w2, a2, *v2))
    grad_sigmoid, grad_g2 = product(grads.g, sigmoid, g2)
    grad_hidden_w = torch.ops.aten.tanh_backward(grad_tanh, tanh)
    grad_hidden_g = torch.ops.aten.sigmoid_backward(grad_sigmoid, sigmoid)
    grad_hidden = grad_hidden_w, grad_hidden_a, grad_hidden_g, *(grad for grad, _ in v_gate)
    grad_matrices = grad_w2, grad_a2, grad_g2, *(grad for _, grad in v_gate)
    return GateGrads(grad_k, grad_v, grad_first, grad_hidden, tuple(grad.view(1, 1, -1) for grad in grad_vectors),
                     grad_matrices)


def _gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """Returns (log_w, k, v, a, b, 1 / |k k_k|) from z = (zw, za[, zv]) and the vectors k_k, k_a, w0, a0[, v0].

    zw = tanh(m_w w1) w2, za = (m_a a1) a2 and zv = (m_v v1) v2.
    """
    if backend := _backend_for(k, v, *z, *_without_none(v_first), N=N):
        return backend.gates(k, v, v_first, z, N, vectors)
    decay, rate, factor = _decay_rate_factor(z, vectors)
    keys = _split_heads(k * vectors[0].to(k.dtype), N)
    inverse = keys.norm(dim=-1, keepdim=True, dtype=decay.dtype).clamp_(min=LEAST_NORM).reciprocal_()
    kk = (keys * inverse).to(k.dtype).flatten(2)
    new_v = v if v_first is None else torch.addcmul(v, v_first - v, _gate(z, vectors))
    return decay.mul_(FASTEST_LOG_W), k * factor, new_v, -kk, kk * rate, inverse


def _gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                    grads: Tensors, extra: tuple[Tensor | None, Tensor | None] = (None, None),
                    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """Returns the gradients of (k, v, v_first), z and the vectors (C,).

    Args:
        grads: the gradients of the results log_w, k, v, a and b.
        extra: further gradients of the results k and v, or None.
    """
    if backend := _backend_for(k, v, *z, *_without_none(v_first), N=N):
        return backend.gates_backward(k, v, v_first, z, N, vectors, inverse, grads, extra)
    grad_log_w, grad_k, grad_v, grad_a, grad_b = grads
    grad_k, grad_v = (grad if other is None else grad + other for grad, other in zip((grad_k, grad_v), extra, strict=True))
    k_k, k_a = cast(k.dtype, vectors[:2])
    decay, rate, factor = _decay_rate_factor(z, vectors)
    grad_zw = torch.ops.aten.sigmoid_backward(grad_log_w * FASTEST_LOG_W, decay)
    # The formulas are kk = q / |q| with q = k k_k; a = -kk, b = kk rate, new k = k factor.
    kk = (_split_heads(k * k_k, N) * inverse).to(k.dtype).flatten(2)
    grad_kk = torch.addcmul(-grad_a, grad_b, rate)
    along = _split_heads(grad_kk * kk, N).sum(-1, keepdim=True)
    _split_heads(grad_kk, N).addcmul_(_split_heads(kk, N), along, value=-1).mul_(inverse)
    k_grad_k = k * grad_k
    grad_za = torch.ops.aten.sigmoid_backward(torch.addcmul(grad_b * kk, k_grad_k, k_a), rate)
    grad_vectors = (_vector_grad(grad_kk * k), _vector_grad(k_grad_k * (rate - 1)), _vector_grad(grad_zw),
                    _vector_grad(grad_za))
    grad_old_k = torch.addcmul(grad_k * factor, grad_kk, k_k)
    grad_z = grad_zw.to(k.dtype), grad_za
    if v_first is None:
        return (grad_old_k, grad_v, None), grad_z, grad_vectors
    gate = _gate(z, vectors)
    grad_first = grad_v * gate
    grad_zv = torch.ops.aten.sigmoid_backward(grad_v * (v_first - v), gate)
    return (grad_old_k, grad_v - grad_first, grad_first), (*grad_z, grad_zv), (*grad_vectors, _vector_grad(grad_zv))


def _decay_rate_factor(z: Tensors, vectors: Tensors) -> Tensors:
    """Returns sigmoid(w0 + zw) in float32 or wider, rate = sigmoid(a0 + za), and 1 + (rate - 1) k_a."""
    _, k_a, w0, a0 = vectors[:4]
    dtype = z[0].dtype
    decay = torch.sigmoid(z[0].to(torch.promote_types(dtype, torch.float32)) + w0)
    rate = torch.sigmoid(z[1] + a0.to(dtype))
    # k_a (1.02 initially) stays float32, because rounding it to half precision would make all factors too small
    return decay, rate, torch.addcmul(1 - k_a, rate, k_a).to(dtype)


def _gate(z: Tensors, vectors: Tensors) -> Tensor:
    return torch.sigmoid(z[2] + vectors[4].to(z[2].dtype))


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
                matrix: Tensor) -> Tensor:
        vectors = r_k, weight, bias
        (multiplied,) = round_weights(g.dtype, (matrix,))
        gated = _gated(y, r, k, v, g, vectors)
        ctx.save_for_backward(y, r, k, v, g, gated, *vectors, *tensors_to_save((matrix,), (multiplied,)))
        ctx.weight_dtype = matrix.dtype
        return linear(gated, multiplied)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> Tensors:
        y, r, k, v, g, gated, *vectors, matrix = ctx.saved_tensors
        (matrix,) = round_weights(g.dtype, (matrix,))
        grad_gated, grad_matrix = product_backward(grad, gated, matrix, ctx.weight_dtype)
        grads, (grad_r_k, grad_weight, grad_bias) = _gated_backward(y, r, k, v, g, tuple(vectors), grad_gated)
        return *grads, grad_r_k.view_as(vectors[0]), grad_weight, grad_bias, grad_matrix


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(y, r, k, v, g, *vectors)
        return _gated(y, r, k, v, g, vectors)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> Tensors:
        y, r, k, v, g, *vectors = ctx.saved_tensors
        grads, (grad_r_k, grad_weight, grad_bias) = _gated_backward(y, r, k, v, g, tuple(vectors), grad)
        return *grads, grad_r_k.view_as(vectors[0]), grad_weight, grad_bias


def _gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, vectors: Tensors) -> Tensor:
    """Returns (GroupNorm(y) + (sum over the head of r k r_k) v) g, from vectors r_k, weight and bias."""
    N = y.shape[-1]
    if backend := _backend_for(y, r, k, v, g, N=N):
        return backend.gated(y, r, k, v, g, N, vectors)
    ungated, _, _, _, _ = _norm_and_bonus(y, r, k, v, cast(g.dtype, vectors))
    return ungated * g


def _gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, vectors: Tensors,
                    grad: Tensor) -> tuple[Tensors, Tensors]:
    """Returns the gradients of y, r, k, v, g and the vectors (C,) from `grad`, the gradient of _gated's result."""
    N = y.shape[-1]
    if backend := _backend_for(y, r, k, v, g, N=N):
        return backend.gated_backward(y, r, k, v, g, N, vectors, grad)
    r_k, weight, bias = cast(g.dtype, vectors)
    ungated, normal, bonus, mean, inverse_std = _norm_and_bonus(y, r, k, v, (r_k, weight, bias))
    grad_g, grad_ungated = grad * ungated, grad * g
    grad_v = (_split_heads(grad_ungated, N) * bonus).flatten(2)
    grad_bonus = (_split_heads(grad_ungated, N) * _split_heads(v, N)).sum(-1, keepdim=True)
    along = grad_bonus * r_k
    grad_r = (_split_heads(k, N) * along).flatten(2)
    grad_k = (_split_heads(r, N) * along).flatten(2)
    grad_r_k = _vector_grad((_split_heads(r * k, N) * grad_bonus).flatten(2))
    grad_vectors = grad_r_k, _vector_grad(normal.mul_(grad_ungated)), _vector_grad(grad_ungated)
    grad_normal = _split_heads(grad_ungated.mul_(weight), N).to(y.dtype)
    grad_y, _, _ = torch.ops.aten.native_layer_norm_backward(grad_normal, y, (N,), mean, inverse_std, None, None,
                                                             (True, False, False))
    return (grad_y, grad_r, grad_k, grad_v, grad_g), grad_vectors


def _norm_and_bonus(y: Tensor, r: Tensor, k: Tensor, v: Tensor, vectors: Tensors) -> Tensors:
    """Returns GroupNorm(y) + bonus v, the normalised y, bonus = sum of r k r_k per head, and each head's mean and 1/std."""
    N, (r_k, weight, bias) = y.shape[-1], vectors
    normal, mean, inverse_std = torch.native_layer_norm(y, (N,), None, None, EPS)
    normal = normal.to(weight.dtype).flatten(2)
    bonus = _split_heads(r * k, N).mul(r_k).sum(-1, keepdim=True)
    ungated = torch.addcmul(bias, normal, weight)
    _split_heads(ungated, N).addcmul_(bonus, _split_heads(v, N))
    return ungated, normal, bonus, mean, inverse_std


class _ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, x_k: Tensor, *weights: Tensor) -> Tensor:
        saved, (mixed,) = mix(dtype, x, last_x, (x_k,), to_previous=True)
        key, value = multiplied = round_weights(dtype, weights)
        k = linear(mixed, key)
        hidden = squared_relu(k)
        ctx.save_for_backward(mixed, k, hidden, *tensors_to_save(weights, multiplied), *saved)
        ctx.weight_dtype = weights[0].dtype
        return linear(hidden, value)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, k, hidden, *weights, x, last_x, x_k = ctx.saved_tensors
        key, value = round_weights(k.dtype, weights)
        grad_hidden, grad_value = product_backward(grad, hidden, value, ctx.weight_dtype)
        grad_mixed, grad_key = product_backward(squared_relu_backward(grad_hidden, k), mixed, key, ctx.weight_dtype)
        grad_x, grad_last_x, grad_x_k = mix_backward((x, last_x, x_k), (grad_mixed,), to_previous=True)
        return None, grad_x, grad_last_x, grad_x_k, grad_key, grad_value


def _save(ctx: Context, *groups: Iterable[Tensor | None]) -> list[int]:
    """Saves groups of tensors for backward. Returns the groups' sizes, which _saved_groups needs."""
    lists = [tuple(group) for group in groups]
    ctx.save_for_backward(*chain(*lists))
    return [len(group) for group in lists]


def _saved_groups(ctx: Context) -> list[tuple[Tensor, ...]]:
    tensors = iter(ctx.saved_tensors)
    return [tuple(next(tensors) for _ in range(size)) for size in ctx.sizes]


def _matrix_names(part: int, gates: str) -> list[str]:
    return [f"{gate}{part}" for gate in gates]


def _vector_names(gates: str) -> list[str]:
    return ["k_k", "k_a", *(f"{gate}0" for gate in gates if gate != "g")]


def _select(parameters: Mapping[str, Tensor | None], names: Iterable[str]) -> Tensors:
    return tuple(parameters[name] for name in names)     # type: ignore[misc]


def _without_none(*tensors: Tensor | None) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _split_heads(tensor: Tensor, N: int) -> Tensor:
    return tensor.unflatten(-1, (-1, N))


def _vector_grad(grad: Tensor) -> Tensor:
    """Returns the gradient (C,) of a vector that was broadcast over B and T, from `grad` (B,T,C)."""
    return grad.sum((0, 1), dtype=wide_sum(grad))


def _row_product_backward(grad: Tensor, x: Tensor, matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (B,T,d) and M (d,C) from the gradient of x M (B,T,C). `dtype` is M's dtype before rounding."""
    return grad @ matrix.T, product_in(dtype, x.flatten(0, 1).T, grad.flatten(0, 1))
