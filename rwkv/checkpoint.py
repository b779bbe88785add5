"""Weights in and out of files, in every format of rwkv/formats. A pickle is never executed; nothing is half-loaded.

    checkpoint = read_checkpoint(path)           # names, shapes and sizes are checked; the data stays in the file
    checkpoint.weights["emb.weight"]             # read, and checked to be finite, when asked for
    write_checkpoint(checkpoint, "model.safetensors", dtype="bfloat16")      # tensor by tensor; whole or not at all
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.select import select
from rwkv import formats
from rwkv.config import ModelConfig
from rwkv.formats import _rwkv4 as rwkv4
from rwkv.formats._content import ENTRY, Content, Outgoing
from rwkv.formats._stored import DTYPES as STORED_DTYPES
from rwkv.formats._stored import CheckpointError, Stored, dtype_for

__all__ = ["ENTRY", "Checkpoint", "CheckpointError", "Pretrained", "Weights", "checkpoint_of", "computed_in", "describe",
           "follow", "locate", "read_checkpoint", "require_tokenizer", "write_checkpoint"]

DTYPES = ("float32", "bfloat16", "int8")         # that a model is run in; int8 is for its matrices, on a CPU
MOST_SPARE_ROWS = 255                    # of a vocabulary rounded up to a multiple that matrix products like
DEFAULT_CTX_LEN = 1024                   # where a file does not say; nothing in the weights depends on it


class Weights(Mapping[str, Tensor]):
    """Official name -> tensor, in the model's order and shapes, each read from the file when asked for."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].get()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored.values())


@dataclass
class Checkpoint:
    """What a file holds: weights by official name; the tokenizer's dict and the run's configuration where it has them."""

    path: Path
    config: ModelConfig
    vocab_size: int
    weights: Weights
    tokenizer: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    step: int = 0
    tokenizer_hash: str | None = None


class Unfilled(TorchFunctionMode):
    """Random initialisation is left out: on the meta device it does nothing, and importing what does it takes seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = getattr(function, "__module__", None) == torch.nn.init.__name__
        return None if skipped else function(*args, **(kwargs or {}))


class Pretrained:
    """from_pretrained and save_pretrained of the model, kept apart from what it computes."""

    @classmethod
    def from_pretrained(cls, path: str | Path, kernel: str = "auto", device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True, trainable: bool = False) -> Self:
        """The model in a file of any format, a Hugging Face directory or a run's directory, under any kernel.

        It is for inference: in evaluation mode, no weight has a gradient, and on a CPU weights that the file holds in `dtype`
        already are the mapped file, not a copy: a program that writes into that file, instead of replacing it, changes the
        model too. mmap=False gives the model memory of its own. trainable=True: for training, with gradients, in memory of
        its own; `dtype` is then that of the weights, so float32 unless the optimiser is made for another. Raises
        CheckpointError (a ValueError) where the file is missing, damaged or not an RWKV-4 checkpoint, KernelUnavailable where
        the kernel cannot run on `device`.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype is one of {', '.join(DTYPES)}; got {dtype!r}")
        if trainable and dtype == "int8":
            raise ValueError("weights in int8 cannot be trained: use dtype=float32 or bfloat16, or leave trainable out")
        wkv = select(kernel, device, computed_in(dtype))
        if trainable:
            return cls.to_train_on(read_checkpoint(path), wkv, device, dtype)
        return cls.from_checkpoint(read_checkpoint(path), wkv, device, dtype, mmap)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, wkv: Any, device: str = "cpu", dtype: str = "float32",
                        mmap: bool = True) -> Self:
        """The model of a checkpoint already read, in evaluation mode."""
        if dtype == "int8":
            return cls._in_int8(checkpoint, wkv, device, mmap)
        weights = {name: tensor.cast(dtype_for(tensor, dtype)).get(copy=not mmap).to(device)
                   for name, tensor in checkpoint.weights.stored.items()}
        return cls._of(checkpoint, wkv, weights).requires_grad_(False).eval()

    @classmethod
    def _in_int8(cls, checkpoint: Checkpoint, wkv: Any, device: str, mmap: bool) -> Any:
        """The matrices go from the file to int8 one at a time; all else is computed in float32."""
        from rwkv.int8 import to_int8  # which imports the model, which imports this file

        if device != "cpu":
            raise ValueError(f"dtype=int8 runs on a CPU, not on {device}: use dtype=bfloat16 there")
        weights = {name: (tensor if len(tensor.shape) == 2 else tensor.cast(torch.float32)).get(copy=not mmap)
                   for name, tensor in checkpoint.weights.stored.items()}
        return to_int8(cls._of(checkpoint, wkv, weights).requires_grad_(False).eval())

    @classmethod
    def to_train_on(cls, checkpoint: Checkpoint, wkv: Any, device: str = "cpu", dtype: str = "float32") -> Self:
        """The same in memory of its own and ready for training."""
        weights = {name: tensor.cast(dtype_for(tensor, dtype)).get(copy=True).to(device)
                   for name, tensor in checkpoint.weights.stored.items()}
        return cls._of(checkpoint, wkv, weights)

    @classmethod
    def _of(cls, checkpoint: Checkpoint, wkv: Any, weights: dict[str, Tensor]) -> Any:
        """Built without memory or random numbers, then given the weights: all, once each has been read."""
        with torch.device("meta"), Unfilled():
            model: Any = cls(checkpoint.config, checkpoint.vocab_size, wkv)  # type: ignore[call-arg]
        model.load_state_dict(weights, assign=True)
        return model

    def save_pretrained(self, path: str | Path, tokenizer: Any = None, dtype: str | None = None,
                        format: str | None = None) -> None:
        """Writes the weights, and what the format has room for of configuration and tokenizer.

        The suffix of `path` chooses the format (.pth .ckpt .safetensors, .bin or .ggmf for rwkv.cpp, none for a Hugging Face
        directory), or `format` names it. dtype: None as in the model, or float32, float16, bfloat16. Raises ValueError for
        another suffix, a dtype that the format lacks, a tokenizer with more tokens than the model, and a model in int8.
        """
        from rwkv.int8 import Int8Linear  # which imports the model, which imports this file

        model = cast(Any, self)
        if isinstance(model.head, Int8Linear):
            raise ValueError("a model in int8 cannot be saved, because its matrices are rounded: load it with dtype=float32 or "
                             "bfloat16 and save that")
        checkpoint = checkpoint_of(model.state_dict(), tokenizer, model.config, "the model")
        write_checkpoint(checkpoint, path, dtype, format)


def computed_in(dtype: str) -> torch.dtype:
    """The dtype of k and v in a model that is run in `dtype`."""
    return torch.float32 if dtype == "int8" else getattr(torch, dtype)


def checkpoint_of(weights: Mapping[str, Tensor], tokenizer: Any = None, config: ModelConfig | None = None,
                  source: str = "the weights") -> Checkpoint:
    """A checkpoint of tensors in memory. Raises CheckpointError where they are not RWKV-4's."""
    stored = {name: Stored.of(name, source, tensor) for name, tensor in weights.items()}
    checkpoint = _understand(Content(Path(source), stored))
    checkpoint = replace(checkpoint, config=config or checkpoint.config)
    if tokenizer is None:
        return checkpoint
    _require_vocabulary(checkpoint, tokenizer)
    return replace(checkpoint, tokenizer=tokenizer.to_dict(), tokenizer_hash=tokenizer.hash)


def describe(run: dict[str, Any], vocab_size: int, tokenizer: Any) -> dict[str, Any]:
    """Our entry in a .ckpt: plain containers alone, so that loading it executes nothing."""
    known = tokenizer is not None
    return {"format": 1, "run": run, "vocab_size": vocab_size, "tokenizer": tokenizer.to_dict() if known else None,
            "tokenizer_hash": tokenizer.hash if known else None}


def read_checkpoint(path: str | Path) -> Checkpoint:
    """What the file, the Hugging Face directory, or the last checkpoint of a run's directory holds.

    Raises CheckpointError, one sentence: which file or tensor, what was found, what was expected, the likely cause.
    """
    path = locate(path)
    try:
        return _understand(formats.recognise(path).read(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, dtype: str | None = None, format: str | None = None,
                     progress: Callable[[int, int], Any] = lambda count, total: None) -> None:
    """Writes it tensor by tensor, so that no more than one is in memory; progress(its bytes, the bytes of all) is told of each.

    Raises ValueError as save_pretrained does, before anything is written.
    """
    path = Path(path)
    if dtype is not None and dtype not in STORED_DTYPES:
        raise ValueError(f"dtype is one of {', '.join(STORED_DTYPES)}; got {dtype!r}")
    module = formats.load(format) if format else formats.by_suffix(path)
    choose = getattr(module, "dtype_for", dtype_for)
    tensors = {name: tensor.cast(choose(tensor, dtype)) for name, tensor in checkpoint.weights.stored.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    told = {name: _told(tensor, lambda count: progress(count, total)) for name, tensor in tensors.items()}
    entry = {"format": 1, "run": checkpoint.run or {"model": asdict(checkpoint.config)}, "vocab_size": checkpoint.vocab_size,
             "tokenizer": checkpoint.tokenizer, "tokenizer_hash": checkpoint.tokenizer_hash}
    module.write(path, Outgoing(told, checkpoint.config, checkpoint.vocab_size, entry))


def require_tokenizer(checkpoint: Checkpoint, tokenizer: Any, name: str) -> None:
    """Raises CheckpointError where `tokenizer`, called `name`, is not the one that the weights were trained with.

    Known by its hash where the file has one. Elsewhere by its size: a few rows of the embedding may be spare.
    """
    if checkpoint.tokenizer_hash not in (None, tokenizer.hash):
        raise CheckpointError(f"{name} is not the tokenizer that {checkpoint.path} was trained with (SHA-256 "
                              f"{tokenizer.hash[:12]}, expected {str(checkpoint.tokenizer_hash)[:12]}): its ids mean other "
                              "texts")
    _require_vocabulary(checkpoint, tokenizer, name)
    if checkpoint.tokenizer_hash is None and tokenizer.vocab_size + MOST_SPARE_ROWS < checkpoint.vocab_size:
        raise CheckpointError(f"{name} has {tokenizer.vocab_size} tokens and {checkpoint.path} {checkpoint.vocab_size}: it is "
                              "not the tokenizer that the weights were trained with; name that one")


def _require_vocabulary(checkpoint: Checkpoint, tokenizer: Any, name: str = "the tokenizer") -> None:
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise CheckpointError(f"{name} has {tokenizer.vocab_size} tokens and {checkpoint.path} {checkpoint.vocab_size}: they "
                              "do not belong together")


def locate(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, the last one of a run's directory, or through a link written as text."""
    path = follow(Path(path))
    last = path / "checkpoints" / "last.ckpt"
    if path.is_dir() and not (path / "config.json").is_file():
        if not last.is_file():
            raise CheckpointError(f"no checkpoint in {path}: expected {last} of a run, or config.json of a Hugging Face "
                                  "directory")
        return last
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: give checkpoint=FILE, a Hugging Face directory or a run's "
                              "directory, or train one with train.py")
    return path


def follow(path: Path) -> Path:
    """runs/latest is a link, or a one-line file with the run's directory where links need rights."""
    if path.name == "latest" and path.is_file():
        return path.parent / path.read_text(encoding="utf-8").strip()
    return path


def _understand(content: Content) -> Checkpoint:
    """Official names and shapes, sizes read off the tensors, and everything that the file says beside them compared."""
    path, tensors = content.path, rwkv4.to_official(content.path, content.tensors)
    rwkv4.refuse_other_versions(path, tensors)
    if content.tied and "emb.weight" in tensors:
        tensors.setdefault("head.weight", tensors["emb.weight"].renamed("head.weight"))
    ctx_len = content.declared.get("ctx_len", DEFAULT_CTX_LEN)
    config, vocab_size = rwkv4.sizes(path, tensors, ctx_len)
    rwkv4.require_sizes(path, content.declared, config, vocab_size)
    weights = Weights(rwkv4.fit(path, tensors, rwkv4.shapes(config, vocab_size)))
    checkpoint = Checkpoint(path, config, vocab_size, weights, content.tokenizer, step=content.step)
    return checkpoint if content.entry is None else _with_entry(checkpoint, content.entry)


def _with_entry(checkpoint: Checkpoint, entry: dict[str, Any]) -> Checkpoint:
    """Our entry's configuration, where it agrees with the tensors, its tokenizer and the run's options."""
    path = checkpoint.path
    try:
        config, vocab_size, tokenizer = ModelConfig(**entry["run"]["model"]), entry["vocab_size"], entry["tokenizer"]
        stated = asdict(config) | {"n_att": config.n_att or config.n_embd, "n_ffn": config.n_ffn or 4 * config.n_embd}
        hash = entry.get("tokenizer_hash")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} has a {ENTRY} entry that this version cannot read ({error!r}): was it written by a "
                              "newer version?") from error
    rwkv4.require_sizes(path, stated | {"vocab_size": vocab_size}, checkpoint.config, checkpoint.vocab_size)
    if not isinstance(tokenizer, dict | None) or not isinstance(hash, str | None):
        raise CheckpointError(f"{path} has a {ENTRY} entry whose tokenizer is a {type(tokenizer).__name__}: the file is "
                              "damaged")
    return replace(checkpoint, config=config, run=entry["run"], tokenizer=tokenizer or checkpoint.tokenizer,
                   tokenizer_hash=hash)


def _told(tensor: Stored, progress: Callable[[int], Any]) -> Stored:
    """Reading it for the writer is progress."""
    def data() -> Tensor:
        read = tensor.data()
        progress(tensor.nbytes)
        return read

    return replace(tensor, data=data)
