"""DeepEmbed, RWKV-7a's addition to channel mixing: a matrix for each token in every layer. mix.py has the formula."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from rwkv.model import fused
from rwkv.model.base import Model
from rwkv.model.packing import Packing
from rwkv.model.rwkv7.architecture import sizes
from rwkv.model.rwkv7.mix import Block, Carry, ChannelMix, Recompute

MERGED_ROWS = 4096                       # rows of s_emb that are merged at a time


def first_carry(tokens: Tensor) -> Carry:
    return Carry(tokens=tokens)


class DeepEmbedChannelMix(ChannelMix):
    """Channel mixing with DeepEmbed, which reads the carry's tokens and, before merge(), the tokens' embeddings."""

    def __init__(self, n_embd: int, n_ffn: int, vocab_size: int, R: int) -> None:
        super().__init__(n_embd, n_ffn)
        self.R = R
        self.s_emb = nn.Embedding(vocab_size, R * R)
        self.s_emb_x: nn.Linear | None = nn.Linear(n_embd, R * R, bias=False)
        self.s1 = nn.Parameter(torch.zeros(n_embd, R))
        self.s2 = nn.Parameter(torch.zeros(R, n_ffn))
        self.s0 = nn.Parameter(torch.ones(1, 1, n_ffn))

    def forward(self, x: Tensor, last_x: Tensor | None, packing: Packing | None = None, recompute_x: Recompute | None = None,
                carry: Carry = Carry()) -> tuple[Tensor, Tensor]:        # noqa: B008  immutable
        (mixed,) = fused.token_shift(x, last_x, 1 - self.x_k, first=packing.shift_mask if packing else None)
        relu = torch.relu(self.key(mixed))
        inner = (x @ self.s1).unsqueeze(-2) @ self._matrices(x, carry)           # (B,T,1,R)
        return self.value(relu * relu * (inner.squeeze(-2) @ self.s2 + self.s0)), fused.last_step(x)

    def _matrices(self, x: Tensor, carry: Carry) -> Tensor:
        rows = self.s_emb(carry.tokens).to(x.dtype)
        if self.s_emb_x is not None:
            rows = rows + self.s_emb_x(carry.embedded)
        return rows.unflatten(-1, (self.R, self.R))

    @torch.no_grad()
    def merge(self, embedding: Tensor, norm: nn.LayerNorm) -> None:
        """Adds s_emb_x ln0(emb[token]), computed in float32, to each row of s_emb, and drops s_emb_x."""
        assert self.s_emb_x is not None
        merged = torch.empty_like(self.s_emb.weight)
        weight, bias, matrix = norm.weight.float(), norm.bias.float(), self.s_emb_x.weight.float()
        for start in range(0, len(merged), MERGED_ROWS):
            rows = slice(start, start + MERGED_ROWS)
            normal = layer_norm(embedding[rows].float(), norm.normalized_shape, weight, bias, norm.eps)
            merged[rows] = linear(normal, matrix).add_(self.s_emb.weight[rows])
        self.s_emb.weight = nn.Parameter(merged, requires_grad=self.s_emb.weight.requires_grad)
        self.s_emb_x = None


def add_deep_embed(model: Model) -> None:
    """Replaces the channel mixing of a new model's blocks by DeepEmbedChannelMix."""
    C, _, _, F, _ = sizes(model.config)
    R = model.config.deep_embed_dim
    assert R is not None
    for block in cast(list[Block], [*model.blocks]):
        block.ffn = DeepEmbedChannelMix(C, F, model.vocab_size, R)


def merge(model: Model) -> None:
    """Merges the embedding into every layer's s_emb, except in layers where this has been done already."""
    blocks = cast(list[Block], [*model.blocks])
    for block in blocks:
        ffn = cast(DeepEmbedChannelMix, block.ffn)
        if ffn.s_emb_x is not None:
            ffn.merge(model.emb.weight, blocks[0].ln0)
