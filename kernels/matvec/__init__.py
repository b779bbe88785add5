"""Multiplies a few rows by a packed matrix, which is packed once and used often, as in decoding.

    y[r,n] = sum_k x[r,k] W[n,k]          x (R,K), W (N,K), y (R,N)

In one line of PyTorch: x @ W.T. Each format of W is a class. q are integers:

    float32               W is not rounded
    bfloat16              W and x are rounded
    int8                  W[n,k] = scale[n] q[n,k], |q| <= 127. Each row of x is rounded to multiples of the row's scale
    int4                  W[n,k] = scale[n,g] q[n,k] + shift[n,g], 0 <= q <= 15, g = k // 32. Each group of 32 numbers of x is
                          rounded to multiples of 1/127 of the group's largest magnitude
    q8_0 ... q6_k         blocks as in GGUF files (BLOCKS), which `pack` does not make. Each group of 16 numbers of x is rounded
                          to multiples of 1/127 of the group's largest magnitude

In every format the order of summation is the same for all R, so the bits of a row's result do not depend on the other rows. In
int8 the sums are of integers, so that all implementations give the same bits.

An implementation is a file in this folder with two definitions. REQUIRES lists the supported formats, and float64 among the
dtypes if the implementation supports float64. bind(weights) takes n packed weights with the same format and K, does the work
that has to be done only once, and returns a function that computes n outputs y (R,N) from x (n,R,K). x is contiguous, in
float32 or float64, and already rounded by the format's `rounded`. y is contiguous and in the dtype of x. An implementation may
also define dense(packed, dtype), which returns the same bits as packed.dense(dtype), but faster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.matvec import _blocks, _calibrated, _packing
from kernels.matvec._packing import GROUP, SMALLEST, Groups
from kernels.matvec._packing import exact_copy as exact_copy
from kernels.matvec._packing import transpose as transpose
from kernels.operator import Operator, require_tensor

TOGETHER = 8                             # int4 groups whose words are interleaved, so that a vector contains one word of each
LARGEST = 127                            # int4, blocks: largest integer of a rounded group of x; in int4 16 * 15 * 127 < 2^15
MOST_ROWS = 16                           # for more rows, an ordinary matrix product is faster
Bound = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix W (N,K) in one format. Iterating over it yields its tensors.

    The first fields are tensors, each with N as the first axis. The other fields are numbers.
    """

    weight: Tensor
    format: ClassVar[str]

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Packs a floating-point W (N,K) in this format."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the floating-point matrix W (N,K) that the packed data represents."""
        return self.weight.to(dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns x (...,K) rounded for this format, and the factor (...,1) by which y must be multiplied, or None."""
        return x, None

    @property
    def K(self) -> int:
        return self.weight.shape[1]

    @property
    def by_input(self) -> bool:
        """Returns True if the memory of `weight` is (K,N)."""
        return False

    @property
    def stored(self) -> Tensor:
        """Returns `weight` as a contiguous tensor, transposed if by_input, without a copy if the memory is contiguous."""
        return self.weight.T if self.by_input else self.weight.contiguous()

    @property
    def numbers(self) -> list[int]:
        return [int(part) for part in self._parts().values() if not isinstance(part, Tensor)]

    def __iter__(self) -> Iterator[Tensor]:
        return (part for part in self._parts().values() if isinstance(part, Tensor))

    def _parts(self) -> dict[str, Any]:
        """Returns the fields by name, because torch.compile does not support vars() of a frozen dataclass (torch 2.11)."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns a copy with function(tensor) in place of each tensor."""
        return replace(self, **{name: function(part) for name, part in self._parts().items() if isinstance(part, Tensor)})

    def nbytes(self) -> int:
        """Returns the number of bytes of the packed matrix, which a product must read."""
        return sum(tensor.nbytes for tensor in self)


class Float32(Packed):
    """W in float32. `weight` shares the memory of a W that is already float32 and contiguous."""

    format = "float32"

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        return cls(weight.detach().float().contiguous())


class BFloat16(Packed):
    """W in bfloat16. `weight` shares the memory of a W that is already bfloat16 and contiguous."""

    format = "bfloat16"

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        return cls(weight.detach().bfloat16().contiguous())

    def rounded(self, x: Tensor) -> tuple[Tensor, None]:
        return x.bfloat16(), None


class Rounding(NamedTuple):
    """The rounding of a row of x to integers of `bits` bits in int8 products.

    The bits include a sign, unless x is never negative, as after a ReLU. Products of 7 bits never saturate. Products of 8 bits
    with a sign never saturate in C, and other products of 8 bits saturate only on CPUs without VNNI.
    """

    bits: int = 7
    non_negative: bool = False

    @property
    def steps(self) -> int:
        """Returns the largest magnitude of the integers."""
        return 2**self.bits - 1 - self.offset

    @property
    def offset(self) -> int:
        """Returns the number that turns the integers into unsigned bytes when added."""
        return 0 if self.non_negative else 2 ** (self.bits - 1)

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest magnitude of each row (...,1), which becomes the integer `steps`."""
        return (x if self.non_negative else x.abs()).amax(-1, keepdim=True).clamp_(min=SMALLEST)


@dataclass(frozen=True, eq=False)
class Int8(Packed):
    """W in int8: `weight` (N,K) contains q, and `scale` (N,) is float32. `bits` and `non_negative` are the Rounding of x.

    If x is never negative, `weight` may be the transpose of a contiguous (K,N). Then c_v0 skips weights whose x is zero.
    """

    format = "int8"
    scale: Tensor
    bits: int = 7
    non_negative: bool = False

    @classmethod
    def of(cls, weight: Tensor, bits: int = 7, non_negative: bool = False) -> Self:
        """Packs W. Raises ValueError if sums may not fit into 32 bits, as for K > 133,144 and 7 bits."""
        max_K = (2**31 - 1) // (127 * (2**bits - 1))
        if weight.shape[1] > max_K:
            raise ValueError(f"int8: K of W (N,K) must be at most {max_K:,}; got {tuple(weight.shape)}: use another format")
        return cls(*_packing.int8(weight), bits, non_negative)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype).unsqueeze(1)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.float()
        step = self.rounding.largest(rows).div_(self.rounding.steps)
        return (rows / step).round_(), step

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.bits, self.non_negative)

    @property
    def by_input(self) -> bool:
        """Returns True if the memory of `weight` is (K,N), in a form that c_v0 can multiply."""
        return self.non_negative and self.K % 8 == 0 and self.weight.T.is_contiguous() and not self.weight.is_contiguous()

    def stored_by_input(self) -> Self:
        """Returns a copy whose memory is (K,N), or this matrix if x may be negative or K does not allow it."""
        if not self.non_negative or self.K % 8 or self.weight.T.is_contiguous():
            return self
        return replace(self, weight=transpose(self.weight).T)


@dataclass(frozen=True, eq=False)
class Int4(Packed):
    """W in int4, in groups of 32 elements, G = groups_of(K) per row.

    Attributes:
        weight (N,G/8,8,8): int16, eight words of each of eight groups. Byte i of word w of a group is
            q[2w + i] | q[2w + i + 16] << 4.
        scale, shift (N,G): bfloat16.
        width: K.
    """

    format = "int4"
    scale: Tensor
    shift: Tensor
    width: int

    @classmethod
    def of(cls, weight: Tensor, symmetric: bool = False) -> Self:
        """Packs W. If `symmetric`, shift is -8 scale, so that a 0 stays 0."""
        return cls.from_groups(_packing.int4(weight, symmetric), weight.shape[1])

    @classmethod
    def from_groups(cls, groups: Groups, K: int) -> Self:
        """Packs groups in the form that `groups` returns."""
        N, G, _ = groups[0].shape
        missing = groups_of(K) - G
        words = pad(groups[0].contiguous().view(torch.int16), (0, 0, 0, missing))
        weight = words.view(N, groups_of(K) // TOGETHER, TOGETHER, GROUP // 4).transpose(2, 3).contiguous()
        scale, shift = (pad(part, (0, missing)) for part in groups[1:])
        return cls(weight, scale, shift, K)

    def groups(self) -> Groups:
        """Returns q (N,K/32,16) uint8, with two integers per byte, and scale and shift (N,K/32), with K/32 rounded up."""
        words = self.weight.transpose(2, 3).flatten(1, 2)
        G = -(-self.K // GROUP)
        return words[:, :G].contiguous().view(torch.uint8), self.scale[:, :G], self.shift[:, :G]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        weight, scale, shift = self.groups()
        wide = torch.promote_types(dtype, torch.float32)
        q = torch.cat((weight & 15, weight >> 4), dim=2).to(wide)                            # (N,G,32)
        weight = q.mul_(scale.to(wide).unsqueeze(2)).add_(shift.to(wide).unsqueeze(2))      # addcmul would take twice as long
        return weight.flatten(1)[:, :self.K].to(dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, None]:
        return _round_groups(x, GROUP), None

    @property
    def K(self) -> int:
        return self.width


def _round_groups(x: Tensor, size: int) -> Tensor:
    """Rounds each group of `size` neighbours in x (...,K) to LARGEST steps of its largest magnitude."""
    groups = pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    step = groups.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST).div_(LARGEST)
    return (groups / step).round_().mul_(step).flatten(-2)[..., :x.shape[-1]]


@dataclass(frozen=True, eq=False)
class Blocks(Packed):
    """W as blocks of a GGUF file.

    Attributes:
        weight (N, bytes of a row): uint8, a series of blocks per row.
        elements, bytes_per_block: the sizes of a block.
        inputs: the number of neighbours in x that share a scale.
        halves: the byte offsets of a block's float16 numbers.
        values: a function that returns the values (n,elements), in a given dtype, of blocks (n,bytes_per_block).
    """

    elements: ClassVar[int] = 32
    inputs: ClassVar[int] = 16
    halves: ClassVar[tuple[int, ...]] = (0,)
    bytes_per_block: ClassVar[int]
    values: ClassVar[_blocks.Values]

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        raise ValueError(f"W (N,K) cannot be packed in {cls.format}, which only GGUF files contain: use int8 or int4")

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        blocks = self.weight.reshape(-1, self.bytes_per_block)
        return type(self).values(blocks, wide).view(len(self.weight), self.K).to(dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, None]:
        return _round_groups(x, self.inputs), None

    def elements_at(self, indices: Tensor) -> Tensor:
        """Returns the elements W.flatten()[indices] in float32, for indices (n,)."""
        blocks = self.weight.reshape(-1, self.bytes_per_block)[indices // self.elements]
        values = type(self).values(blocks, torch.float32)
        return values.gather(1, (indices % self.elements).unsqueeze(1)).squeeze(1)

    def is_finite(self) -> bool:
        """Returns True if all values are finite, which depends only on the scales of the blocks."""
        return _packing.finite_scales(self.weight, self.bytes_per_block, self.halves)

    @property
    def K(self) -> int:
        return self.weight.shape[1] // self.bytes_per_block * self.elements


class KQuant(Blocks):
    """W as blocks of 256 elements, in groups of 32 or 16 elements with a scale each."""

    elements = 256


class Q8_0(Blocks):
    format, bytes_per_block, values = "q8_0", 34, _blocks.q8_0


class Q4_0(Blocks):
    format, bytes_per_block, values = "q4_0", 18, _blocks.q4_0


class Q4_1(Blocks):
    format, bytes_per_block, halves, values = "q4_1", 20, (0, 2), _blocks.q4_1


class Q5_0(Blocks):
    format, bytes_per_block, values = "q5_0", 22, _blocks.q5_0


class Q5_1(Blocks):
    format, bytes_per_block, halves, values = "q5_1", 24, (0, 2), _blocks.q5_1


class Q4_K(KQuant):
    format, bytes_per_block, halves, values = "q4_k", 144, (0, 2), _blocks.q4_k


class Q5_K(KQuant):
    format, bytes_per_block, halves, values = "q5_k", 176, (0, 2), _blocks.q5_k


class Q6_K(KQuant):
    format, bytes_per_block, halves, values = "q6_k", 210, (208,), _blocks.q6_k


BLOCKS: dict[str, type[Blocks]] = {kind.format: kind for kind in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)}
FORMATS: dict[str, type[Packed]] = {**{kind.format: kind for kind in (Float32, BFloat16, Int8, Int4)}, **BLOCKS}
KINDS = {name: kind for kind, name in enumerate(        # as in products.h; "bfloat16 as float32": x is not rounded
    ("float32", "bfloat16 as float32", "bfloat16", "int8", "int4", *BLOCKS))}


class MatVec(Operator):
    """Multiplies x by a packed W with the named implementation: `MatVec("c_v0")(x, packed) -> y`.

    x (...,K) is floating-point, and y (...,N) has the dtype of x. There is no gradient. For weights that are used often, `bind`
    is faster. Raises ValueError for an unknown name, for an x that has the wrong shape or requires a gradient, and for a format
    that the implementation does not support. Raises KernelUnavailable if the implementation cannot run on the device of x.
    """

    folder = "matvec"
    inputs = "Tensor x, str format, Tensor[] tensors, int[] numbers"
    outputs = (("y", "x"),)              # y has the dtype of x; for its shape see _empty_outputs
    parts = (("bind",),)

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        self._check(x, packed)
        y, = self._function(x, packed.format, list(packed), packed.numbers)
        return y

    def _forward(self, x: Tensor, format: str, tensors: list[Tensor], numbers: list[int]) -> Tensor:
        if len(tensors[0]) == 0:
            return x.new_empty(*x.shape[:-1], 0)
        kind: Any = FORMATS[format]
        packed = kind(*(tensor.detach().contiguous() for tensor in tensors), *numbers)
        y, = self.bind(packed)(x.detach().reshape(1, -1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)

    def bind(self, *weights: Packed) -> Bound:
        """Returns a function that multiplies by n weights with the same format and K, without checks.

        The function takes x (n,R,K), one input for each weight, with R >= 1. The function rounds all inputs as the first
        weight's format requires, and returns n outputs (R,N) in the dtype of x.
        """
        product = self._implementation.bind(weights)
        rounded = weights[0].rounded
        in_float64 = torch.float64 in self.requires.dtypes

        def bound(x: Tensor) -> list[Tensor]:
            wide = torch.promote_types(x.dtype, torch.float32) if in_float64 else torch.float32
            rows, factors = rounded(x)
            outputs = product(rows.to(wide).contiguous())
            if factors is not None:
                outputs = [y.mul_(factor) for y, factor in zip(outputs, factors.unbind(), strict=True)]
            return [y.to(x.dtype) for y in outputs]

        return bound

    def dense(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Returns the matrix W (N,K) that `packed` represents, in float32 or bfloat16."""
        matrix: Tensor = getattr(self._implementation, "dense", type(packed).dense)(packed, dtype)
        return matrix

    def _empty_outputs(self, x: Tensor, format: str, tensors: list[Tensor], numbers: list[int]) -> list[Tensor]:
        return [x.new_zeros(*x.shape[:-1], len(tensors[0]))]

    def _check(self, x: Tensor, packed: Packed) -> None:
        self._require_tensors(x)
        if not isinstance(packed, Packed):
            raise ValueError(f"MatVec: W must be packed; got a {type(packed).__name__}: pack it with kernels.matvec.pack")
        if packed.format not in self.requires.formats:
            raise ValueError(f"{self.name} does not support the format {packed.format}: use another implementation")
        if x.dim() == 0 or x.shape[-1] != packed.K or not x.is_floating_point():
            raise ValueError(f"MatVec: x must be a floating-point tensor (...,{packed.K}); got {x.dtype} {tuple(x.shape)}")
        self.check_dtype(x.dtype)
        if x.device != packed.weight.device:
            raise ValueError(f"MatVec: x must be on {packed.weight.device}, the device of W; got {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("MatVec has no gradient: pass x.detach(), or call MatVec under torch.no_grad()")
        self.check_device(x.device)


def groups_of(K: int) -> int:
    """Returns the number of int4 groups in a row of K elements, rounded up to fill whole vectors."""
    return -(-K // (TOGETHER * GROUP)) * TOGETHER


def pack(weight: Tensor, format: str) -> Packed:
    """Packs a floating-point W (N,K) in the named format. Raises ValueError for other formats or shapes, or as Int8.of does."""
    require_tensor("W", weight)
    if format not in FORMATS or weight.dim() != 2:
        raise ValueError(f"pack requires a matrix W (N,K) and a format from {', '.join(FORMATS)}; got the shape "
                         f"{tuple(weight.shape)} and the format {format!r}")
    return FORMATS[format].of(weight)


def quantise(weight: Tensor, moments: Sequence[Tensor], format: str) -> Blocks:
    """Packs W in the blocks that change products least for inputs with given second moments.

    Raises ValueError if the widths of `moments` do not fit.

    Args:
        weight (N,K): a finite, floating-point W.
        moments: a symmetric matrix (k,k) for each window of k consecutive inputs.
        format: a result of calibrated_format.
    """
    elements = BLOCKS[format].elements
    widths = [len(moment) for moment in moments]
    if sum(widths) != weight.shape[1] or any(width % elements for width in widths):
        raise ValueError(f"the widths of moments must be multiples of {elements} and add up to {weight.shape[1]}; got {widths}")
    return BLOCKS[format](_calibrated.quantise(weight.detach(), moments, format))


def calibrated_format(K: int, bits: int) -> str:
    """Returns the block format for rows of K elements, a multiple of 32, in 4 or 5 bits: a k-quant if 256 divides K."""
    return f"q{bits}_{'0' if K % KQuant.elements else 'k'}"


OPERATOR = MatVec
