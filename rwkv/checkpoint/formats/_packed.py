"""Reads and writes packed matrices in .safetensors, laid out as kernels/matvec reads them, so that a mapped file needs no copy.

    int8    NAME          (N,K) I8
            NAME.scale    (N) F32
    int4    NAME          (N,G/8,8,8) I16: the words of eight groups of 32, side by side, as in kernels.matvec.Int4
            NAME.scale    (N,G) BF16
            NAME.shift    (N,G) BF16

An int4 matrix whose G is not a multiple of 8 is stored in the layout of kernels.matvec.Int4.groups: NAME is (N,G,16) U8, one
group after another, two integers per byte. Files of version 1 store every matrix in that layout. Such matrices are repacked on
reading.

Calibrated int4 (rwkv/checkpoint/calibration.py) has GGUF's blocks: NAME is (N,blocks of a row,bytes of a block) U8. The number
of bytes in a block identifies the kind of block.

A matrix with sparse inputs is stored by input, always in int8 and optionally in bfloat16: the file then has its transpose,
NAME.by_input, and no NAME. Decoding on a CPU does not read the weights of inputs that are zero.

The embedding is BF16, because it is looked up, not multiplied. BF16 low-rank matrices stay BF16. All other tensors are F32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels.matvec import BLOCKS, FORMATS, GROUP, TOGETHER, Blocks, Int4, Int8, Packed, transpose
from rwkv.checkpoint.content import Outgoing, PackedMatrix
from rwkv.checkpoint.lazy_tensors import BlockData, Stored
from rwkv.errors import CheckpointError, UserError
from rwkv.io.json_types import JsonObject
from rwkv.model.base import generation, is_linear_weight

VERSION = 2                              # is stated in the entry `timemix`; version 1 was not stated, and stored int4 as groups
WITH_BLOCKS = 3                          # files with GGUF's blocks have this version
EMBEDDING = "emb.weight"                 # an embedding's name ends in this
SCALE, SHIFT = ".scale", ".shift"        # these are added to a matrix's name
BY_INPUT = ".by_input"
KIND_BY_BYTES = {kind.bytes_per_block: kind for kind in BLOCKS.values()}


def packed_tensors(content: Outgoing) -> list[Stored]:
    """Returns the tensors to write, in the model's order, with each linear layer's matrix replaced by its packed parts."""
    assert content.quantised is not None
    group, sparse = generation(content.config).group, _names_with_sparse_inputs(content)

    @lru_cache(maxsize=1)                # a matrix's parts are read in succession, so that each matrix is packed once
    def packed(name: str) -> tuple[Tensor, ...]:
        return _split_packed(_pack(content, name))

    stored: list[Stored] = []
    for name, tensor in content.tensors.items():
        if is_linear_weight(name, group(name)):
            stored += _stored_parts(name, tensor.shape, _format_to_write(content, name), packed, name.endswith(sparse))
        elif name.endswith(EMBEDDING) or (group(name) == "low rank" and tensor.dtype == torch.bfloat16):
            stored.append(tensor.cast(torch.bfloat16))
        else:
            stored.append(tensor.cast(torch.float32))
    return stored


def version(content: Outgoing) -> int:
    return WITH_BLOCKS if any(_format_to_write(content, name) in BLOCKS for name in content.packed) else VERSION


def _format_to_write(content: Outgoing, name: str) -> str:
    """Returns the format of a matrix in the new file: the source's packed format if its dtype is the one to write."""
    matrix = content.packed.get(name)
    return matrix.format if matrix is not None and matrix.dtype == content.quantised else str(content.quantised)


def _pack(content: Outgoing, name: str) -> Packed:
    matrix = content.packed.get(name)
    if matrix is not None and matrix.dtype == content.quantised:
        stored = matrix.read()
        if isinstance(stored, Blocks) and not stored.is_finite():
            content.tensors[name].get()  # raises the error of a damaged tensor
        return stored
    packed: list[Packed] = []
    content.tensors[name].pass_on(lambda weight: packed.append(FORMATS[str(content.quantised)].of(weight)))
    return packed[0]


def _split_packed(packed: Packed) -> tuple[Tensor, ...]:
    if isinstance(packed, Int4) and not _is_interleaved(packed.K):
        return packed.groups()
    return tuple(packed)


def _is_interleaved(K: int) -> bool:
    return K % (GROUP * TOGETHER) == 0


def _stored_parts(name: str, shape: tuple[int, ...], format: str, packed: Callable[[str], tuple[Tensor, ...]],
                  is_sparse: bool) -> list[Stored]:
    N, K = shape
    if format == "int8":
        weight = (Stored(name + BY_INPUT, name, (K, N), torch.int8, lambda: transpose(packed(name)[0])) if is_sparse
                  else Stored(name, name, (N, K), torch.int8, lambda: packed(name)[0]))
        return [weight, Stored(name + SCALE, name, (N,), torch.float32, lambda: packed(name)[1])]
    if K % GROUP:
        raise UserError(f"int4 in .safetensors requires row lengths that are multiples of {GROUP}, but the rows of {name} have "
                        f"length {K}: choose another dtype")
    if kind := BLOCKS.get(format):
        return [Stored(name, name, (N, K // kind.elements, kind.bytes_per_block), torch.uint8, lambda: packed(name)[0])]
    G = K // GROUP
    interleaved = (N, G // TOGETHER, TOGETHER, GROUP // 4), torch.int16
    weight_shape, dtype = interleaved if _is_interleaved(K) else ((N, G, GROUP // 2), torch.uint8)
    return [Stored(name, name, weight_shape, dtype, lambda: packed(name)[0]),
            Stored(name + SCALE, name, (N, G), torch.bfloat16, lambda: packed(name)[1]),
            Stored(name + SHIFT, name, (N, G), torch.bfloat16, lambda: packed(name)[2])]


def tensors_by_input(content: Outgoing) -> list[Stored]:
    """Returns the tensors to write, with each matrix that has sparse inputs transposed and renamed NAME.by_input."""
    sparse = _names_with_sparse_inputs(content)
    return [tensor.transpose().rename(name + BY_INPUT) if name.endswith(sparse) else tensor
            for name, tensor in content.tensors.items()]


def _names_with_sparse_inputs(content: Outgoing) -> tuple[str, ...]:
    """Returns the ends of the names of matrices whose inputs are squared ReLUs."""
    return tuple(f"{layer}.weight" for layer in generation(content.config).non_negative(content.config))


def by_output(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the file's tensors, with each NAME.by_input transposed back, without a copy, and renamed NAME."""
    return {name.removesuffix(BY_INPUT): _transpose_back(tensor) if name.endswith(BY_INPUT) else tensor
            for name, tensor in tensors.items()}


def _transpose_back(tensor: Stored) -> Stored:
    return replace(tensor.transpose(), name=tensor.name.removesuffix(BY_INPUT), by_input=True)


def require_known_version(path: Path, entry: JsonObject | None) -> None:
    version = ((entry or {}).get("packed") or {}).get("version", 1)
    if version not in range(1, WITH_BLOCKS + 1):
        raise CheckpointError(f"{path} has packed matrices of format version {version}, but this program reads versions 1 to "
                              f"{WITH_BLOCKS}. A newer version of this program may have written the file")


def join_packed(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, PackedMatrix]]:
    """Returns the file's tensors, with each packed matrix as one float32 tensor, and the packed matrices themselves.

    Raises CheckpointError if a part of a matrix is missing or has a wrong shape or dtype.
    """
    packed = {name: _join_parts(name, tensors) for name, tensor in tensors.items()
              if name + SCALE in tensors or not tensor.dtype.is_floating_point}
    part_names = {name + end for name in packed for end in ("", SCALE, SHIFT)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in part_names}
    for name, matrix in packed.items():
        if matrix.format in BLOCKS:
            whole[name] = Stored(name, tensors[name].source, matrix.shape, torch.float32,
                                 BlockData(cast(Blocks, matrix.read())), blocks=matrix.format.upper())
        else:
            whole[name] = Stored(name, tensors[name].source, matrix.shape, torch.float32, partial(_dense, matrix))
    return whole, packed


def _dense(matrix: PackedMatrix) -> Tensor:
    return matrix.read().dense()


def _join_parts(name: str, tensors: Mapping[str, Stored]) -> PackedMatrix:
    parts = [tensors[name + end] for end in ("", SCALE, SHIFT) if name + end in tensors]
    weight = parts[0]
    kinds = [(part.shape, part.dtype) for part in parts]
    if (kind := _block_kind(parts)) is not None:
        N, size, _ = weight.shape
        return PackedMatrix(kind.format, (N, size * kind.elements), lambda: kind(weight.get().flatten(1)))
    N, size = (*weight.shape, 0, 0)[:2]
    if kinds == [((N, size), torch.int8), ((N,), torch.float32)]:
        return PackedMatrix("int8", (N, size), lambda: Int8(*_read(parts)))
    if kinds == [((N, size, TOGETHER, GROUP // 4), torch.int16), *[((N, size * TOGETHER), torch.bfloat16)] * 2]:
        K = size * TOGETHER * GROUP
        return PackedMatrix("int4", (N, K), lambda: _int4(parts, K))
    if kinds == [((N, size, GROUP // 2), torch.uint8), *[((N, size), torch.bfloat16)] * 2]:
        K = size * GROUP
        return PackedMatrix("int4", (N, K), lambda: Int4.from_groups(_read(parts), K), _is_interleaved(K))
    raise CheckpointError(f"{weight.source}: {name} is {weight.dtype} of shape {weight.shape}, which is not supported. "
                          f"Expected one of: int8, (N,K) in torch.int8 with {name}.scale (N) in float32; int4, (N,G/8,8,8) in "
                          f"torch.int16 or (N,G,16) in torch.uint8 with {name}.scale and {name}.shift (N,G) in bfloat16; GGUF "
                          "blocks, (N,blocks,bytes of a block) in torch.uint8")


def _block_kind(parts: list[Stored]) -> type[Blocks] | None:
    weight = parts[0]
    if len(parts) > 1 or weight.by_input or len(weight.shape) != 3 or weight.dtype != torch.uint8:
        return None
    return KIND_BY_BYTES.get(weight.shape[2])


def _int4(parts: list[Stored], K: int) -> Int4:
    weight, scale, shift = _read(parts)
    return Int4(weight, scale, shift, K)


def _read(parts: list[Stored]) -> Any:
    return tuple(part.get() for part in parts)
