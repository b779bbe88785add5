"""Tensors in files, with known shape and dtype, whose data is read on demand, from a memory mapping where possible.

A tensor whose dtype does not change is a view of the mapping, without a copy. If the dtype changes, the mapped pages are
released after each tensor's conversion, so that the source and the result are never in memory completely at the same time.
"""

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from kernels.matvec import Blocks
from kernels.select import AUTO, select
from rwkv.errors import CheckpointError
from rwkv.model.weights_watch import is_finite

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAMPLED = 4096                           # number of elements to compare in same_numbers
MADV_DONTNEED = 4                        # Linux: discards pages; unmodified pages of a private mapping are read again on access


@dataclass
class Lending:
    """lent: a caller has a view of the mapped tensor, so its pages must not be released. All copies of a Stored share it."""

    lent: bool = False


@dataclass(frozen=True)
class BlockData:
    """The data of a tensor in GGUF's blocks. Calling it dequantises them to float32 and then releases the mapped pages."""

    packed: Blocks

    def __call__(self) -> Tensor:
        values: Tensor = select("matvec", AUTO, "cpu", self.packed.format).dense(self.packed, torch.float32)
        release(self.packed.weight)
        return values


@dataclass
class Stored:
    """The tensor `name` in the file `source`: data() reads it as stored, get() returns it in `shape` and `dtype`.

    mapped: whether data() is a view of the mapped file, not a copy. blocks: the type of the file's quantised blocks; None if
    not quantised. by_input: the file has the transpose of this matrix, so data() is a non-contiguous view, and so is get() if
    the dtype does not change.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Callable[[], Tensor]
    mapped: bool = False
    lending: Lending = field(default_factory=Lending)
    blocks: str | None = None
    by_input: bool = False

    @classmethod
    def of(cls, name: str, source: str, tensor: Tensor, mapped: bool = False) -> "Stored":
        tensor = tensor.detach()
        return cls(name, source, tuple(tensor.shape), tensor.dtype, lambda: tensor, mapped)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def renamed(self, name: str) -> "Stored":
        return replace(self, name=name)

    def viewed(self, shape: tuple[int, ...]) -> "Stored":
        return replace(self, shape=shape)

    def cast(self, dtype: torch.dtype) -> "Stored":
        return replace(self, dtype=dtype)

    def transposed(self) -> "Stored":
        """The transpose of a matrix or of a stack of matrices. A vector is returned unchanged; `fit` rejects it later."""
        if len(self.shape) < 2:
            return self
        *several, rows, columns = self.shape
        return replace(self, shape=(*several, columns, rows), data=lambda: self.data().reshape(self.shape).mT, by_input=False)

    def scaled(self, factor: float) -> "Stored":
        """The tensor times `factor`, computed in float32 and then rounded to `dtype`."""
        return replace(self, data=lambda: self.data().float() * factor, mapped=False)

    def part(self, index: int, name: str, shape: tuple[int, ...]) -> "Stored":
        """The slice `index` along the first axis, renamed."""
        return replace(self, name=name, shape=shape, data=lambda: self.data().reshape(self.shape)[index])

    @classmethod
    def joined(cls, name: str, parts: "list[Stored]", shape: tuple[int, ...]) -> "Stored":
        """The concatenation of `parts`, in the widest of their dtypes."""
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        return cls(name, parts[0].source, shape, dtype, lambda: torch.cat([part.get().flatten() for part in parts]))

    def get(self, copy: bool = False) -> Tensor:
        """Reads the tensor, which the caller may keep; it is contiguous unless by_input. copy=True: never a view of the file.

        Raises CheckpointError if a value is not finite or is too large for `dtype`.
        """
        data = self.data()
        result = self._converted(data)
        if copy and result.data_ptr() == data.data_ptr():
            result = result.clone()
        if result.data_ptr() == data.data_ptr():
            self.lending.lent = True
        else:
            self._release(data)
        return result

    def has_blocks(self) -> bool:
        """Whether in_blocks() returns a matrix, not None."""
        return isinstance(self.data, BlockData) and self.shape == (len(self.data.packed.weight), self.data.packed.K)

    def packed_nbytes(self) -> int:
        """The size in bytes of in_blocks(), or of get() if in_blocks() is None."""
        return cast(BlockData, self.data).packed.nbytes() if self.has_blocks() else self.nbytes

    def in_blocks(self) -> Blocks | None:
        """The file's quantised blocks, mapped, if kernels/matvec can multiply them and no adapter changes them; otherwise None.

        Raises CheckpointError if a value is not finite.
        """
        if not self.has_blocks():
            return None
        packed = cast(BlockData, self.data).packed
        if not packed.is_finite():
            self.get()                   # raises the error
        self.lending.lent = True
        return packed

    def pass_on(self, use: Callable[[Tensor], object]) -> None:
        """Reads the tensor and calls use(tensor), which must not keep a reference to it. Raises CheckpointError as get does."""
        data = self.data()
        use(self._converted(data).contiguous())
        self._release(data)

    def peek(self) -> Tensor:
        """Reads the tensor, which may not be finite. The caller must not keep it, and must call drop_pages() afterwards."""
        return self.data().cpu().to(self.dtype).reshape(self.shape)

    def drop_pages(self) -> None:
        """Releases the pages of a mapped tensor; they are read again on access. The tensor must be unmodified."""
        if self.mapped:
            release(self.data())

    def _converted(self, data: Tensor) -> Tensor:
        result = data.cpu().to(self.dtype)
        if not (self.by_input and result.shape == self.shape and result.dtype == data.dtype):
            result = result.contiguous().view(self.shape)
        self._require_finite(data, result)
        return result

    def _release(self, data: Tensor) -> None:
        if self.mapped and not self.lending.lent:
            release(data)

    def _require_finite(self, data: Tensor, result: Tensor) -> None:
        if not data.dtype.is_floating_point:
            return
        if is_finite(min(result, data, key=Tensor.element_size)):          # the narrower: it is finite only if both are
            return
        if is_finite(data):
            raise CheckpointError(f"{self.source}: {self.name} reaches {data.abs().max().item():g}, more than {result.dtype} "
                                  "can hold: choose float32 or bfloat16")
        n_bad = int((~data.isfinite()).sum())
        raise CheckpointError(f"{self.source}: {self.name} is not finite in {n_bad} of {data.numel()} values: the file is "
                              "damaged, or the training that wrote it had diverged")


def same_numbers(first: Stored, second: Stored) -> bool:
    """Whether evenly spaced elements of two tensors are equal after rounding to the narrower of their dtypes."""
    if first.shape != second.shape:
        return False
    sampled = []
    for tensor in (first, second):
        data = tensor.data().flatten()
        sampled.append(data[::max(1, data.numel() // SAMPLED)].clone())
        tensor.drop_pages()
    narrow = min(sampled, key=Tensor.element_size).dtype
    return torch.equal(*(elements.to(narrow) for elements in sampled))


def raw(tensor: Tensor) -> Any:
    """A contiguous tensor's bytes, as a memoryview without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def release(tensor: Tensor) -> None:
    """Releases the memory pages that lie entirely within a mapped tensor, which must be unmodified."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)
