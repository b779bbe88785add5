"""What is computed from a model's weights and kept, and how to know that it still holds.

A weight has changed where another tensor or module is in its place (load_state_dict(assign=True), adapters), where its numbers
lie elsewhere in memory (`weight.data = ...`, model.to), and where torch has counted a change in place. It counts its own,
under no_grad and inference_mode too, but not writes through `weight.data`, NumPy or other programs, not those of its fused
optimisers, and none in tensors made under inference_mode. For these some elements are compared: a change of a whole matrix is
seen, and one of a few of its numbers is not. Write `with torch.no_grad(): weight[rows] = ...` in place of
`weight.data[rows] = ...`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.machine.memory import available_memory
from kernels.matvec import Packed

ROWS = 1024                              # of a matrix that are compared at once
WATCHED = 8                              # elements in the middle of each tensor that a Watch compares, for each token
SAMPLED = 4096                           # elements of each matrix that are compared with its copy, for each text


class Watch:
    """Tells whether all weights of a model are as they were when the Watch was made. Until then their memory is kept."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.model = model
        self._parts = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._places = [place for module in modules for place in _places(module)]
        self._elements: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for place in self._places:
            if place.tensor is not None and place.tensor.is_contiguous():        # else they would be a copy
                flat = place.tensor.detach().flatten()
                self._elements[flat.dtype].append(flat[len(flat) // 2:][:WATCHED])
        self._before = self._read()

    def unchanged(self) -> bool:
        """Whether they are, as far as can be known: see above."""
        return (all(parts == before for parts, before in self._parts) and all(place.unchanged() for place in self._places)
                and self._read() == self._before)

    def _read(self) -> list[bytes]:
        """The elements that are compared, as bytes: NaN is not equal to itself."""
        return [torch.cat(elements).view(torch.uint8).cpu().numpy().tobytes() for elements in self._elements.values()]


class _Place(NamedTuple):
    """Where a module has a tensor, or may get one, and what the tensor was."""

    container: dict[str, Any]
    name: str
    held: Any                            # the tensor, a Packed that has it, or None
    tensor: Tensor | None = None
    version: int | None = None
    address: int = 0
    strides: tuple[int, ...] = ()

    def unchanged(self) -> bool:
        if self.container.get(self.name) is not self.held:
            return False
        tensor = self.tensor
        return tensor is None or ((self.version is None or tensor._version == self.version)
                                  and tensor.data_ptr() == self.address and tensor.stride() == self.strides)


def _places(module: nn.Module) -> Iterator[_Place]:
    for container in (module._parameters, module._buffers, vars(module)):
        for name, held in container.items():
            if held is None and container is not vars(module):           # as a learnt state that the model has not got yet
                yield _Place(container, name, None)
            tensors = held if isinstance(held, Packed) else [held] if isinstance(held, Tensor) else []
            for tensor in tensors:
                yield _Place(container, name, held, tensor, _version(tensor), tensor.data_ptr(), tensor.stride())


class Bfloat16Copies:
    """A model's matrices in float32, as bfloat16 where that is exact: what is read for each token is half as much.

    Published files are in bfloat16, and a model that is loaded from one in float32 has the same numbers until it is trained. A
    copy of the model has no copies at first.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Bfloat16Copies, ()

    def __bool__(self) -> bool:
        """Whether there are copies, which the model's steps read."""
        return bool(self._copies)

    def of(self, weights: Sequence[Tensor]) -> list[Tensor] | None:
        """Of these matrices (N,K), made anew where they have changed. None where a number would change, where changes are not
        counted, and where memory is short: then there are no copies at all."""
        known, self._copies = self._copies, []
        if not (len(known) == len(weights) and all(copy.is_of(weight) for copy, weight in zip(known, weights, strict=True))):
            known.clear()                                # their memory is free before others are made
            known = _exact_copies(weights)
        self._copies = known
        return [copy.copy for copy in known] or None

    def drop(self) -> None:
        """Frees their memory."""
        self._copies = []


class _Copy(NamedTuple):
    """A matrix in bfloat16, and what the matrix was."""

    copy: Tensor
    storage: StorageWeakRef              # which keeps no memory, but whose id no other storage gets
    version: int | None
    address: int
    strides: tuple[int, ...]

    def is_of(self, weight: Tensor) -> bool:
        """Whether it is, as far as can be known: see above."""
        same = (weight.shape == self.copy.shape and StorageWeakRef(weight.untyped_storage()) == self.storage
                and (weight.data_ptr(), weight.stride(), _version(weight)) == (self.address, self.strides, self.version))
        return same and torch.equal(_spaced(weight, SAMPLED), _spaced(self.copy, SAMPLED).float())


def _exact_copies(weights: Sequence[Tensor]) -> list[_Copy]:
    """A copy of each matrix; none where one of them has no exact one."""
    available = available_memory()
    if any(weight.is_inference() for weight in weights):
        return []
    if available is not None and sum(weight.nbytes for weight in weights) > available:       # the copies take half as much
        return []
    copies = []
    for weight in weights:
        copy = _exact_copy(weight)
        if copy is None:
            return []
        copies.append(_Copy(copy, StorageWeakRef(weight.untyped_storage()), _version(weight), weight.data_ptr(),
                            weight.stride()))
    return copies


def _exact_copy(weight: Tensor) -> Tensor | None:
    copy = torch.empty(weight.shape, dtype=torch.bfloat16)
    for rows, exact in zip(copy.split(ROWS), weight.split(ROWS), strict=True):
        if not torch.equal(rows.copy_(exact).float(), exact):
            return None
    return copy


def _spaced(tensor: Tensor, n: int) -> Tensor:
    """Evenly spaced elements: about n of them, or all."""
    step = max(1, tensor.numel() // n) | 1               # odd: not one column of a width that is a power of two
    return tensor.flatten()[::step]


def _version(tensor: Tensor) -> int | None:
    """How many changes in place torch has counted; None for a tensor whose changes it does not count."""
    return None if tensor.is_inference() else tensor._version
