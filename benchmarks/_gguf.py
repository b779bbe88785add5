"""Writes random models in llama.cpp's format Q4_K_M, because the package gguf cannot quantise to this format."""

from pathlib import Path

import numpy as np
import torch

from kernels.matvec import BLOCKS
from kernels.matvec.cases import random_blocks

LOW_RANK = tuple(f"time_mix_{letter}{part}.weight" for letter in "wavg" for part in "12")
FINER = ("time_mix_value.weight", "channel_mix_value.weight")            # these matrices are Q6_K in every second layer
HEAD = "output.weight"


def write_q4_k_m(source: Path, target: Path) -> None:
    """Copies a GGUF file, and replaces its matrices with random blocks.

    The head and half of the value matrices become Q6_K, other matrices Q4_K. Low-rank matrices, and matrices whose width is not
    a multiple of the block size, are copied unchanged.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    generator = torch.Generator().manual_seed(0)
    for tensor in reader.tensors:
        if len(tensor.shape) != 2 or tensor.name.endswith(LOW_RANK) or int(tensor.shape[0]) % BLOCKS["q4_k"].elements:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        width, rows = map(int, tensor.shape)
        is_finer = tensor.name == HEAD or (tensor.name.endswith(FINER) and int(tensor.name.split(".")[1]) % 2 == 0)
        format = "q6_k" if is_finer else "q4_k"
        blocks = random_blocks(format, rows, width, generator).weight.numpy()
        writer.add_tensor(tensor.name, np.ascontiguousarray(blocks), raw_dtype=gguf.GGMLQuantizationType[format.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
