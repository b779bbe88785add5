"""RWKV-4: embedding, n_layer blocks of time and channel mixing, and a head; official parameter names (RWKV-LM, RWKV-v4neo).

One model, three forms that agree: whole sequences (T > 1), chunks with the state carried between them, and one token
at a time (T = 1). Which kernel mixes time is the operator it is built with; the weights do not depend on it.
"""

from typing import cast

import torch
from torch import Tensor, nn

from kernels.wkv import WKV
from rwkv.channel_mix import ChannelMix
from rwkv.checkpoint import Pretrained
from rwkv.config import ModelConfig
from rwkv.fused import untouched
from rwkv.init import init_channel_mix, init_embedding_and_head, init_time_mix
from rwkv.state import LayerState, State
from rwkv.time_mix import TimeMix


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

    from_pretrained and save_pretrained are in rwkv/checkpoint.py.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, wkv: WKV) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.fingerprint: str | None = None      # rwkv/fingerprint.py
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
