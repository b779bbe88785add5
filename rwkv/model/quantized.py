"""Matrix products in int8 and int4 on a CPU. In int8 weights are rounded once, with a scale per output channel, inputs at each
call; in int4 weights are rounded in groups of 32, and so are the inputs of few rows (kernels/matvec).

In int8 an input row is scaled by its own largest magnitude, so that its result does not depend on the rows beside it, and the
product of the integers is exact: a batch gives to the bit what its rows give alone. The products are torch's own (FBGEMM,
which uses VNNI instructions where the CPU has them), or those of kernels/matvec in C, with the same roundings: for few rows,
which need not wait until the weights are in FBGEMM's order. Everything else is computed in float32.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.machine.cpu import multiplies
from kernels.matvec import MOST_ROWS, SMALLEST, Packed, inputs_of, pack
from kernels.registry import load, why_not
from rwkv.errors import UserError
from rwkv.model.base import Model
from rwkv.model.first_derivative import first_derivative
from rwkv.model.operators import matvec_for

ENGINES = ("x86", "fbgemm")
ROUNDED_ROWS = 1024                      # rows of a matrix that are rounded at once
IN_C = "c_v0"                            # the kernel of matvec that multiplies few rows in int8
UNPACKED = 2**22                         # numbers of a matrix in int4 that are floats at once
M = TypeVar("M", bound=Model)


class Int8Linear(nn.Module):
    """nn.Linear without a bias, from its float weight (N,K): x (...,K) float32 -> (...,N) float32.

    non_negative: inputs are never negative, as after a ReLU, and use all bits for their magnitude. bits: the width of an
    input, by default 8, or 7 where the CPU has no VNNI: FBGEMM then adds two products in 16 bits, which 8 bits would saturate.
    in_c: the product of few rows may be C's, which keeps the weight row by row, beside FBGEMM's order once there are more.
    """

    def __init__(self, weight: Tensor, non_negative: bool = False, bits: int | None = None, in_c: bool = True) -> None:
        super().__init__()
        self._in_c = in_c and why_not("matvec", IN_C) is None
        self.out_features, self.in_features = weight.shape
        self._non_negative = non_negative
        levels: int = 2 ** (bits or (8 if multiplies(torch.int8) else 7))
        self._zero = 0 if non_negative else levels // 2
        self._step = 1 / (levels - 1 - self._zero)
        self._rounded = [_rounded(weight.detach())]      # scale and integers, row by row, while nothing else has them

    def __getstate__(self) -> dict[str, Any]:
        """Without the product, which reads this layer's weight where it lies: a copy of the layer has one of its own."""
        return {name: value for name, value in vars(self).items() if name != "_few"}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        trained = torch.is_grad_enabled() and rows.requires_grad
        return (_WithGradient.apply(rows, self) if trained else self.of_rows(rows)).view(*x.shape[:-1], -1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """forward for rows (B,K), with fewer operations."""
        largest = _largest(rows if self._non_negative else rows.abs())
        return self.product(rows / largest).mul_(largest)

    @cached_property
    def packed(self) -> Packed:
        """The weight as kernels/matvec takes it, row by row: FBGEMM's own order is another."""
        if self._rounded:
            scale, integers = self._rounded[0]
        else:
            weight: Tensor = torch.ops.quantized.linear_unpack(self._ordered)[0]
            scale, integers = weight.q_per_channel_scales().float(), weight.int_repr()
        return Packed(integers, scale, torch.tensor([1 / self._step, 0.0 if self._non_negative else 1.0]))

    @cached_property
    def _ordered(self) -> torch.ScriptObject:
        """The weight in FBGEMM's order. Where that alone has been asked for, as in training, it is the only one in memory."""
        ordered = _pack(*self._rounded[0])
        if "packed" not in vars(self):
            self._rounded.clear()
        return ordered

    @cached_property
    def _few(self) -> Callable[[Tensor], Tensor]:
        """`product` in C."""
        zero, step = self._zero, torch.tensor(self._step)
        scaled = self.packed._replace(scale=self.packed.scale * step)
        per_step = (1 / step).double()
        product = load("matvec", IN_C).bind([scaled])

        def few(rows: Tensor) -> Tensor:
            integers = (rows.double() * per_step + zero).float().round_() - zero     # as FBGEMM's fused multiply-add rounds
            y: Tensor = product(integers.unsqueeze(0))[0]
            return y

        return few

    def rounded_weight(self) -> Tensor:
        """The weight (N,K) in float32, as it was rounded."""
        weight: Tensor = torch.ops.quantized.linear_unpack(self._ordered)[0].dequantize()
        return weight

    def product(self, rows: Tensor) -> Tensor:
        """The product without the scale of each row: rows (B,K) within [-1, 1] -> (B,N)."""
        if self._in_c and 0 < len(rows) <= MOST_ROWS:
            return self._few(rows)
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, self._step, self._zero, self._ordered)
        return out


class _WithGradient(torch.autograd.Function):
    """layer.of_rows, with the gradient of the product with the rounded weight: the rounding of the input counts as none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: Int8Linear) -> Tensor:
        ctx.layer = layer
        return layer.of_rows(rows)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float() @ ctx.layer.rounded_weight(), None


def products(layers: Sequence[Int8Linear], inputs: Tensor) -> list[Tensor]:
    """The output (B,N) of each of n layers for its input, inputs[i] (B,K); all inputs (n,B,K) are scaled together."""
    largest = _largest(inputs.abs())
    return [layer.product(rows).mul_(scale)
            for layer, rows, scale in zip(layers, (inputs / largest).unbind(), largest.unbind(), strict=True)]


@torch.no_grad()
def to_int8(model: M, head: bool = True, replaced: Callable[[str], Any] = lambda name: None,
            later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}), in_c: bool = True) -> M:
    """Replaces every matrix of the model, which must be on a CPU, by its int8 form, one at a time; the embedding is bfloat16.

    head: that of the head too. replaced(name): called after each layer has been replaced. later: by the name of the weight,
    what reads a matrix, whatever the model has in its place; its fingerprint_before is known then. in_c: as in Int8Linear.
    The model can then generate; its weights cannot be trained or saved. Raises UserError where this build of torch has no
    FBGEMM.
    """
    if torch.backends.quantized.engine not in ENGINES:
        raise UserError("dtype=int8 needs a torch with FBGEMM, which is there for x86 CPUs: use dtype=bfloat16 or float32")
    model.fingerprint_before = model.fingerprint()
    for name in _linears(model):
        layer = cast(nn.Linear, model.get_submodule(name))
        if head or layer is not model.head:
            weight = later.get(f"{name}.weight", lambda layer=layer: layer.weight)()
            model.set_submodule(name, Int8Linear(weight, name.endswith(model.generation.NON_NEGATIVE), in_c=in_c))
            del layer, weight
            replaced(name)
    model.emb.weight = nn.Parameter(model.emb.weight.to(torch.bfloat16), requires_grad=False)
    return model


class Int4Linear(nn.Module):
    """nn.Linear without a bias, from its weight (N,K) packed in int4: x (...,K), floating-point -> (...,N) in its dtype.

    Many rows are multiplied by W as bfloat16 where the CPU multiplies it itself, else as float32, a part of W at a time, which
    takes memory for that part alone.
    """

    def __init__(self, packed: Packed, in_features: int) -> None:
        super().__init__()
        self.out_features = len(packed.weight)
        self.in_features = in_features
        self._matvec = matvec_for("int4")
        self.packed = packed

    def __getstate__(self) -> dict[str, Any]:
        """Without the product, which reads this layer's weight where it lies: a copy of the layer has one of its own."""
        return {name: value for name, value in vars(self).items() if name != "_few"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed = self._packed

    @property
    def packed(self) -> Packed:
        return self._packed

    @packed.setter
    def packed(self, packed: Packed) -> None:
        self._packed = packed
        self._few = self._matvec.bind(packed)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_rows(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """forward for rows (B,K)."""
        if 0 < len(rows) <= MOST_ROWS:
            return self._few(rows.unsqueeze(0))[0]
        x = rows.bfloat16() if multiplies(torch.bfloat16) else rows
        part = max(1, UNPACKED // inputs_of(self.packed))
        parts = [Packed(*(tensor[start:start + part] for tensor in self.packed))
                 for start in range(0, self.out_features, part)]
        outputs = [F.linear(x, self._matvec.unpacked(part, x.dtype)[:, :self.in_features]) for part in parts]
        return torch.cat(outputs, dim=1).to(rows.dtype)


@torch.no_grad()
def to_int4(model: M, packed: Mapping[str, Packed] | None = None,
            later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})) -> M:
    """The same in int4, for which the model must be on a CPU, too; everything but its matrices is computed in float32.

    packed: by the name of the weight, matrices that are in int4 already, whatever the model has in their places. later: as in
    to_int8.
    """
    model.fingerprint_before = model.fingerprint()
    for name in _linears(model):
        layer = cast(nn.Linear, model.get_submodule(name))
        read = later.get(f"{name}.weight", lambda layer=layer: layer.weight)
        weight = (packed or {}).get(f"{name}.weight") or pack(read(), "int4")
        model.set_submodule(name, Int4Linear(weight, layer.in_features))
        del layer, read
    model.emb.weight = nn.Parameter(model.emb.weight.to(torch.bfloat16), requires_grad=False)
    return model


def _linears(model: Model) -> list[str]:
    """The names, so that a matrix can be freed as soon as it is replaced."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def _largest(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(-1, keepdim=True).clamp_(min=SMALLEST)


def _pack(scale: Tensor, integers: Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():      # torch 2.13 deprecates its quantized tensors, and packs weights from nothing else
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each row and its integers, computed for a few rows at a time: float32 takes four times the memory."""
    scale, integers = torch.empty(len(weight)), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), ROUNDED_ROWS):
        rows = slice(start, start + ROUNDED_ROWS)
        exact = weight[rows].float()
        scale[rows] = exact.abs().amax(1).clamp_(min=SMALLEST) / 127
        integers[rows] = (exact / scale[rows].unsqueeze(1)).round_()
    return scale, integers
