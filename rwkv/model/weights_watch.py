"""Detects changes to a model's weights, and caches values that are computed from weights.

These changes are always detected:

- a weight or module is replaced by another object (load_state_dict(assign=True), adapters, reordered blocks),
- a weight's data moves in memory (`weight.data = ...`, model.to),
- torch's own operations change a weight in place, even under no_grad and inference_mode, because torch counts these changes,
- a number, string or function is assigned to a module's attribute (`norm.eps = ...`, `block.first = ...`),
- a module changes its class, or gets or loses a hook.

torch does not count writes through `weight.data`, writes by NumPy or other libraries, steps of its fused optimisers, and
changes to tensors created under inference_mode. To detect these too, some elements are compared: a change to a whole matrix is
detected, but a change to a few elements may be missed. So write `with torch.no_grad(): weight[rows] = ...`, not
`weight.data[rows] = ...`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.machine.memory import available_memory
from kernels.matvec import Packed, exact_copy

WATCHED = 8                              # elements, in the middle of each tensor, that a WeightsWatch compares for each token
SAMPLED = 64                             # elements of each tensor that CachedFromWeights compares at each call
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))         # every module has these; they hold tensors or do not affect results
Watched = TypeVar("Watched", bound=nn.Module)
Value = TypeVar("Value")


class WeightsWatch:
    """Detects changes of a model's weights, settings, hooks and modules since the watch was created.

    A watch refers to the weights, and so keeps them in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.model = model
        self._modules, self._types = modules, list(map(type, modules))
        self._parts = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._tensor_slots = [slot for module in modules for slot in _tensor_slots(module)]
        self._settings = [(vars(module).get, *_settings(module)) for module in modules]
        self._hooks = [getattr(module, name) for module in modules for name in HOOKS]
        self._hooks_before = list(map(tuple, self._hooks))
        flat = [view for slot in self._tensor_slots
                if slot.tensor is not None and (view := _flat_view(slot.tensor)) is not None]
        self._elements = _group_by_dtype(tensor[len(tensor) // 2:][:WATCHED] for tensor in flat)
        self._before = _bytes_of(self._elements)

    def is_unchanged(self) -> bool:
        """Returns True if no change of the model is detected. The top of this file lists what is detected."""
        return (all(parts == before for parts, before in self._parts)
                and all(slot.is_unchanged() for slot in self._tensor_slots)
                and all(tuple(map(get, names)) == values for get, names, values in self._settings)
                and list(map(tuple, self._hooks)) == self._hooks_before and list(map(type, self._modules)) == self._types
                and _bytes_of(self._elements) == self._before)


class _TensorSlot(NamedTuple):
    """A module's attribute that is or may become a tensor, and its value when the watch was created."""

    container: Mapping[str, object]
    name: str
    value: object                        # the tensor, a Packed that contains it, or None
    tensor: Tensor | None = None
    version: int | None = None
    address: int = 0
    strides: tuple[int, ...] = ()

    def is_unchanged(self) -> bool:
        if self.container.get(self.name) is not self.value:
            return False
        tensor = self.tensor
        return tensor is None or ((self.version is None or tensor._version == self.version)
                                  and tensor.data_ptr() == self.address and tensor.stride() == self.strides)


def _tensor_slots(module: nn.Module) -> Iterator[_TensorSlot]:
    for container in (module._parameters, module._buffers, vars(module)):
        for name, value in container.items():
            if value is None and container is not vars(module):          # a tensor, such as a learnt state, may be set later
                yield _TensorSlot(container, name, None)
            tensors = value if isinstance(value, Packed) else [value] if isinstance(value, Tensor) else []
            for tensor in tensors:
                yield _TensorSlot(container, name, value, tensor, _version(tensor), tensor.data_ptr(), tensor.stride())


def _settings(module: nn.Module) -> tuple[tuple[str, ...], tuple[object, ...]]:
    """Returns the names and values of attributes, other than tensors, that may affect a module's result.

    A norm's epsilon is an example. The attribute `forward` is included, and is None unless it is set on the instance.
    """
    settings = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES
                and (_is_comparable(value) or (callable(value) and not name.startswith("_")))}    # private ones are set lazily
    settings.setdefault("forward", None)
    return tuple(settings), tuple(settings.values())


def _is_comparable(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_comparable, value))
    return value is None or isinstance(value, bool | int | float | str)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Returns all tensors in attributes of the model's modules, including the tensors in packed weights."""
    return [slot.tensor for module in model.modules() for slot in _tensor_slots(module) if slot.tensor is not None]


class CachedFromWeights:
    """Caches a value computed from a model's weights until the weights change, without keeping the weights in memory.

    Threads may share the model. A copied or pickled model starts with an empty cache.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._signature: list[object] = []
        self._lock = Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return CachedFromWeights, ()

    def of(self, model: Watched, compute: Callable[[Watched], Value]) -> Value:
        """Returns compute(model), cached until a change of the model is detected (see the top of this file)."""
        with self._lock:
            if self._value is None or _signature(model) != self._signature:
                self._value = None                       # frees the old value's memory before more is allocated
                self._value = compute(model)
                self._signature = _signature(model)
            return cast(Value, self._value)


def _signature(model: nn.Module) -> list[object]:
    """Returns a value that changes with the model.

    The value contains the modules and their settings, the weights' addresses, torch's counts of changes, and some elements.
    Functions and modules are replaced by their ids, because an object may refer to weights.
    """
    tensors = tensors_of(model)
    modules = list(model.modules())
    settings = [(names, tuple(id(value) if callable(value) else value for value in values))
                for names, values in map(_settings, modules)]
    return [settings, list(map(type, modules)), [id(part) for module in modules for part in module._modules.values()],
            *_bytes_of(_group_by_dtype(_sample(tensor.detach(), SAMPLED) for tensor in tensors)),
            *((StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
               _version(tensor), tensor.requires_grad) for tensor in tensors)]


def _group_by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())


def _bytes_of(groups: list[list[Tensor]]) -> list[bytes]:
    """Returns the elements as bytes, because bytes can be compared even if the elements contain NaN."""
    return [torch.cat(tensors).view(torch.uint8).cpu().numpy().tobytes() for tensors in groups]


def exact_copies(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Copies float32 matrices (N,K) to bfloat16, which halves the memory traffic per token.

    Published checkpoints are in bfloat16. So bfloat16 represents the float32 weights of a model loaded from such a file
    exactly, until the model is trained. Returns None if a value would change, if torch does not count the changes of a matrix,
    or if memory is insufficient.
    """
    available = available_memory()
    if any(weight.is_inference() for weight in weights):
        return None
    if available is not None and sum(weight.nbytes for weight in weights) > available:       # twice the size of the copies
        return None
    copies = []
    for weight in weights:
        copy = exact_copy(weight)
        if copy is None:
            return None
        copies.append(copy)
    return copies


def _flat_view(tensor: Tensor) -> Tensor | None:
    """Returns all elements as a flat view if the tensor is contiguous or a column-major matrix, and otherwise None."""
    tensor = tensor.detach()
    if tensor.dim() == 2 and tensor.T.is_contiguous():
        tensor = tensor.T
    return tensor.flatten() if tensor.is_contiguous() else None


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all elements are finite. aminmax propagates NaN and, of a flat tensor, needs no temporary."""
    flat = _flat_view(tensor)
    return bool(torch.stack(torch.aminmax(tensor if flat is None else flat)).isfinite().all())


def _sample(tensor: Tensor, n: int) -> Tensor:
    """Returns about n evenly spaced elements of the tensor, or all elements if there are fewer."""
    step = max(1, tensor.numel() // n) | 1               # an odd step selects several columns of a matrix
    flat = _flat_view(tensor)
    return (tensor.flatten() if flat is None else flat)[::step]


def _version(tensor: Tensor) -> int | None:
    """Returns the number of in-place changes that torch has counted, or None for an inference tensor, which has no count."""
    return None if tensor.is_inference() else tensor._version
