"""An RWKV-7 block that processes one token of each row: the formulas of mix.py at T = 1, in fewer PyTorch operations."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from kernels.wkv7 import WKV7
from rwkv.model.decoding.layers import LowRank, norm_function, product_function, products_function
from rwkv.model.rwkv7.architecture import FASTEST_LOG_W, LEAST_NORM, STEP_MIXES, State
from rwkv.model.rwkv7.mix import Block, ChannelMix, TimeMix

PLAIN = (Block, TimeMix, ChannelMix, nn.GroupNorm)       # Step replaces modules of these classes


class Step:
    """Computes Block.forward for one token per row: (x (B,C), state, v_first (B,C)) -> (x, state, v_first).

    The state is a State of one layer, with att_x (B,C), wkv (B,H,N,N) and ffn_x (B,C). Step reads the block's weights and calls
    no modules. Use Step under torch.inference_mode.
    """

    @staticmethod
    def fits(block: Block, first: bool) -> bool:
        """Returns True if Step can replace this block. `first` means the model's first block, which gets no v_first."""
        att = block.att
        H, N = att.r_k.shape
        return (block.first == att.first == first and (N, H) == (att.N, att.ln_x.num_groups)
                and type(att.wkv) is WKV7)

    def __init__(self, block: Block) -> None:
        att, ffn = block.att, block.ffn
        self._ln0 = norm_function(block.ln0) if block.first else None
        self._ln1, self._ln2 = norm_function(block.ln1), norm_function(block.ln2)
        self._att, self._ffn_x_k = att, ffn.x_k[0]
        gates = STEP_MIXES[3:] if block.first else STEP_MIXES[2:]              # the first block has no v gate
        self._mu = torch.stack([getattr(att, f"x_{name}")[0] for name in STEP_MIXES])                          # (6,1,C)
        self._gates = LowRank(*([getattr(att, f"{name}{part}").to(att.k_k.dtype) for name in gates] for part in "12"))
        self._products = products_function(att.receptance, att.key, att.value)
        self._output, self._key, self._value = map(product_function, (att.output, ffn.key, ffn.value))

    def __call__(self, x: Tensor, state: State, carry: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        if self._ln0 is not None:
            x = self._ln0(x)
        normal = self._ln1(x)
        mixed, wkv, carry = self._time_mix(normal, state, carry)
        x = x + mixed
        ffn_normal = self._ln2(x)
        relu = self._key(torch.lerp(ffn_normal, state.ffn_x.to(x.dtype), self._ffn_x_k)).relu_()
        return x + self._value(relu.mul_(relu)), state._replace(att_x=normal, wkv=wkv, ffn_x=ffn_normal), carry

    def _time_mix(self, x: Tensor, state: State, v_first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        att = self._att
        mixes = torch.lerp(x, state.att_x.to(x.dtype), self._mu)               # (6,B,C)
        r, k, v = self._products(mixes[:3])
        if v_first is None:
            v_first = v
            w, a, g = self._gates(mixes[3:], _activate)
        else:
            v_gate, w, a, g = self._gates(mixes[2:], _activate)
            v = v + (v_first - v) * torch.sigmoid(att.v0[0] + v_gate)
        rate = torch.sigmoid(att.a0[0] + a)
        log_w = FASTEST_LOG_W * torch.sigmoid(att.w0[0].float() + w)
        kk = normalize(self._split_heads(k * att.k_k[0]).float(), dim=-1, eps=LEAST_NORM)
        k = k * (1 + (rate - 1) * att.k_a[0])
        r, k, v, rate = map(self._split_heads, (r, k, v, rate))
        y, wkv = WKV7.step(r, self._split_heads(log_w), k, v, -kk, kk * rate, state.wkv)
        bonus = (r * k * att.r_k).sum(-1, keepdim=True)
        y = torch.group_norm(y.flatten(1), len(att.r_k), att.ln_x.weight, att.ln_x.bias, att.ln_x.eps)
        return self._output((y + (bonus * v).flatten(1)) * g), wkv, v_first

    def _split_heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (-1, self._att.N))


def _activate(hidden: Tensor) -> None:
    """Applies the hidden activations of the last three gates in place: tanh for w, none for a, sigmoid for g."""
    hidden[-3].tanh_()
    hidden[-1].sigmoid_()
