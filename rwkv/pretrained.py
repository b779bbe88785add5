"""The public class RWKV, a Model with from_pretrained and save_pretrained; and how programs open a checkpoint."""

import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple, Self

import torch

from kernels import matvec
from kernels.machine.cpu import why_slow
from kernels.machine.memory import available_memory
from kernels.matvec import Blocks, pack
from kernels.operator import Operator
from kernels.registry import why_not
from rwkv.chat.names import Choice, Length, choose_template, trained_length
from rwkv.checkpoint import packed_cache, time_states
from rwkv.checkpoint.files import (
    DEFAULT_CTX_LEN,
    PACKED,
    Checkpoint,
    assumed_tokenizer,
    checkpoint_of,
    fingerprint_of,
    read_checkpoint,
    tokenizer_of,
    with_adapter,
    write_checkpoint,
)
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.checkpoint.location import locate
from rwkv.checkpoint.memory import GIB, require_memory, weights_nbytes
from rwkv.checkpoint.tuned import surviving
from rwkv.config import BLOCKS, DTYPES, SavedModelConfig
from rwkv.errors import UserError
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.states import beginning, is_state_file, load_context
from rwkv.io.lines import counted, wrapped
from rwkv.io.state_file import state_file
from rwkv.model.base import MATRICES, Model, generation, is_linear_weight
from rwkv.model.operators import operator_for
from rwkv.model.quantized import IN_C, BlockLinear, Int4Linear, Int8Linear, to_blocks, to_int4, to_int8, to_packed
from rwkv.tokenizer.tokenizers import Tokenizer

AUTO = "auto"
BLOCK_FORMATS = tuple(name.upper() for name in matvec.BLOCKS)
ALL_SURVIVES = 0.995                     # no line is printed if a larger fraction of the training survives
REQUANTISED = "blocks.0.att.key.weight"        # the matrix on which a second rounding is measured


class RWKV(Model):
    """A model: model(tokens (B,T) int64, state=None) returns (logits (B,T,V), state), and does not change its arguments."""

    @classmethod
    def from_pretrained(cls, path: str | Path, kernel: str = "auto", device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True, trainable: bool = False, lora: str | Path | None = None,
                        lora_alpha: float | None = None) -> Self:
        """Loads a file of any format, a Hugging Face directory or a run's directory. `path` may also be a name on the Hub, such
        as "ORG/REPO/FILE.pth" or "ORG/REPO:Q4_K_M" (rwkv/io/hub.py); its files are downloaded once.

        The model is for inference: in evaluation mode and without gradients. On a CPU, weights stored in `dtype` are memory-
        mapped: a program that writes into the file, instead of replacing it, changes the model. mmap=False copies the weights.
        dtype="blocks" keeps the quantised blocks of a GGUF file, and "int4" the blocks of a calibrated file; "auto" chooses as
        for generate.py. trainable=True returns a model for training, with gradients and its own memory; the weights are in
        `dtype`, which should be float32 unless the optimiser is made for another dtype. Adapters of a run with tune=lora are
        merged in float32; if `dtype` rounds the sums, a warning reports the share of the training that survives. lora: another
        program's adapter (rwkv/checkpoint/adapters.py), merged likewise; lora_alpha: the adapter's alpha, if its file lacks it.
        Raises CheckpointError (a ValueError) if the file is missing, damaged or not a checkpoint, and KernelUnavailable if the
        kernel cannot run on `device`.
        """
        require_dtype(dtype, device)
        if trainable and dtype not in ("float32", "bfloat16"):
            raise UserError(f"trainable requires dtype=float32 or bfloat16; got dtype={dtype}")
        checkpoint = _read(path, lora, lora_alpha)
        dtype, line = resolved_dtype(dtype, device, checkpoint)
        for note in [*checkpoint.notes, *([line] if dtype == "float32" and line else [])]:
            warnings.warn(note, stacklevel=2)
        wkv = operator_for(checkpoint.config, kernel, device, computed_in(dtype))
        for note in [*rounded_adapters(checkpoint, dtype), *repacked(checkpoint, dtype)]:
            warnings.warn(note, stacklevel=2)
        if trainable:
            model = cls.with_weights(checkpoint.config, wkv, checkpoint.tensors(dtype, device))
            if checkpoint.time_states:
                model.set_time_states([state.get(copy=True).to(device) for state in checkpoint.time_states])
            return model
        return cls.from_checkpoint(checkpoint, wkv, device, dtype, mmap)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, wkv: Operator, device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True) -> Self:
        """The model of a checkpoint, in evaluation mode and without gradients. Raises UserError if memory is short."""
        if torch.device(device).type == "cpu":
            require_memory(checkpoint, dtype, available_memory())
        if dtype in PACKED:
            model = cls._quantised(checkpoint, wkv, device, dtype, mmap)
        elif dtype == BLOCKS:
            model = cls._in_blocks(checkpoint, wkv, mmap)
        else:
            model = cls.with_weights(checkpoint.config, wkv, checkpoint.tensors(dtype, device, mmap))
            model.fingerprint_before = checkpoint.fingerprint
            model.merge()
        if checkpoint.time_states:
            model.set_time_states([state.get().to(device) for state in checkpoint.time_states])
        return model.requires_grad_(False).eval()

    @classmethod
    def _quantised(cls, checkpoint: Checkpoint, wkv: Operator, device: str, dtype: str, mmap: bool) -> Self:
        """The model with matrices converted to int8 or int4 one at a time; everything else is computed in float32.

        A matrix that is not memory-mapped, such as one of a quantised GGUF, is read only when it is converted.
        """
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise UserError(f"dtype={dtype} requires a CPU or a CUDA device; got {device}: use dtype=bfloat16")
        group = generation(checkpoint.config).group
        packed = {name: matrix.read() if mmap else matrix.read().map(torch.clone) for name, matrix in checkpoint.packed.items()
                  if matrix.format == dtype and checkpoint.fingerprint is not None}        # packed weights have no fingerprint
        stored = checkpoint.weights.stored
        later = {name: tensor.get for name, tensor in stored.items()
                 if name not in packed and is_linear_weight(name, group(name)) and not tensor.mapped}

        def keeps_dtype(name: str, tensor: Stored) -> bool:
            low_rank = kind == "cpu" and _has_half_low_rank(checkpoint, name)
            return group(name) in MATRICES or (low_rank and tensor.dtype == torch.bfloat16)

        weights = {name: torch.empty(tensor.shape, device="meta") if name in packed or name in later else
                   (tensor if keeps_dtype(name, tensor) else tensor.cast(torch.float32)).get(copy=not mmap)
                   for name, tensor in stored.items()}
        model = cls.with_weights(checkpoint.config, wkv, weights).requires_grad_(False).eval()
        model.fingerprint_before = checkpoint.fingerprint
        if later and checkpoint.fingerprint is None:
            model.fingerprint_before = fingerprint_of(checkpoint)
        model.merge()
        if kind == "cuda":
            return to_packed(model, dtype, device, packed, later)
        return to_int8(model, later=later, packed=packed) if dtype == "int8" else to_int4(model, packed, later)

    @classmethod
    def _in_blocks(cls, checkpoint: Checkpoint, wkv: Operator, mmap: bool) -> Self:
        """The model with its matrices and embedding in the file's quantised blocks; everything else is computed in float32."""
        blocks = blocks_of(checkpoint)
        stored = checkpoint.weights.stored
        keeps_dtype = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16
                       and (name == "emb.weight" or _has_half_low_rank(checkpoint, name))}
        weights = {name: torch.empty(tensor.shape, device="meta") if name in blocks else
                   (tensor if name in keeps_dtype else tensor.cast(torch.float32)).get(copy=not mmap)
                   for name, tensor in stored.items()}
        model = cls.with_weights(checkpoint.config, wkv, weights).requires_grad_(False).eval()
        model.fingerprint_before = checkpoint.fingerprint
        to_blocks(model, blocks if mmap else {name: packed.map(torch.clone) for name, packed in blocks.items()})
        return model.merge()

    def save_pretrained(self, path: str | Path, tokenizer: Tokenizer | None = None, dtype: str | None = None,
                        format: str | None = None) -> None:
        """Writes the weights, and the configuration and the tokenizer if the format supports them.

        The suffix of `path` chooses the format (.pth .ckpt .safetensors, .bin or .ggmf for rwkv.cpp, .gguf for llama.cpp, none
        for a Hugging Face directory), unless `format` names the format. dtype: float32, float16, bfloat16, in GGUF also q4_0,
        q4_1, q5_0, q5_1 and q8_0, in .safetensors also int8 and int4, or None for the model's own dtype. Raises UserError for
        any other suffix, for a dtype, generation or tokenizer that the format does not support, for a tokenizer with more
        tokens than the model, and for a model in int8, int4 or GGUF's blocks.
        """
        quantised = next((layer for layer in self.modules() if isinstance(layer, Int8Linear | Int4Linear | BlockLinear)), None)
        if quantised is not None:
            raise UserError(f"a model in {quantised.format} cannot be saved, because its matrices are quantised: load it with "
                            "dtype=float32 or bfloat16 and save that model (.safetensors can store it in int8 or int4)")
        if self.time_states():
            raise UserError("save_pretrained cannot write the model's tuned state: timemix convert writes weights and "
                            "state as .pth, .safetensors or .st; or save the base model")
        checkpoint = checkpoint_of(self.state_dict(), tokenizer, self.config, "the model")
        write_checkpoint(checkpoint, path, dtype, format)


class OpenCheckpoint(NamedTuple):
    """A checkpoint, read and checked; its model is not loaded yet.

    assumed: the name of a guessed tokenizer, if neither the file nor the user names one. caches: whether model() caches the
    packed weights (rwkv/checkpoint/packed_cache.py). dtype_line: a line about dtype, if a rule has chosen it.
    """

    checkpoint: Checkpoint
    wkv: Operator
    tokenizer: Tokenizer
    device: str
    dtype: str
    assumed: str | None = None
    caches: bool = False
    dtype_line: str | None = None

    def lines(self) -> list[tuple[str, str]]:
        """Labels and notes to print: on slow matmuls, a chosen dtype, a guessed tokenizer, end-of-text tokens and what rounding
        loses.
        """
        notes = [("WARNING", note) for note in self.checkpoint.notes]
        if slow := why_slow(computed_in(self.dtype), torch.device(self.device)):
            notes.append(("WARNING", f"dtype={self.dtype}: {slow}; use dtype=float32, int8 or int4"))
        if self.dtype_line:
            notes.append(("dtype", self.dtype_line))
        if self.checkpoint.begins:
            notes.append(("state", self.checkpoint.begins))
        if self.checkpoint.about:
            notes.append(("adapter", f"{self.checkpoint.about} at {self.checkpoint.path}, merged into the matrices of "
                          f"{counted(len(self.checkpoint.unadapted), 'layer')}"))
        if self.assumed:
            notes.append(("tokenizer", f"{self.assumed} (guessed from the vocabulary size, {self.checkpoint.vocab_size:,})"))
        if end := self.tokenizer.end_line():
            notes.append(("sequences", f"end with {end}"))
        rounding = [*second_rounding(self.checkpoint, self.dtype), *rounded_adapters(self.checkpoint, self.dtype),
                    *repacked(self.checkpoint, self.dtype), *self._packing_lines()]
        return notes + [("weights", line) for line in rounding]

    def print_notes(self) -> None:
        """Prints the lines on standard error."""
        notes = self.lines()
        needed, free = self.nbytes(), available_memory()
        if self.device == "cpu" and needed >= GIB and free is not None:
            notes.append(("memory", f"the weights need {needed / GIB:.1f} of {free / GIB:.1f} GiB that are free"))
        for label, note in notes:
            print(wrapped(f"{label}: {note}", sys.stderr), file=sys.stderr)

    def nbytes(self) -> int:
        """The bytes of the weights, as weights_nbytes counts them, whether they are mapped or not."""
        return weights_nbytes(self.checkpoint, self.dtype, self.device == "cpu")

    def _packing_lines(self) -> list[str]:
        """A line on how to pack the weights only once, if each start packs them; or on the cache that stores them."""
        checkpoint, dtype = self.checkpoint, self.dtype
        if self.caches:
            return [f"packed in {dtype} once, into {packed_cache.entry_of(checkpoint.path, dtype)}"]
        if not _is_packed_on_loading(checkpoint, self.device, dtype) or not packed_cache.can_hold(checkpoint):
            return []
        target = f"{checkpoint.path.stem}-{dtype}.safetensors"
        return [f"packed in {dtype} at each start; cache_packed=true caches the packed weights; to store them in a file: "
                f"timemix convert {shlex.quote(str(checkpoint.path))} {shlex.quote(target)} --dtype {dtype}"]

    def model(self) -> RWKV:
        checkpoint = packed_cache.write(self.checkpoint, self.dtype) if self.caches else self.checkpoint
        return RWKV.from_checkpoint(checkpoint, self.wkv, self.device, self.dtype)

    def model_and_context(self, state: str | None, layout: str | None) -> tuple[RWKV, PrefillResult | None]:
        """The model, and the context in the file `state`, if any: a file that save_state= wrote, or a tuned state.

        layout: the layout of a tuned state; None infers it. Prints a tuned state's layout. Raises UserError, if possible before
        the model is loaded.
        """
        if state is None:
            return self.model(), None
        path = state_file(state)
        if is_state_file(path):
            if layout is not None:
                raise UserError(f"state_layout requires a tuned state, and save_state= wrote {path}: omit state_layout")
            model = self.model()
            return model, load_context(path, model, self.tokenizer)
        tuned = time_states.read(path, self.checkpoint.config, layout)
        state_before = tuned.state(self.checkpoint.config)
        print(wrapped(f"state: {tuned.line}", sys.stderr), file=sys.stderr)
        model = self.model()
        return model, beginning(model, self.tokenizer, state_before)


def open_checkpoint(config: SavedModelConfig) -> OpenCheckpoint:
    """Reads a checkpoint. Raises UserError for an unreadable file, an unavailable kernel or a tokenizer that does not fit."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    dtype = config.dtype or AUTO
    require_dtype(dtype, device)
    adapters = config.lora or getattr(config, "adapters", None)          # merged into the unrounded weights
    may_cache = config.cache_packed and not adapters and device == "cpu" and dtype in PACKED
    cached = packed_cache.read(locate(config.checkpoint), dtype) if may_cache else None
    checkpoint = cached or _read(config.checkpoint, config.lora, config.lora_alpha)
    dtype, line = resolved_dtype(dtype, device, checkpoint)
    caches = may_cache and _is_packed_on_loading(checkpoint, device, dtype) and packed_cache.can_hold(checkpoint)
    wkv = operator_for(checkpoint.config, config.kernel.name, device, computed_in(dtype))
    tokenizer = tokenizer_of(checkpoint, config.tokenizer, config.end_of_text)
    assumed = assumed_tokenizer(checkpoint) if config.tokenizer is None else None
    return OpenCheckpoint(checkpoint, wkv, tokenizer, device, dtype, assumed, caches, line)


def _is_packed_on_loading(checkpoint: Checkpoint, device: str, dtype: str) -> bool:
    """Whether loading the checkpoint on a CPU quantises it."""
    return device == "cpu" and dtype in PACKED and not any(matrix.dtype == dtype for matrix in checkpoint.packed.values())


def _read(path: str | Path, lora: str | Path | None, alpha: float | None) -> Checkpoint:
    if lora is None:
        return read_checkpoint(path)
    return with_adapter(read_checkpoint(path), lora, alpha)


def require_dtype(dtype: str, device: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if dtype == "float16" and torch.device(device).type == "cpu":
        raise UserError("dtype=float16 requires a GPU, and the device is a CPU: use dtype=bfloat16")


def default_dtype(device: str) -> str:
    """The dtype for inference, on this device, from a file without blocks: bfloat16 on a GPU that supports it, else float32."""
    return "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def _has_half_low_rank(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the tensor is a low-rank matrix that a quantised model on a CPU may have in bfloat16."""
    return generation(checkpoint.config).group(name) == "low rank" and not checkpoint.config.deep_embed_dim


def resolved_dtype(dtype: str, device: str, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The dtype for inference, and a line to print about this dtype; None as the line if there is nothing to tell.

    On a CPU, auto resolves to blocks if the file has blocks that kernels/matvec multiplies; otherwise auto is default_dtype's
    result. Where the C library cannot run, blocks resolves to float32; where it can, int4 of a calibrated file resolves to
    blocks. Raises UserError for blocks on a GPU, or with a file without blocks.
    """
    formats = sorted({matrix.format.upper() for matrix in checkpoint.packed.values() if matrix.dtype == dtype != matrix.format})
    if formats and torch.device(device).type == "cpu" and why_not("matvec", IN_C) is None:
        return BLOCKS, f"{dtype}, calibrated: the file's {', '.join(formats)} as they are"
    if dtype not in (AUTO, BLOCKS):
        return dtype, None
    if torch.device(device).type != "cpu":
        if dtype == BLOCKS:
            raise UserError(f"dtype=blocks requires a CPU; got {device}: use dtype=int4, int8 or bfloat16")
        chosen = default_dtype(device)
        return chosen, f"{chosen}, the default on this GPU; dtype=float32 computes in float32" if chosen == "bfloat16" else None
    types = {str(tensor.blocks) for tensor in checkpoint.weights.stored.values() if tensor.has_blocks()}
    if not types:
        if dtype == BLOCKS:
            raise UserError(f"dtype=blocks requires a GGUF or calibrated file with matrices in {', '.join(BLOCK_FORMATS)}, "
                            f"and {checkpoint.path} has none: use dtype=int8, int4 or float32")
        return default_dtype(device), None
    names = ", ".join(sorted(types))
    if reason := why_not("matvec", IN_C):
        return "float32", f"float32: the file's {names} are dequantised, because they cannot be multiplied here ({reason})"
    if dtype == BLOCKS:
        return BLOCKS, None
    return BLOCKS, f"blocks, the file's {names} unchanged; dtype=float32 dequantises them"


def blocks_of(checkpoint: Checkpoint) -> dict[str, Blocks]:
    """By name, the embedding and the matrices of linear layers if the file has them in block formats of kernels/matvec."""
    group = generation(checkpoint.config).group
    candidates = {name: tensor for name, tensor in checkpoint.weights.stored.items()
                  if is_linear_weight(name, group(name)) or name == "emb.weight"}
    return {name: packed for name, tensor in candidates.items() if (packed := tensor.in_blocks()) is not None}


def second_rounding(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """A line with the error of requantising one matrix of a quantised file to `dtype`; [] for other files."""
    stored = checkpoint.weights.stored[REQUANTISED]
    if dtype not in PACKED or stored.blocks is None:
        return []
    exact = stored.get().float()
    error = (pack(exact, dtype).dense() - exact).norm() / exact.norm()
    return [f"{dtype} requantises the file's {stored.blocks}: {REQUANTISED} changes by {error:.1%}"]


def rounded_adapters(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """A line with the fraction of the training that survives rounding merged adapters to `dtype`; [] if nothing is lost."""
    share = surviving(checkpoint, "float32" if dtype == BLOCKS else dtype)       # merged matrices are not in blocks
    if share > ALL_SURVIVES:
        return []
    return [f"{dtype} rounds the merged adapters: {share:.0%} of their training survives; dtype=float32 keeps all of it"]


def repacked(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """A line, if the file's packed matrices of this dtype are in the memory order of an earlier version of timemix; else []."""
    if not any(matrix.repacked for matrix in checkpoint.packed.values() if matrix.format == dtype):
        return []
    return [f"{checkpoint.path} has {dtype} matrices in the memory order of an earlier version, so each start takes more "
            "memory and time: convert the file once to a new .safetensors with timemix convert"]


def computed_in(dtype: str) -> torch.dtype:
    """The dtype of the operator's inputs in a model of this dtype."""
    return torch.float32 if dtype in (*PACKED, BLOCKS) else getattr(torch, dtype)


def template_choice(checkpoint: Checkpoint, name: str | None = None) -> Choice:
    return choose_template(name, str(checkpoint.path), checkpoint.run)


def template_line(checkpoint: Checkpoint, choice: Choice) -> str:
    """A line with the chat template, the trained context length, and where each comes from."""
    length = trained_with(checkpoint)
    trained = f"; trained on sequences of up to {length.tokens:,} tokens ({length.why})" if length.tokens else ""
    return f"{choice.template} ({choice.why}){trained}"


def trained_with(checkpoint: Checkpoint) -> Length:
    length = trained_length(str(checkpoint.path), (checkpoint.run or {}).get("init_from"))
    ctx_len = checkpoint.config.ctx_len
    if ctx_len in (length.tokens, DEFAULT_CTX_LEN):          # writers that do not know the length write the default
        return length
    return Length(ctx_len, "the file says so")
