"""A tensor that still lies in its file: shape and dtype are known, the data is mapped, and read when it is asked for.

Memory: where the dtype is to change, one tensor at a time is copied and its mapped pages are given back, so that the source
never adds up beside the result; where it is not, the tensor is the mapped file itself, and nothing is copied.
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KEPT_FLOAT32 = ("time_decay", "time_first")
MADV_DONTNEED = 4                        # Linux: the pages of an unchanged private mapping are read again when touched


class CheckpointError(ValueError):
    """A file that is not, or not wholly, an RWKV-4 checkpoint: which, what was found, what was expected, the likely cause."""


@dataclass
class Lending:
    """Whether a view of a mapped tensor is in other hands: its pages are no longer ours to give back."""

    out: bool = False


@dataclass
class Stored:
    """`name` in the file `source`: `data()` gives its elements as the file has them, `get()` in `shape` and `dtype`.

    mapped: data() is a view of the file, not a copy.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Callable[[], Tensor]
    mapped: bool = False
    lending: Lending = field(default_factory=Lending)

    @classmethod
    def of(cls, name: str, source: str, tensor: Tensor, mapped: bool = False) -> "Stored":
        tensor = tensor.detach()
        return cls(name, source, tuple(tensor.shape), tensor.dtype, lambda: tensor, mapped)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def renamed(self, name: str) -> "Stored":
        return replace(self, name=name)

    def viewed(self, shape: tuple[int, ...]) -> "Stored":
        return replace(self, shape=shape)

    def cast(self, dtype: torch.dtype) -> "Stored":
        return replace(self, dtype=dtype)

    def get(self, copy: bool = False) -> Tensor:
        """The tensor, contiguous, to keep; copy: in memory of its own, whatever the file holds.

        Raises CheckpointError where a value is not finite, or not in `dtype`.
        """
        held = self.data()
        result = self._converted(held)
        if copy and result.data_ptr() == held.data_ptr():
            result = result.clone()
        if result.data_ptr() == held.data_ptr():
            self.lending.out = True
        else:
            self._release(held)
        return result

    def pass_on(self, use: Callable[[Tensor], Any]) -> None:
        """Calls use(tensor), which keeps nothing of it. Raises CheckpointError as get does."""
        held = self.data()
        use(self._converted(held))
        self._release(held)

    def _converted(self, held: Tensor) -> Tensor:
        result = held.cpu().to(self.dtype).contiguous().view(self.shape)
        self._require_finite(held, result)
        return result

    def _release(self, held: Tensor) -> None:
        if self.mapped and not self.lending.out:
            release(held)

    def _require_finite(self, held: Tensor, result: Tensor) -> None:
        if _finite(result):
            return
        if _finite(held):
            raise CheckpointError(f"{self.source}: {self.name} reaches {held.abs().max().item():g}, more than {result.dtype} "
                                  "can hold: choose float32 or bfloat16")
        bad = int((~held.isfinite()).sum())
        raise CheckpointError(f"{self.source}: {self.name} is not finite in {bad} of {held.numel()} values: the file is "
                              "damaged, or the training that wrote it had diverged")


def dtype_for(tensor: Stored, dtype: str | None) -> torch.dtype:
    """Its own where `dtype` is None. WKV's own parameters stay in float32: a decay rounded to bfloat16 is another decay."""
    if dtype is None:
        return tensor.dtype
    return torch.float32 if tensor.name.endswith(KEPT_FLOAT32) else DTYPES[dtype]


def raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)    # NaN and infinity come through; one pass, and nothing as large as the tensor
    return math.isfinite(low.item()) and math.isfinite(high.item())


def release(tensor: Tensor) -> None:
    """Gives back the pages that lie wholly inside a mapped tensor, once it has been copied."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)
