"""The fused form of RWKV-7's time and channel mixing: autograd functions with gradients of their own (see fused.py).

    time:     mixed_products -> gates -> the operator wkv7 -> output
    channel:  channel_mixing

B rows, T steps, C channels in H heads of N, d the ranks of the low-rank gates. Formulas: rwkv7.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from rwkv.model.first_derivative import first_derivative
from rwkv.model.fused import Tensors, cast, mix, mix_backward, product_backward, product_dtype

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
        of_last_x = grad_last_x if ctx.needs_input_grad[3] else None
        return (None, None, grad_x, of_last_x, *(-grad for grad in grad_mus), grad_R, grad_K, grad_V,
                *(grad for _, grad in found))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, N: int, k: Tensor, v: Tensor, v_first: Tensor | None, n: int, *others: Tensor) -> Tensors:
        dtype = k.dtype
        hidden, (k_k, k_a, w0, *rest), matrices = others[:n], others[n:2 * n + 1], cast(dtype, others[2 * n + 1:])
        k_k, *biases = cast(dtype, (k_k, *rest))
        tanh, sigmoid = torch.tanh(hidden[0]), torch.sigmoid(hidden[2])
        wide = torch.promote_types(dtype, torch.float32)
        decay = (tanh @ matrices[0]).to(wide).add_(w0).sigmoid_()
        rate = (hidden[1] @ matrices[1]).add_(biases[0]).sigmoid_()
        g = sigmoid @ matrices[2]
        keys = _by_head(k * k_k, N)
        inverse = keys.norm(dim=-1, keepdim=True, dtype=wide).clamp_(min=LEAST_NORM).reciprocal_()
        kk = (keys * inverse).to(dtype).flatten(2)
        # in half precision a rounded k_a, 1.02 at first, would make all factors too small; a rounded inverse may be infinite
        factor = torch.addcmul(1 - k_a, rate, k_a).to(dtype)             # 1 + (rate - 1) k_a
        k_a = k_a.to(dtype)
        new_v, saved_v = v, []
        if v_first is not None:
            gate = (hidden[3] @ matrices[3]).add_(biases[1]).sigmoid_()
            change = v_first - v
            new_v = torch.addcmul(v, change, gate)
            saved_v = [gate, change, hidden[3]]
        ctx.N, ctx.n = N, n
        ctx.save_for_backward(k, tanh, hidden[1], sigmoid, decay, rate, kk, inverse, factor, k_k, k_a, *matrices, *saved_v)
        return decay * FASTEST_LOG_W, k * factor, new_v, -kk, kk * rate, g

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_log_w: Tensor, grad_k: Tensor, grad_v: Tensor, grad_a: Tensor, grad_b: Tensor,
                 grad_g: Tensor) -> tuple[Tensor | None, ...]:
        k, tanh, hidden_a, sigmoid, decay, rate, kk, inverse, factor, k_k, k_a, *rest = ctx.saved_tensors
        (w2, a2, g2, *v2), saved_v = rest[:ctx.n], rest[ctx.n:]
        dtype, N = k.dtype, ctx.N
        grad_z = torch.ops.aten.sigmoid_backward(grad_log_w * FASTEST_LOG_W, decay)
        grad_w0 = _summed(grad_z)
        grad_tanh, grad_w2 = _row_product_backward(grad_z.to(dtype), tanh, w2)
        grad_hidden_w = torch.ops.aten.tanh_backward(grad_tanh, tanh)
        grad_sigmoid, grad_g2 = _row_product_backward(grad_g, sigmoid, g2)
        grad_hidden_g = torch.ops.aten.sigmoid_backward(grad_sigmoid, sigmoid)
        # kk = q / |q| with q = k k_k; a = -kk, b = kk rate, new k = k factor
        grad_kk = torch.addcmul(-grad_a, grad_b, rate)
        along = _by_head(grad_kk * kk, N).sum(-1, keepdim=True)
        _by_head(grad_kk, N).addcmul_(_by_head(kk, N), along, value=-1).mul_(inverse)
        grad_k_k = _summed(grad_kk * k)
        k_grad_k = k * grad_k
        grad_rate = torch.addcmul(grad_b * kk, k_grad_k, k_a)
        grad_k_a = _summed(k_grad_k.mul_(rate - 1))
        grad_old_k = torch.addcmul(grad_k * factor, grad_kk, k_k)
        grad_z = torch.ops.aten.sigmoid_backward(grad_rate, rate)
        grad_a0 = _summed(grad_z)
        grad_hidden_a, grad_a2 = _row_product_backward(grad_z, hidden_a, a2)
        if not saved_v:
            return (None, grad_old_k, grad_v, None, None, grad_hidden_w, grad_hidden_a, grad_hidden_g,
                    grad_k_k, grad_k_a, grad_w0, grad_a0, grad_w2, grad_a2, grad_g2)
        gate, change, hidden_v = saved_v
        grad_first = grad_v * gate
        grad_z = torch.ops.aten.sigmoid_backward(grad_v * change, gate)
        grad_v0 = _summed(grad_z)
        grad_hidden_v, grad_v2 = _row_product_backward(grad_z, hidden_v, v2[0])
        return (None, grad_old_k, grad_v - grad_first, grad_first, None, grad_hidden_w, grad_hidden_a, grad_hidden_g,
                grad_hidden_v, grad_k_k, grad_k_a, grad_w0, grad_a0, grad_v0, grad_w2, grad_a2, grad_g2, grad_v2)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor,
                matrix: Tensor) -> Tensor:
        dtype, N = g.dtype, y.shape[-1]
        weight, bias, matrix, r_k = cast(dtype, (weight, bias, matrix, r_k))
        normal, mean, inverse_std = torch.native_layer_norm(y, (N,), None, None, EPS)
        normal = normal.to(dtype)
        share = _by_head(r * k, N).mul(r_k).sum(-1, keepdim=True)
        read = torch.addcmul(bias, normal.flatten(2), weight)
        _by_head(read, N).addcmul_(share, _by_head(v, N))
        gated = read * g
        ctx.save_for_backward(y, mean, inverse_std, r, k, v, g, read, gated, share, r_k, weight, matrix)
        return linear(gated, matrix)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        y, mean, inverse_std, r, k, v, g, read, gated, share, r_k, weight, matrix = ctx.saved_tensors
        N = y.shape[-1]
        grad_gated, grad_matrix = product_backward(grad, gated, matrix)
        grad_g, grad_read = grad_gated * read, grad_gated.mul_(g)
        grad_bias = _summed(grad_read, 1)
        normal = ((y - mean) * inverse_std).to(grad_read.dtype).flatten(2)
        grad_weight = _summed(normal.mul_(grad_read), 1)
        grad_v = (_by_head(grad_read, N) * share).flatten(2)
        grad_share = (_by_head(grad_read, N) * _by_head(v, N)).sum(-1, keepdim=True)
        along = grad_share * r_k
        grad_r = (_by_head(k, N) * along).flatten(2)
        grad_k = (_by_head(r, N) * along).flatten(2)
        grad_r_k = (_by_head(r * k, N) * grad_share).sum((0, 1), dtype=_wide(r))
        grad_normal = _by_head(grad_read.mul_(weight), N).to(y.dtype)
        grad_y, _, _ = torch.ops.aten.native_layer_norm_backward(grad_normal, y, (N,), mean, inverse_std, None, None,
                                                                 (True, False, False))
        return grad_y, grad_r, grad_k, grad_v, grad_g, grad_r_k, grad_weight, grad_bias, grad_matrix


class _ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, x_k: Tensor, *weights: Tensor) -> Tensor:
        kept, (mixed,) = mix(dtype, x, last_x, (1 - x_k,))
        key, value = weights = cast(dtype, weights)
        relu = linear(mixed, key).clamp_(min=0)
        hidden = relu * relu
        ctx.save_for_backward(mixed, relu, hidden, *weights, *kept)
        return linear(hidden, value)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, relu, hidden, key, value, *kept = ctx.saved_tensors
        grad_hidden, grad_value = product_backward(grad, hidden, value)
        grad_relu = torch.addcmul(grad.new_zeros(()), grad_hidden, relu, value=2, out=grad_hidden)     # 2 grad_hidden relu
        grad_mixed, grad_key = product_backward(grad_relu, mixed, key)
        grad_x, grad_last_x, grad_mu = mix_backward(kept, (grad_mixed,))
        return None, grad_x, grad_last_x if ctx.needs_input_grad[2] else None, -grad_mu, grad_key, grad_value


def _by_head(tensor: Tensor, N: int) -> Tensor:
    """(B,T,C) as (B,T,H,N), without a copy."""
    return tensor.unflatten(-1, (-1, N))


def _summed(grad: Tensor, axes: int = 3) -> Tensor:
    """The gradient of a vector that was added or multiplied at each of (B,T): (1,1,C), or (C,) for axes=1."""
    total = grad.sum((0, 1), dtype=_wide(grad))
    return total if axes == 1 else total.view(1, 1, -1)


def _wide(tensor: Tensor) -> torch.dtype | None:
    """A sum over B and T is wide where the gradients are scaled."""
    return torch.float32 if tensor.dtype == torch.float16 else None


def _row_product_backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x (B,T,d) and M (d,C) from the gradient of x M (B,T,C)."""
    return grad @ matrix.T, x.flatten(0, 1).T @ grad.flatten(0, 1)
