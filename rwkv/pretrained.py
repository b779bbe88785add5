"""The public class RWKV, a Model with from_pretrained and save_pretrained, and the functions that open a checkpoint."""

import math
import shlex
import sys
import warnings
from dataclasses import asdict, replace
from numbers import Real
from pathlib import Path
from typing import NamedTuple, Self

import torch

from kernels import matvec, native
from kernels.arguments import path_of
from kernels.machine.cpu import matrix_dtype
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
from rwkv.checkpoint.tuned import surviving_fraction
from rwkv.config import BLOCKS, DTYPES, SavedModelConfig, require_between, require_path, require_type
from rwkv.errors import UserError
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.state_files import context_of_state, is_state_file, load_context
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of, wrap_text
from rwkv.io.state_path import state_path
from rwkv.model.base import MATRICES, Model, generation, is_linear_weight
from rwkv.model.decoding import c_step
from rwkv.model.operators import operator_for
from rwkv.model.quantized import (
    IN_C,
    BlockLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    to_bfloat16,
    to_blocks,
    to_int4,
    to_int8,
    to_packed,
)
from rwkv.tokenizer.tokenizers import Tokenizer

AUTO = "auto"
BLOCK_FORMATS = tuple(name.upper() for name in matvec.BLOCKS)
ALL_SURVIVES = 0.995                     # no line is printed if a larger fraction of the training survives rounding
QUANTISED = (Int8Linear, Int4Linear, PackedLinear, BlockLinear)          # models with these layers cannot be saved
REQUANTISED = "blocks.0.att.key.weight"        # the error of a second rounding is measured on this matrix


class RWKV(Model):
    """An RWKV language model: model(tokens, state) returns the logits (B,T,V) and the new state.

    The tokens (B,T) are int64, and `state` defaults to the initial state. A call does not change its arguments.

    Attributes:
        origin: the path of the checkpoint from which the model was loaded, and the configuration of the run that wrote it.
    """

    origin: tuple[Path, JsonObject | None] | None = None

    @classmethod
    def from_pretrained(cls, path: str | Path, kernel: str = "auto", device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True, trainable: bool = False, lora: str | Path | None = None,
                        lora_alpha: float | None = None) -> Self:
        """Loads a model from a file of any format, a Hugging Face directory or the directory of a training run.

        By default the model is for inference: in evaluation mode and without gradients. On a CPU, weights stored in `dtype` are
        memory-mapped, so a program that writes into the file, instead of replacing it, changes the model. Adapters of a run
        with tune=lora are merged in float32. If `dtype` rounds the sums, a warning reports how much of the training survives.

        Raises CheckpointError (a ValueError) if the file is missing, damaged or not a checkpoint, and KernelUnavailable if the
        kernel cannot run on `device`.

        Args:
            path: a path, or a name on the Hub such as "ORG/REPO/FILE.pth" or "ORG/REPO:Q4_K_M" (rwkv/io/hub.py), whose files
                are downloaded once.
            dtype: the weights' dtype. "blocks" keeps the quantised blocks of a GGUF file, and "int4" those of a calibrated
                file. "auto" chooses as generate.py does.
            mmap: False to copy the weights instead of mapping them.
            trainable: True to return a model for training, with gradients and its own memory. `dtype` should then be float32,
                unless the optimiser is made for another dtype.
            lora: another program's adapter (rwkv/checkpoint/adapters.py), which is merged like those of a run.
            lora_alpha: the adapter's alpha, if its file has none.
        """
        require_path("path", path)
        require_type("kernel", kernel, str, "a string")
        require_dtype(dtype, device)
        if lora is not None:
            require_path("lora", lora)
        if lora is None and lora_alpha is not None:
            raise UserError("lora_alpha requires lora=")
        if lora_alpha is not None:
            require_type("lora_alpha", lora_alpha, Real, "a number")
            require_between("lora_alpha", lora_alpha, 0, math.inf)
        if trainable and dtype not in ("float32", "bfloat16"):
            raise UserError(f"trainable=True requires dtype=float32 or dtype=bfloat16; got dtype={dtype}")
        checkpoint = _read_with_adapter(path, lora, lora_alpha)
        dtype, line = resolve_dtype(dtype, device, checkpoint)
        for note in [*checkpoint.notes, *([line] if dtype == "float32" and line else [])]:
            warnings.warn(note, stacklevel=2)
        activations = getattr(torch, dtype) if trainable else compute_dtype(dtype, device)
        wkv = operator_for(checkpoint.config, kernel, device, activations)
        for note in [*adapter_rounding_lines(checkpoint, dtype), *old_memory_order_lines(checkpoint, dtype)]:
            warnings.warn(note, stacklevel=2)
        if trainable:
            model = cls.with_weights(checkpoint.config, wkv, checkpoint.tensors(dtype, device))
            model.origin = checkpoint.path.absolute(), checkpoint.run
            if checkpoint.time_states:
                model.set_time_states([state.get(copy=True).to(device) for state in checkpoint.time_states])
            return model
        return cls.from_checkpoint(checkpoint, wkv, device, dtype, mmap)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, wkv: Operator, device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True) -> Self:
        """Returns a checkpoint's model, in evaluation mode and without gradients. Raises UserError if memory is short."""
        if torch.device(device).type == "cpu":
            require_memory(checkpoint, dtype, available_memory())
        if dtype == BLOCKS:
            model = cls._with_blocks(checkpoint, wkv, mmap)
        elif dtype in PACKED or compute_dtype(dtype, device) != getattr(torch, dtype):
            model = cls._with_converted_matrices(checkpoint, wkv, device, dtype, mmap)
        else:
            model = cls.with_weights(checkpoint.config, wkv, checkpoint.tensors(dtype, device, mmap))
            if checkpoint.fingerprint is not None or dtype == "float16":         # the file is packed, or float16 may round
                model.unrounded = {model.fingerprint(): checkpoint.fingerprint or fingerprint_of(checkpoint)}
            model.merge()
        if checkpoint.time_states:
            model.set_time_states([state.get().to(device) for state in checkpoint.time_states])
        model.origin = checkpoint.path.absolute(), checkpoint.run
        return model.requires_grad_(False).eval()

    @classmethod
    def _with_converted_matrices(cls, checkpoint: Checkpoint, wkv: Operator, device: str, dtype: str, mmap: bool) -> Self:
        """Returns the model with matrices converted to bfloat16, int8 or int4, one at a time. All else is computed in float32.

        A matrix that is not memory-mapped, such as one in a quantised GGUF file, is read only when it is converted.
        """
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise UserError(f"dtype={dtype} requires a CPU or a CUDA device; got {device}. Use dtype=bfloat16")
        group = generation(checkpoint.config).group
        packed = {name: matrix.read() if mmap else matrix.read().map(torch.clone) for name, matrix in checkpoint.packed.items()
                  if matrix.format == dtype and checkpoint.fingerprint is not None}    # a fingerprint needs unpacked weights
        stored = checkpoint.weights.stored
        later = {name: tensor.get for name, tensor in stored.items()
                 if name not in packed and is_linear_weight(name, group(name)) and not tensor.mapped}

        def keeps_dtype(name: str, tensor: Stored) -> bool:
            low_rank = kind == "cpu" and _has_half_low_rank(checkpoint, name)
            return group(name) in MATRICES or (low_rank and tensor.dtype == torch.bfloat16)

        in_use = {name for name, tensor in stored.items() if tensor.lending.lent}       # a model may have changed these tensors

        def drop_pages_of_original(name: str) -> None:
            original = stored[f"{name}.weight"]
            if f"{name}.weight" not in in_use and str(original.dtype) != f"torch.{dtype}":     # the same dtype needs no copy
                original.drop_pages()

        weights = {name: torch.empty(tensor.shape, device="meta") if name in packed or name in later else
                   (tensor if keeps_dtype(name, tensor) else tensor.cast(torch.float32)).get(copy=not mmap)
                   for name, tensor in stored.items()}
        model = cls.with_weights(checkpoint.config, wkv, weights).requires_grad_(False).eval()
        model.fingerprint_before = checkpoint.fingerprint
        if later and checkpoint.fingerprint is None:
            model.fingerprint_before = fingerprint_of(checkpoint)
        model.merge()
        if kind == "cuda":
            return to_packed(model, dtype, device, packed, later, replaced=drop_pages_of_original)
        if dtype == "bfloat16":
            return to_bfloat16(model, later, drop_pages_of_original)
        if dtype == "int8":
            return to_int8(model, later=later, packed=packed, replaced=drop_pages_of_original)
        return to_int4(model, packed, later, replaced=drop_pages_of_original)

    @classmethod
    def _with_blocks(cls, checkpoint: Checkpoint, wkv: Operator, mmap: bool) -> Self:
        """Returns the model with its matrices and embedding in the file's quantised blocks. All else is computed in float32."""
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

    @staticmethod
    def tokenizer_of(path: str | Path, tokenizer: str | Path | None = None) -> Tokenizer:
        """Returns a checkpoint's tokenizer. A checkpoint without one gets `world` if its vocabulary has World's size.

        Raises UserError if there is none, or if `tokenizer` does not match the checkpoint.

        Args:
            path: as in from_pretrained.
            tokenizer: the tokenizer to use instead, a name as in Tokenizer.named.
        """
        require_path("path", path)
        return tokenizer_of(read_checkpoint(path), None if tokenizer is None else str(tokenizer))

    def save_pretrained(self, path: str | Path, tokenizer: Tokenizer | None = None, dtype: str | None = None,
                        format: str | None = None) -> None:
        """Writes the weights to `path`, and also the configuration and the tokenizer if the format supports them.

        A directory and a GGUF file also contain the chat template and the generation options of the checkpoint from which the
        model was loaded, as after `timemix convert`.

        Raises UserError for an unknown suffix, for a dtype, generation or tokenizer that the format does not support, for a
        tokenizer with more tokens than the model, and for a model in int8, int4 or GGUF's blocks.

        Args:
            path: a path whose suffix chooses the format, unless `format` names a format: .pth, .ckpt, .safetensors, .bin or
                .ggmf for rwkv.cpp, .gguf for llama.cpp, or none for a Hugging Face directory.
            dtype: float32, float16 or bfloat16; in GGUF also q4_0, q4_1, q5_0, q5_1 and q8_0; in .safetensors also int8 and
                int4. None keeps the model's own dtype.
        """
        require_path("path", path)
        quantised = next((layer for layer in self.modules() if isinstance(layer, QUANTISED)), None)
        if quantised is not None:
            raise UserError(f"a model loaded in {quantised.format} cannot be saved, because its matrices are quantised. Load "
                            "the model with dtype=float32 or dtype=bfloat16 before saving. To save a quantised file, choose a "
                            ".safetensors path and dtype=int8 or dtype=int4")
        if self.time_states():
            raise UserError("save_pretrained cannot save the model's tuned state. Save the base model, or "
                            "use timemix convert, which writes the weights and the state as .pth, .safetensors or .st")
        weights = self.official_weights()
        own = self.generation.shapes(replace(self.config, n_layer=len(self.blocks)), self.vocab_size)
        if other := next((name for name in weights if name not in own), None):
            raise UserError(f"save_pretrained can save only the weights of {self.generation.NAME}, but this model has {other}. "
                            "Remove what was added to the layer, such as a parametrisation or a pruning mask of "
                            "torch.nn.utils, or save model.state_dict() with torch.save")
        if wrapper := next((name for name, weight in weights.items() if hasattr(weight, "__tensor_flatten__")), None):
            raise UserError("save_pretrained can save only plain tensors, but "
                            f"{wrapper} is a {type(weights[wrapper]).__name__}. Gather a sharded model's weights with "
                            "full_state_dict=True of torch.distributed.checkpoint.state_dict.get_model_state_dict, and save "
                            "them with torch.save, as a .pth")
        checkpoint = checkpoint_of(weights, tokenizer, self.config, "the model")
        if self.origin is not None:
            origin, run = self.origin
            checkpoint = replace(checkpoint, origin=origin, run=run and {**run, "model": asdict(self.config)})
        write_checkpoint(checkpoint, path_of(path), dtype, format)


class OpenCheckpoint(NamedTuple):
    """A checkpoint that is read and checked, but whose model is not loaded yet.

    Args:
        assumed: the name of a guessed tokenizer, if neither the file nor the user names a tokenizer.
        caches: whether model() caches the packed weights (rwkv/checkpoint/packed_cache.py).
        dtype_line: a line to print about `dtype`, if a rule has chosen the dtype.
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
        """Returns labels and notes to print.

        The notes are about the chosen dtype, a guessed tokenizer, end-of-text tokens and what rounding loses.
        """
        notes = [("WARNING", note) for note in self.checkpoint.notes]
        if self.dtype_line:
            notes.append(("dtype", self.dtype_line))
        if self.dtype == "bfloat16" and compute_dtype(self.dtype, self.device) == torch.float32:
            notes.append(("dtype", "bfloat16 weights with float32 activations, because this CPU has no bfloat16 instructions"))
        if self.checkpoint.state_note:
            notes.append(("state", self.checkpoint.state_note))
        if self.checkpoint.adapter_kind:
            notes.append(("adapter", f"{self.checkpoint.adapter_kind} at {self.checkpoint.path} is merged into "
                          f"{count_of(len(self.checkpoint.unadapted), 'linear layer')}"))
        if self.assumed:
            notes.append(("tokenizer", f"{self.assumed} (guessed from the vocabulary size, {self.checkpoint.vocab_size:,})"))
        if end := self.tokenizer.end_line():
            notes.append(("sequences", f"end with {end}"))
        rounding = [*requantisation_lines(self.checkpoint, self.dtype), *adapter_rounding_lines(self.checkpoint, self.dtype),
                    *old_memory_order_lines(self.checkpoint, self.dtype), *self._packing_lines(), *self._by_output_lines()]
        return notes + [("weights", line) for line in rounding]

    def print_notes(self) -> None:
        """Prints the lines on standard error and, for weights of at least a GiB on a CPU, the memory that they need."""
        notes = self.lines()
        needed, free = self.nbytes(), available_memory()
        if self.device == "cpu" and needed >= GIB and free is not None:
            notes.append(("memory", f"the weights need {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"))
        for label, note in notes:
            print(wrap_text(f"{label}: {note}", sys.stderr), file=sys.stderr)

    def nbytes(self) -> int:
        """Returns the size of the weights in bytes, including memory-mapped weights."""
        return weights_nbytes(self.checkpoint, self.dtype, self.device == "cpu")

    def _packing_lines(self) -> list[str]:
        """Returns a line on how to pack the weights only once, if each start packs them, or on the cache that stores them."""
        checkpoint, dtype = self.checkpoint, self.dtype
        if self.caches:
            return [f"the packed {dtype} weights are stored in {packed_cache.entry_of(checkpoint.path, dtype)}"]
        if not _is_packed_on_loading(checkpoint, self.device, dtype) or not packed_cache.can_hold(checkpoint):
            return []
        target = f"{checkpoint.path.stem}-{dtype}.safetensors"
        return [f"each start packs the weights in {dtype}. cache_packed=true caches the packed weights. To store them in a "
                f"file: timemix convert {shlex.quote(str(checkpoint.path))} {shlex.quote(target)} --dtype {dtype}"]

    def _by_output_lines(self) -> list[str]:
        """Returns a line on how to skip the weights of zero inputs, if decoding reads these weights."""
        checkpoint = self.checkpoint
        if (self.device, self.dtype) != ("cpu", "bfloat16") or checkpoint.unadapted or native.why_not():
            return []
        layers = generation(checkpoint.config).non_negative(checkpoint.config)
        names = tuple(f"{layer}.weight" for layer in layers)
        elements = sum(tensor.count for name, tensor in checkpoint.weights.stored.items()
                       if name.endswith(names) and not tensor.by_input)
        if elements * torch.bfloat16.itemsize <= c_step.COPIED:
            return []
        target = f"{checkpoint.path.stem}-by-input.safetensors"
        return [f"decoding reads all of {' and '.join(layers)}, although most of the inputs are zero in a trained model. To "
                f"skip the weights of zero inputs: timemix convert {shlex.quote(str(checkpoint.path))} {shlex.quote(target)} "
                "--dtype bfloat16 --by-input"]

    def model(self) -> RWKV:
        checkpoint = packed_cache.write(self.checkpoint, self.dtype) if self.caches else self.checkpoint
        return RWKV.from_checkpoint(checkpoint, self.wkv, self.device, self.dtype)

    def model_and_context(self, state: str | None, layout: str | None) -> tuple[RWKV, PrefillResult | None]:
        """Loads the model, and the context in the file `state`, if any. The file may also contain a tuned state.

        Prints a tuned state's layout. Raises UserError, if possible before the model is loaded. `layout` is the layout of a
        tuned state; None infers the layout.
        """
        if state is None:
            return self.model(), None
        path = state_path(state)
        if is_state_file(path):
            if layout is not None:
                raise UserError(f"state_layout= requires a file with a tuned state, but {path} was written by "
                                "save_state=. Omit state_layout=")
            model = self.model()
            return model, load_context(path, model, self.tokenizer)
        tuned = time_states.read(path, self.checkpoint.config, layout)
        state_before = tuned.state(self.checkpoint.config)
        print(wrap_text(f"state: {tuned.line}", sys.stderr), file=sys.stderr)
        model = self.model()
        return model, context_of_state(model, self.tokenizer, state_before)


def open_checkpoint(config: SavedModelConfig, option: str = "tokenizer") -> OpenCheckpoint:
    """Reads and checks the checkpoint that `config` names.

    Raises UserError for an unreadable file, an unavailable kernel or a tokenizer that does not fit. `option` is the option that
    sets the tokenizer, for error messages.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    dtype = config.dtype or AUTO
    require_dtype(dtype, device)
    adapters = config.lora or getattr(config, "adapters", None)          # adapters are merged into unrounded weights
    may_cache = config.cache_packed and not adapters and device == "cpu" and dtype in PACKED
    cached = packed_cache.read(locate(config.checkpoint), dtype) if may_cache else None
    checkpoint = cached or _read_with_adapter(config.checkpoint, config.lora, config.lora_alpha)
    dtype, line = resolve_dtype(dtype, device, checkpoint)
    caches = may_cache and _is_packed_on_loading(checkpoint, device, dtype) and packed_cache.can_hold(checkpoint)
    wkv = operator_for(checkpoint.config, config.kernel.name, device, compute_dtype(dtype, device))
    tokenizer = tokenizer_of(checkpoint, config.tokenizer, config.end_of_text, option)
    assumed = assumed_tokenizer(checkpoint) if config.tokenizer is None else None
    return OpenCheckpoint(checkpoint, wkv, tokenizer, device, dtype, assumed, caches, line)


def _is_packed_on_loading(checkpoint: Checkpoint, device: str, dtype: str) -> bool:
    return device == "cpu" and dtype in PACKED and not any(matrix.dtype == dtype for matrix in checkpoint.packed.values())


def _read_with_adapter(path: str | Path, lora: str | Path | None, alpha: float | None) -> Checkpoint:
    if lora is None:
        return read_checkpoint(path)
    return with_adapter(read_checkpoint(path), lora, alpha)


def require_dtype(dtype: str, device: str) -> None:
    """Raises UserError for an unknown dtype or device, and for a dtype that the device does not support."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"device must be a device of PyTorch, such as cpu or cuda; got {device!r}") from None
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if dtype == "float16" and torch.device(device).type == "cpu":
        raise UserError("dtype=float16 requires a GPU, but the device is a CPU. Use dtype=bfloat16")


def default_dtype(device: str) -> str:
    """Returns the dtype for inference from a file without blocks: bfloat16 on a GPU that supports bfloat16, else float32."""
    on_gpu = torch.device(device).type == "cuda"
    return "bfloat16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def _has_half_low_rank(checkpoint: Checkpoint, name: str) -> bool:
    """Returns True if the tensor is a low-rank matrix that a quantised model on a CPU may keep in bfloat16."""
    return generation(checkpoint.config).group(name) == "low rank" and not checkpoint.config.deep_embed_dim


def resolve_dtype(dtype: str, device: str, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """Returns the dtype for inference, and a line to print about this dtype or None.

    On a CPU, auto resolves to blocks if the file has blocks that kernels/matvec multiplies, and to int8 or int4 if the file is
    packed in that format. Otherwise auto resolves to the result of default_dtype. If the C library cannot run, blocks resolves
    to float32. If it can run, int4 resolves to blocks for a calibrated file. Raises UserError for blocks on a GPU, or with a
    file without blocks.
    """
    formats = sorted({matrix.format.upper() for matrix in checkpoint.packed.values() if matrix.dtype == dtype != matrix.format})
    if formats and torch.device(device).type == "cpu" and why_not("matvec", IN_C) is None:
        return BLOCKS, f"{dtype}: the calibrated file's {', '.join(formats)} matrices are used unchanged"
    if dtype not in (AUTO, BLOCKS):
        return dtype, None
    if torch.device(device).type != "cpu":
        if dtype == BLOCKS:
            raise UserError(f"dtype=blocks requires a CPU; got {device}. Use dtype=int4, int8 or bfloat16")
        default = default_dtype(device)
        return default, (f"{default} is the default on this GPU; dtype=float32 avoids rounding" if default == "bfloat16"
                         else None)
    packed = {matrix.dtype for matrix in checkpoint.packed.values() if matrix.dtype == matrix.format}
    if dtype == AUTO and len(packed) == 1:
        dtype, = packed
        return dtype, f"{dtype}: the file's matrices are packed in {dtype}; dtype=float32 unpacks them"
    types = {str(tensor.blocks) for tensor in checkpoint.weights.stored.values() if tensor.has_blocks()}
    if not types:
        if dtype == BLOCKS:
            raise UserError(f"dtype=blocks requires a GGUF or calibrated file with matrices in {', '.join(BLOCK_FORMATS)}, "
                            f"but {checkpoint.path} has no such matrices. Use dtype=int8, int4 or float32")
        return default_dtype(device), None
    names = ", ".join(sorted(types))
    if reason := why_not("matvec", IN_C):
        return "float32", f"float32: the file's {names} matrices are dequantised, because they cannot be multiplied ({reason})"
    if dtype == BLOCKS:
        return BLOCKS, None
    return BLOCKS, f"blocks: the file's {names} matrices are used unchanged; dtype=float32 dequantises them"


def blocks_of(checkpoint: Checkpoint) -> dict[str, Blocks]:
    """Returns the embedding and the linear layers' matrices that the file has in block formats of kernels/matvec, by name."""
    group = generation(checkpoint.config).group
    candidates = {name: tensor for name, tensor in checkpoint.weights.stored.items()
                  if is_linear_weight(name, group(name)) or name == "emb.weight"}
    return {name: packed for name, tensor in candidates.items() if (packed := tensor.in_blocks()) is not None}


def requantisation_lines(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """Returns a line with the error of requantising a matrix of a quantised file to `dtype`, or [] for other files."""
    stored, packed = checkpoint.weights.stored[REQUANTISED], checkpoint.packed.get(REQUANTISED)
    source = stored.blocks or (packed and packed.format)
    if dtype not in PACKED or source in (None, dtype):
        return []
    exact = stored.get().float()
    error = (pack(exact, dtype).dense() - exact).norm() / exact.norm()
    return [f"{dtype} requantises the file's {source}: {REQUANTISED} changes by {error:.1%}"]


def adapter_rounding_lines(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """Returns a line with the fraction of the training that survives rounding merged adapters to `dtype`, or [] for no loss."""
    kept_dtype = "float32" if dtype == BLOCKS else dtype                 # merged matrices cannot be in blocks
    share = surviving_fraction(checkpoint.weights.stored, checkpoint.unadapted, kept_dtype)
    if share > ALL_SURVIVES:
        return []
    return [f"{dtype} rounds the merged adapters: {share:.0%} of their training survives; dtype=float32 keeps all of it"]


def old_memory_order_lines(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """Returns a line if the file's matrices in `dtype` are in the memory order of an earlier version of timemix, else []."""
    if not any(matrix.repacked for matrix in checkpoint.packed.values() if matrix.format == dtype):
        return []
    return [f"{checkpoint.path} has {dtype} matrices in the memory order of an earlier timemix version, so each start takes "
            "more memory and time. Convert the file once to a new .safetensors file with timemix convert"]


def compute_dtype(dtype: str, device: str) -> torch.dtype:
    """Returns the dtype of activations in a model whose matrices are in `dtype`, and so of the operator's inputs.

    The result is float32 on a CPU without bfloat16 instructions, where PyTorch's bfloat16 products take a hundred times as long
    as float32 products.
    """
    if dtype in (*PACKED, BLOCKS) or (dtype == "bfloat16" and matrix_dtype(torch.device(device)) == torch.float32):
        return torch.float32
    return getattr(torch, dtype)


def template_choice(checkpoint: Checkpoint, name: str | None = None) -> Choice:
    return choose_template(name, str(checkpoint.path), checkpoint.run)


def template_line(checkpoint: Checkpoint, choice: Choice) -> str:
    """Returns a line with the chat template and the trained context length, each with its reason."""
    length = trained_length_of(checkpoint)
    length_note = f"; trained on sequences of up to {length.tokens:,} tokens ({length.why})" if length.tokens else ""
    return f"{choice.template} ({choice.why}){length_note}"


def trained_length_of(checkpoint: Checkpoint) -> Length:
    length = trained_length(str(checkpoint.path), (checkpoint.run or {}).get("init_from"))
    ctx_len = checkpoint.config.ctx_len
    if ctx_len in (length.tokens, DEFAULT_CTX_LEN):          # writers write the default if they do not know the length
        return length
    return Length(ctx_len, "the file states it")
