"""RWKV-4's time and channel mixing as fused autograd functions, with hand-written gradients (see ../fused)."""


import torch
from torch import Tensor
from torch.nn.functional import linear

from rwkv.model.first_derivative import Context, first_derivative
from rwkv.model.fused import (
    Tensors,
    gate_backward,
    mix,
    mix_backward,
    product_backward,
    product_dtype,
    squared_relu,
    squared_relu_backward,
)
from rwkv.model.weight_cache import round_weights, tensors_to_save


def gated_product(gate: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Returns W (sigmoid(gate) * x), (B,T,O), for gate and x (B,T,C) and W (O,C)."""
    product: Tensor = _GatedProduct.apply(gate, x, weight)
    return product


def channel_mixing(x: Tensor, last_x: Tensor | None, mus: Tensors, key: Tensor, receptance: Tensor, value: Tensor) -> Tensor:
    """Returns sigmoid(R mix_r(x)) * (V max(K mix_k(x), 0)^2), (B,T,C). `mus` has mu_k and mu_r."""
    mixed: Tensor = _ChannelMixing.apply(product_dtype(x), x, last_x, *mus, key, receptance, value)
    return mixed


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        gate = torch.sigmoid(gate)
        (multiplied,) = round_weights(gate.dtype, (weight,))
        gated = gate * x
        ctx.save_for_backward(gate, x, gated, *tensors_to_save((weight,), (multiplied,)))
        ctx.weight_dtype = weight.dtype
        return linear(gated, multiplied)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> Tensors:
        gate, x, gated, weight = ctx.saved_tensors
        (weight,) = round_weights(gate.dtype, (weight,))
        grad_gated, grad_weight = product_backward(grad, gated, weight, ctx.weight_dtype)
        return *gate_backward(grad_gated, gate, x), grad_weight


class _ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, x: Tensor, last_x: Tensor | None, mu_k: Tensor, mu_r: Tensor,
                *weights: Tensor) -> Tensor:
        saved, (mix_k, mix_r) = mix(dtype, x, last_x, (mu_k, mu_r))
        key, receptance, value = multiplied = round_weights(dtype, weights)
        k = linear(mix_k, key)
        gate = linear(mix_r, receptance).sigmoid_()
        hidden = squared_relu(k)
        kv = linear(hidden, value)
        ctx.save_for_backward(mix_k, mix_r, k, hidden, gate, kv, *tensors_to_save(weights, multiplied), *saved)
        ctx.weight_dtype = weights[0].dtype
        return gate * kv

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        mix_k, mix_r, k, hidden, gate, kv, *weights, x, last_x, mu_k, mu_r = ctx.saved_tensors
        key, receptance, value = round_weights(k.dtype, weights)
        grad_r, grad_kv = gate_backward(grad, gate, kv)
        grad_hidden, grad_value = product_backward(grad_kv, hidden, value, ctx.weight_dtype)
        grad_mix_k, grad_key = product_backward(squared_relu_backward(grad_hidden, k), mix_k, key, ctx.weight_dtype)
        grad_mix_r, grad_receptance = product_backward(grad_r, mix_r, receptance, ctx.weight_dtype)
        grad_x, grad_last_x, *grad_mus = mix_backward((x, last_x, mu_k, mu_r), (grad_mix_k, grad_mix_r))
        return None, grad_x, grad_last_x, *grad_mus, grad_key, grad_receptance, grad_value
