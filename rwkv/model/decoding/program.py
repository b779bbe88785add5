"""A model's step for one token as a program of kernels/decoding, in which all of it is one call of C.

The instructions of a block are written down in rwkvN_program.py beside this file.
"""

from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.decoding import LANES, Product, Program, Run
from kernels.matvec import FORMS, pack
from rwkv.model.operators import decoding_for, decoding_name, drawing, why_no_decoding
from rwkv.model.quantized import Int4Linear, Int8Linear

LEAST_NUMBERS = 2**22                    # of a model's matrices: smaller models are as fast in PyTorch


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
    """Whether the model is large enough, on a CPU, and of a form that a program takes, which has no DeepEmbed."""
    return _is_large(model) and why_no_decoding(form_of(model.head)) is None and not model.config.deep_embed_dim


def _is_large(model: Any) -> bool:
    matrices = sum(layer.in_features * layer.out_features
                   for layer in model.modules() if isinstance(layer, (nn.Linear, Int8Linear, Int4Linear)))
    return bool(model.emb.weight.device.type == "cpu" and matrices >= LEAST_NUMBERS)


class Runner:
    """Runs the program of a model on the registers of any number of rows.

    In float32 its matrices are copied to bfloat16 at the first run where that loses nothing (derived.py): a step reads half as
    much then.
    """

    def __init__(self, model: Any, program: ModelProgram) -> None:
        self._model, self._program = model, program

    @cached_property
    def _run(self) -> Run:
        copies = matrix_copies(self._model, self._program)
        program = self._program.program
        bind = decoding_for(self._program.form)
        return cast(Run, bind(program if copies is None else program.with_weights(copies), self._program.form))

    def __call__(self, registers: Tensor) -> None:
        self._run(registers)


def matrix_copies(model: Any, program: ModelProgram) -> list[Tensor] | None:
    """The program's matrices in bfloat16, which its steps then read; None where they read the matrices themselves, as those of
    a model that is trained."""
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if program.form != "float32" or trained:
        model.bfloat16_copies.drop()
        return None
    copies: list[Tensor] | None = model.bfloat16_copies.of([packed.weight for packed in program.program.weights])
    return copies


def decoding_line(model: Any) -> str | None:
    """One line to print: what computes a step while a text is generated; None for a small model, and on a GPU."""
    form = form_of(model.head)
    if not _is_large(model):
        return None
    reason = why_no_decoding(form) or ("the C code has no DeepEmbed" if model.config.deep_embed_dim else None)
    if reason is not None:
        return f"decoding: by PyTorch ({reason})"
    line = f"decoding: {decoding_name(form)}, one call a token"
    if model.bfloat16_copies:
        line += ", reading its matrices as bfloat16, which is exact here"
    return line + ("; tokens drawn in C" if drawing() else "")


def form_of(layer: nn.Module) -> str:
    """The form of kernels.matvec that the layer's weights have; another dtype by its own name."""
    if isinstance(layer, (Int8Linear, Int4Linear)):
        return layer.form
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
    if isinstance(layer, (Int8Linear, Int4Linear)):
        return Product(x, y, layer.packed, layer.in_features)
    assert isinstance(layer, nn.Linear)
    return Product(x, y, pack(layer.weight.detach(), form_of(layer)), layer.in_features)


def shares(*parameters: Tensor) -> Tensor:
    """Parameters of one element for each channel, stacked: (n,C)."""
    return torch.stack([parameter.detach().float().flatten() for parameter in parameters])
