"""A run's directory (config.yaml, checkpoints/, metrics.csv, ...), and how a run is opened: new, or to be resumed.

runs/latest points to the newest run. A resumed run has its own configuration; options given on the command line replace its
values, and those that would make it another run (FIXED) are refused.
"""

import itertools
import os
import shutil
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rwkv import report
from rwkv.checkpoint.files import Checkpoint, follow, read_checkpoint
from rwkv.config import LENGTHS, SCALED, DataConfig, TrainConfig, require_effect
from rwkv.errors import UserError
from rwkv.io.atomic import write_file
from rwkv.report.reading import KERNEL, METRICS, SAMPLES, SWEEP, TUNED, is_finished, read_metrics, read_samples
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.checkpoints import FOLDER, newest_sound, settle
from rwkv.training.device import AUTO, with_precision
from rwkv.training.run.lock import NAME, RunLock
from rwkv.training.tuning.defaults import with_tuning_defaults
from rwkv.training.tuning.guard import with_guard
from rwkv.training.tuning.init_from import NOT_A_SIZE, open_init_checkpoint
from rwkv.training.tuning.passes import same_step, with_less_memory, with_passes
from rwkv.training.tuning.tuned import tuned_files

RUNS = Path("runs")
CONFIG_FILE = "config.yaml"
FIXED = ("model", "data", "tune", "seed",    # options and groups that may not change when a run is resumed
         "optim.name", "optim.weight_decay", *(f"optim.{name}_lr_scale" for name in SCALED),      # they form the groups
         "trainer.accumulate",           # the position in the data is counted in batches
         "trainer.val_tokens")           # the losses are compared, for best.ckpt
NOT_FIXED = ("data.cache_dir", "data.sample_prompt", "data.tokenize_workers", "data.preview")      # exceptions
CHAT_EPOCHS = 2.0                        # of a new run on conversations for which nothing says how long to train
DELETED = {"optim.matrix_every": 1, "optim.matrix_iterations": 3}        # options of earlier versions: their defaults
ADDED = {"tune.guard": None}             # what runs did that were begun before there was the option


@dataclass(frozen=True)
class Run:
    """A run's directory and its configuration, and the checkpoint and step that it resumes from (None for a new run).

    init_checkpoint, tokenizer: with init_from=, the file that gives the weights, and the tokenizer for the data.
    tuning_defaults: the options of optim that tune= has set (rwkv/training/tuning/defaults.py), in a new run.
    saved_memory: lines of rwkv/training/tuning/passes.py, in a new run with init_from=.
    exists: the directory belongs to this run already. lock: held by a resumed run, and by a new one once `create` has run.
    """

    out_dir: Path
    config: TrainConfig
    resume_from: Path | None = None
    resume_step: int | None = None
    init_checkpoint: Checkpoint | None = None
    tokenizer: Tokenizer | None = None
    tuning_defaults: tuple[str, ...] = ()
    saved_memory: tuple[str, ...] = ()
    exists: bool = False
    lock: RunLock = field(default_factory=RunLock, compare=False, repr=False)


def open_run(config: TrainConfig, given: Collection[str] = (), chosen: Collection[str] = ()) -> Run:
    """A new run, or the one that `resume` names. Nothing is written yet.

    given: the keys that the user set on the command line. chosen: the options that the groups among these keys set.
    Raises UserError if the new run's directory is not empty, if a given key has no effect, if there is nothing to resume, if
    another process trains that run, if a FIXED option differs from the run's, and if a given key differs from the checkpoint
    that `init_from` names.
    """
    if config.resume is not None and config.init_from is not None:
        raise UserError("resume= continues a run, and init_from= begins one with the weights of another: give one of them")
    if config.resume is not None:
        resumed = _resumed(config, given, chosen)
        if resumed is not None:
            return resumed
    require_effect(config, given)
    config = with_default_length(config, {*given, *chosen})
    out_dir = Path(config.out_dir) if config.out_dir else new_folder()
    require_unused(out_dir)
    if config.init_from is None and "tune.guard" in given:
        raise UserError("tune.guard is measured where a run tunes the weights of another: name them with init_from=")
    if config.init_from is None and config.tune.method != "full":
        raise UserError(f"tune={config.tune.method} trains something beside the weights of a model: name them with init_from=")
    if config.init_from is None and config.tune.prefers:
        raise UserError(f"tune.objective={config.tune.objective} changes which answers a trained model prefers: name that "
                        "model with init_from=")
    if config.init_from is None:
        return Run(out_dir, resolved(config, given))
    config, defaults = with_tuning_defaults(config, {*given, *chosen})
    sized, checkpoint, tokenizer = open_init_checkpoint(config, given)
    sized = with_guard(sized, tokenizer, given)
    divided, of_passes = with_passes(resolved(sized, given), given)
    frugal, of_memory = with_less_memory(divided, checkpoint.vocab_size, given)
    return Run(out_dir, frugal, init_checkpoint=checkpoint, tokenizer=tokenizer, tuning_defaults=defaults,
               saved_memory=tuple(line for line in (of_passes, of_memory) if line))


def new_folder(kind: str = "") -> Path:
    """A path in runs/, named by the time to the microsecond."""
    return RUNS / f"{kind}{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


def require_unused(out_dir: Path, resume: str = "resume=auto") -> None:
    """Raises UserError if the directory holds anything but a lock, or cannot be written. `resume`: what would continue it."""
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"out_dir {out_dir} is a file: choose another")
    if out_dir.exists() and any(path.name != NAME for path in out_dir.iterdir()):
        if not any((out_dir / name).is_file() for name in (CONFIG_FILE, SWEEP)):
            raise UserError(f"out_dir {out_dir} holds other files than a run's: choose another")
        raise UserError(f"out_dir {out_dir} exists already: choose another, or continue it with {resume} "
                        f"{quote(f'out_dir={out_dir}')}")
    existing = next(folder for folder in (out_dir, *out_dir.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write into out_dir {out_dir}: {existing} is not writable for this user; choose another")


def resolved(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The configuration with one length, its max_steps if they are known, and the precision that precision=auto means."""
    return with_precision(with_max_steps(config, given))


def with_max_steps(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The configuration with the fewest max_steps that read trainer.max_tokens, if these or nothing else is given.

    The length that is given replaces those of an experiment or of a resumed run; what trainer.epochs are in steps is found when
    the data are known (rwkv/training/length.py). Raises UserError if the command line gives two.
    """
    own = [key for key in LENGTHS if key in given and _look_up(config, key) is not None]
    if len(own) > 1:
        raise UserError(f"{own[0]} and {own[1]} both say how long to train: give one of them")
    trainer = config.trainer
    if own:
        trainer = replace(trainer, max_tokens=trainer.max_tokens if own == ["trainer.max_tokens"] else None,
                          epochs=trainer.epochs if own == ["trainer.epochs"] else None)
    if trainer.max_tokens is not None:
        trainer = replace(trainer, max_steps=ceil(trainer.max_tokens / config.tokens_per_step))
    return replace(config, trainer=trainer)


def with_default_length(config: TrainConfig, chosen: Collection[str]) -> TrainConfig:
    """A new run's configuration: on conversations CHAT_EPOCHS, if the user and the chosen groups give no length."""
    if config.data.name != "chat" or not set(LENGTHS).isdisjoint(chosen):
        return config
    return replace(config, trainer=replace(config.trainer, epochs=CHAT_EPOCHS))


def create(run: Run, resolved: dict[str, Any]) -> None:
    """Makes the directory, writes the resolved configuration into it and points runs/latest to it.

    Raises UserError if the directory cannot be made, or if another process has begun a run in it.
    """
    try:
        run.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make out_dir {run.out_dir}: {error.strerror}") from None
    run.lock.hold(run.out_dir)
    if not run.exists:
        require_unused(run.out_dir)      # again: another process may have begun and ended a run since open_run
    apart = folder_apart(run)
    if apart is not None:
        _set_apart(run.out_dir, apart)
    write_file(run.out_dir / CONFIG_FILE, lambda file: yaml.safe_dump(resolved, file, encoding="utf-8", sort_keys=False))
    _point_latest(run.out_dir)


def folder_apart(run: Run) -> Path | None:
    """Where the rows and samples go of a run that begins again because it had saved no checkpoint: out_dir/unsaved-1, or the
    next free number. None where there is nothing to keep.
    """
    if not run.exists or run.resume_from is not None:
        return None
    trained = any(int(row["step"]) > 0 for row in read_metrics(run.out_dir / METRICS, []))
    if not trained and not read_samples(run.out_dir / SAMPLES, []):
        return None
    return next(folder for number in itertools.count(1) if not (folder := run.out_dir / f"unsaved-{number}").exists())


def _set_apart(out_dir: Path, folder: Path) -> None:
    """Moves what a run writes into `folder`, with a copy of its configuration."""
    folder.mkdir()
    shutil.copy(out_dir / CONFIG_FILE, folder)
    for path in (out_dir / name for name in (METRICS, SAMPLES, KERNEL, TUNED, report.PAGE, report.TABLE, "wandb")):
        if path.exists():
            path.rename(folder / path.name)


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration in dictionaries and lists, for YAML, checkpoints and W&B."""
    plain = asdict(config)
    plain["optim"]["betas"] = list(plain["optim"]["betas"])
    plain["tune"]["modules"] = list(plain["tune"]["modules"])
    return plain


def _resumed(config: TrainConfig, given: Collection[str], chosen: Collection[str]) -> Run | None:
    """The run that `resume` names, at its newest sound checkpoint or at the one named; None if resume=auto finds no run."""
    auto = config.resume == "auto"
    path = Path(config.out_dir) if auto and config.out_dir else follow(RUNS / "latest" if auto else Path(str(config.resume)))
    lock = _held(path.resolve().parent.parent if path.is_file() else path)
    try:
        run = _found(config, given, chosen, path, auto)
    except ValueError:
        lock.release()                   # the traceback would keep it
        raise
    return run and replace(run, exists=True, lock=lock)


def _held(out_dir: Path) -> RunLock:
    """A lock, held if out_dir is a run's directory."""
    lock = RunLock()
    if (out_dir / CONFIG_FILE).is_file() or (out_dir / FOLDER).is_dir():
        lock.hold(out_dir)
    return lock


def _found(config: TrainConfig, given: Collection[str], chosen: Collection[str], path: Path, auto: bool) -> Run | None:
    if path.is_file() and not auto:
        return _continue(config, given, chosen, path.resolve().parent.parent, read_checkpoint(path))
    if (path / FOLDER).is_dir():
        settle(path)
        found = newest_sound(path)
        if found is not None:
            return _continue(config, given, chosen, path.resolve(), found)
    if (path / CONFIG_FILE).is_file():
        return _restart(config, given, chosen, path.resolve())
    if auto:
        return None
    raise UserError(f"nothing to resume from at {config.resume!r}: expected a run's directory or a checkpoint in one")


def _continue(config: TrainConfig, given: Collection[str], chosen: Collection[str], out_dir: Path,
              checkpoint: Checkpoint) -> Run:
    saved, step = checkpoint.run or {}, checkpoint.step
    if "trainer" not in saved or checkpoint.path.parent.name != FOLDER:
        raise UserError(f"nothing to resume from at {checkpoint.path}: it is not a checkpoint in the directory of a run")
    merged = _merged(config, given, chosen, out_dir, saved)
    resumed = Run(out_dir, merged, checkpoint.path, step)
    if merged.trainer.epochs is None:
        require_unfinished(resumed)
    if merged.init_from is None:
        return replace(resumed, tokenizer=_from_same_file(merged.data, checkpoint))
    if merged.tune.method != "full":     # the checkpoint read as weights has them with what was trained
        return replace(resumed, init_checkpoint=read_checkpoint(merged.init_from),
                       tokenizer=Tokenizer.from_dict(checkpoint.tokenizer or {}))
    return replace(resumed, init_checkpoint=checkpoint, tokenizer=Tokenizer.from_dict(checkpoint.tokenizer or {}))


def require_unfinished(run: Run) -> None:
    """Raises UserError for a resumed run that has no step left."""
    trainer, step = run.config.trainer, run.resume_step
    if step is None or step < trainer.max_steps:
        return
    finished = is_finished(run.out_dir) and all(path.exists() for path in tuned_files(run.config, run.out_dir))
    if step > trainer.max_steps or finished:
        more = "max_steps" if trainer.epochs is None else "epochs"
        raise UserError(f"the run in {run.out_dir} is finished at step {step}: to train on, give trainer.{more}=MORE")


def _from_same_file(data: DataConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that data.tokenizer=FILE.json names, with the ends of text that the run began with; None for another."""
    if not data.tokenizer.endswith(".json"):
        return None
    return Tokenizer.named(data.tokenizer, "data.tokenizer", end_of_text=data.end_of_text, like=checkpoint.tokenizer)


def _restart(config: TrainConfig, given: Collection[str], chosen: Collection[str], out_dir: Path) -> Run:
    """A run that ended before its first checkpoint, from step 0 and with its own configuration."""
    saved = yaml.safe_load((out_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    merged = _merged(config, given, chosen, out_dir, saved)
    if merged.init_from is None:
        return Run(out_dir, merged)
    sized, checkpoint, tokenizer = open_init_checkpoint(merged, given)
    return Run(out_dir, sized, init_checkpoint=checkpoint, tokenizer=tokenizer)


def _merged(config: TrainConfig, given: Collection[str], chosen: Collection[str], out_dir: Path,
            saved: dict[str, Any]) -> TrainConfig:
    """The run's own configuration with the given options in place of its own. Raises UserError if a FIXED one differs."""
    merged = _from_plain(_of_this_version(saved, out_dir))
    replacing = [*given, *_not_overruled(chosen, given, merged.init_from)]
    for key in _options_given(config, replacing):
        old, new = _look_up(merged, key), _look_up(config, key)
        if key == "data.batch_size" and same_step(config, merged):
            continue                     # the run reads these rows in several passes
        if old != new and key not in NOT_FIXED and not {key, key.split(".")[0]}.isdisjoint(FIXED):
            raise UserError(f"{key} differs from that of the run in {out_dir}, {old}: to resume, leave it out, or the group "
                            "that sets it; or start a new run")
        if key == "trainer.precision" and new == AUTO:
            continue                     # the run keeps the precision that it began with
        *parents, name = key.split(".")
        setattr(_look_up(merged, ".".join(parents)), name, new)
    checked = _from_plain(as_plain(merged))
    return resolved(replace(checked, resume=config.resume, out_dir=str(out_dir)), replacing)


def _of_this_version(saved: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """A configuration with the options that its version did not have, and without those that this one has no longer.

    Raises UserError if one of these is not at its default.
    """
    current = {name: dict(value) if isinstance(value, dict) else value for name, value in saved.items()}
    for option, before in ADDED.items():
        group, name = option.split(".")
        current.setdefault(group, {}).setdefault(name, before)
    for option, default in DELETED.items():
        group, name = option.split(".")
        value = current[group].pop(name, default)
        if value != default:
            raise UserError(f"the run in {out_dir} has {option}={value}, and this version has no such option: continue it "
                            "with the version that began it, or begin a new run with its weights, init_from=")
    return current


def _options_given(config: TrainConfig, given: Collection[str]) -> list[str]:
    """The given options that replace a resumed run's, without the names of groups."""
    options = [key for key in given if not key.startswith(("resume", "out_dir", "experiment", "debug", "hydra"))]
    return [key for key in options if not is_dataclass(_look_up(config, key))]


def _not_overruled(chosen: Collection[str], given: Collection[str], init_from: str | None) -> list[str]:
    """The options that groups set, without those that were replaced when the run was new.

    They are an experiment's length if the user gives another, and its sizes if init_from's file gave them. Runs begun before
    debug= set val_tokens read the whole split, and go on doing so.
    """
    lengthened = not set(LENGTHS).isdisjoint(given)
    kept = [option for option in chosen
            if not (option in LENGTHS and lengthened) and option != "trainer.val_tokens"]
    if init_from is None or "model" in given:
        return kept
    return [option for option in kept if not option.startswith("model.") or option == f"model.{NOT_A_SIZE}"]


def _from_plain(plain: dict[str, Any]) -> TrainConfig:
    """The inverse of as_plain. Raises UserError as the dataclasses do, which check their values."""
    defaults = TrainConfig()
    values: dict[str, Any] = {}
    for name, value in plain.items():
        default = getattr(defaults, name, None)
        unknown = [name] if name not in defaults.__dict__ else (
            [f"{name}.{option}" for option in value if option not in default.__dict__] if is_dataclass(default) else [])
        if unknown:
            raise UserError(f"the run has the option {unknown[0]}, which this version does not know: continue it with the "
                            "version that began it, or begin a new run with its weights, init_from=")
        if is_dataclass(default):
            group: Any = type(default)
            value = group(**{option: tuple(item) if isinstance(item, list) else item for option, item in value.items()})
        values[name] = value
    return TrainConfig(**values)


def _look_up(config: Any, key: str) -> Any:
    """The value of a dotted key; of the empty one, the configuration itself."""
    for part in filter(None, key.split(".")):
        config = getattr(config, part)
    return config


def _point_latest(out_dir: Path) -> None:
    """Makes runs/latest a symlink to out_dir, or a one-line file where links need rights. A failure is reported, not raised."""
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
        print(f"{latest} does not point to this run ({error.strerror}): name it with {quote(f'out_dir={out_dir}')}",
              file=sys.stderr)


def _replace_link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    try:
        temporary.replace(link)
    finally:
        temporary.unlink(missing_ok=True)
