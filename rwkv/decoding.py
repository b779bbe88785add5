"""One token after the other for a batch of rows, with as few small operations as PyTorch allows.

The arithmetic is the model's (rwkv/model.py at T = 1, WKV.step), which the tests hold it to. What makes it quicker: the
weights' forms are prepared once, buffers are overwritten, all mixes of a layer are one operation, and WKV's two
rescalings, of what y reads and of what the state becomes, are done together.

All this reads the weights and calls no module, so it is for plain models. A model with adapters, hooks or layers of another
kind is called for every token.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.wkv import decay_exponent
from rwkv.channel_mix import ChannelMix
from rwkv.fused import untouched
from rwkv.int8 import Int8Linear, products
from rwkv.model import RWKV, Block
from rwkv.state import State
from rwkv.time_mix import TimeMix

PLAIN = (RWKV, Block, TimeMix, ChannelMix, nn.ModuleList, nn.Embedding, nn.LayerNorm, nn.Linear, Int8Linear)


def decoder_of(model: RWKV, state: State) -> "Decoder | CallingDecoder":
    """The quick decoder where the model is plain, else one that calls the model."""
    return Decoder(model, state) if all(map(_plain, model.modules())) else CallingDecoder(model, state)


def _plain(module: nn.Module) -> bool:
    """Whether the weights alone, without a bias in a linear layer, say what a call of the module computes."""
    return type(module) in PLAIN and untouched(module) and not (isinstance(module, nn.Linear) and module.bias is not None)


class CallingDecoder:
    """What Decoder does, by a call of the model for each step, whatever its modules are."""

    def __init__(self, model: RWKV, state: State) -> None:
        self._model, self._state = model, state

    def step(self, tokens: Tensor) -> Tensor:
        logits, self._state = self._model.prefill(tokens.to(self._state.p.device).unsqueeze(1), self._state)
        return logits

    def keep(self, rows: list[int]) -> None:
        self._state = State(*(part[:, rows] for part in self._state))

    def state(self) -> State:
        return self._state


class Decoder:
    """Reads one token (B,) per step from a state of its own; `state` is what it has become, and `keep` drops rows."""

    @torch.inference_mode()
    def __init__(self, model: RWKV, state: State) -> None:
        self._embedding, blocks = model.emb.weight, model._layers()
        self._ln0, self._ln_out = _norm(blocks[0].ln0), _norm(model.ln_out)
        self._layers = [_Layer(block, *parts) for block, parts in zip(blocks, zip(*state, strict=True), strict=True)]
        self._head, self._dtype = _linear(model.head), model.ln_out.weight.dtype

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B,V) after tokens (B,)."""
        x = self._ln0(F.embedding(tokens.to(self._embedding.device), self._embedding).to(self._dtype))
        for layer in self._layers:
            x = layer.step(x)
        return self._head(self._ln_out(x))

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, in this order."""
        for layer in self._layers:
            layer.keep(rows)

    def state(self) -> State:
        """A copy of the state."""
        parts = ((layer.att.x, *layer.att.ab, layer.att.p, layer.ffn.x) for layer in self._layers)
        return State(*(torch.stack(part).float() for part in zip(*parts, strict=True)))


class _Layer:
    def __init__(self, block: Block, att_x: Tensor, a: Tensor, b: Tensor, p: Tensor, ffn_x: Tensor) -> None:
        self._ln1, self._ln2 = _norm(block.ln1), _norm(block.ln2)
        self.att, self.ffn = _TimeMixStep(block.att, att_x, a, b, p), _ChannelMixStep(block.ffn, ffn_x)

    def step(self, x: Tensor) -> Tensor:
        x = x + self.att.step(self._ln1(x))
        return self.ffn.add_step(x, self._ln2(x))

    def keep(self, rows: list[int]) -> None:
        self.att.keep(rows)
        self.ffn.x = self.ffn.x[rows]


class _TimeMixStep:
    """x (B,C) -> (B,C). The state: x of the step before; ab (2,B,A), numerator and denominator; p (B,A)."""

    def __init__(self, att: TimeMix, x: Tensor, a: Tensor, b: Tensor, p: Tensor) -> None:
        self._key_value_receptance = _linears(att.key, att.value, att.receptance)
        self._output = _linear(att.output)
        self._mu = torch.stack((att.time_mix_k[0], att.time_mix_v[0], att.time_mix_r[0]))                   # (3,1,C)
        u, w = att.time_first.float(), decay_exponent(att.time_decay.float())
        self._on_p = torch.stack((torch.zeros_like(w), w)).unsqueeze(1)        # (2,1,A): as y reads p, as the state keeps it
        self._on_k = torch.stack((u, torch.zeros_like(u))).unsqueeze(1)
        self.x, self.ab, self.p = x.to(self._mu.dtype), torch.stack((a, b)), p
        self._v1 = torch.ones_like(self.ab)                                                          # (2,B,A): v and 1
        self._shares = torch.empty(2, *self.ab.shape, device=a.device)         # of the past, and of now, in both weightings

    def step(self, x: Tensor) -> Tensor:
        k, v, r = self._key_value_receptance(torch.lerp(self.x, x, self._mu))
        self.x = x
        return self._output(r.sigmoid_().mul_(self._remember(k, v)))

    def _remember(self, k: Tensor, v: Tensor) -> Tensor:
        """WKV.step twice at once: index 0 is y's weighting (p against u + k), index 1 the new state's (p + w against k)."""
        past, now = shares = self._shares                                                                    # (2,B,A) each
        torch.add(self.p, self._on_p, out=past)
        torch.add(k, self._on_k, out=now)
        top = torch.maximum(past, now)
        shares.sub_(top).exp_()
        self._v1[0] = v
        y_and_state = torch.mul(past.unsqueeze(1), self.ab).addcmul_(now.unsqueeze(1), self._v1)           # (2,2,B,A)
        (num, den), self.ab = y_and_state.unbind()
        self.p = top[1]
        return num.div_(den)

    def keep(self, rows: list[int]) -> None:
        self.x, self.ab, self.p, self._v1 = self.x[rows], self.ab[:, rows], self.p[rows], self._v1[:, rows]
        self._shares = self._shares[:, :, rows]


class _ChannelMixStep:
    """x (B,C) -> (B,C). The state: x of the step before."""

    def __init__(self, ffn: ChannelMix, x: Tensor) -> None:
        self._key_receptance, self._value = _linears(ffn.key, ffn.receptance), _linear(ffn.value)
        self._mu = torch.stack((ffn.time_mix_k[0], ffn.time_mix_r[0]))                                      # (2,1,C)
        self.x = x.to(self._mu.dtype)

    def add_step(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + what channel mixing makes of x."""
        hidden, r = self._key_receptance(torch.lerp(self.x, x, self._mu))
        self.x = x
        hidden.relu_()
        return torch.addcmul(residual, r.sigmoid_(), self._value(hidden.mul_(hidden)))


def _norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    assert isinstance(norm, nn.LayerNorm)
    return partial(_layer_norm, norm.weight, norm.bias, norm.normalized_shape, norm.eps)


def _layer_norm(weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float, x: Tensor) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, eps)


def _linear(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer as a plain function of (B,K): nn.Module's call costs as much as a small operation."""
    return layer.of_rows if isinstance(layer, Int8Linear) else partial(F.linear, weight=cast(nn.Linear, layer).weight)


def _linears(*layers: nn.Module) -> Callable[[Tensor], list[Tensor]]:
    """Several layers as one function of their inputs (n,B,K), one after the other."""
    if all(isinstance(layer, Int8Linear) for layer in layers):
        return partial(products, cast(list[Int8Linear], layers))
    functions = [_linear(layer) for layer in layers]
    return lambda inputs: [function(rows) for function, rows in zip(functions, inputs.unbind(), strict=True)]
