"""A model's step for one token as a program of kernels/decoding, in which all of it is one launch.

The instructions of a block are written down in rwkvN_program.py beside this file.
"""

from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backends.cpu import multiplies
from kernels.decoding import LANES, Product, Program, Run
from kernels.matvec import FORMS, pack
from rwkv.model.operators import FEW, MANY, can_decode, decoding_for, decoding_name, decodings_for, drawing
from rwkv.model.quantized import Int4Linear, Int8Linear

LEAST_NUMBERS = 2**22                    # of a model's matrices: smaller models are as fast in PyTorch, and compile nothing
# The most rows for which one launch of taichi_v0 was faster than PyTorch's products on two cores; in bfloat16 fewer where the
# CPU multiplies it itself, which PyTorch makes use of. taichi_v2 is faster for any number of rows.
MOST_ROWS = {"float32": 32, "bfloat16": 64, "int4": 64, "int8": 4}
MOST_ROWS_NATIVE = 8                     # in bfloat16


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
    """The program of a plain model on a CPU; None where a width, or that of a head, is no multiple of 8, or its matrices
    have several forms."""
    linears = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear, Int4Linear))]
    forms = {form_of(layer) for layer in linears}
    widths = {model.config.head_size, *(layer.in_features for layer in linears)}
    if len(forms) != 1 or not forms <= set(FORMS) or any(width % LANES for width in widths):
        return None
    program, C = Program(), model.config.n_embd
    x, normal, logits = program.register(C), program.register(C), program.register(model.vocab_size)
    blocks = model.generation.ProgramBlocks(program, model.config, x)
    layers = [blocks.add(block) for block in model.blocks]
    add_norm(program, model.ln_out, x, normal)
    add_products(program, (model.head, normal, logits))
    return ModelProgram(program, forms.pop(), x, logits, layers)


def decodes_by_program(model: Any) -> bool:
    """Whether the model is large enough, on a CPU, and of a form that a program takes."""
    matrices = sum(layer.in_features * layer.out_features
                   for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear, Int4Linear)))
    return model.emb.weight.device.type == "cpu" and matrices >= LEAST_NUMBERS and can_decode(form_of(model.head))


def most_rows(model: Any) -> int | None:
    """The most rows that one launch takes, while those of more are multiplied by PyTorch; None for any number."""
    form = form_of(model.head)
    if decoding_for(form) != FEW:
        return None
    return MOST_ROWS_NATIVE if form == "bfloat16" and multiplies(torch.bfloat16) else MOST_ROWS[form]


class Runner:
    """Runs the program of a model on the registers of any number of rows.

    In float32 its matrices are copied to bfloat16 at the first run where that loses nothing (derived.py): a step reads half as
    much then.
    """

    def __init__(self, model: Any, program: ModelProgram) -> None:
        self._model = model
        self._program = program
        self._most = most_rows(model)
        self._bind_few, self._bind_many = decodings_for(program.form)

    @cached_property
    def _few(self) -> Run:
        copies = matrix_copies(self._model, self._program)
        program = self._program.program
        return cast(Run, self._bind_few(program if copies is None else program.with_weights(copies), self._program.form))

    @cached_property
    def _many(self) -> Run:
        return cast(Run, self._bind_many(self._program.program, self._program.form))

    def __call__(self, registers: Tensor) -> None:
        (self._few if self._most is None or len(registers) <= self._most else self._many)(registers)

    def warm_up(self) -> None:
        """Compiles what one row, several and many need. Raises KernelUnavailable where the program cannot run."""
        for rows in (1, 2):
            self._few(torch.zeros(rows, self._program.program.size))
        if self._most is not None:
            self._many(torch.zeros(2, self._program.program.size))


def matrix_copies(model: Any, program: ModelProgram) -> list[Tensor] | None:
    """The program's matrices in bfloat16, which its steps then read; None where they read the matrices themselves, as in a model
    that is trained."""
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if program.form != "float32" or most_rows(model) is not None or trained:
        model.bfloat16_copies.drop()
        return None
    copies: list[Tensor] | None = model.bfloat16_copies.of([packed.weight for packed in program.program.weights])
    return copies


def decoding_line(model: Any) -> str | None:
    """One line to print: what computes a step while a text is generated; None where that is PyTorch alone."""
    if not decodes_by_program(model):
        return None
    line, most = f"decoding: {decoding_name(form_of(model.head))}, one launch a token", most_rows(model)
    if most is not None:
        line += f", up to {most} rows; of more, products by torch and all else by {MANY}"
    if model.bfloat16_copies:
        line += ", reading its matrices as bfloat16, which is exact here"
    return line + ("; tokens drawn in C" if drawing() else "")


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
