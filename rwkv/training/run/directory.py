"""Creates the directory of a run, which holds config.yaml, checkpoints/, metrics.csv and so on.

runs/latest points to the run that was started or resumed last.
"""

import itertools
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import yaml

from rwkv import cli, report
from rwkv.config import LATEST, TrainConfig
from rwkv.errors import UserError
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject
from rwkv.report.run_files import KERNEL, METRICS, SAMPLES, SWEEP, TENSORBOARD, TUNED, read_metrics, read_samples
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.run.lock import RunLock

if TYPE_CHECKING:                        # this import would load PyTorch
    from rwkv.checkpoint.files import Checkpoint

RUNS = LATEST.parent
CONFIG_FILE = "config.yaml"
LOGS = (".log", ".out", ".err", "log", "out", "err", "stdout", "stderr")       # names and suffixes of files that hold output


class Note(NamedTuple):
    """A line of the plan that explains an option whose value the program chose."""

    subject: str
    text: str


@dataclass(frozen=True)
class Run:
    """The directory and the configuration of a run, and the state in which the run starts.

    Args:
        resume_from: the checkpoint that the run resumes from, or None for a new run.
        resume_step: the step of that checkpoint.
        data_sha256: the hash of the data with which the run began, if that checkpoint states it.
        init_checkpoint: the source of the weights with init_from=.
        tokenizer: the tokenizer for the data with init_from=.
        notes: lines of the plan on the values that the program chose (rwkv/training/run/resolve.py).
        exists: True if the directory belongs to this run already.
        lock: the lock on the directory. A resumed run holds the lock from the start, and a new run after `create`.
    """

    out_dir: Path
    config: TrainConfig
    resume_from: Path | None = None
    resume_step: int | None = None
    data_sha256: str | None = None
    init_checkpoint: "Checkpoint | None" = None
    tokenizer: Tokenizer | None = None
    notes: tuple[Note, ...] = ()
    exists: bool = False
    lock: RunLock = field(default_factory=RunLock, compare=False, repr=False)

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns the base model's vocabulary size, which may exceed the tokenizer's; without a base, the tokenizer's."""
        return self.init_checkpoint.vocab_size if self.init_checkpoint else tokenizer.vocab_size


def sampling_command(folder: Path, data: str) -> str:
    """Returns the command that samples from a run trained with data=`data`: chat.py for conversations, else generate.py."""
    checkpoint = quote(f"checkpoint={folder}")
    return f"{cli.command('chat')} {checkpoint}" if data == "chat" else f"{cli.command('generate')} {checkpoint} prompt=..."


def new_folder(kind: str = "") -> Path:
    """Returns a path in runs/ that is named by the time to the microsecond."""
    return RUNS / f"{kind}{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


def run_folder(out_dir: str) -> Path:
    """Returns the path of the option out_dir. Loggers, cards and reports name a run by its folder, so "." is made absolute."""
    path = Path(out_dir)
    return path if path.name not in ("", "..") else path.resolve()


def require_unused(out_dir: Path) -> None:
    """Raises UserError if the directory is not writable, or contains files other than a lock, logs and system files."""
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"out_dir={out_dir} is a file, but must be a folder: choose another out_dir=")
    if out_dir.exists() and not all(map(_is_ignored, out_dir.iterdir())):
        if not any((out_dir / name).is_file() for name in (CONFIG_FILE, SWEEP)):
            raise UserError(f"out_dir={out_dir} contains files that do not belong to a run: choose another out_dir=")
        kind, resume = ("sweep", "-m resume=auto") if (out_dir / SWEEP).is_file() else ("run", "resume=auto")
        raise UserError(f"out_dir={out_dir} exists already and contains a {kind}. Choose another out_dir=, or continue with "
                        f"{resume} {quote(f'out_dir={out_dir}')}")
    existing = next(folder for folder in (out_dir, *out_dir.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise UserError(f"out_dir={out_dir} cannot be created, because {existing} is a file, or a link to a missing folder: "
                        "choose another out_dir=")
    if not os.access(existing, os.W_OK):
        raise UserError(f"out_dir={out_dir} cannot be used, because {existing} is not writable: choose another out_dir=")


def _is_ignored(path: Path) -> bool:
    """Returns True if a new run's directory may already contain `path`: a hidden file, lost+found, or a file with output."""
    if (path.name.startswith(".") and path.name != ".git") or path.name == "lost+found":
        return True
    return path.is_file() and (path.suffix in LOGS or path.name in LOGS or _is_own_output(path))


def _is_own_output(path: Path) -> bool:
    try:                                 # the user may have redirected this process's output to a file in the folder
        return any(os.path.samestat(path.stat(), os.fstat(descriptor)) for descriptor in (1, 2))
    except OSError:                      # standard output or error is closed
        return False


def create(run: Run, resolved: JsonObject) -> None:
    """Creates the directory, writes the resolved configuration and makes runs/latest point to the run."""
    try:
        run.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out_dir={run.out_dir} cannot be created: {error.strerror}") from None
    run.lock.hold(run.out_dir)
    if not run.exists:
        require_unused(run.out_dir)      # another process may have used the directory since open_run
    backup = backup_folder(run)
    if backup is not None:
        _back_up(run.out_dir, backup)
    write_file(run.out_dir / CONFIG_FILE, lambda file: yaml.safe_dump(resolved, file, encoding="utf-8", sort_keys=False))
    _point_latest(run.out_dir)


def backup_folder(run: Run) -> Path | None:
    """Returns the folder for the earlier output of a run that restarts without a checkpoint, or None without such output.

    The folder is out_dir/unsaved-1, or the next name with a free number.
    """
    if not run.exists or run.resume_from is not None:
        return None
    trained = any(int(row["step"]) > 0 for row in read_metrics(run.out_dir / METRICS, []))
    if not trained and not read_samples(run.out_dir / SAMPLES, []):
        return None
    return next(folder for number in itertools.count(1) if not (folder := run.out_dir / f"unsaved-{number}").exists())


def _back_up(out_dir: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(out_dir / CONFIG_FILE, folder)           # the output moves, but the run still needs its configuration
    for path in (out_dir / name for name in (METRICS, SAMPLES, KERNEL, TUNED, report.PAGE, report.TABLE, "wandb", TENSORBOARD)):
        if path.exists():
            path.rename(folder / path.name)


def _point_latest(out_dir: Path) -> None:
    """Makes runs/latest a symlink to out_dir, or a one-line file where symlinks require privileges. Only prints errors."""
    target = out_dir.resolve()
    if target.is_relative_to(RUNS.resolve()):
        target = target.relative_to(RUNS.resolve())
    try:
        RUNS.mkdir(exist_ok=True)
        try:
            _replace_link(LATEST, target)
        except OSError:
            if LATEST.is_symlink():
                LATEST.unlink()          # Windows cannot replace a link to a directory
            write_file(LATEST, lambda file: file.write(f"{target}\n".encode()))
    except OSError as error:
        print(f"{LATEST} cannot point to this run ({error.strerror}). To name the run, use {quote(f'out_dir={out_dir}')}",
              file=sys.stderr)


def _replace_link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    try:
        temporary.replace(link)
    finally:
        temporary.unlink(missing_ok=True)


def as_plain(config: TrainConfig) -> JsonObject:
    """Returns the configuration as dictionaries and lists, for YAML, checkpoints and W&B."""
    plain: JsonObject = json.loads(json.dumps(asdict(config)))         # turns tuples into lists
    return plain
