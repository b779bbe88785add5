"""Resumes a run with the saved configuration.

Options on the command line override saved options. FIXED options must not change, because a change would make a different run.
"""

import os
from collections.abc import Collection
from dataclasses import is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rwkv.checkpoint.files import Checkpoint, read_checkpoint
from rwkv.checkpoint.location import FOLDER, is_checkpoint, locate
from rwkv.cli.recipe import RUN_GROUPS
from rwkv.config import LENGTHS, SCALED, TrainConfig
from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import read_text
from rwkv.report.run_files import METRICS, SAMPLES, is_finished, read_metrics, read_samples
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.checkpoints import newest_sound_checkpoint, rotate_checkpoints
from rwkv.training.callbacks.samples import sample_every
from rwkv.training.device import AUTO
from rwkv.training.memory.savings import same_step
from rwkv.training.run.directory import CONFIG_FILE, Run, as_plain
from rwkv.training.run.lock import RunLock
from rwkv.training.run.options import resume_error, resumed_path
from rwkv.training.run.resolve import Context, Stage, resolve
from rwkv.training.tuning.exports import tuned_files
from rwkv.training.tuning.init_from import NOT_A_SIZE, open_init_checkpoint

FIXED = ("model", "data", "tune", "seed", "init_from",    # these options and groups must not change on resume
         "optim.name", "optim.weight_decay", *(f"optim.{name}_lr_scale" for name in SCALED),      # parameter groups use these
         "trainer.accumulate",           # the saved data position counts batches
         "trainer.val_tokens")           # the loss that selects best.ckpt must stay comparable
NOT_FIXED = ("data.cache_dir", "data.num_workers", "data.tokenize_workers", "data.sample_prompt", "data.preview",
             "data.path", "data.sources")        # the user may have moved the data; the loader rejects different data


def is_fixed(key: str) -> bool:
    """Returns True if a resumed run must keep the option `key`."""
    return key not in NOT_FIXED and not {key, key.split(".")[0]}.isdisjoint(FIXED)


class Request(NamedTuple):
    """The configuration of a command line, the keys that the user set, and the options that the groups among these keys set."""

    config: TrainConfig
    user_keys: Collection[str]
    chosen: Collection[str]


def resumed_run(request: Request) -> Run | None:
    """Returns the run that `resume` names, or None if resume=auto finds no run.

    The run resumes from the checkpoint that `resume` names, or else from the newest undamaged checkpoint.
    """
    config = request.config
    path = resumed_path(config)
    if path is None:
        return None
    out_dir = path.resolve().parent.parent if is_checkpoint(path) else path
    lock = RunLock()
    if (out_dir / CONFIG_FILE).is_file() or (out_dir / FOLDER).is_dir():
        lock.hold(out_dir)
    try:
        run = _open_run(request, path)
    except ValueError:
        lock.release()                   # otherwise the traceback would keep the lock alive
        raise
    return run and replace(run, exists=True, lock=lock)


def _open_run(request: Request, path: Path) -> Run | None:
    if is_checkpoint(path):
        return _continue(request, path.resolve().parent.parent, read_checkpoint(path))
    if os.path.lexists(path / FOLDER) and not (path / FOLDER).is_dir():
        raise UserError(f"{path / FOLDER} must be the folder of the run's checkpoints, but is a file, or a link to a missing "
                        "folder: restore the folder, or remove the file or link to start the run again")
    if (path / FOLDER).is_dir():
        rotate_checkpoints(path)
        checkpoint = newest_sound_checkpoint(path)
        if checkpoint is not None:
            return _continue(request, path.resolve(), checkpoint)
    if (path / CONFIG_FILE).is_file():   # without a checkpoint, the run starts again at step 0
        return _restart(request, path.resolve())
    if request.config.resume == "auto":
        return None
    raise resume_error(request.config)


def _continue(request: Request, out_dir: Path, checkpoint: Checkpoint) -> Run:
    saved = checkpoint.run or {}
    if "trainer" not in saved or checkpoint.path.parent.name != FOLDER:
        raise UserError(f"resume= requires a checkpoint in a run's directory, but {checkpoint.path} is not in such a "
                        "directory. To start a new run with the checkpoint's weights, use init_from=")
    merged = _merge(request, out_dir, saved)
    resumed = Run(out_dir, merged, checkpoint.path, checkpoint.step, checkpoint.data_sha256)
    if merged.trainer.epochs is None:
        require_unfinished(resumed)
    _require_sound_records(resumed)
    if merged.init_from is None:
        if not merged.data.tokenizer.endswith(".json"):
            return resumed
        return replace(resumed, tokenizer=Tokenizer.named(         # the end-of-text token must not change on resume
            merged.data.tokenizer, "data.tokenizer", end_of_text=merged.data.end_of_text, like=checkpoint.tokenizer))
    # with tune=lora and tune=state, read_checkpoint has merged the trained values into the weights
    weights = checkpoint if merged.tune.method == "full" else read_checkpoint(merged.init_from)
    return replace(resumed, init_checkpoint=weights, tokenizer=Tokenizer.from_dict(checkpoint.tokenizer or {}))


def _require_sound_records(run: Run) -> None:
    """Raises UserError if metrics.csv or samples.jsonl, which the run will continue, is damaged."""
    if run.config.logger.name != "none":
        read_metrics(run.out_dir / METRICS)
    if sample_every(run.config.trainer):
        read_samples(run.out_dir / SAMPLES)


def require_unfinished(run: Run) -> None:
    """Raises UserError if a resumed run has no steps left."""
    trainer = run.config.trainer
    step = run.resume_step
    if step is None or step < trainer.max_steps:
        return
    finished = is_finished(run.out_dir) and all(path.exists() for path in tuned_files(run.config, run.out_dir))
    if step > trainer.max_steps or finished:
        more = next((name for name in ("epochs", "max_tokens") if getattr(trainer, name) is not None), "max_steps")
        raise UserError(f"the run in {run.out_dir} finished at step {step}: to train longer, increase trainer.{more}=")


def _restart(request: Request, out_dir: Path) -> Run:
    merged = _merge(request, out_dir, _read_config(out_dir / CONFIG_FILE))
    if merged.init_from is None:
        return Run(out_dir, merged)
    sized, checkpoint, tokenizer = open_init_checkpoint(merged, request.user_keys)
    return Run(out_dir, sized, init_checkpoint=checkpoint, tokenizer=tokenizer)


def _read_config(path: Path) -> JsonObject:
    text = read_text(path, str(path))
    try:
        saved = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): restore the file, or use another "
                        "out_dir=") from None
    if not isinstance(saved, dict) or not RUN_GROUPS <= saved.keys():
        raise UserError(f"{path} is damaged, because it lacks some of the run's options: restore the file, or use another "
                        "out_dir=")
    return saved


def _merge(request: Request, out_dir: Path, saved: JsonObject) -> TrainConfig:
    """Returns the saved configuration with the command line's overrides.

    Raises UserError if a FIXED option differs, or if options conflict.
    """
    config, user_keys, chosen = request
    merged = _from_plain(saved)
    overrides = [*user_keys, *_group_options(chosen, user_keys, merged.init_from)]
    for key in overrides:
        if key.startswith(("resume", "out_dir", "experiment", "debug", "hydra")) or is_dataclass(attrgetter(key)(config)):
            continue                     # these options belong to this start, not to the run
        old = attrgetter(key)(merged)
        new = attrgetter(key)(config)
        if key == "data.batch_size" and same_step(config, merged):
            continue                     # the run splits the same rows into several passes
        if key == "init_from" and _is_same_base(new, old):
            continue                     # the name may now be written in another way
        moves_position = key == "trainer.tbptt" and not (old and new)        # windows and segments have different positions
        if old != new and (is_fixed(key) or moves_position):
            saved_value = "null" if old is None else old
            raise UserError(f"the run in {out_dir} began with {key}={saved_value}, which cannot change. To resume the run, "
                            f"omit {key}= and any group (such as model=) that sets {key}. To change {key}, start a new run in "
                            "another out_dir=")
        if key == "trainer.precision" and new in (None, AUTO):
            continue                     # the run keeps its saved precision
        group, _, name = key.rpartition(".")
        setattr(attrgetter(group)(merged) if group else merged, name, new)
    checked = _from_plain(as_plain(merged))
    checked.require_separate_updates()
    context = Context(overrides, resumed=True)
    return resolve(replace(checked, resume=config.resume, out_dir=str(out_dir)), Stage.BASE, context)[0]


def _is_same_base(given: str | None, saved: str | None) -> bool:
    """Returns True if both names refer to the same checkpoint. For the Hub, the saved name includes the commit."""
    if given is None or saved is None or given == saved:
        return given == saved            # is also true if the file is missing
    if hub.parse(saved) is not None:
        return given == saved.partition("@")[0]
    return Path(given).absolute() == Path(saved) or locate(given).resolve() == locate(saved).resolve()


def _group_options(chosen: Collection[str], user_keys: Collection[str], init_from: str | None) -> list[str]:
    """Returns the options set by groups, without a length if the user gives one, and without sizes if init_from= gives them."""
    user_length = not set(LENGTHS).isdisjoint(user_keys)
    options = [option for option in chosen if not (option in LENGTHS and user_length)]
    if init_from is None or "model" in user_keys:
        return options
    return [option for option in options if not option.startswith("model.") or option == f"model.{NOT_A_SIZE}"]


def _from_plain(plain: JsonObject) -> TrainConfig:
    """Inverts as_plain. Raises UserError for unknown options, invalid values, and values of the wrong type."""
    try:
        config: TrainConfig = _build_dataclass(TrainConfig, plain)
    except (TypeError, AttributeError) as error:
        raise UserError(f"the run's saved options are damaged ({error}). Restore config.yaml or the checkpoint, or start a new "
                        "run") from None
    return config


def _build_dataclass(kind: type, plain: JsonObject, prefix: str = "") -> Any:
    defaults = vars(kind())
    names = plain.keys()
    unknown = [name for name in names if name not in defaults]
    if unknown:
        raise UserError(f"the run has the option {prefix}{unknown[0]}, which this version of timemix does not have. Resume the "
                        "run with the version of timemix that started the run, or start a new run with init_from=")
    groups = {name: type(default) for name, default in defaults.items() if is_dataclass(default)}
    return kind(**{name: _build_dataclass(groups[name], value, f"{name}.") if name in groups else
                   tuple(value) if isinstance(value, list) else value for name, value in plain.items()})
