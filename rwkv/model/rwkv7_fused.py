"""The fused form of RWKV-7's time and channel mixing: autograd functions with gradients of their own (see fused.py).

    time:     mixed_products -> gates -> the operator wkv7 -> output
    channel:  channel_mixing

B rows, T steps, C channels in H heads of N, d the ranks of the low-rank gates. Formulas: rwkv7.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from rwkv.model import fused_c
from rwkv.model.first_derivative import first_derivative
from rwkv.model.fused import (
    Tensors,
    cast,
    mix,
    mix_backward,
    product_backward,
    product_dtype,
    squared_relu,
    squared_relu_backward,
)

EPS = 64e-5                              # of the normalisation of each head
FASTEST_LOG_W = -0.6065306597126334      # of the decay: -e^-0.5
LEAST_NORM = 1e-12                       # of kk, as in torch.nn.functional.normalize


class Gates(NamedTuple):
    """What time mixing hands on: log_w (float32 or wider), k, v, a = -kk, b = kk * rate and g, each (B,T,C)."""

    log_w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    g: Tensor


def mixed_products(x: Tensor, last_x: Tensor | None, x_rwkvag: Tensors, weights: Tensors, low_rank: Tensors) -> Tensors:
    """R m_r, K m_k, V m_v, m_w w1, m_a a1, m_g g1 and, where there is a v1, m_v v1, with m_n = x_t + (x_{t-1} - x_t) x_n.

    x (B,T,C), and last_x (B,C) before its first step, None for zeros. weights: R, K, V (C,C). low_rank: w1, a1, g1[, v1] (C,d).
    """
    products: Tensors = _MixedProducts.apply(product_dtype(x), len(low_rank), x, last_x, *x_rwkvag, *weights, *low_rank)
    return products


def gates(k: Tensor, v: Tensor, v_first: Tensor | None, hidden: Tensors, N: int, vectors: Tensors, matrices: Tensors) -> Gates:
    """The operator's inputs and g, from k and v and the low-rank gates' hidden layers.

    k, v, v_first (B,T,C); hidden: m_w w1, m_a a1, m_g g1[, m_v v1], (B,T,d) each; vectors: k_k, k_a, w0, a0[, v0] (1,1,C);
    matrices: w2, a2, g2[, v2] (d,C). In layer 0 v_first is None, and v1, v0 and v2 are left out.
    """
    return Gates(*_Gates.apply(N, k, v, v_first, len(hidden), *hidden, *vectors, *matrices))


def output(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
           matrix: Tensor) -> Tensor:
    """O ((GroupNorm(y) + (sum over the head of r k r_k) v) g), (B,T,C).

    y (B,T,H,N); r, k, v, g (B,T,C); r_k (H,N); weight and bias of the normalisation (C,); matrix O (C,C).
    """
    product: Tensor = _Output.apply(y, r, k, v, g, r_k, weight, bias, matrix)
    return product


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What output multiplies O with, for an O that is not a plain matrix."""
    product: Tensor = _Gated.apply(y, r, k, v, g, r_k, weight, bias)
    return product


def channel_mixing(x: Tensor, last_x: Tensor | None, x_k: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """V max(K mix(x), 0)^2, (B,T,C), with mix(x) = x_t + (x_{t-1} - x_t) x_k; x and last_x as in mixed_products."""
    mixed: Tensor = _ChannelMixing.apply(product_dtype(x), x, last_x, x_k, key, value)
    return mixed


class _MixedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, n_low_rank: int, x: Tensor, last_x: Tensor | None, *others: Tensor) -> Tensors:
        mus, matrices = [1 - x_n for x_n in others[:6]], cast(dtype, others[6:])
        kept, (r, w, k, v, a, g) = mix(dtype, x, last_x, tuple(mus))
        ctx.save_for_backward(r, w, k, v, a, g, *matrices, *kept)
        ctx.n_matrices = len(matrices)
        square, low_rank = matrices[:3], matrices[3:]
        return *map(linear, (r, k, v), square), *(m @ matrix for m, matrix in zip((w, a, g, v), low_rank, strict=False))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        r, w, k, v, a, g, *rest = ctx.saved_tensors
        (R, K, V, *low_rank), kept = rest[:ctx.n_matrices], rest[ctx.n_matrices:]
        (grad_r, grad_R), (grad_k, grad_K), (grad_v, grad_V) = map(product_backward, grads[:3], (r, k, v), (R, K, V))
        found = [(grad @ matrix.T, m.flatten(0, 1).T @ grad.flatten(0, 1))
                 for grad, m, matrix in zip(grads[3:], (w, a, g, v), low_rank, strict=False)]
        (grad_w, _), (grad_a, _), (grad_g, _) = found[:3]
        for of_v, _ in found[3:]:
            grad_v += of_v
        grad_x, grad_last_x, *grad_mus = mix_backward(kept, (grad_r, grad_w, grad_k, grad_v, grad_a, grad_g))
        return (None, None, grad_x, grad_last_x, *(-grad for grad in grad_mus if grad is not None), grad_R, grad_K, grad_V,
                *(grad for _, grad in found))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, N: int, k: Tensor, v: Tensor, v_first: Tensor | None, n: int, *others: Tensor) -> Tensors:
        hidden, vectors, matrices = others[:n], others[n:2 * n + 1], cast(k.dtype, others[2 * n + 1:])
        tanh, sigmoid = torch.tanh(hidden[0]), torch.sigmoid(hidden[2])
        inputs = (tanh, hidden[1], *hidden[3:])
        w2, a2, g2, *v2 = matrices
        z = tuple(x @ matrix for x, matrix in zip(inputs, (w2, a2, *v2), strict=True))
        *of_operator, inverse = _gates(k, v, v_first, z, N, vectors)
        ctx.N, ctx.n = N, n
        ctx.save_for_backward(k, v, v_first, inverse, sigmoid, *inputs, *z, *vectors, *matrices)
        return *of_operator, sigmoid @ g2

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, v, v_first, inverse, sigmoid, *rest = ctx.saved_tensors
        n = ctx.n - 1                    # all gates but g
        inputs, z, vectors, (w2, a2, g2, *v2) = rest[:n], rest[n:2 * n], rest[2 * n:3 * n + 2], rest[3 * n + 2:]
        of_inputs, grad_z, grad_vectors = _gates_backward(k, v, v_first, tuple(z), ctx.N, tuple(vectors), inverse, grads[:5])
        (grad_tanh, grad_w2), (grad_hidden_a, grad_a2), *of_v = [
            _row_product_backward(*parts) for parts in zip(grad_z, inputs, (w2, a2, *v2), strict=True)]
        grad_sigmoid, grad_g2 = _row_product_backward(grads[5], sigmoid, g2)
        grad_hidden_w = torch.ops.aten.tanh_backward(grad_tanh, inputs[0])
        grad_hidden_g = torch.ops.aten.sigmoid_backward(grad_sigmoid, sigmoid)
        grad_hidden = grad_hidden_w, grad_hidden_a, grad_hidden_g, *(grad for grad, _ in of_v)
        grad_matrices = grad_w2, grad_a2, grad_g2, *(grad for _, grad in of_v)
        return None, *of_inputs, None, *grad_hidden, *(grad.view(1, 1, -1) for grad in grad_vectors), *grad_matrices


def _gates(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors) -> Tensors:
    """(log_w, k, v, a, b, 1 / |k k_k|) from z = (tanh(m_w w1) w2, (m_a a1) a2[, (m_v v1) v2]) and k_k, k_a, w0, a0[, v0]."""
    if fused_c.takes(k, v, *z):
        return fused_c.gates(k, v, v_first, z, N, vectors)
    decay, rate, factor = _decay_rate_factor(z, vectors)
    keys = _by_head(k * vectors[0].to(k.dtype), N)
    inverse = keys.norm(dim=-1, keepdim=True, dtype=decay.dtype).clamp_(min=LEAST_NORM).reciprocal_()
    kk = (keys * inverse).to(k.dtype).flatten(2)
    new_v = v if v_first is None else torch.addcmul(v, v_first - v, _gate(z, vectors))
    return decay.mul_(FASTEST_LOG_W), k * factor, new_v, -kk, kk * rate, inverse


def _gates_backward(k: Tensor, v: Tensor, v_first: Tensor | None, z: Tensors, N: int, vectors: Tensors, inverse: Tensor,
                    grads: Tensors) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors, Tensors]:
    """From the gradients of log_w, k, v, a and b those of (k, v, v_first), of z, and of the vectors (C,)."""
    if fused_c.takes(k, v, *z):
        return fused_c.gates_backward(k, v, v_first, z, N, vectors, inverse, grads)
    grad_log_w, grad_k, grad_v, grad_a, grad_b = grads
    k_k, k_a = cast(k.dtype, vectors[:2])
    decay, rate, factor = _decay_rate_factor(z, vectors)
    grad_zw = torch.ops.aten.sigmoid_backward(grad_log_w * FASTEST_LOG_W, decay)
    # kk = q / |q| with q = k k_k; a = -kk, b = kk rate, new k = k factor
    kk = (_by_head(k * k_k, N) * inverse).to(k.dtype).flatten(2)
    grad_kk = torch.addcmul(-grad_a, grad_b, rate)
    along = _by_head(grad_kk * kk, N).sum(-1, keepdim=True)
    _by_head(grad_kk, N).addcmul_(_by_head(kk, N), along, value=-1).mul_(inverse)
    k_grad_k = k * grad_k
    grad_za = torch.ops.aten.sigmoid_backward(torch.addcmul(grad_b * kk, k_grad_k, k_a), rate)
    grad_vectors = [_summed(grad_kk * k), _summed(k_grad_k * (rate - 1)), _summed(grad_zw), _summed(grad_za)]
    grad_old_k = torch.addcmul(grad_k * factor, grad_kk, k_k)
    grad_z = grad_zw.to(k.dtype), grad_za
    if v_first is None:
        return (grad_old_k, grad_v, None), grad_z, tuple(grad_vectors)
    gate = _gate(z, vectors)
    grad_first = grad_v * gate
    grad_zv = torch.ops.aten.sigmoid_backward(grad_v * (v_first - v), gate)
    return (grad_old_k, grad_v - grad_first, grad_first), (*grad_z, grad_zv), (*grad_vectors, _summed(grad_zv))


def _decay_rate_factor(z: Tensors, vectors: Tensors) -> Tensors:
    """sigmoid(w0 + zw) in float32 or wider, rate = sigmoid(a0 + za), and 1 + (rate - 1) k_a."""
    _, k_a, w0, a0 = vectors[:4]
    dtype = z[0].dtype
    decay = torch.sigmoid(z[0].to(torch.promote_types(dtype, torch.float32)) + w0)
    rate = torch.sigmoid(z[1] + a0.to(dtype))
    # in half precision a rounded k_a, 1.02 at first, would make all factors too small; a rounded inverse may be infinite
    return decay, rate, torch.addcmul(1 - k_a, rate, k_a).to(dtype)


def _gate(z: Tensors, vectors: Tensors) -> Tensor:
    return torch.sigmoid(z[2] + vectors[4].to(z[2].dtype))


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
                matrix: Tensor) -> Tensor:
        matrix, vectors = matrix.to(g.dtype), (r_k, weight, bias)
        gated = _gated(y, r, k, v, g, vectors)
        ctx.save_for_backward(y, r, k, v, g, gated, *vectors, matrix)
        return linear(gated, matrix)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        y, r, k, v, g, gated, *vectors, matrix = ctx.saved_tensors
        grad_gated, grad_matrix = product_backward(grad, gated, matrix)
        grads, (grad_r_k, grad_weight, grad_bias) = _gated_backward(y, r, k, v, g, tuple(vectors), grad_gated)
        return *grads, grad_r_k.view_as(vectors[0]), grad_weight, grad_bias, grad_matrix


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(y, r, k, v, g, *vectors)
        return _gated(y, r, k, v, g, vectors)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        y, r, k, v, g, *vectors = ctx.saved_tensors
        grads, (grad_r_k, grad_weight, grad_bias) = _gated_backward(y, r, k, v, g, tuple(vectors), grad)
        return *grads, grad_r_k.view_as(vectors[0]), grad_weight, grad_bias


def _gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, vectors: Tensors) -> Tensor:
    """(GroupNorm(y) + (sum over the head of r k r_k) v) g, from vectors r_k, weight and bias."""
    if fused_c.takes(y, r, k, v, g):
        return fused_c.gated(y, r, k, v, g, y.shape[-1], vectors)
    read, _, _, _, _ = _read(y, r, k, v, cast(g.dtype, vectors))
    return read * g


def _gated_backward(y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, vectors: Tensors,
                    grad: Tensor) -> tuple[Tensors, Tensors]:
    """From the gradient of what _gated returns those of y, r, k, v and g, and of the vectors (C,)."""
    N = y.shape[-1]
    if fused_c.takes(y, r, k, v, g):
        return fused_c.gated_backward(y, r, k, v, g, N, vectors, grad)
    r_k, weight, bias = cast(g.dtype, vectors)
    read, normal, share, mean, inverse_std = _read(y, r, k, v, (r_k, weight, bias))
    grad_g, grad_read = grad * read, grad * g
    grad_v = (_by_head(grad_read, N) * share).flatten(2)
    grad_share = (_by_head(grad_read, N) * _by_head(v, N)).sum(-1, keepdim=True)
    along = grad_share * r_k
    grad_r = (_by_head(k, N) * along).flatten(2)
    grad_k = (_by_head(r, N) * along).flatten(2)
    grad_r_k = _summed((_by_head(r * k, N) * grad_share).flatten(2))
    grad_vectors = grad_r_k, _summed(normal.mul_(grad_read)), _summed(grad_read)
    grad_normal = _by_head(grad_read.mul_(weight), N).to(y.dtype)
    grad_y, _, _ = torch.ops.aten.native_layer_norm_backward(grad_normal, y, (N,), mean, inverse_std, None, None,
                                                             (True, False, False))
    return (grad_y, grad_r, grad_k, grad_v, grad_g), grad_vectors


def _read(y: Tensor, r: Tensor, k: Tensor, v: Tensor, vectors: Tensors) -> Tensors:
    """What g gates, the normalised y, the sum of r k r_k, and the mean and 1/std of each head."""
    N, (r_k, weight, bias) = y.shape[-1], vectors
    normal, mean, inverse_std = torch.native_layer_norm(y, (N,), None, None, EPS)
    normal = normal.to(weight.dtype).flatten(2)
    share = _by_head(r * k, N).mul(r_k).sum(-1, keepdim=True)
    read = torch.addcmul(bias, normal, weight)
    _by_head(read, N).addcmul_(share, _by_head(v, N))
    return read, normal, share, mean, inverse_std


class _ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, x_k: Tensor, *weights: Tensor) -> Tensor:
        kept, (mixed,) = mix(dtype, x, last_x, (1 - x_k,))
        key, value = weights = cast(dtype, weights)
        k = linear(mixed, key)
        hidden = squared_relu(k)
        ctx.save_for_backward(mixed, k, hidden, *weights, *kept)
        return linear(hidden, value)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, k, hidden, key, value, *kept = ctx.saved_tensors
        grad_hidden, grad_value = product_backward(grad, hidden, value)
        grad_mixed, grad_key = product_backward(squared_relu_backward(grad_hidden, k), mixed, key)
        grad_x, grad_last_x, grad_mu = mix_backward(kept, (grad_mixed,))
        assert grad_mu is not None
        return None, grad_x, grad_last_x, -grad_mu, grad_key, grad_value


def _by_head(tensor: Tensor, N: int) -> Tensor:
    """(B,T,C) as (B,T,H,N), without a copy."""
    return tensor.unflatten(-1, (-1, N))


def _summed(grad: Tensor) -> Tensor:
    """The gradient (C,) of a vector that was added or multiplied at each of (B,T)."""
    return grad.sum((0, 1), dtype=_wide(grad))


def _wide(tensor: Tensor) -> torch.dtype | None:
    """A sum over B and T is wide where the gradients are scaled."""
    return torch.float32 if tensor.dtype == torch.float16 else None


def _row_product_backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x (B,T,d) and M (d,C) from the gradient of x M (B,T,C)."""
    return grad @ matrix.T, x.flatten(0, 1).T @ grad.flatten(0, 1)
