"""A model's step for one token as a program of kernels/decoding, in which all of it is one launch.

The instructions of a block are written down in rwkvN_program.py beside this file.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backends.cpu import multiplies
from kernels.decoding import LANES, Product, Program
from kernels.matvec import FORMS, pack
from rwkv.model.operators import can_decode, decoding_name
from rwkv.model.quantized import Int4Linear, Int8Linear

LEAST_NUMBERS = 2**22                    # of a model's matrices: smaller models are as fast in PyTorch, and compile nothing
# The most rows for which the program was faster than PyTorch's products on two cores; in bfloat16 fewer where the CPU
# multiplies it itself, which PyTorch makes use of. In int8 it is as fast up to 4 rows for RWKV-7, and for RWKV-4 a quarter
# slower from 2 on while nothing else runs; beside another busy process it is four times as fast.
MOST_ROWS = {"float32": 8, "bfloat16": 64, "int4": 16, "int8": 4}
MOST_ROWS_NATIVE = 4                     # in bfloat16


class Place(NamedTuple):
    """Where a tensor of a layer's state begins in the registers, and its shape without the rows."""

    at: int
    shape: tuple[int, ...]


class ModelProgram(NamedTuple):
    """x (C) takes the embedding of the token, logits (V) are found; layers: where each tensor of each layer's state is."""

    program: Program
    form: str
    x: int
    logits: int
    layers: list[list[Place]]


def program_of(model: Any) -> ModelProgram | None:
    """The program of a plain model on a CPU; None where a width is no multiple of 8, or its matrices have several
    forms."""
    linears = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear, Int4Linear))]
    forms = {form_of(layer) for layer in linears}
    if len(forms) != 1 or not forms <= set(FORMS) or any(layer.in_features % LANES for layer in linears):
        return None
    program, C = Program(), model.config.n_embd
    x, normal, logits = program.register(C), program.register(C), program.register(model.vocab_size)
    blocks = model.generation.ProgramBlocks(program, model.config, x)
    layers = [blocks.add(block) for block in model.blocks]
    add_norm(program, model.ln_out, x, normal)
    add_products(program, (model.head, normal, logits))
    return ModelProgram(program, forms.pop(), x, logits, layers)


def most_rows(model: Any) -> int:
    """The most rows for which the program is used; 0 for never."""
    form = form_of(model.head)
    matrices = sum(layer.in_features * layer.out_features
                   for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear, Int4Linear)))
    if model.emb.weight.device.type != "cpu" or matrices < LEAST_NUMBERS or not can_decode(form):
        return 0
    if form == "bfloat16" and multiplies(torch.bfloat16):
        return MOST_ROWS_NATIVE
    return MOST_ROWS[form]


def decoding_line(model: Any) -> str | None:
    """One line to print: what computes a step while a text is generated; None where that is PyTorch alone."""
    most = most_rows(model)
    name = decoding_name(form_of(model.head)) if most else ""
    return f"decoding: {name}, one launch a token, up to {most} rows; more by torch" if most else None


def form_of(layer: nn.Module) -> str:
    """The form of kernels.matvec that the layer's weights have; another dtype by its own name."""
    if isinstance(layer, (Int8Linear, Int4Linear)):
        return "int8" if isinstance(layer, Int8Linear) else "int4"
    assert isinstance(layer, nn.Linear)
    return str(layer.weight.dtype).removeprefix("torch.")


def add_norm(program: Program, norm: nn.Module, x: int, y: int, **options: int) -> None:
    """y = norm(x), of a LayerNorm."""
    assert isinstance(norm, nn.LayerNorm)
    program.norm(x, y, len(norm.weight), norm.weight, norm.bias, norm.eps, **options)


def add_products(program: Program, *products: tuple[nn.Module, int, int]) -> None:
    """y = layer(x) for each (layer, x, y) of linear layers in any form; none of them reads what another computes."""
    program.products([_product(*product) for product in products])


def _product(layer: nn.Module, x: int, y: int) -> Product:
    if isinstance(layer, Int8Linear):
        return Product(x, y, layer.packed, layer.in_features, layer.of_whole_numbers)
    if isinstance(layer, Int4Linear):
        return Product(x, y, layer.packed, layer.in_features, layer.of_rows)
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach()
    return Product(x, y, pack(weight, form_of(layer)), layer.in_features,
                   lambda rows: F.linear(rows.to(weight.dtype), weight))


def shares(*parameters: Tensor) -> Tensor:
    """Parameters of one element for each channel, stacked: (n,C)."""
    return torch.stack([parameter.detach().float().flatten() for parameter in parameters])
