"""Weights in and out of files. A pickle is never executed; a file is written whole or not at all.

Two layouts are read and written: RWKV-LM's official .pth (the tensors by their official names), and our .ckpt, which is a
Lightning checkpoint with one more entry, `timemix`: the configuration and the tokenizer, as plain containers.
"""

import os
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from kernels.select import select
from rwkv.config import ModelConfig

ENTRY = "timemix"                        # our own entry in a .ckpt
PREFIX = "model."                        # of the weights in a .ckpt
DTYPES = ("float32", "bfloat16")
KEPT_FLOAT32 = ("time_decay", "time_first")


@dataclass
class Checkpoint:
    """What a file holds: weights by official name; the tokenizer's dict and the run's configuration where it has them."""

    path: Path
    config: ModelConfig
    vocab_size: int
    weights: dict[str, Tensor]
    tokenizer: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    step: int = 0


class Pretrained:
    """from_pretrained and save_pretrained of the model, kept apart from what it computes."""

    @classmethod
    def from_pretrained(cls, path: str | Path, kernel: str = "auto", device: str = "cpu", dtype: str = "float32") -> Self:
        """The model in a .pth, a .ckpt or a run's directory, under any kernel.

        Raises ValueError where the file is missing, damaged or not an RWKV-4 checkpoint, KernelUnavailable where the
        kernel cannot run on `device`.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype is one of {', '.join(DTYPES)}; got {dtype!r}")
        wkv = select(kernel, device)
        return cls.from_checkpoint(read_checkpoint(path), wkv, device, dtype)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, wkv: Any, device: str = "cpu", dtype: str = "float32") -> Self:
        """The model of a checkpoint already read, in evaluation mode."""
        with torch.device("meta"):
            model: Any = cls(checkpoint.config, checkpoint.vocab_size, wkv)  # type: ignore[call-arg]
        weights = {name: _cast(name, tensor, device, dtype) for name, tensor in checkpoint.weights.items()}
        load_weights(model, weights, checkpoint.path, assign=True)
        return model.requires_grad_(False).eval()

    def save_pretrained(self, path: str | Path, tokenizer: Any = None) -> None:
        """Writes the weights as `path`: .pth in the official layout, .ckpt with the configuration and the tokenizer.

        Raises ValueError for another suffix.
        """
        path, model = Path(path), cast(Any, self)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        if path.suffix == ".pth":
            save_atomically(weights, path)
        elif path.suffix == ".ckpt":
            entry = describe({"model": asdict(model.config)}, model.vocab_size, tokenizer)
            save_atomically({"state_dict": {PREFIX + name: tensor for name, tensor in weights.items()}, ENTRY: entry}, path)
        else:
            raise ValueError(f"save_pretrained writes .pth or .ckpt, not {path.name}: choose one of these suffixes")


def describe(run: dict[str, Any], vocab_size: int, tokenizer: Any) -> dict[str, Any]:
    """Our entry in a .ckpt: plain containers alone, so that loading it executes nothing."""
    return {"format": 1, "run": run, "vocab_size": vocab_size, "tokenizer": tokenizer.to_dict() if tokenizer else None}


def read_checkpoint(path: str | Path) -> Checkpoint:
    """What the file, or the last checkpoint of a run's directory, holds. Raises ValueError with one sentence."""
    path = locate(path)
    content = _read(path)
    if ENTRY in content:
        return _own(path, content)
    if "emb.weight" in content:
        return _official(path, content)
    raise ValueError(f"{path} is not an RWKV-4 checkpoint: it holds {_some(content)}, and neither emb.weight (the official "
                     f".pth layout) nor a {ENTRY} entry (a .ckpt of this program)")


def locate(path: str | Path) -> Path:
    """The checkpoint file that a path means: itself, the last one of a run's directory, or through a link written as text."""
    path = follow(Path(path))
    if path.is_dir():
        last = path / "checkpoints" / "last.ckpt"
        if not last.is_file():
            raise ValueError(f"no checkpoint in {path}: expected {last}; is it a run's directory?")
        return last
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: give checkpoint=FILE or a run's directory, or train one with train.py")
    return path


def follow(path: Path) -> Path:
    """runs/latest is a link, or a one-line file with the run's directory where links need rights."""
    if path.name == "latest" and path.is_file():
        return path.parent / path.read_text(encoding="utf-8").strip()
    return path


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], path: Path, assign: bool = False) -> None:
    """All weights, or a ValueError that names the first tensor missing, surplus or of the wrong shape, and loads none."""
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in weights:
            raise ValueError(f"{path} lacks the tensor {name} {tuple(tensor.shape)}: it is not a whole RWKV-4 checkpoint")
        if weights[name].shape != tensor.shape:
            raise ValueError(f"{path}: {name} is {tuple(weights[name].shape)}, expected {tuple(tensor.shape)}")
    surplus = sorted(weights.keys() - expected.keys())
    if surplus:
        raise ValueError(f"{path} holds tensors that RWKV-4 does not have ({surplus[0]} first): another RWKV version?")
    model.load_state_dict(weights, assign=assign)


def save_atomically(content: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")      # torch's thoughts on foreign pickles; the sentence below says it
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError,
            pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: it is truncated, damaged, or not a file of plain tensors "
                         f"written by torch.save; copy or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not an RWKV-4 checkpoint: it holds a {type(content).__name__}, not tensors by name")
    return content


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _own(path: Path, content: dict[str, Any]) -> Checkpoint:
    try:
        entry, tensors = content[ENTRY], content["state_dict"]
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        config = ModelConfig(**entry["run"]["model"])
        return Checkpoint(path, config, entry["vocab_size"], _tensors(path, weights), entry["tokenizer"], entry["run"],
                          content.get("global_step", 0))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a {ENTRY} entry that this version cannot read (it lacks {error}): was it written by a "
                         "newer version?") from error


def _official(path: Path, content: dict[str, Any]) -> Checkpoint:
    """Sizes are inferred from the tensors; time_mix may be [C] and time_decay [C,1], as older files have them."""
    weights = {name: _official_shape(name, tensor) for name, tensor in _tensors(path, content).items()}
    vocab_size, n_embd = _matrix_sizes(path, weights, "emb.weight")
    n_att, _ = _matrix_sizes(path, weights, "blocks.0.att.key.weight")
    n_ffn, _ = _matrix_sizes(path, weights, "blocks.0.ffn.key.weight")
    n_layer = len({match[1] for name in weights if (match := re.match(r"blocks\.(\d+)\.", name))})
    config = ModelConfig(n_layer=n_layer, n_embd=n_embd, n_att=n_att, n_ffn=n_ffn, ctx_len=1024)
    return Checkpoint(path, config, vocab_size, weights)


def _tensors(path: Path, content: dict[Any, Any]) -> dict[str, Tensor]:
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{path} is not an RWKV-4 checkpoint: its {name} is a {type(tensor).__name__}, not a tensor")
    return content


def _matrix_sizes(path: Path, weights: dict[str, Tensor], name: str) -> tuple[int, int]:
    if name not in weights or weights[name].dim() != 2:
        raise ValueError(f"{path} is not an RWKV-4 checkpoint: it has no matrix {name}")
    rows, columns = weights[name].shape
    return rows, columns


def _official_shape(name: str, tensor: Tensor) -> Tensor:
    if ".time_mix_" in name:
        return tensor.reshape(1, 1, -1)
    return tensor.flatten() if name.endswith(KEPT_FLOAT32) else tensor


def _cast(name: str, tensor: Tensor, device: str, dtype: str) -> Tensor:
    """WKV's own parameters stay in float32: a decay rounded to bfloat16 is another decay."""
    return tensor.to(device, torch.float32 if name.endswith(KEPT_FLOAT32) else getattr(torch, dtype))


def _some(content: dict[str, Any]) -> str:
    names = ", ".join(str(name) for name in list(content)[:3])
    return f"{len(content)} entries ({names}, ...)" if content else "nothing"
