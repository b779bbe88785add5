"""Writes and reads GGUF files with matrices of any type, with the package gguf."""

import re
from collections.abc import Container, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy import ndarray

KINDS = gguf.GGMLQuantizationType
# Offsets of the float16 numbers in a block (ggml, src/ggml-common.h)
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
LOW_RANK = tuple(f"time_mix_{letter}{part}.weight" for letter in "wavg" for part in "12")
BLOCK = {"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "att.ln_x", "channel_mix_lerp_k": "ffn.x_k",
         "channel_mix_key": "ffn.key", "channel_mix_value": "ffn.value"}
TOP = {"token_embd.weight": "emb.weight", "output.weight": "head.weight", "token_embd_norm.weight": "blocks.0.ln0.weight",
       "token_embd_norm.bias": "blocks.0.ln0.bias", "output_norm.weight": "ln_out.weight", "output_norm.bias": "ln_out.bias"}
NEEDS_SUFFIX = ("receptance", "key", "value", "output", "ln_x", "ln1", "ln2")


def random_blocks(kind: str, rows: int, width: int, seed: int) -> ndarray:
    """Returns random blocks (rows, bytes per row) whose values have a root mean square of width^-0.5."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * width // elements, nbytes), dtype=np.uint8)
    scale = 1.0
    for _ in range(2):                   # values are linear in these numbers
        for place in HALVES[kind]:
            signs = random.choice([1.0] if kind == "Q8_0" else [1.0, -1.0], (len(data), 1))      # Q8_0 has no negative scales
            data[:, place:place + 2] = (scale * signs).astype(np.float16).view(np.uint8)
        values = gguf.dequantize(data.reshape(rows, -1), KINDS[kind])
        scale /= float(np.sqrt((values ** 2).mean() * width))
    return data.reshape(rows, -1)


def rewritten(source: Path, target: Path, kind: str | Sequence[str] | None = None,
              metadata: dict[str, Any] | None = None) -> Path:
    """Copies the file with random blocks as large matrices, and with these strings or numbers in its metadata.

    `kind` is the type of the blocks, or several types that are used alternately.
    """
    kinds = cycle([kind] if isinstance(kind, str) else kind or [])
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "rwkv7")
    add_fields(writer, reader, but=metadata or ())
    for name, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    for seed, tensor in enumerate(reader.tensors):
        if kind and len(tensor.shape) == 2 and not tensor.name.endswith(LOW_RANK):
            width, rows = map(int, tensor.shape)
            chosen = next(kinds)
            writer.add_tensor(tensor.name, random_blocks(chosen, rows, width, seed), raw_dtype=KINDS[chosen])
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)
    return target


def in_parts(source: Path, folder: Path, most_tensors: int, **options: Any) -> list[Path]:
    """Splits the file into several in a new folder, with the package's writer."""
    folder.mkdir(parents=True)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(folder / source.name, "rwkv7", split_max_tensors=most_tensors, **options)
    add_fields(writer, reader)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)
    return sorted(folder.iterdir())


def add_fields(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, but: Container[str] = ()) -> None:
    """Copies the reader's metadata, except the names in `but` and the architecture, which the writer adds itself."""
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in but:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def official_weights(path: Path) -> dict[str, ndarray]:
    """Returns the file's weights by their official names, read with the package's reader and without code of rwkv/."""
    reader = gguf.GGUFReader(path)
    head_size = reader.fields["rwkv7.wkv.head_size"].contents()
    weights: dict[str, ndarray] = {}
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if match is None:
            weights[TOP[tensor.name]] = values
            continue
        layer, name, end = match.groups()
        name = BLOCK.get(name) or f"att.{name.removeprefix('time_mix_')}"
        if name == "att.lerp_fused":
            weights |= {f"blocks.{layer}.att.x_{letter}": row for letter, row in zip("rwkvag", values, strict=True)}
            continue
        values = values.T if tensor.name.endswith(LOW_RANK) else values
        values = values.reshape(-1, head_size) if name == "att.r_k" else values
        weights[f"blocks.{layer}.{name}" + (f".{end}" if name.endswith(NEEDS_SUFFIX) else "")] = values
    return weights
