"""Tensors in files: the name, shape and dtype are known immediately, and the data is read and checked when it is used.

The data is mapped into memory where possible. If the dtype does not change, a tensor is a view of the mapping, without a copy.
If the dtype changes, the mapped pages are released after each tensor is converted. So the whole source and the whole result are
never in memory at the same time.
"""

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from kernels.matvec import Blocks
from kernels.select import AUTO, select
from rwkv.errors import CheckpointError
from rwkv.model.weights_watch import is_finite

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAMPLED = 4096                           # same_numbers compares this many elements
MADV_DONTNEED = 4                        # Linux: discards pages; unmodified pages of a private mapping are read again on access


@dataclass
class Lending:
    """Records that a caller has a view of a mapped tensor (`lent`), so that the tensor's pages must not be released.

    All copies of a Stored share one Lending.
    """

    lent: bool = False


@dataclass(frozen=True)
class BlockData:
    """The blocks of a GGUF tensor. Calling it dequantises them to float32 and then releases the mapped pages."""

    packed: Blocks

    def __call__(self) -> Tensor:
        values: Tensor = select("matvec", AUTO, "cpu", self.packed.format).dense(self.packed, torch.float32)
        release(self.packed.weight)
        return values


@dataclass
class Stored:
    """The tensor `name` in the file `source`: get() reads it and returns it in `shape` and `dtype`.

    Attributes:
        data: reads the tensor in the shape and dtype that the file has.
        mapped: data() returns a view of the mapped file, not a copy.
        blocks: the GGUF type of the file's quantised blocks; None if the tensor is not quantised.
        by_input: the file has the transpose of this matrix. Then data() returns a non-contiguous view, and so does get() if the
            dtype does not change.
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

    def rename(self, name: str) -> "Stored":
        return replace(self, name=name)

    def view(self, shape: tuple[int, ...]) -> "Stored":
        return replace(self, shape=shape)

    def cast(self, dtype: torch.dtype) -> "Stored":
        return replace(self, dtype=dtype)

    def transpose(self) -> "Stored":
        """Returns the transpose of a matrix or of a stack of matrices, and a vector unchanged (generations.fit rejects it)."""
        if len(self.shape) < 2:
            return self
        *several, rows, columns = self.shape
        return replace(self, shape=(*several, columns, rows), data=lambda: self.data().reshape(self.shape).mT, by_input=False)

    def scale(self, factor: float) -> "Stored":
        """Returns the tensor times `factor`. The product is computed in float32 and then rounded to `dtype`."""
        return replace(self, data=lambda: self.data().float() * factor, mapped=False)

    def part(self, index: int, name: str, shape: tuple[int, ...]) -> "Stored":
        """Returns the slice `index` along the first axis, under a new name."""
        return replace(self, name=name, shape=shape, data=lambda: self.data().reshape(self.shape)[index])

    @classmethod
    def join(cls, name: str, parts: "list[Stored]", shape: tuple[int, ...]) -> "Stored":
        """Concatenates `parts` in the widest of their dtypes."""
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        return cls(name, parts[0].source, shape, dtype, lambda: torch.cat([part.get().flatten() for part in parts]))

    def get(self, copy: bool = False) -> Tensor:
        """Reads the tensor and returns it for the caller to keep; it is contiguous unless by_input.

        Raises CheckpointError if a value is not finite or is too large for `dtype`. With copy=True the result is never a view
        of the file.
        """
        data = self.data()
        result = self._convert(data)
        if copy and result.data_ptr() == data.data_ptr():
            result = result.clone()
        if result.data_ptr() == data.data_ptr():
            self.lending.lent = True
        else:
            self._release(data)
        return result

    def has_blocks(self) -> bool:
        """Returns True if in_blocks() returns a matrix, not None."""
        return isinstance(self.data, BlockData) and self.shape == (len(self.data.packed.weight), self.data.packed.K)

    def packed_nbytes(self) -> int:
        """Returns the size in bytes of the matrix from in_blocks(), or of the tensor from get() if in_blocks() is None."""
        return cast(BlockData, self.data).packed.nbytes() if self.has_blocks() else self.nbytes

    def in_blocks(self) -> Blocks | None:
        """Returns the file's quantised blocks as a mapped matrix that kernels/matvec can multiply.

        Returns None if the tensor has no such blocks or an adapter changes it. Raises CheckpointError if a value is not finite.
        """
        if not self.has_blocks():
            return None
        packed = cast(BlockData, self.data).packed
        if not packed.is_finite():
            self.get()                   # raises the error
        self.lending.lent = True
        return packed

    def pass_on(self, use: Callable[[Tensor], object]) -> None:
        """Reads the tensor and calls use(tensor), which must not keep a reference to the tensor.

        Raises CheckpointError as get() does.
        """
        data = self.data()
        use(self._convert(data).contiguous())
        self._release(data)

    def peek(self) -> Tensor:
        """Reads the tensor, which may not be finite. The caller must not keep it, and must call drop_pages() afterwards."""
        return self.data().cpu().to(self.dtype).reshape(self.shape)

    def drop_pages(self) -> None:
        """Releases the pages of a mapped, unmodified tensor. The next access reads the pages from the file again."""
        if self.mapped:
            release(self.data())

    def _convert(self, data: Tensor) -> Tensor:
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
        if is_finite(min(result, data, key=Tensor.element_size)):          # if the narrower dtype is finite, so is the wider
            return
        if is_finite(data):
            raise CheckpointError(f"{self.source}: {self.name} has values up to {data.abs().max().item():g}, too large for "
                                  f"{result.dtype}: choose float32 or bfloat16")
        n_bad = int((~data.isfinite()).sum())
        raise CheckpointError(f"{self.source}: {n_bad} of the {data.numel()} values of {self.name} are not finite: the file is "
                              "damaged, or the training run diverged")


def is_counter(name: str, shape: Sequence[int]) -> bool:
    """Returns True for a single number that a program saves beside weights, such as n_averaged of torch's AveragedModel."""
    return "." not in name and len(shape) == 0


def same_numbers(first: Stored, second: Stored) -> bool:
    """Returns True if evenly spaced elements of two tensors are equal after rounding to the narrower dtype."""
    if first.shape != second.shape:
        return False
    samples = []
    for tensor in (first, second):
        data = tensor.data().flatten()
        samples.append(data[::max(1, data.numel() // SAMPLED)].clone())
        tensor.drop_pages()
    narrow = min(samples, key=Tensor.element_size).dtype
    return torch.equal(*(elements.to(narrow) for elements in samples))


def bytes_view(tensor: Tensor) -> Any:
    """Returns the bytes of a contiguous tensor as a memoryview, without a copy."""
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
