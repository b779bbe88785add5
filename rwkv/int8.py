"""Matrix products in int8 on a CPU: weights rounded once per output channel, inputs as they come, per row.

An input row is scaled by its own largest magnitude, so that a row's result does not depend on the rows beside it, and the
product of the integers is exact: a batch gives to the bit what its rows give alone. The products are torch's own
(FBGEMM: VNNI instructions where the CPU has them). Everything else is computed in float32.
"""

import warnings
from typing import cast

import torch
from torch import Tensor, nn

from rwkv.fingerprint import fingerprint
from rwkv.model import RWKV, Block

SMALLEST = 1e-30                         # a row of zeros stays one


class Int8Linear(nn.Module):
    """nn.Linear without a bias, from its float weight (N,K): x (...,K) float32 -> (...,N) float32.

    non_negative: inputs are at least 0, as after a ReLU, and use all 8 bits for their magnitude.
    """

    def __init__(self, weight: Tensor, non_negative: bool = False) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self._step, self._zero = (1 / 255, 0) if non_negative else (1 / 127, 128)
        self._packed = _pack(weight.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
        return self.product(rows / largest).mul_(largest).view(*x.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """The integer product alone, of rows (B,K) within [-1, 1]."""
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, self._step, self._zero, self._packed)
        return out


@torch.no_grad()
def to_int8(model: RWKV) -> RWKV:
    """Replaces every matrix of the model by its int8 form, one at a time; the embedding becomes bfloat16.

    The model, which must be on a CPU, then reads and writes, and cannot be trained or saved.
    """
    model.fingerprint = fingerprint(model)
    for block in (cast(Block, block) for block in model.blocks):
        _replace(block.att, "key", "value", "receptance", "output")
        _replace(block.ffn, "key", "receptance")
        _replace(block.ffn, "value", non_negative=True)          # of a squared ReLU
    _replace(model, "head")
    model.emb.weight = nn.Parameter(model.emb.weight.to(torch.bfloat16), requires_grad=False)
    return model


def _replace(parent: nn.Module, *names: str, non_negative: bool = False) -> None:
    for name in names:
        setattr(parent, name, Int8Linear(cast(nn.Linear, getattr(parent, name)).weight, non_negative))


def _pack(weight: Tensor) -> torch.ScriptObject:
    scale = weight.abs().amax(1).clamp_(min=SMALLEST) / 127
    integers = (weight / scale.unsqueeze(1)).round_().to(torch.int8)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed
