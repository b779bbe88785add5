"""Matrix products in int8 on a CPU: weights rounded once per output channel, inputs as they come, per row.

An input row is scaled by its own largest magnitude, so that a row's result does not depend on the rows beside it, and the
product of the integers is exact: a batch gives to the bit what its rows give alone. The products are torch's own
(FBGEMM: VNNI instructions where the CPU has them). Everything else is computed in float32.
"""

import warnings
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from rwkv.errors import UserError
from rwkv.model.base import Model

SMALLEST = 1e-30                         # a row of zeros stays one
ENGINES = ("x86", "fbgemm")
ROWS = 1024                              # that are rounded at once
M = TypeVar("M", bound=Model)


class Int8Linear(nn.Module):
    """nn.Linear without a bias, from its float weight (N,K): x (...,K) float32 -> (...,N) float32.

    non_negative: inputs are at least 0, as after a ReLU, and use all bits for their magnitude. bits: of an input, 8, or 7
    where the CPU has no VNNI: without it FBGEMM adds two products in 16 bits, which 8 bits would saturate.
    """

    def __init__(self, weight: Tensor, non_negative: bool = False, bits: int | None = None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self._non_negative = non_negative
        levels: int = 2 ** (bits or (8 if torch.cpu._is_vnni_supported() else 7))
        self._zero = 0 if non_negative else levels // 2
        self._step = 1 / (levels - 1 - self._zero)
        self._packed = _pack(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_rows(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """The same for rows (B,K), with fewer operations."""
        largest = _largest(rows if self._non_negative else rows.abs())
        return self.product(rows / largest).mul_(largest)

    def product(self, rows: Tensor) -> Tensor:
        """The integer product alone, of rows (B,K) within [-1, 1]."""
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, self._step, self._zero, self._packed)
        return out


def products(layers: Sequence[Int8Linear], inputs: Tensor) -> list[Tensor]:
    """Each layer's output (B,N) for its own of inputs (n,B,K): the inputs are scaled together."""
    largest = _largest(inputs.abs())
    return [layer.product(rows).mul_(scale)
            for layer, rows, scale in zip(layers, (inputs / largest).unbind(), largest.unbind(), strict=True)]


@torch.no_grad()
def to_int8(model: M) -> M:
    """Replaces every matrix of the model by its int8 form, one at a time; the embedding becomes bfloat16.

    The model, which must be on a CPU, then reads and writes, and cannot be trained or saved. Raises ValueError where this
    build of torch has no FBGEMM.
    """
    if torch.backends.quantized.engine not in ENGINES:
        raise UserError("dtype=int8 needs a torch with FBGEMM, which is there for x86 CPUs: use dtype=bfloat16 or float32")
    model.fingerprint_before = model.fingerprint()
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name in linears:
        layer = cast(nn.Linear, model.get_submodule(name))
        model.set_submodule(name, Int8Linear(layer.weight, name.endswith(model.generation.NON_NEGATIVE)))
    model.emb.weight = nn.Parameter(model.emb.weight.to(torch.bfloat16), requires_grad=False)
    return model


def _largest(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(-1, keepdim=True).clamp_(min=SMALLEST)


def _pack(weight: Tensor) -> torch.ScriptObject:
    scale, integers = _rounded(weight.detach())
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What one integer is worth in each row, and the integers: a few rows at a time, for float32 takes four times the room."""
    scale, integers = torch.empty(len(weight)), torch.empty(weight.shape, dtype=torch.int8)
    for rows, worth, rounded in zip(*(tensor.split(ROWS) for tensor in (weight, scale, integers)), strict=True):
        exact = rows.float()
        worth.copy_(exact.abs().amax(1).clamp_(min=SMALLEST) / 127)
        rounded.copy_((exact / worth.unsqueeze(1)).round_())
    return scale, integers
