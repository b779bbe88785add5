"""Calibrates int4 on a text: rounds the matrices to GGUF's 4-bit blocks so that their outputs change least on that text.

The blocks of the model process the text one after another. Only the current block has its weights in memory, in float32,
together with the second moments of its layers' inputs. kernels/matvec/_calibrated.py rounds the matrices for these moments. The
output of the rounded block is the next block's input.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.matvec import BLOCKS, Blocks, calibrated_format, quantise
from kernels.select import AUTO
from rwkv.checkpoint.content import PackedMatrix
from rwkv.checkpoint.files import Checkpoint
from rwkv.checkpoint.generations import HEAD
from rwkv.errors import CheckpointError, UserError
from rwkv.io.utf8 import chunks, require_file
from rwkv.model.base import DeepEmbedGeneration, Model, generation, is_linear_weight
from rwkv.model.operators import operator_for
from rwkv.tokenizer.lost_bytes import NOTHING, LossCounter
from rwkv.tokenizer.tokenizers import Tokenizer

OPTION = "--calibrate"
TOKENS = 8192                            # at most this many tokens of the text are read
MIN_TOKENS = 1024
SEQUENCE = 512                           # tokens per sequence; the first is the end-of-text token
WINDOW = 2048                            # inputs that share a matrix of moments; one for 8192 inputs would take 256 MiB
BITS, HEAD_BITS = 4, 5                   # bits per integer; more for the head, because no later layer corrects its errors


def read_ids(path: Path, tokenizer: Tokenizer) -> Tensor:
    """Reads the first TOKENS tokens of a text and returns them as sequences (R,SEQUENCE).

    Raises UserError if the file is missing, too short or not UTF-8, or if the tokenizer loses too much of the text.
    """
    require_file(path, OPTION)
    counter, lost = LossCounter(tokenizer), NOTHING
    ids: list[int] = []
    for text, piece in tokenizer.encode_pieces(chunks(path, option=OPTION)):
        ids += piece
        lost += counter.count([text], [piece])
        if len(ids) >= TOKENS:
            break
    if lost.too_much:
        raise UserError(f"{OPTION}={path} does not suit the model's tokenizer: {lost.describe('the text')}. Choose "
                        "another text")
    if len(ids) < MIN_TOKENS:
        raise UserError(f"{OPTION} requires a text of at least {MIN_TOKENS:,} tokens, but {path} has {len(ids):,}")
    length = SEQUENCE - 1
    rows = torch.tensor(ids[:min(len(ids), TOKENS) // length * length]).view(-1, length)
    return F.pad(rows, (1, 0), value=tokenizer.end_of_text)


def calibrate(checkpoint: Checkpoint, ids: Tensor) -> Checkpoint:
    """Returns the checkpoint with its matrices packed for the sequences ids (R,T).

    A matrix is packed when it is read. Read the matrices in the model's order: reading an earlier block starts again at the
    first block. Only int4 in .safetensors can store the result.
    """
    group = generation(checkpoint.config).group
    stored = checkpoint.weights.stored
    shapes = {name: tensor.shape for name, tensor in stored.items() if is_linear_weight(name, group(name))}
    formats = {name: calibrated_format(shape[1], HEAD_BITS if name == HEAD else BITS) for name, shape in shapes.items()}
    calibrator = _Calibrator(checkpoint, ids, formats)
    return replace(checkpoint, packed={name: PackedMatrix(formats[name], shape, partial(calibrator.matrix, name))
                                       for name, shape in shapes.items()})


def describe(checkpoint: Checkpoint) -> str:
    """Describes the formats of a calibrated checkpoint's matrices, the reason for them, and the bits per weight."""
    matrices = checkpoint.packed
    small = next((matrix for matrix in matrices.values() if matrix.format.endswith("_0")), None)
    formats = sorted({matrix.format.upper() for name, matrix in matrices.items() if name != HEAD})
    why = f" ({small.format.upper()} for rows of {small.shape[1]}, not a multiple of 256)" if small else ""
    counts = {name: math.prod(matrix.shape) for name, matrix in matrices.items()}
    kinds = {name: BLOCKS[matrix.format] for name, matrix in matrices.items()}
    bits = sum(8 * kinds[name].bytes_per_block / kinds[name].elements * count for name, count in counts.items())
    mean = bits / sum(counts.values())
    return f"{' and '.join(formats)}{why}, the head in {matrices[HEAD].format.upper()}: {mean:.2f} bits per weight"


class _Calibrator:
    """Runs the sequences ids (R,T) through the model, with one block's weights in memory at a time.

    `formats` maps the names of matrices to their packed formats.
    """

    def __init__(self, checkpoint: Checkpoint, ids: Tensor, formats: Mapping[str, str]) -> None:
        self._stored, self._ids, self._formats = checkpoint.weights.stored, ids, formats
        config = checkpoint.config
        absent = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self._stored.items()}
        self._model = Model.with_weights(config, operator_for(config, AUTO, "cpu", torch.float32), absent).requires_grad_(False)
        self._matrices: dict[str, Blocks] = {}           # the matrices of the part that was read last
        self._sequences: list[tuple[Tensor, object]] = []        # the input x (1,T,C) of the next part, and its carry
        self._next = 0                   # the number of the next part: a block, or the head after all blocks

    @torch.no_grad()
    def matrix(self, name: str) -> Blocks:
        """Returns the matrix `name`, packed. Raises CheckpointError if the model's activations are not finite."""
        if name not in self._matrices:
            part = len(self._model.blocks) if name == HEAD else int(name.split(".")[1])
            if part < self._next or not self._sequences:
                self._restart()
            while self._next <= part:
                self._quantise_part(self._next)
                self._next += 1
        return self._matrices[name]

    def _restart(self) -> None:
        config = self._model.config
        embedding = self._stored["emb.weight"].get()
        self._sequences = []
        for row in self._ids.split(1):
            carry = cast(DeepEmbedGeneration, self._model.generation).first_carry(row) if config.deep_embed_dim else None
            self._sequences.append((F.embedding(row, embedding).float(), carry))
        self._next = 0

    def _quantise_part(self, part: int) -> None:
        if part == len(self._model.blocks):
            self._matrices = {HEAD: self._quantise_head()}
            self._sequences = []
        else:
            self._matrices = self._quantise_block(part)

    def _quantise_block(self, part: int) -> dict[str, Blocks]:
        """Returns the packed matrices of a block, and replaces the sequences with the output of the block."""
        prefix = f"blocks.{part}."
        module = self._model.blocks[part]
        self._load(module, prefix)
        layers = {f"{prefix}{name}.weight": cast(nn.Linear, layer) for name, layer in module.named_modules()
                  if f"{prefix}{name}.weight" in self._formats}
        moments = {name: _Moments(layer.in_features) for name, layer in layers.items()}
        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.enter_context(layer.register_forward_pre_hook(moments[name].add_input))
            for x, carry in self._sequences:
                module(x, None, carry)
        matrices: dict[str, Blocks] = {}
        for name, layer in layers.items():
            matrices[name] = self._quantise_matrix(name, layer.weight, moments.pop(name))
            layer.weight = nn.Parameter(matrices[name].dense(), requires_grad=False)
        for index, (x, carry) in enumerate(self._sequences):
            x, _, carry = module(x, None, carry)
            self._sequences[index] = x, carry
        module.to("meta")
        return matrices

    def _quantise_head(self) -> Blocks:
        norm = self._model.ln_out
        self._load(norm, "ln_out.")
        moments = _Moments(self._model.config.n_embd)
        for x, _ in self._sequences:
            moments.add(norm(x))
        matrices: list[Blocks] = []
        self._stored[HEAD].pass_on(lambda weight: matrices.append(self._quantise_matrix(HEAD, weight, moments)))
        return matrices[0]

    def _quantise_matrix(self, name: str, weight: Tensor, moments: "_Moments") -> Blocks:
        if not all(window.isfinite().all() for window in moments.windows):
            raise CheckpointError(f"{self._stored[name].source}: on the {OPTION} text, the inputs of {name} are not finite. "
                                  "The training run diverged, or the file is damaged")
        packed = quantise(weight, moments.windows, self._formats[name])
        if not packed.is_finite():
            raise CheckpointError(f"{self._stored[name].source}: the values of {name} are too large for "
                                  f"{packed.format.upper()}: omit {OPTION}")
        return packed

    def _load(self, module: nn.Module, prefix: str) -> None:
        tensors = {name.removeprefix(prefix): tensor.cast(torch.float32).get(copy=True) for name, tensor in self._stored.items()
                   if name.startswith(prefix)}
        module.load_state_dict(tensors, assign=True)


class _Moments:
    """Sums x x^T over the inputs x (K) of a layer, in windows of WINDOW inputs."""

    def __init__(self, K: int) -> None:
        widths = [min(WINDOW, K - start) for start in range(0, K, WINDOW)]
        self.windows = [torch.zeros(width, width, device="cpu") for width in widths]

    def add_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.add(inputs[0])

    def add(self, x: Tensor) -> None:
        """Adds the inputs x (...,K)."""
        for window, part in zip(self.windows, x.flatten(0, -2).float().split(WINDOW, 1), strict=True):
            window.addmm_(part.T, part)
