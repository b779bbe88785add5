"""int4 matrices in .safetensors: a matrix (N,32 G) is stored as the three tensors of kernels.matvec.Int4.groups.

    NAME          (N,G,16) U8      the integers of each group of 32, two per byte
    NAME.scale    (N,G) BF16
    NAME.shift    (N,G) BF16

The embedding is BF16, because it is looked up, not multiplied. Everything else is F32.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from kernels.matvec import GROUP, Groups, Int4
from rwkv.checkpoint.content import Outgoing
from rwkv.checkpoint.stored import Stored
from rwkv.errors import CheckpointError, UserError
from rwkv.model.base import generation, is_linear_weight

EMBEDDING = "emb.weight"                 # the suffix of embeddings' names
PARTS = {"": torch.uint8, ".scale": torch.bfloat16, ".shift": torch.bfloat16}       # suffix of the name: dtype


def outgoing(content: Outgoing) -> tuple[list[Stored], list[Stored]]:
    """The tensors to write: floating-point tensors, and the three parts of each int4 matrix."""
    group = generation(content.config).group
    matrices = [name for name in content.tensors if is_linear_weight(name, group(name))]
    floats = [tensor.cast(torch.bfloat16 if name.endswith(EMBEDDING) else torch.float32)
              for name, tensor in content.tensors.items() if name not in matrices]

    @lru_cache(maxsize=1)                # the parts of a matrix are read one after another
    def groups(name: str) -> Groups:
        return (content.packed[name]() if name in content.packed else Int4.of(content.tensors[name].get())).groups()

    return floats, [part for name in matrices for part in _parts(name, content.tensors[name].shape, groups)]


def _parts(name: str, shape: tuple[int, ...], groups_of: Callable[[str], Groups]) -> list[Stored]:
    N, K = shape
    if K % GROUP:
        raise UserError(f"int4 in .safetensors requires rows of a multiple of {GROUP} numbers; {name} has {K}: choose another "
                        "dtype")
    groups = (N, K // GROUP)
    shapes = ((*groups, GROUP // 2), groups, groups)
    return [Stored(name + end, name, shape, dtype, lambda i=i: groups_of(name)[i])          # type: ignore[misc]
            for i, ((end, dtype), shape) in enumerate(zip(PARTS.items(), shapes, strict=True))]


def joined(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, Callable[[], Int4]]]:
    """The file's tensors, with each int4 matrix as one float32 tensor, and functions that read these matrices in int4.

    Raises CheckpointError if a part of a matrix is missing.
    """
    packed = {name: [tensors.get(name + end) for end in PARTS] for name, tensor in tensors.items()
              if f"{name}.scale" in tensors or not tensor.dtype.is_floating_point}
    part_names = {name + end for name in packed for end in PARTS}
    readers = {name: _reader(name, parts) for name, parts in packed.items()}
    whole = {name: tensor for name, tensor in tensors.items() if name not in part_names}
    for name, read in readers.items():
        N, G, _ = tensors[name].shape
        whole[name] = Stored(name, tensors[name].source, (N, G * GROUP), torch.float32,
                             lambda read=read: read().dense())           # type: ignore[misc]
    return whole, readers


def _reader(name: str, parts: list[Stored | None]) -> Callable[[], Int4]:
    weight, scale, shift = parts
    assert weight is not None
    groups = weight.shape[:2]
    fits = (weight.shape, weight.dtype) == ((*groups, GROUP // 2), torch.uint8) and all(
        part is not None and (part.shape, part.dtype) == (groups, torch.bfloat16) for part in (scale, shift))
    if not fits or scale is None or shift is None:
        raise CheckpointError(f"{weight.source}: {name} is {weight.dtype} of shape {weight.shape}, expected integers "
                              f"(N,G,{GROUP // 2}) in torch.uint8 with {name}.scale and {name}.shift (N,G) in bfloat16: other "
                              "quantised weights are not supported")
    return lambda: Int4.from_groups((weight.get(), scale.get(), shift.get()), groups[1] * GROUP)
