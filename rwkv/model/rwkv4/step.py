"""An RWKV-4 block that processes one token of each row, in as few PyTorch operations as possible.

The formulas are those of mix.py at T = 1, and tests compare the results. This code is faster, because weights are prepared
once, one operation computes all mixes of time or of channel mixing, and one operation computes WKV's exponentials both for y
and for the next state.
"""

import torch
from torch import Tensor

from kernels.wkv4 import WKV4, decay_exponent
from rwkv.model.decoding.layers import norm_function, product_function, products_function
from rwkv.model.rwkv4.architecture import State
from rwkv.model.rwkv4.mix import Block, ChannelMix, TimeMix

PLAIN = (Block, TimeMix, ChannelMix)       # Step replaces modules of these classes


class Step:
    """Computes Block.forward for one token per row: (x (B,C), state) -> (x, state).

    The state is a State of one layer, with tensors (B,C) or (B,A). Step reads the block's weights and calls no modules. Use
    Step under torch.inference_mode.
    """

    @staticmethod
    def fits(block: Block, first: bool) -> bool:
        """Returns True if Step can replace this block. `first` tells whether this is the model's first block."""
        return block.first == first and type(block.att.wkv) is WKV4

    def __init__(self, block: Block) -> None:
        att, ffn = block.att, block.ffn
        self._ln0 = norm_function(block.ln0) if block.first else None
        self._ln1, self._ln2 = norm_function(block.ln1), norm_function(block.ln2)
        self._key_value_receptance = products_function(att.key, att.value, att.receptance)
        self._output, self._value = product_function(att.output), product_function(ffn.value)
        self._key_receptance = products_function(ffn.key, ffn.receptance)
        self._mu = torch.stack((att.time_mix_k[0], att.time_mix_v[0], att.time_mix_r[0]))      # (3,1,C)
        self._ffn_mu = torch.stack((ffn.time_mix_k[0], ffn.time_mix_r[0]))     # (2,1,C)
        u, w = att.time_first.float(), decay_exponent(att.time_decay.float())
        self._p_offset = torch.stack((torch.zeros_like(w), w)).unsqueeze(1)    # (2,1,A); 0 is for y, 1 for the next state
        self._k_offset = torch.stack((u, torch.zeros_like(u))).unsqueeze(1)

    def __call__(self, x: Tensor, state: State, carry: None = None) -> tuple[Tensor, State, None]:
        if self._ln0 is not None:
            x = self._ln0(x)
        normal = self._ln1(x)
        k, v, r = self._key_value_receptance(torch.lerp(state.att_x.to(x.dtype), normal, self._mu))
        wkv, a, b, p = self._wkv(k, v, state)
        x = x + self._output(r.sigmoid_().mul_(wkv))
        ffn_normal = self._ln2(x)
        relu_k, r = self._key_receptance(torch.lerp(state.ffn_x.to(x.dtype), ffn_normal, self._ffn_mu))
        relu_k.relu_()
        x = torch.addcmul(x, r.sigmoid_(), self._value(relu_k.mul_(relu_k)))
        return x, state._replace(att_x=normal, a=a, b=b, p=p, ffn_x=ffn_normal), None

    def _wkv(self, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes WKV4.step. Index 0 of `past` and `now` is for y (p, u + k), index 1 for the next state (p + w, k)."""
        past, now = state.p + self._p_offset, k + self._k_offset               # (2,B,A) each
        top = torch.maximum(past, now)
        past, now = past.sub_(top).exp_(), now.sub_(top).exp_()
        numerators = (past * state.a).addcmul_(now, v.to(now.dtype))
        denominators = (past * state.b).add_(now)
        return numerators[0] / denominators[0], numerators[1], denominators[1], top[1]
