"""What is computed from a model's weights and kept, and how to know that it still holds.

A weight has changed where another tensor or module is in its place (load_state_dict(assign=True), adapters), where its numbers
lie elsewhere in memory (`weight.data = ...`, model.to), and where torch has counted a change in place. It counts its own,
under no_grad and inference_mode too, but not writes through `weight.data`, NumPy or other programs, not those of its fused
optimisers, and none in tensors made under inference_mode. For these some elements are compared: a change of a whole matrix is
seen, and one of a few of its numbers is not. Write `with torch.no_grad(): weight[rows] = ...` in place of
`weight.data[rows] = ...`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.machine.memory import available_memory
from kernels.matvec import Packed, exact_copy

WATCHED = 8                              # elements in the middle of each tensor that a Watch compares, for each token
SAMPLED = 64                             # elements of each tensor that are compared for each text


class Watch:
    """Tells whether all weights of a model are as they were when the Watch was made. Until then their memory is kept."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.model = model
        self._parts = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._places = [place for module in modules for place in _places(module)]
        flat = [place.tensor.detach().flatten() for place in self._places
                if place.tensor is not None and place.tensor.is_contiguous()]    # else they would be a copy
        self._elements = _by_dtype(tensor[len(tensor) // 2:][:WATCHED] for tensor in flat)
        self._before = _bytes_of(self._elements)

    def unchanged(self) -> bool:
        """Whether they are, as far as can be known: see above."""
        return (all(parts == before for parts, before in self._parts) and all(place.unchanged() for place in self._places)
                and _bytes_of(self._elements) == self._before)


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


def tensors_of(model: nn.Module) -> list[Tensor]:
    """The tensors of all modules."""
    return [place.tensor for module in model.modules() for place in _places(module) if place.tensor is not None]


class Kept:
    """What is computed from all weights of a model, until they change. It keeps no weight's memory; a copy of the model has
    nothing at first."""

    def __init__(self) -> None:
        self._value: Any = None
        self._seen: list[Any] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Kept, ()

    def of(self, model: nn.Module, compute: Callable[[Any], Any]) -> Any:
        """compute(model), of the weights as they are now, as far as can be known: see above."""
        if self._value is None or _seen(model) != self._seen:
            self._value = None                           # its memory is free before other is taken
            self._value = compute(model)
            self._seen = _seen(model)
        return self._value


def _seen(model: nn.Module) -> list[Any]:
    """What tells the weights from others: where they lie, what changes torch has counted, and some of their numbers."""
    tensors = tensors_of(model)
    return [*_bytes_of(_by_dtype(_spaced(tensor.detach(), SAMPLED) for tensor in tensors)),
            *((StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
               _version(tensor), tensor.requires_grad) for tensor in tensors)]


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())


def _bytes_of(groups: list[list[Tensor]]) -> list[bytes]:
    """The numbers as bytes: NaN is not equal to itself."""
    return [torch.cat(tensors).view(torch.uint8).cpu().numpy().tobytes() for tensors in groups]


def exact_copies(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Matrices (N,K) in float32 as bfloat16: what is read for each token is half as much.

    Published files are in bfloat16, and a model that is loaded from one in float32 has the same numbers until it is trained.
    None where a number would change, where changes are not counted, and where memory is short.
    """
    available = available_memory()
    if any(weight.is_inference() for weight in weights):
        return None
    if available is not None and sum(weight.nbytes for weight in weights) > available:       # the copies take half as much
        return None
    copies = []
    for weight in weights:
        copy = exact_copy(weight)
        if copy is None:
            return None
        copies.append(copy)
    return copies


def _spaced(tensor: Tensor, n: int) -> Tensor:
    """Evenly spaced elements: about n of them, or all."""
    step = max(1, tensor.numel() // n) | 1               # odd: not one column of a width that is a power of two
    return tensor.flatten()[::step]


def _version(tensor: Tensor) -> int | None:
    """How many changes in place torch has counted; None for a tensor whose changes it does not count."""
    return None if tensor.is_inference() else tensor._version
