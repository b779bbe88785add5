"""A run's directory: the resolved configuration, checkpoints/, metrics.csv; runs/latest points to the newest.

Also what a run continues from, and what it may not change when it does.
"""

import os
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from rwkv.checkpoint import Checkpoint, follow, read_checkpoint
from rwkv.config import SCALED, TrainConfig
from rwkv.finetune import begin
from rwkv.formats._atomic import write_file
from rwkv.lock import NAME, RunLock
from rwkv.precision import with_precision
from rwkv.report import is_finished
from rwkv.saving import FOLDER, newest_sound, settle
from rwkv.tokenizer import Tokenizer

RUNS = Path("runs")
CONFIG_FILE = "config.yaml"
FREE = ("data.cache_dir", "data.sample_prompt", "data.tokenize_workers")      # what may change when a run is continued
FIXED = ("model", "data", "seed",        # what may not: options, and whole groups of them
         "optim.name", "optim.weight_decay", "optim.matrix_every",            # the optimiser's state is of these
         *(f"optim.{name}_lr_scale" for name in SCALED),
         "trainer.accumulate")           # the place in the data is counted in batches


@dataclass(frozen=True)
class Run:
    """The directory, the configuration that counts, and the checkpoint and step to continue from (None for a new run).

    beginning, tokenizer: of a run that began with init_from=, the file that its weights come from and what reads its data.
    begun: the directory is this run's already. lock: held for a run that is continued, and for a new one from `create` on.
    """

    out_dir: Path
    config: TrainConfig
    resume_from: Path | None = None
    resume_step: int | None = None
    beginning: Checkpoint | None = None
    tokenizer: Tokenizer | None = None
    begun: bool = False
    lock: RunLock = field(default_factory=RunLock, compare=False, repr=False)


def open_run(config: TrainConfig, given: Collection[str] = (), chosen: Collection[str] = ()) -> Run:
    """A new run's directory, or the one that `resume` names. `given`: the keys that the user set on the command line;
    `chosen`: the options that the groups among them set.

    Raises ValueError where the directory exists and is not empty, where there is nothing to resume from, where another
    process is training that run, where one of the FIXED options differs from the run's, and where a given key of model or
    data differs from the file that `init_from` names.
    """
    if config.resume is not None and config.init_from is not None:
        raise ValueError("resume= continues a run, and init_from= begins one with the weights of another: give one of them")
    if config.resume is not None:
        resumed = _resumed(config, [*given, *_not_overruled(chosen, given)])
        if resumed is not None:
            return resumed
    out_dir = Path(config.out_dir) if config.out_dir else new_folder()
    require_unused(out_dir)
    if config.init_from is None:
        return Run(out_dir, decided(config, given))
    sized, beginning, tokenizer = begin(config, given)
    return Run(out_dir, decided(sized, given), beginning=beginning, tokenizer=tokenizer)


def new_folder(kind: str = "") -> Path:
    """In runs/, by the time: two that are started in the same second differ too."""
    return RUNS / f"{kind}{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


def require_unused(out_dir: Path, resume: str = "resume=auto") -> None:
    """Raises ValueError where there is something in the directory. `resume`: how it would be continued."""
    if out_dir.exists() and (not out_dir.is_dir() or any(path.name != NAME for path in out_dir.iterdir())):
        raise ValueError(f"out_dir {out_dir} exists already: choose another, or continue it with {resume} out_dir={out_dir}")


def decided(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """With what it leaves open: steps where it says tokens, and a precision where that is auto."""
    return with_precision(in_steps(config, given))


def in_steps(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """With trainer.max_tokens in steps, as many as it takes to read them. Raises ValueError where `given` has steps as well."""
    trainer = config.trainer
    if trainer.max_tokens is None:
        return config
    if "trainer.max_steps" not in given:
        return replace(config, trainer=replace(trainer, max_steps=ceil(trainer.max_tokens / config.tokens_per_step)))
    if "trainer.max_tokens" in given:
        raise ValueError("trainer.max_steps and trainer.max_tokens both say how long to train: give one of them")
    return replace(config, trainer=replace(trainer, max_tokens=None))


def create(run: Run, resolved: dict[str, Any]) -> None:
    """Makes the directory, writes the resolved configuration into it and lets runs/latest point to it.

    Raises ValueError where it cannot be made, and where another process was quicker.
    """
    try:
        run.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make out_dir {run.out_dir}: {error.strerror}") from None
    run.lock.hold(run.out_dir)
    if not run.begun:
        require_unused(run.out_dir)      # asked before, but another process may have begun and ended a run since
    write_file(run.out_dir / CONFIG_FILE, lambda file: yaml.safe_dump(resolved, file, encoding="utf-8", sort_keys=False))
    _point_latest(run.out_dir)


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain containers that YAML, checkpoints and W&B take."""
    plain = asdict(config)
    plain["optim"]["betas"] = list(plain["optim"]["betas"])
    return plain


def _resumed(config: TrainConfig, given: Collection[str]) -> Run | None:
    """The run that `resume` names, from its newest sound checkpoint or the one named; None where resume=auto finds no run."""
    auto = config.resume == "auto"
    path = Path(config.out_dir) if auto and config.out_dir else follow(RUNS / "latest" if auto else Path(str(config.resume)))
    lock = _held(path.resolve().parent.parent if path.is_file() else path)
    try:
        run = _found(config, given, path, auto)
    except ValueError:
        lock.release()                   # its traceback refers to it
        raise
    return run and replace(run, begun=True, lock=lock)


def _held(out_dir: Path) -> RunLock:
    """The lock of a run's directory; of any other, one that nobody holds."""
    lock = RunLock()
    if (out_dir / CONFIG_FILE).is_file() or (out_dir / FOLDER).is_dir():
        lock.hold(out_dir)
    return lock


def _found(config: TrainConfig, given: Collection[str], path: Path, auto: bool) -> Run | None:
    if path.is_file() and not auto:
        return _continue(config, given, path.resolve().parent.parent, read_checkpoint(path))
    if (path / FOLDER).is_dir():
        settle(path)
        found = newest_sound(path)
        if found is not None:
            return _continue(config, given, path.resolve(), found)
    if (path / CONFIG_FILE).is_file():
        return _begin_again(config, given, path.resolve())
    if auto:
        return None
    raise ValueError(f"nothing to resume from at {config.resume}: expected a run's directory or a checkpoint in one")


def _continue(config: TrainConfig, given: Collection[str], out_dir: Path, read: Checkpoint) -> Run:
    saved = read.run or {}
    if "trainer" not in saved or read.path.parent.name != FOLDER:
        raise ValueError(f"nothing to resume from at {read.path}: it is not a checkpoint in the directory of a run")
    merged = _merged(config, given, out_dir, saved)
    if read.step > merged.trainer.max_steps or (read.step == merged.trainer.max_steps and is_finished(out_dir)):
        raise ValueError(f"the run in {out_dir} is finished at step {read.step}: to train on, give trainer.max_steps=MORE")
    resumed = Run(out_dir, merged, read.path, read.step)
    if merged.init_from is None:
        return resumed
    return replace(resumed, beginning=read, tokenizer=Tokenizer.from_dict(read.tokenizer or {}))


def _begin_again(config: TrainConfig, given: Collection[str], out_dir: Path) -> Run:
    """A run that was killed before its first checkpoint, from its start."""
    saved = yaml.safe_load((out_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    merged = _merged(config, given, out_dir, saved)
    if merged.init_from is None:
        return Run(out_dir, merged)
    sized, beginning, tokenizer = begin(merged, given)
    return Run(out_dir, sized, beginning=beginning, tokenizer=tokenizer)


def _merged(config: TrainConfig, given: Collection[str], out_dir: Path, saved: dict[str, Any]) -> TrainConfig:
    """The run's own configuration, with what the user gave anew, save what would make it another run."""
    merged = TrainConfig(**{name: _restore(getattr(config, name), value) for name, value in saved.items()})
    for key in _options_given(config, given):
        old, new = _look_up(merged, key), _look_up(config, key)
        if old != new and key not in FREE and not {key, key.split(".")[0]}.isdisjoint(FIXED):
            raise ValueError(f"{key} differs from that of the run in {out_dir}, {old}: to resume, leave it out, or the group "
                             "that sets it; or start a new run")
        _put(merged, key, new)
    checked = TrainConfig(**{name: _restore(getattr(merged, name), value) for name, value in asdict(merged).items()})
    return decided(replace(checked, resume=config.resume, out_dir=str(out_dir)), given)


def _options_given(config: TrainConfig, given: Collection[str]) -> list[str]:
    """The options to compare or take anew, without the groups that set some of them."""
    options = [key for key in given if not key.startswith(("resume", "out_dir", "experiment", "debug", "hydra"))]
    return [key for key in options if not is_dataclass(_look_up(config, key))]


def _not_overruled(chosen: Collection[str], given: Collection[str]) -> list[str]:
    """The tokens that a user gives stand in the place of the steps of an experiment."""
    return [option for option in chosen if option != "trainer.max_steps" or "trainer.max_tokens" not in given]


def _restore(default: Any, value: Any) -> Any:
    if not is_dataclass(default):
        return value
    kind: Any = type(default)
    return kind(**{name: tuple(item) if isinstance(item, list) else item for name, item in value.items()})


def _look_up(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _put(config: Any, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    setattr(_look_up(config, ".".join(parents)) if parents else config, last, value)


def _point_latest(out_dir: Path) -> None:
    """A symlink, or a one-line file where links need rights; put in place whole, and no reason for a run to fail."""
    latest, target = RUNS / "latest", out_dir.resolve()
    if target.is_relative_to(RUNS.resolve()):
        target = target.relative_to(RUNS.resolve())
    try:
        RUNS.mkdir(exist_ok=True)
        try:
            _replace_link(latest, target)
        except OSError:
            if latest.is_symlink():
                latest.unlink()          # Windows does not replace a link to a directory
            write_file(latest, lambda file: file.write(f"{target}\n".encode()))
    except OSError as error:
        print(f"{latest} does not point to this run ({error.strerror}): name it with out_dir={out_dir}", file=sys.stderr)


def _replace_link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    try:
        temporary.replace(link)
    finally:
        temporary.unlink(missing_ok=True)
