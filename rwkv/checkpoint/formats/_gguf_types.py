"""Reads and writes GGUF's tensor types. Each type stores neighbouring elements of a row in blocks of a fixed number of bytes.

This program itself reads F32, F16, BF16 and the block formats of kernels/matvec (Q4_0 to Q8_0, Q4_K, Q5_K and Q6_K). All other
types, such as Q2_K, Q3_K, IQ4_XS and IQ4_NL, require the package gguf of llama.cpp's authors, which dequantises to float32.
Running the model in int8 or int4 then rounds the weights a second time (docs/log.md has the error); dtype=blocks does not.

Source: ggml, src/ggml-common.h.
"""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.matvec import BLOCKS
from rwkv.checkpoint.lazy_tensors import BlockData, release
from rwkv.errors import CheckpointError, UserError

PACKAGE = "requires the package gguf: pip install gguf"


class Block(NamedTuple):
    """A type's name, and the number of elements and bytes in one block."""

    type: str
    elements: int
    nbytes: int


IN_BLOCKS = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
PLAIN = {0: Block("F32", 1, 4), 1: Block("F16", 1, 2), 30: Block("BF16", 1, 2), 28: Block("F64", 1, 8),
         **{number: Block(name, BLOCKS[name.lower()].elements, BLOCKS[name.lower()].bytes_per_block)
            for number, name in IN_BLOCKS.items()}}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}    # torch has these types
BLOCKS_PER_ROW = 32                      # the package dequantises 16 rows at a time; such rows fit the CPU's cache


def package(purpose: str) -> ModuleType:
    """Imports the package gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"{purpose} {PACKAGE}") from error
    return gguf


def block_type(number: int, where: str) -> Block:
    """Returns the type with this number. Raises CheckpointError, with `where` as the tensor's name, for an unreadable type."""
    if number in PLAIN:
        return PLAIN[number]
    try:
        block = _package_block(number)
    except ImportError as error:
        raise CheckpointError(f"{where} is quantised in GGUF type {number}. Reading this type {PACKAGE}") from error
    if block is None:
        raise CheckpointError(f"{where} is {_name(number)}, which the installed gguf package cannot dequantise. Upgrade the "
                              "package (pip install -U gguf), or convert the unquantised weights to Q8_0 or BF16")
    return block


@cache
def _package_block(number: int) -> Block | None:
    """Returns the type with this number; None if the package does not know it or cannot dequantise it."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return Block(kind.name, elements, nbytes)


def _name(number: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"of the type {number}"


def reader(type_: str, shape: tuple[int, ...], bytes_: Tensor) -> Callable[[], Tensor]:
    """Returns a function that dequantises a tensor's mapped blocks to float32 and then releases the mapped pages."""
    if kind := BLOCKS.get(type_.lower()):
        return BlockData(kind(bytes_.view(-1, shape[-1] // kind.elements * kind.bytes_per_block)))
    return partial(_dequantise_by_package, type_, bytes_)


def round_to_blocks(matrix: Tensor, type_: str) -> Tensor:
    """Rounds a float32 matrix to this block type, or to float16 if its row length is not a multiple of the block's."""
    gguf = package(f"writing {type_}")
    kind = gguf.GGMLQuantizationType[type_]
    if matrix.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        return matrix.half().float()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(matrix.numpy(), kind), kind))


def _dequantise_by_package(type_: str, bytes_: Tensor) -> Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[type_]
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = bytes_.numpy().reshape(-1, nbytes)
    whole = len(blocks) // BLOCKS_PER_ROW * BLOCKS_PER_ROW
    rows = (blocks[:whole].reshape(-1, BLOCKS_PER_ROW * nbytes), blocks[whole:])
    values = torch.cat([torch.from_numpy(gguf.dequantize(part, kind)).flatten() for part in rows if len(part)])
    release(bytes_)
    return values
