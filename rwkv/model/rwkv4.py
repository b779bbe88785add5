"""RWKV-4: embedding, n_layer blocks of time and channel mixing, and a head; official parameter names (RWKV-LM, RWKV-v4neo).

One model, three forms that agree: whole sequences (T > 1), chunks with the state carried between them, and one token
at a time (T = 1). Which kernel mixes time is the operator it is built with; the weights do not depend on it.

Time mixing, RWKV-4's attention: what it reads of the past comes through the WKV operator that it is given.

    r, k, v = R mix_r(x), K mix_k(x), V mix_v(x)        out = O (sigmoid(r) * wkv(k, v))

with mix(x) = mu x_t + (1 - mu) x_{t-1}. Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1; names are RWKV-LM's.

Channel mixing, RWKV-4's feed-forward: sigmoid(R mix_r(x)) * (V relu(K mix_k(x))^2).

Source: the RWKV-4 paper (arXiv 2305.13048), section 3.1; names are RWKV-LM's.

RWKV-4's initialisation: decays spread over the channels and layers, matrices orthogonal or zero.

Source: RWKV-LM, RWKV-v4neo/src/model.py; the paper (arXiv 2305.13048), appendix E. Draws from torch's global generator.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from kernels.wkv4 import WKV, WKVState
from rwkv.config import ModelConfig
from rwkv.model import rwkv4_fused
from rwkv.model.rwkv4_fused import last, token_shift, untouched
from rwkv.model.state import LayerState, State
from rwkv.pretrained import Pretrained


class Block(nn.Module):
    """x + time mixing of it, then + channel mixing of it, each after a LayerNorm; block 0 normalises the embedding."""

    def __init__(self, config: ModelConfig, layer: int, wkv: WKV) -> None:
        super().__init__()
        C, self.first = config.n_embd, layer == 0
        if self.first:
            self.ln0 = nn.LayerNorm(C)
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.att = TimeMix(C, config.n_att or C, wkv)
        self.ffn = ChannelMix(C, config.n_ffn or 4 * C)

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        x = self.ln0(x) if self.first else x
        mixed, att_x, wkv = self.att(self.ln1(x), state.att_x, state.wkv)
        x = x + mixed
        mixed, ffn_x = self.ffn(self.ln2(x), state.ffn_x)
        return x + mixed, LayerState(att_x, wkv, ffn_x)


class RWKV(Pretrained, nn.Module):
    """model(tokens (B,T) int64, state=None) -> (logits (B,T,V), state); the state given is not changed.

    from_pretrained and save_pretrained are in rwkv/checkpoint/files.py.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, wkv: WKV) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.fingerprint: str | None = None      # rwkv/model/fingerprint.py
        self.emb = nn.Embedding(vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer, wkv) for layer in range(config.n_layer))
        self.ln_out = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the head reads, (B,T,C): for a loss, or for the logits of the last position alone; and the state after it."""
        hidden, layers = self._read(tokens, state)
        return hidden, State.stack(layers)

    def hidden_alone(self, tokens: Tensor) -> Tensor:
        """The same from the empty state, without the state after it, of which training on windows has no use."""
        return self._read(tokens, None)[0]

    def _read(self, tokens: Tensor, state: State | None) -> tuple[Tensor, list[LayerState]]:
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens are (B,T) with T at least 1, got {tuple(tokens.shape)}")
        if state is None:
            state = self.empty_state(len(tokens))
        self.check_state(state, len(tokens))
        blocks, layers = self._layers(), []
        x = self.emb(tokens).to(self.ln_out.weight.dtype)
        for block, layer_state in zip(blocks, state.layers(), strict=True):
            x, layer_state = block(x, layer_state)
            layers.append(layer_state)
        return self.ln_out(x), layers

    def empty_state(self, B: int) -> State:
        """The state before the first token, for B rows."""
        C = self.config.n_embd
        return State.empty(self.config.n_layer, B, C, self.config.n_att or C, self.emb.weight.device)

    def check_state(self, state: State, B: int) -> None:
        """Raises ValueError where `state` is not one of this model for B rows."""
        L, C = self.config.n_layer, self.config.n_embd
        A = self.config.n_att or C
        expected = [(L, B, C), (L, B, A), (L, B, A), (L, B, A), (L, B, C)]
        found = [tuple(part.shape) for part in state]
        if found != expected:
            raise ValueError(f"the state does not fit this model and {B} rows: its parts have the shapes {found}, expected "
                             f"{expected}")

    def init_weights(self) -> "RWKV":
        """RWKV-4's initialisation, from torch's global random generator."""
        init_embedding_and_head(self.emb, self.head)
        for layer, block in enumerate(self._layers()):
            init_time_mix(block.att, layer, len(self.blocks))
            init_channel_mix(block.ffn, layer, len(self.blocks))
        return self

    def _layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The logits (B,V) after the last of tokens (B,T), T >= 1, in one parallel pass."""
        if not untouched(self):              # a hook on the model sees and changes the logits of all positions
            logits, state = self(tokens, state)
            return logits[:, -1], state
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden[:, -1]), state


class TimeMix(nn.Module):
    """x (B,T,C), last_x (B,C) and state before it -> (out (B,T,C), last x, state after it)."""

    def __init__(self, n_embd: int, n_att: int, wkv: WKV) -> None:
        super().__init__()
        self.wkv = wkv
        self.time_decay = nn.Parameter(torch.zeros(n_att))
        self.time_first = nn.Parameter(torch.zeros(n_att))
        self.time_mix_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_v = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_att, bias=False)
        self.value = nn.Linear(n_embd, n_att, bias=False)
        self.receptance = nn.Linear(n_embd, n_att, bias=False)
        self.output = nn.Linear(n_att, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor, state: WKVState) -> tuple[Tensor, Tensor, WKVState]:
        mus = self.time_mix_k, self.time_mix_v, self.time_mix_r
        if not rwkv4_fused.fits(self.key, self.value, self.receptance, self.output):
            for_k, for_v, for_r = token_shift(x, last_x, *mus)
            y, state = self._remember(self.key(for_k), self.value(for_v), state)
            return self.output(torch.sigmoid(self.receptance(for_r)) * y), last(x), state
        weights = self.key.weight, self.value.weight, self.receptance.weight
        k, v, r = rwkv4_fused.mixed_products(x, last_x, mus, weights)
        y, state = self._remember(k, v, state)
        return rwkv4_fused.gated_product(r, y, self.output.weight), last(x), state

    def _remember(self, k: Tensor, v: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
        if k.shape[1] == 1 and not torch.is_grad_enabled():
            y, state = self.wkv.step(self.time_decay, self.time_first, k[:, 0], v[:, 0], state)
            return y.unsqueeze(1), state
        return self.wkv(self.time_decay, self.time_first, k, v, state)


class ChannelMix(nn.Module):
    """x (B,T,C) and last_x (B,C) before it -> (out (B,T,C), last x)."""

    def __init__(self, n_embd: int, n_ffn: int) -> None:
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.time_mix_r = nn.Parameter(torch.zeros(1, 1, n_embd))
        self.key = nn.Linear(n_embd, n_ffn, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x: Tensor, last_x: Tensor) -> tuple[Tensor, Tensor]:
        mus = self.time_mix_k, self.time_mix_r
        if not rwkv4_fused.fits(self.key, self.receptance, self.value):
            for_k, for_r = token_shift(x, last_x, *mus)
            positive = torch.relu(self.key(for_k))
            return torch.sigmoid(self.receptance(for_r)) * self.value(positive * positive), last(x)
        weights = self.key.weight, self.receptance.weight, self.value.weight
        return rwkv4_fused.channel_mixing(x, last_x, mus, *weights), last(x)


def init_time_mix(att: TimeMix, layer: int, n_layer: int) -> None:
    rho, sigma = _depth(layer, n_layer)
    n_att, x = len(att.time_decay), _ramp(att.time_mix_k.shape[-1])
    h = torch.arange(n_att)
    with torch.no_grad():
        att.time_decay.copy_(-5 + 8 * (h / max(n_att - 1, 1)) ** (0.7 + 1.3 * rho))
        att.time_first.copy_(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
        att.time_mix_k.copy_(x ** sigma)
        att.time_mix_v.copy_(x ** sigma + 0.3 * rho)
        att.time_mix_r.copy_(x ** (0.5 * sigma))
    _zero(att.key, att.receptance, att.output)
    _orthogonal(att.value)


def init_channel_mix(ffn: ChannelMix, layer: int, n_layer: int) -> None:
    _, sigma = _depth(layer, n_layer)
    with torch.no_grad():
        for mu in (ffn.time_mix_k, ffn.time_mix_r):
            mu.copy_(_ramp(mu.shape[-1]) ** sigma)
    _zero(ffn.value, ffn.receptance)
    _orthogonal(ffn.key)


def init_embedding_and_head(emb: nn.Embedding, head: nn.Linear) -> None:
    nn.init.uniform_(emb.weight, -1e-4, 1e-4)
    _orthogonal(head, scale=0.5)


def _depth(layer: int, n_layer: int) -> tuple[float, float]:
    """How deep the layer lies, from 0 to 1, and from 1 towards 0."""
    return layer / max(n_layer - 1, 1), 1 - layer / n_layer


def _ramp(n_embd: int) -> Tensor:
    return torch.arange(n_embd) / n_embd


def _zero(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.zeros_(layer.weight)


def _orthogonal(layer: nn.Linear, scale: float = 1.0) -> None:
    rows, columns = layer.weight.shape
    nn.init.orthogonal_(layer.weight, gain=scale * math.sqrt(max(rows / columns, 1.0)))
