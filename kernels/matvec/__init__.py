"""The product of one to a few rows and a matrix that is packed once and used often, as in decoding one token at a time.

    y[r,n] = sum_k x[r,k] W[n,k]          x (R,K), W (N,K), y (R,N)

In one line of PyTorch: x @ W.T. W is packed in one of four forms; the last two hold integers q:

    float32               as they are
    bfloat16              rounded. A row of x is rounded, too
    int8                  W[n,k] = scale[n] q[n,k], |q| <= 127. A row of x is rounded, too, to steps of its largest magnitude
    int4                  W[n,k] = scale[n,g] q[n,k] + shift[n,g], 0 <= q <= 15, g = k // 32. A row of x is rounded, too: each
                          group of 32 to steps of 1/127 of its largest magnitude

Every form adds in one order, whatever R is: the result for a row does not depend, to the bit, on the rows beside it. In int8
the sum is one of integers, so that the implementations give the same bits.

An implementation is a file beside this one with REQUIRES, whose dtypes are those of the packed weights that it takes (int4:
int16) and float64 if it computes in it, and bind(weights) -> function(x (n,R,K)) -> n outputs (R,N), for n packed weights of
one form and one K. x is contiguous; x and y are float32, or float64. What can be prepared once, bind prepares. x are rounded
rows: in bfloat16 numbers of that kind; in int8 whole numbers, and y lacks a row's own factor; in int4 K is that of groups_of(K)
groups. An implementation may have unpacked(packed, dtype) in int4, to the bit what `unpacked` gives, where it is faster.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.operator import Operator

FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.int16}
KINDS = {"float32": 0, "bfloat16 as float32": 1, "bfloat16": 2, "int8": 3, "int4": 4}    # in products.h; of 1, x is not rounded
GROUP = 32                               # neighbours in a row of W that share a scale, in int4
TOGETHER = 8                             # groups of int4 that are stored side by side, so that a vector holds one word of each
LARGEST = 127                            # of the whole numbers that a group of x is rounded to, in int4: 16 * 15 * 127 < 2^15
SMALLEST = 1e-30                         # largest magnitude of zeros, when they are scaled
MOST_INPUTS = (2**31 - 1) // 127**2      # K of an int8 matrix whose sums certainly fit into 32 bits: 133,144
PACKED_ROWS = 1024                       # rows of a matrix that are rounded at once: float32 takes up to eight times the memory
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)     # shares of a group's range that int4 tries; what lies outside is clipped
MOST_ROWS = 16                           # more are faster as one matrix product
Bound = Callable[[Tensor], list[Tensor]]


class Packed(NamedTuple):
    """A matrix W (N,K) in one form: tensors, which can be saved and loaded.

    weight: (N,K) float32, bfloat16 or int8; int4: (N,G/8,8,8) int16, eight words of each of eight groups, G = groups_of(K); the
    two bytes of word w of a group hold the integers of its elements 2w + i, in their low bits, and 2w + i + 16. scale: int8
    (N,) float32, int4 (N,G) bfloat16, else (0,). shift: int4 (N,G) bfloat16; int8 (2,) float32, how x is rounded: the number of
    steps of a row's largest magnitude, and 0 where no x is negative, else 1; else (0,).
    """

    weight: Tensor
    scale: Tensor
    shift: Tensor

    @property
    def form(self) -> str:
        return next(form for form, dtype in FORMS.items() if dtype == self.weight.dtype)

    def nbytes(self) -> int:
        """What a product must read of it, in bytes."""
        return sum(tensor.nbytes for tensor in self)


class MatVec(Operator):
    """One implementation of the operator, by name: `MatVec("c_v0")(x, packed) -> y`.

    x (...,K), floating-point; y (...,N) in the dtype of x. There is no gradient. `bind` is the fast way for weights that are
    used often. Raises ValueError for an unknown name, an x that does not fit or requires a gradient, and a form that the
    implementation lacks; KernelUnavailable where it cannot run on the device of x.
    """

    folder = "matvec"
    inputs = "Tensor x, Tensor weight, Tensor scale, Tensor shift"
    outputs = (("y", "x"),)              # in its dtype; _empty_outputs has the shape

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        self._check(x, packed)
        y, = self._function(x, *packed)
        return y

    def _forward(self, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        if len(weight) == 0:
            return x.new_empty(*x.shape[:-1], 0)
        packed = Packed(weight.detach().contiguous(), scale.contiguous(), shift.contiguous())
        y, = self.bind(packed)(x.detach().reshape(1, -1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    def bind(self, *weights: Packed) -> Bound:
        """The products of several weights of one form and one K as one function, without checks.

        It takes their inputs (n,R,K), one for each weight, R >= 1, and returns n outputs (R,N) in the dtype of the inputs.
        """
        product = self._implementation.bind(weights)
        if weights[0].form == "int8":
            steps, signed = weights[0].shift.tolist()
            return _rounding(product, steps, bool(signed))
        if weights[0].form == "bfloat16":
            return _rounding_to_bfloat16(product)
        if weights[0].form == "int4":
            return _rounding_groups(product, inputs_of(weights[0]))
        return product if torch.float64 in self.requires.dtypes else _in_float32(product)

    def unpacked(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """W (N,K) that the int4 form stands for, float32 or bfloat16; K is whole groups."""
        function = getattr(self._implementation, "unpacked", unpacked)
        matrix: Tensor = function(packed, dtype)
        return matrix

    def _empty_outputs(self, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> list[Tensor]:
        return [x.new_zeros(*x.shape[:-1], len(weight))]

    def _check(self, x: Tensor, packed: Packed) -> None:
        if packed.weight.dtype not in self.requires.dtypes:
            raise ValueError(f"{self.name} has no product in {packed.form}: use another implementation")
        K = inputs_of(packed)
        fits = x.dim() > 0 and 0 <= K - x.shape[-1] < (TOGETHER * GROUP if packed.form == "int4" else 1)
        if not fits or not x.is_floating_point():
            raise ValueError(f"MatVec expects a floating-point x (...,{K}), got {x.dtype} of shape {tuple(x.shape)}")
        self.check_dtype(x.dtype)
        if x.device != packed.weight.device:
            raise ValueError(f"MatVec expects x on {packed.weight.device}, where W is, got one on {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("MatVec has no gradient: pass x.detach(), or call it under torch.no_grad()")
        self.check_device(x.device)


def inputs_of(packed: Packed) -> int:
    """K; in int4 that of whole groups."""
    return GROUP * packed.scale.shape[1] if packed.form == "int4" else packed.weight.shape[1]


def groups_of(K: int) -> int:
    """The groups of a row of K elements in int4: as many as fill whole vectors."""
    return -(-K // (TOGETHER * GROUP)) * TOGETHER


def in_groups(packed: Packed, K: int) -> Packed:
    """A W (N,K) in int4 one group after the other, K whole groups: weight (N,K/32,16) uint8, scale and shift (N,K/32)."""
    words = packed.weight.transpose(2, 3).reshape(len(packed.weight), -1, GROUP // 4)
    return Packed(words[:, :K // GROUP].contiguous().view(torch.uint8), *(part[:, :K // GROUP] for part in packed[1:]))


def side_by_side(groups: Packed) -> Packed:
    """The reverse of in_groups."""
    N, G, _ = groups.weight.shape
    missing = groups_of(G * GROUP) - G
    words = torch.nn.functional.pad(groups.weight.contiguous().view(torch.int16), (0, 0, 0, missing))
    weight = words.view(N, -1, TOGETHER, GROUP // 4).transpose(2, 3).contiguous()
    return Packed(weight, *(torch.nn.functional.pad(part, (0, missing)) for part in groups[1:]))


def pack(weight: Tensor, form: str, non_negative: bool = False, symmetric: bool = False) -> Packed:
    """W (N,K), floating-point, in the form; float32 and bfloat16 share its memory where it has that dtype already.

    non_negative: in int8, its inputs are never negative, as after a ReLU, and are rounded to more steps. symmetric: in int4,
    shift is -8 scale, so that a 0 stays 0. Raises ValueError for another form or another shape, and in int8 for K above
    MOST_INPUTS.
    """
    if form not in FORMS or weight.dim() != 2:
        raise ValueError(f"pack takes a W (N,K) and one of {', '.join(FORMS)}, got {tuple(weight.shape)} and {form!r}")
    if form == "int8" and weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"int8 takes a W (N,K) with K up to {MOST_INPUTS:,}, got {tuple(weight.shape)}: use another form")
    weight = weight.detach()
    if form == "int8":
        return _pack_int8(weight, non_negative)
    if form == "int4":
        return _pack_int4(weight, symmetric)
    nothing = torch.empty(0, device=weight.device)
    return Packed(weight.to(FORMS[form]).contiguous(), nothing, nothing)


def unpacked(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """W (N,K) that the packed form stands for; in int4 K is whole groups."""
    if packed.form == "int8":
        return packed.weight.to(dtype) * packed.scale.to(dtype).unsqueeze(1)
    if packed.form == "int4":
        weight, scale, shift = in_groups(packed, inputs_of(packed))
        wide = torch.promote_types(dtype, torch.float32)
        q = torch.cat((weight & 15, weight >> 4), dim=2).to(wide)                            # (N,G,32)
        weight = q.mul_(scale.to(wide).unsqueeze(2)).add_(shift.to(wide).unsqueeze(2))      # addcmul takes twice as long
        return weight.flatten(1).to(dtype)
    return packed.weight.to(dtype)


def _pack_int8(weight: Tensor, non_negative: bool) -> Packed:
    """The inputs have 7 bits, of which one is for the sign, if any: what all CPUs can multiply without saturation."""
    q, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), PACKED_ROWS):
        rows = slice(start, start + PACKED_ROWS)
        exact = weight[rows].float()
        scale[rows] = exact.abs().amax(1).clamp_(min=SMALLEST) / 127 if weight.shape[1] else SMALLEST
        q[rows] = (exact / scale[rows].unsqueeze(1)).round_()
    return Packed(q, scale, torch.tensor([127.0, 0.0] if non_negative else [63.0, 1.0]))


def _pack_int4(weight: Tensor, symmetric: bool) -> Packed:
    N, G = len(weight), -(-weight.shape[1] // GROUP)
    q, scale = torch.empty(N, G, GROUP // 2, dtype=torch.uint8), torch.empty(N, G, dtype=torch.bfloat16)
    shift = torch.empty_like(scale)
    for start in range(0, N, PACKED_ROWS):
        rows = slice(start, start + PACKED_ROWS)
        exact = torch.nn.functional.pad(weight[rows].float(), (0, GROUP * G - weight.shape[1])).view(-1, G, GROUP)
        found, scale[rows], shift[rows] = _rounded_groups(exact, symmetric)
        q[rows] = found[:, :, :GROUP // 2] | found[:, :, GROUP // 2:] << 4
    return side_by_side(Packed(q, scale, shift))


def _rounded_groups(exact: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, scale and shift of groups (N,G,32): of the shares of a group's range in SHRUNK, the one with the least error."""
    if symmetric:                        # from -8 to 7 steps
        high = exact.abs().amax(2)
        low = -high
    else:
        low, high = exact.amin(2), exact.amax(2)
    least = torch.full_like(low, torch.inf)
    best_scale = best_shift = torch.full_like(low, torch.nan)        # which stays where W is not finite
    for share in SHRUNK:
        scale = _as_kept(((high - low) * share / 15).clamp_(min=SMALLEST))
        shift = -8 * scale if symmetric else _as_kept((low + high) / 2 - 7.5 * scale)
        q, shifted = _steps(exact, scale, shift)
        error = shifted.addcmul_(q, scale.unsqueeze(2), value=-1).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        best_scale, best_shift = torch.where(better, scale, best_scale), torch.where(better, shift, best_shift)
    q, _ = _steps(exact, best_scale, best_shift)
    return q.to(torch.uint8), best_scale.bfloat16(), best_shift.bfloat16()


def _steps(exact: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of groups, as float32, and exact - shift."""
    shifted = exact - shift.unsqueeze(2)
    return (shifted / scale.unsqueeze(2)).round_().clamp_(0, 15), shifted


def _as_kept(values: Tensor) -> Tensor:
    """The values rounded to bfloat16, in float32."""
    return values.bfloat16().float()


def _rounding(product: Bound, steps: float, signed: bool) -> Bound:
    """The product of rows that are rounded to `steps` steps of their largest magnitude."""
    def bound(x: Tensor) -> list[Tensor]:
        rows = x.float()
        step = (rows.abs() if signed else rows).amax(-1, keepdim=True).clamp_(min=SMALLEST).div_(steps)
        outputs = product((rows / step).round_().to(torch.promote_types(x.dtype, torch.float32)))
        return [y.mul_(row_step).to(x.dtype) for y, row_step in zip(outputs, step.unbind(), strict=True)]

    return bound


def _rounding_to_bfloat16(product: Bound) -> Bound:
    def bound(x: Tensor) -> list[Tensor]:
        rows = x.bfloat16().to(torch.promote_types(x.dtype, torch.float32))
        return [y.to(x.dtype) for y in product(rows.contiguous())]

    return bound


def _rounding_groups(product: Bound, K: int) -> Bound:
    """The product of rows of which each group is rounded."""
    def bound(x: Tensor) -> list[Tensor]:
        rows = in_steps(torch.nn.functional.pad(x.float(), (0, K - x.shape[-1])))
        return [y.to(x.dtype) for y in product(rows.to(torch.promote_types(x.dtype, torch.float32)))]

    return bound


def in_steps(x: Tensor) -> Tensor:
    """Rows (...,K) in whole steps, of which each group of GROUP has LARGEST as its largest magnitude."""
    groups = x.unflatten(-1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST).div_(LARGEST)
    return (groups / step).round_().mul_(step).flatten(-2)


def _in_float32(product: Bound) -> Bound:
    def bound(x: Tensor) -> list[Tensor]:
        if x.dtype == torch.float32:
            return product(x.contiguous())
        return [y.to(x.dtype) for y in product(x.float().contiguous())]

    return bound


OPERATOR = MatVec
