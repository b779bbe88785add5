"""What time and channel mixing compute between LayerNorm, WKV and the residual stream, in three steps of autograd.

Each computes its gradient itself, in few operations over few temporaries. A CPU spends a third of a small model's step on
starting operations and on autograd's own, and those between a large model's matrix products are bound by memory: autograd's
general formulas read and write each tensor several times more. Under autocast everything here is in the dtype of the products.

The token shift of long sequences is the operator of kernels/ where there is one that is faster than PyTorch's operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from kernels import select
from kernels.shift import TokenShift
from rwkv.first_derivative import first_derivative
from rwkv.token_shift import multiplied

LONG = range(2**19, 2**29)      # elements of x: from where one pass outweighs an operator's call, to where its indices may end
Tensors = tuple[Tensor, ...]


def fits(*layers: nn.Module) -> bool:
    """Whether these layers' products may be computed without calling them.

    Not where a compiler, which fuses better, torch.jit.trace, a function transform (torch.func) or a hook has to see them
    called, where another layer or forward stands in one's place, or where a weight learns nothing, which autograd leaves out.
    """
    seen = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    return not seen and all(map(_plain, layers))


def untouched(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward and nothing else: it has no hook and no forward of its own."""
    hooked = (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
              or _has_any_global_hook())
    return "forward" not in module.__dict__ and not hooked


def _plain(layer: nn.Module) -> bool:
    return (type(layer) is nn.Linear and layer.bias is None and untouched(layer)
            and type(layer.weight) in (nn.Parameter, Tensor)
            and (layer.weight.requires_grad or not torch.is_grad_enabled()))


def mixed_products(x: Tensor, last_x: Tensor, mus: Tensors, weights: Tensors) -> Tensors:
    """W mix(x) for each mu (1,1,C), of mix(x) = mu x_t + (1 - mu) x_{t-1}, and its W (O,C): (B,T,O) each.

    x (B,T,C), and last_x (B,C) before its first step.
    """
    products: Tensors = _MixedProducts.apply(_operator(x), multiplied(x), x, last_x, *mus, *weights)
    return products


def gated_product(gate: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """W (sigmoid(gate) * x), of gate and x (B,T,C) and W (O,C): (B,T,O)."""
    product: Tensor = _GatedProduct.apply(gate, x, weight)
    return product


def channel_mixing(x: Tensor, last_x: Tensor, mus: Tensors, key: Tensor, receptance: Tensor, value: Tensor) -> Tensor:
    """sigmoid(R mix_r(x)) * (V max(K mix_k(x), 0)^2), (B,T,C), of x (B,T,C), last_x (B,C), mus = (mu_k, mu_r) and K, R, V."""
    mixed: Tensor = _ChannelMixing.apply(_operator(x), multiplied(x), x, last_x, *mus, key, receptance, value)
    return mixed


def _operator(x: Tensor) -> TokenShift | None:
    """Of a long x; only training pays for its start."""
    return select.token_shift(x.device, x.dtype) if torch.is_grad_enabled() and x.numel() in LONG else None


class _MixedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shift: TokenShift | None, dtype: torch.dtype, x: Tensor, last_x: Tensor, *others: Tensor) -> Tensors:
        mus, weights = others[:len(others) // 2], _in(dtype, others[len(others) // 2:])
        ctx.shift, (kept, mixes) = shift, _mix(shift, dtype, x, last_x, mus)
        ctx.save_for_backward(*mixes, *weights, *kept)
        return tuple(map(linear, mixes, weights))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, saved = len(grads), ctx.saved_tensors
        products = list(map(_product_backward, grads, saved[:n], saved[n:2 * n]))
        of_mixes, of_weights = zip(*products, strict=True)
        return None, None, *_mix_backward(ctx.shift, saved[2 * n:], of_mixes), *of_weights


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        share, weight = torch.sigmoid(gate), weight.to(gate.dtype)
        gated = share * x
        ctx.save_for_backward(share, x, gated, weight)
        return linear(gated, weight)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        share, x, gated, weight = ctx.saved_tensors
        of_gated, of_weight = _product_backward(grad, gated, weight)
        return *_gate_backward(of_gated, share, x), of_weight


class _ChannelMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shift: TokenShift | None, dtype: torch.dtype, x: Tensor, last_x: Tensor, mu_k: Tensor, mu_r: Tensor,
                *weights: Tensor) -> Tensor:
        ctx.shift, (kept, (for_k, for_r)) = shift, _mix(shift, dtype, x, last_x, (mu_k, mu_r))
        key, receptance, value = weights = _in(dtype, weights)
        positive = linear(for_k, key).clamp_(min=0)
        share, hidden = linear(for_r, receptance).sigmoid_(), positive * positive
        read = linear(hidden, value)
        ctx.save_for_backward(for_k, for_r, positive, hidden, share, read, *weights, *kept)
        return share * read

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for_k, for_r, positive, hidden, share, read, key, receptance, value, *kept = ctx.saved_tensors
        of_r, of_read = _gate_backward(grad, share, read)
        of_hidden, of_value = _product_backward(of_read, hidden, value)
        of_k = torch.addcmul(grad.new_zeros(()), of_hidden, positive, value=2, out=of_hidden)     # 2 of_hidden positive
        of_for_k, of_key = _product_backward(of_k, for_k, key)
        of_for_r, of_receptance = _product_backward(of_r, for_r, receptance)
        return None, None, *_mix_backward(ctx.shift, kept, (of_for_k, of_for_r)), of_key, of_receptance, of_value


def _mix(shift: TokenShift | None, dtype: torch.dtype, x: Tensor, last_x: Tensor, mus: Tensors) -> tuple[Tensors, Tensors]:
    """What _mix_backward needs, and the mixes in dtype."""
    if shift is not None:
        kept = x, last_x, torch.cat(mus).view(len(mus), -1)
        return kept, shift(*kept, dtype)
    x, last_x, mus = x.to(dtype), last_x.to(dtype), _in(dtype, mus)
    before = torch.cat((last_x.unsqueeze(1), x[:, :-1]), dim=1)
    change = x - before
    return (change, *mus), tuple(torch.addcmul(before, change, mu) for mu in mus)


def _mix_backward(shift: TokenShift | None, kept: Sequence[Tensor], grads: Tensors) -> Tensors:
    """The gradients of x, last_x and each mu; those of the mixes are used up."""
    if shift is not None:
        x, last_x, stacked = kept
        of_x, of_before, of_stacked = shift.gradients(x, last_x, stacked, grads)
        return of_x, of_before, *of_stacked.view(len(grads), 1, 1, -1)
    change, *mus = kept
    wide = torch.float32 if change.dtype == torch.float16 else None      # a sum over B and T, of gradients that are scaled
    of_mus = [(grad * change).sum((0, 1), keepdim=True, dtype=wide) for grad in grads]
    of_x, of_before = grads[0] * mus[0], grads[0]
    for grad, mu in zip(grads[1:], mus[1:], strict=True):
        of_x.addcmul_(grad, mu)
        of_before += grad
    of_before -= of_x
    of_x[:, :-1].add_(of_before[:, 1:])      # += would write the part back once more
    return of_x, of_before[:, 0], *of_mus


def _product_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x (B,T,I) and W (O,I), of that of W x (B,T,O)."""
    return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


def _gate_backward(grad: Tensor, share: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a gate, whose sigmoid is share, and x, of that of share * x."""
    return torch.ops.aten.sigmoid_backward(grad * x, share), grad * share


def _in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensors:
    return tuple(tensor.to(dtype) for tensor in tensors)
