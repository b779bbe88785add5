"""Finds the checkpoint at a path, or downloads it from the Hub. Does not import PyTorch, so that programs can call it first."""

import re
import sys
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from rwkv.config import LATEST
from rwkv.errors import CheckpointError
from rwkv.io import hub
from rwkv.io.lines import count_of
from rwkv.io.utf8 import read_bytes

ADAPTER = hub.ADAPTER_CONFIG             # the file that marks a PEFT directory
WEIGHT_SUFFIXES = (*hub.WEIGHTS, ".pt")         # a file with one of these suffixes contains weights
DIRECTORY_SUFFIXES = (".safetensors", ".bin", ".json", ".txt", ".jinja")      # files of a Hugging Face directory
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.(?:safetensors|bin)")       # the name of one shard of a Hugging Face directory
LONGEST_PATH = 4096                      # bytes: a longer file called latest contains no path
DEEPSPEED = "zero_to_fp32.py"            # DeepSpeed writes this program into the folder of its checkpoints
SIMILAR = 0.85                           # a hint names a file whose name is at least this similar, from 0 to 1
FOLDER = "checkpoints"                   # the folder of a run's checkpoints, in the run's directory
LAST = Path(FOLDER) / "last.ckpt"
COMPLETE = "complete.json"               # trainer=fsdp writes this file into a checkpoint's folder (formats/_fsdp_folder.py)


def locate(path: str | Path) -> Path:
    """Returns the path of a checkpoint: a file, a Hugging Face directory, or the last checkpoint in a run's directory.

    If `path` is a name on the Hub, downloads the checkpoint (rwkv/io/hub.py). The path of a directory's only weights file
    stands for the directory, because config.json or adapter_config.json states how to compute with the weights. Raises
    CheckpointError if there is no checkpoint, or if a folder has several.
    """
    path = follow(hub.local(path))
    _require_joined(path)
    if path.name in hub.DIRECTORY_WEIGHTS and path.is_file():
        path = path.parent if hub.is_directory(path.name, [file.name for file in path.parent.iterdir()]) else path
    last = path / LAST
    _require_links(path)
    if path.is_dir() and not is_sharded(path) and not any((path / mark).is_file() for mark in hub.MARKS):
        if is_checkpoint(last):
            return last
        if runs := saved_runs(path):
            raise CheckpointError(f"{path} is a folder of runs: name one run, such as {runs[0]}")
        return _single_file(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}{_nearest(path)}: expected a file, a Hugging Face directory, a "
                              "run directory of train.py, or a name on the Hub such as ORG/REPO/FILE.pth")
    return path


def _require_joined(path: Path) -> None:
    """Raises CheckpointError if the path is a folder of torch.distributed.checkpoint, or a file in it."""
    folder = path if path.is_dir() else path.parent
    if (folder / ".metadata").is_file() and (path == folder or path.suffix == ".distcp") and any(folder.glob("*.distcp")):
        raise CheckpointError(f"{path} belongs to a checkpoint of torch.distributed (FSDP) in several parts: join the parts "
                              f"with python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pth, and "
                              "pass FILE.pth")


def _require_links(path: Path) -> None:
    """Raises CheckpointError if the path, or a file of a Hugging Face directory, is a link to a missing file.

    The Hub's cache consists of links, whose targets some ways of copying leave behind.
    """
    links = [path]
    if any((path / mark).is_file() or (path / mark).is_symlink() for mark in hub.MARKS):
        links = [file for file in sorted(path.iterdir()) if file.suffix in DIRECTORY_SUFFIXES and file.name[0] != "."]
    broken = next((link for link in links if link.is_symlink() and not link.exists()), None)
    if broken is not None:
        raise CheckpointError(f"there is no checkpoint at {path}: {broken.name} is a link to {broken.readlink()}, which does "
                              "not exist. Copy that file, too, copy links as files (cp -L), or download it again")


def _nearest(path: Path) -> str:
    """Returns a hint for a missing path: the most similar name in its folder, for example with a suffix, or ""."""
    names: list[str] = []
    with suppress(OSError):              # there is no such folder, or it cannot be read
        names = [file.name for file in sorted(path.parent.iterdir())
                 if file.is_dir() or hub.has_weights(file.name, WEIGHT_SUFFIXES)]
    by_lower_case = {name.lower(): name for name in names}
    close = get_close_matches(path.name.lower(), by_lower_case, n=1, cutoff=SIMILAR)
    return f" (did you mean {path.with_name(by_lower_case[close[0]])}?)" if close and path.name else ""


def is_sharded(path: Path) -> bool:
    """Returns True if the path is a complete checkpoint of trainer=fsdp."""
    return (path / COMPLETE).is_file()


def is_checkpoint(path: Path) -> bool:
    """Returns True if the path is a file or a checkpoint of trainer=fsdp."""
    return path.is_file() or is_sharded(path)


def _single_file(folder: Path) -> Path:
    """Returns the only file with weights in a folder, the first part of a split GGUF, or a folder of shards with an index."""
    files = [file for file in sorted(folder.iterdir()) if hub.has_weights(file.name, WEIGHT_SUFFIXES) and file.is_file()
             and not re.search(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(files) == 1:
        return files[0]
    if files and all(SHARD.fullmatch(file.name) for file in files):
        if any((folder / index).is_file() for index in hub.INDICES):
            return folder
        raise CheckpointError(f"{folder} contains {len(files)} shards of a Hugging Face directory, but lacks the config.json: "
                              "download this file, too")
    parts = all(file.name.endswith("_model_states.pt") for file in files)
    program = next((parent / DEEPSPEED for parent in (folder, folder.parent) if (parent / DEEPSPEED).is_file()), None)
    if parts and program:
        raise CheckpointError(f"{folder} is a checkpoint of DeepSpeed in several parts: join the parts with python {DEEPSPEED} "
                              f". OUT in {program.parent}, and pass OUT")
    if files:
        names = ", ".join(file.name for file in files[:4]) + (", ..." if files[4:] else "")
        raise CheckpointError(f"{folder} contains {len(files)} files with weights: name one file ({names})")
    models = {file.parent for mark in hub.MARKS for file in folder.glob(f"*/{mark}")}
    if models:                           # such as checkpoint-500 of transformers' Trainer, or an adapter with a name
        raise CheckpointError(f"{folder} contains {count_of(len(models), 'model')} in folders of their own: name one, such as "
                              f"{max(models, key=lambda model: model.stat().st_mtime_ns)}")
    raise CheckpointError(f"there is no checkpoint in {folder}: expected {folder / LAST} from a training run, the config.json "
                          "of a Hugging Face directory, or one file with weights")


def follow(path: Path) -> Path:
    """Returns the run that runs/latest points to, and any other path unchanged.

    runs/latest is a link, or a file with the run's name if the user may not create links. If that run no longer exists, the
    most recently trained run in the folder is used instead, and a line on standard error says so. A file called latest that
    does not contain a path is itself the checkpoint.
    """
    if path.name != LATEST.name:
        return path
    target = path
    if path.is_file():
        name = _only_line(path)
        if name is None:
            return path
        target = path.parent / name
    if target.exists():
        return target
    runs = saved_runs(path.parent)
    if not runs:
        return path
    newest = max(runs, key=lambda run: (run / LAST).stat().st_mtime_ns)
    _report_replacement(path, newest)
    return newest


def _only_line(file: Path) -> str | None:
    """Returns the line of text in a file of one line, or None for any other content."""
    content = read_bytes(file, str(file), most=LONGEST_PATH)
    with suppress(UnicodeDecodeError):
        line = content.decode().strip()
        return line if line and line.isprintable() and len(content) < LONGEST_PATH else None
    return None


def saved_runs(folder: Path) -> list[Path]:
    """Returns the directories of the runs with a checkpoint in a folder, and in the sweeps in this folder."""
    saved = [*folder.glob(f"*/{LAST}"), *folder.glob(f"*/*/{LAST}")]
    return sorted(last.parents[1] for last in saved if last.parents[1].name != LATEST.name)


@cache
def _report_replacement(link: Path, run: Path) -> None:
    print(f"{link} points to a run that no longer exists: using the newest run, {run}", file=sys.stderr, flush=True)
