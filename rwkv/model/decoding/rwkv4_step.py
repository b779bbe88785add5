"""One RWKV-4 block, one token at a time for a batch of rows, with as few small operations as PyTorch allows.

The arithmetic is that of rwkv4.py at T = 1 (of WKV4.step), which the tests compare it with. It is faster because the weights'
forms are prepared once, buffers are overwritten, all mixes of a layer are one operation, and WKV's two weightings, the one
that y reads and the one that the next state keeps, are computed together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.wkv4 import decay_exponent
from rwkv.model.decoding.layers import norm_function, product_function, products_function


class Step:
    """One block with a state of its own, the tensors of `state`: rwkv4.State of one layer, (B,C) or (B,A) each.

    It reads the weights and calls no module. Use it under torch.inference_mode.
    """

    def __init__(self, block: Any, state: Sequence[Tensor]) -> None:
        att_x, a, b, p, ffn_x = state
        self._ln0 = norm_function(block.ln0) if block.first else None
        self._ln1, self._ln2 = norm_function(block.ln1), norm_function(block.ln2)
        self._att = _TimeMixStep(block.att, att_x, a, b, p)
        self._ffn = _ChannelMixStep(block.ffn, ffn_x)

    def step(self, x: Tensor, carry: None = None) -> tuple[Tensor, None]:
        """x (B,C) -> (x, None): Block.forward for one token."""
        if self._ln0 is not None:
            x = self._ln0(x)
        x = x + self._att.step(self._ln1(x))
        return self._ffn.add_step(x, self._ln2(x)), None

    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, in this order."""
        self._att.keep(rows)
        self._ffn.x = self._ffn.x[rows]

    def join(self, state: Sequence[Tensor]) -> None:
        """Goes on with the rows of `state` too, after those that are here."""
        att_x, a, b, p, ffn_x = state
        self._att.join(att_x, a, b, p)
        self._ffn.x = torch.cat((self._ffn.x, ffn_x.to(self._ffn.x.dtype)))

    def state(self) -> tuple[Tensor, ...]:
        """The tensors of the state; the next step may overwrite them."""
        return self._att.x, *self._att.ab, self._att.p, self._ffn.x


class _TimeMixStep:
    """x (B,C) -> (B,C). The state: x of the step before; ab (2,B,A), numerator and denominator; p (B,A)."""

    def __init__(self, att: Any, x: Tensor, a: Tensor, b: Tensor, p: Tensor) -> None:
        self._key_value_receptance = products_function(att.key, att.value, att.receptance)
        self._output = product_function(att.output)
        self._mu = torch.stack((att.time_mix_k[0], att.time_mix_v[0], att.time_mix_r[0]))      # (3,1,C)
        u, w = att.time_first.float(), decay_exponent(att.time_decay.float())
        self._on_p = torch.stack((torch.zeros_like(w), w)).unsqueeze(1)        # (2,1,A): as y reads p, as the state keeps it
        self._on_k = torch.stack((u, torch.zeros_like(u))).unsqueeze(1)
        self.x, self.ab, self.p = x.to(self._mu.dtype), torch.stack((a, b)), p
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._v_and_1 = torch.ones_like(self.ab)                               # (2,B,A)
        self._weights = torch.empty(2, *self.ab.shape, device=self.ab.device)  # of the past and of now, in both weightings

    def step(self, x: Tensor) -> Tensor:
        k, v, r = self._key_value_receptance(torch.lerp(self.x, x, self._mu))
        self.x = x
        return self._output(r.sigmoid_().mul_(self._wkv(k, v)))

    def _wkv(self, k: Tensor, v: Tensor) -> Tensor:
        """WKV4.step twice at once: index 0 is y's weighting (p against u + k), index 1 the new state's (p + w against k)."""
        past, now = self._weights                                              # (2,B,A) each
        torch.add(self.p, self._on_p, out=past)
        torch.add(k, self._on_k, out=now)
        top = torch.maximum(past, now)
        self._weights.sub_(top).exp_()
        self._v_and_1[0] = v
        y_and_state = torch.mul(past.unsqueeze(1), self.ab).addcmul_(now.unsqueeze(1), self._v_and_1)      # (2,2,B,A)
        (numerator, denominator), self.ab = y_and_state.unbind()
        self.p = top[1]
        return numerator.div_(denominator)

    def keep(self, rows: list[int]) -> None:
        self.x, self.ab, self.p = self.x[rows], self.ab[:, rows], self.p[rows]
        self._make_buffers()

    def join(self, x: Tensor, a: Tensor, b: Tensor, p: Tensor) -> None:
        self.x, self.p = torch.cat((self.x, x.to(self.x.dtype))), torch.cat((self.p, p))
        self.ab = torch.cat((self.ab, torch.stack((a, b))), 1)
        self._make_buffers()


class _ChannelMixStep:
    """x (B,C) -> (B,C). The state: x of the step before."""

    def __init__(self, ffn: Any, x: Tensor) -> None:
        self._key_receptance = products_function(ffn.key, ffn.receptance)
        self._value = product_function(ffn.value)
        self._mu = torch.stack((ffn.time_mix_k[0], ffn.time_mix_r[0]))         # (2,1,C)
        self.x = x.to(self._mu.dtype)

    def add_step(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual plus the channel mixing of x."""
        relu_k, r = self._key_receptance(torch.lerp(self.x, x, self._mu))
        self.x = x
        relu_k.relu_()
        return torch.addcmul(residual, r.sigmoid_(), self._value(relu_k.mul_(relu_k)))
