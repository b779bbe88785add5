"""Reads and writes GGUF, llama.cpp's format, with the tokenizer and the entry `timemix` in the metadata.

Reads the usual tensor types itself, and others with the package gguf. Writes F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0,
always with that package. rwkv/checkpoint/rwkv7.py has the tensors' names and layouts. As in llama.cpp's converter, vectors and
a few small matrices are always F32. As in llama.cpp's quantizer, vectors and low-rank matrices are not quantised, a matrix
whose row length is not a multiple of 32 is F16, and the head has more bits than the other matrices: Q8_0 here, because the
package cannot write the quantizer's Q6_K. context_length is the constant that the converter writes, because RWKV has no limit;
the entry `timemix` states ctx_len. Quantised blocks are dequantised to float32, or mapped unchanged (Stored.in_blocks). To read
a model that llama-gguf-split has split, name any of its files.

Sources: llama.cpp, conversion/rwkv.py, src/llama-quant.cpp, src/models/rwkv7.cpp and tools/gguf-split; ggml, docs/gguf.md.
"""

import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from rwkv.chat.metadata import gguf_metadata
from rwkv.checkpoint.content import ENTRY, Content, Outgoing, entry_in
from rwkv.checkpoint.formats import QUANTISED, _gguf_tokenizer, first_bytes
from rwkv.checkpoint.formats._gguf_header import read_header
from rwkv.checkpoint.formats._gguf_types import DTYPES, package, reader
from rwkv.checkpoint.generations import generation_of, generations, require_supported, unknown_key_notes
from rwkv.checkpoint.lazy_tensors import DTYPES as DTYPES_BY_NAME
from rwkv.checkpoint.lazy_tensors import Stored, bytes_view
from rwkv.checkpoint.mapping import map_file, part_of
from rwkv.errors import CheckpointError, UserError
from rwkv.gguf import MAGIC, SPLIT_COUNT, model_parts
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject

SUFFIXES = (".gguf",)
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32,                       # general.file_type states the type of most tensors
              "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7}
QUANTIZATION_VERSION = 2
BLOCK = 32
HEAD = "output.weight"
HEAD_TYPE = "Q8_0"
STEPS = {"Q4_0": 8, "Q4_1": 1, "Q5_0": 16, "Q5_1": 1, "Q8_0": 127}          # a block's largest value relative to float16's
CONTEXT_LENGTH = 1 << 20
SPLIT_NUMBER = "split.no"
SPLIT_TENSORS = "split.tensors.count"
LAYER_NORM_EPSILON = 1e-5
ADAPTER = "adapter"                      # a value of general.type
HEAD_SIZE_KEY = "wkv.head_size"


def recognises(path: Path) -> bool:
    return path.is_file() and first_bytes(path, 4) == MAGIC


def read(path: Path) -> Content:
    """Reads a model from one file, or from all parts of a split model. `path` may be any part; the first has the metadata."""
    metadata, tensors = _read_part(path)
    if metadata.get("general.type") == ADAPTER:
        raise CheckpointError(f"{path} is a GGUF file with an adapter, not a model. Adapters in GGUF are not supported: pass "
                              "the PEFT directory that it was converted from as lora=")
    parts = model_parts(path, metadata)
    if parts[0] != path:
        metadata, tensors = _read_part(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        part_metadata, part_tensors = _read_part(part)
        if part_metadata.get(SPLIT_COUNT) != len(parts) or part_metadata.get(SPLIT_NUMBER) != number:
            raise CheckpointError(f"{part} is part {part_metadata.get(SPLIT_NUMBER)} of {part_metadata.get(SPLIT_COUNT)}, "
                                  f"but must be part {number} of {len(parts)}, counted from 0: the files are not parts of "
                                  "the same model")
        if duplicates := sorted(tensors.keys() & part_tensors.keys()):
            raise CheckpointError(f"{part} and another part both contain the tensor {duplicates[0]}: the files are not parts "
                                  "of the same model")
        tensors |= part_tensors
    stated = metadata.get(SPLIT_TENSORS, len(tensors))
    if len(parts) > 1 and stated != len(tensors):
        raise CheckpointError(f"{parts[0]} states {stated} tensors, but the parts contain {len(tensors)}: the files are not "
                              "parts of the same model")
    tokenizer = _gguf_tokenizer.tokenizer_in(parts[0], metadata)
    declared, notes = _sizes_and_notes(parts[0], metadata)
    return Content(path, tensors, entry_in(parts[0], metadata), declared, tokenizer, notes=notes)


def _read_part(path: Path) -> tuple[JsonObject, dict[str, Stored]]:
    bytes_ = map_file(path)
    metadata, infos = read_header(path, bytes_.numpy().data)
    tensors: dict[str, Stored] = {}
    for info in infos:
        if info.name in tensors:
            raise CheckpointError(f"{path} contains the tensor {info.name} twice: the file is ambiguous")
        data = part_of(bytes_, info.start, info.end)
        if dtype := DTYPES.get(info.type):
            stored = Stored(info.name, str(path), info.shape, dtype, partial(data.view, dtype), mapped=True)
        else:
            stored = Stored(info.name, str(path), info.shape, torch.float32, reader(info.type, info.shape, data),
                            blocks=info.type)
        tensors[info.name] = stored
    return metadata, tensors


def _sizes_and_notes(path: Path, metadata: JsonObject) -> tuple[JsonObject, list[str]]:
    """Returns the sizes in the metadata, and messages about assumed and ignored keys.

    Raises CheckpointError for other architectures.
    """
    architecture = metadata.get("general.architecture")
    architectures = {module.GGUF_ARCHITECTURE: module for module in generations() if module.GGUF_ARCHITECTURE}
    if not isinstance(architecture, str) or architecture not in architectures:
        raise CheckpointError(f"{path} is a GGUF file with the architecture {architecture!r}, which is not supported: expected "
                              f"{' or '.join(architectures)}")
    generation = architectures[architecture]
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    require_supported(path, stated, generation.GGUF_CONSTANTS, {})
    declared = {name: stated[key] for key, name in generation.GGUF_SIZES.items() if key in stated}
    known_keys = {*generation.GGUF_SIZES, *generation.GGUF_CONSTANTS, *generation.GGUF_UNUSED}
    notes = unknown_key_notes(path, {key: value for key, value in stated.items() if key not in known_keys})
    if HEAD_SIZE_KEY in generation.GGUF_SIZES and HEAD_SIZE_KEY not in stated:
        declared["head_size"] = generation.HEAD_SIZE
        notes.append(f"{path} lacks {architecture}.{HEAD_SIZE_KEY}: assuming a head size of {generation.HEAD_SIZE}, as in "
                     "every released model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    return declared | ({"vocab_size": len(tokens)} if isinstance(tokens, list) else {}), notes


def dtype_for(tensor: Stored, group: str, dtype: str | None) -> torch.dtype:
    """Returns the dtype to convert a tensor of this group to: float32 for vectors, no change for matrices to be quantised."""
    if group == "vector":
        return torch.float32
    return tensor.dtype if dtype is None or dtype in QUANTISED["gguf"] else DTYPES_BY_NAME[dtype]


def write(path: Path, outgoing: Outgoing) -> None:
    """Writes the file. Raises UserError if GGUF lacks the generation or tokenizer, or if the package gguf is missing."""
    generation = generation_of(outgoing.config)
    if generation.GGUF_ARCHITECTURE is None:
        raise UserError(f"GGUF does not support {generation.model.NAME}, because llama.cpp runs only RWKV-6 and 7: choose "
                        ".safetensors, .pth, or rwkv.cpp's .bin")
    library = package("writing GGUF")
    tokenizer = _gguf_tokenizer.metadata_of(outgoing)
    tensors = {name: _with_type(generation, tensor, outgoing.quantised)
               for name, tensor in generation.to_format_layout(outgoing.tensors, "gguf").items()}
    metadata = _metadata(generation, outgoing, tensors) | tokenizer | gguf_metadata(outgoing.texts)
    write_file(path, lambda file: _write_with_package(library, file, generation.GGUF_ARCHITECTURE, metadata, tensors))


def _with_type(generation: ModuleType, tensor: Stored, quantised: str | None) -> tuple[Stored, str]:
    """Returns the tensor, cast for writing, and the GGUF type to write it as."""
    if len(tensor.shape) == 1 or re.fullmatch(generation.GGUF_FLOAT32, tensor.name):
        return tensor.cast(torch.float32), "F32"
    if quantised is None or re.fullmatch(generation.GGUF_UNQUANTISED, tensor.name):
        return tensor, TYPES[tensor.dtype]
    if tensor.shape[-1] % BLOCK:
        return tensor.cast(torch.float16), "F16"
    return tensor.cast(torch.float32), HEAD_TYPE if tensor.name == HEAD else quantised.upper()


def _metadata(generation: ModuleType, outgoing: Outgoing, tensors: dict[str, tuple[Stored, str]]) -> JsonObject:
    architecture = generation.GGUF_ARCHITECTURE
    most = outgoing.quantised.upper() if outgoing.quantised else tensors[HEAD][1]
    config = generation.model.with_default_widths(outgoing.config)
    sizes = {"context_length": CONTEXT_LENGTH, "vocab_size": outgoing.vocab_size,
             "attention.head_count": 0,                          # llama.cpp requires this key, but ignores its value
             "attention.layer_norm_epsilon": LAYER_NORM_EPSILON,
             **{key: getattr(config, name) for key, name in generation.GGUF_SIZES.items()}}
    general = {"general.file_type": FILE_TYPES[most], "general.quantization_version": QUANTIZATION_VERSION,
               **({"general.name": outgoing.name} if outgoing.name else {})}
    return {**general, **{f"{architecture}.{key}": value for key, value in sizes.items()},
            ENTRY: json.dumps(outgoing.entry | {"tokenizer": None})}


def _write_with_package(package: ModuleType, file: BinaryIO, architecture: str, metadata: JsonObject,
                        tensors: dict[str, tuple[Stored, str]]) -> None:
    writer = package.GGUFWriter(None, architecture)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
              list: writer.add_array}
    for key, value in metadata.items():
        adders[type(value)](key, value)
    for name, (tensor, type_) in tensors.items():
        kind = package.GGMLQuantizationType[type_]
        elements, nbytes = package.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.count // elements * nbytes, raw_dtype=kind)
    writer.fout = [file]
    writer.state = package.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, type_ in tensors.values():
        tensor.pass_on(lambda data, type_=type_, tensor=tensor: writer.write_tensor_data(      # type: ignore[misc]
            _quantise(package, tensor, data, type_) if type_ in STEPS else np.frombuffer(bytes_view(data), np.uint8)))


def _quantise(package: ModuleType, tensor: Stored, data: Tensor, type_: str) -> np.ndarray:
    if (largest := data.abs().max().item()) > STEPS[type_] * torch.finfo(torch.float16).max:
        raise CheckpointError(f"{tensor.source}: {tensor.name} has values up to {largest:g}, too large for {type_.lower()}: "
                              "choose another dtype")
    return package.quants.quantize(data.numpy(), package.GGMLQuantizationType[type_])
