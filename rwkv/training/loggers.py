"""Creates the metric loggers of a run: metrics.csv in the run's directory, and W&B or the Lightning logger of logger._target_.

W&B is online if the user is logged in, and offline otherwise. The user's W&B settings, such as WANDB_PROJECT, override our
defaults, and options override the user's settings.
"""

import csv
import importlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from shlex import quote
from typing import Any, Literal, NamedTuple

import yaml
from lightning.pytorch.loggers import Logger, WandbLogger
from tqdm import tqdm

from rwkv.config import PREFERENCES, DataConfig, LoggerConfig
from rwkv.data.mixture import names_of, source_metric
from rwkv.distributed import rank
from rwkv.errors import UserError
from rwkv.io.atomic import append, write_file
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.io.lines import labelled_line
from rwkv.report.run_files import METRICS, SWEEP, read_metrics
from rwkv.training import trackers
from rwkv.training.trackers import TrackerRun
from rwkv.training.tuning.preferences import reward_metrics

COLUMNS = ("train/loss", "val/loss", "val/bpb", "val/lost", "lr", "grad_norm", "tok_per_sec", "peak_mem")
PROJECT = "timemix"                      # the default project
RECORD = Path("wandb", "timemix.json")   # this file in a run's directory holds the W&B run id and the directory's path
Mode = Literal["online", "offline", "disabled"]
GUARD_COLUMNS = ("guard/loss", "guard/bpb")           # runs with tune.guard have these metrics
SAMPLE_COLUMNS = ("step", "prompt", "text")
PAUSE = 10                               # after a failed call, a tracker is skipped for PAUSE times the call's duration
SAMPLES_SHOWN = 100                      # limits W&B's table of samples, because each update uploads the whole table


def require(config: LoggerConfig, logs_nothing: bool = False) -> None:
    """Raises UserError if the logger's package cannot be imported or rejects a name, or if W&B rejects the user's login.

    `logs_nothing` is True if no run will be logged.
    """
    if config._target_ is not None:
        _custom_logger(config, TrackerRun(config.project, PROJECT, config.group, "run", Path(), None))
        options = {"project": config.project, "group": config.group, "run_name": config.run_name}
        if (unused := [f"logger.{option}" for option, value in options.items() if value]) and not _is_tracker(config):
            print(f"{' and '.join(unused)} will not reach {config._target_}: pass the class's own arguments with "
                  "logger.arguments=NAME=VALUE", file=sys.stderr)
        return
    if config.name != "wandb":
        return
    try:
        wandb = importlib.import_module("wandb")
    except Exception as error:           # a broken installation can raise any exception
        raise UserError(f"logger=wandb requires the package wandb, but importing wandb failed ({error!r}). Reinstall wandb "
                        "with pip install --force-reinstall wandb, or use logger=csv") from error
    try:
        names = _Names.of(config, None, "run")
        wandb.Settings(project=names.project, run_group=names.group, run_name=names.name, run_id=_user_setting("run_id"))
    # pydantic's ValidationError is a ValueError; for a user without a home directory, pathlib raises RuntimeError
    except (wandb.errors.UsageError, ValueError, RuntimeError) as error:
        raise UserError("W&B rejected logger.project=, logger.group=, logger.run_name= or a W&B setting, such as a WANDB_ "
                        f"environment variable: {_one_line(error).rstrip('.')}. Correct it, or use logger=csv") from None
    if not logs_nothing:
        _log_in()


def loggers(config: LoggerConfig, out_dir: Path, run: JsonObject, resumed_at: int | None = None) -> list[Logger]:
    """Returns the loggers that the options choose. The list is empty in processes other than rank 0.

    Args:
        run: the resolved configuration, by which W&B shows and filters runs.
        resumed_at: the step of the checkpoint that the run resumes from.
    """
    if config.name == "none" or rank() > 0:
        return []
    norms = norm_names(run["model"]["n_layer"]) if run["trainer"]["grad_norms"] else ()
    guard = GUARD_COLUMNS if run["init_from"] and run["tune"]["guard"] else ()
    rewards = reward_metrics() if run["tune"]["objective"] in PREFERENCES else ()
    sources = [source_metric(name) for name in names_of(DataConfig(**run["data"]))]
    file = MetricsFile(out_dir / METRICS, run["kernel"]["name"], (*sources, *guard, *rewards, *norms), resumed_at)
    if config._target_ is not None:
        group = out_dir.parent.name if _in_sweep(out_dir) else None
        logger = _custom_logger(config, TrackerRun(config.project, PROJECT, config.group or group,
                                                   config.run_name or _default_name(out_dir, run), out_dir, resumed_at))
        try:
            logger.log_hyperparams(run)
            getattr(logger, "experiment", None)          # some loggers create their files only now, and Lightning at the start
        except Exception as error:       # a tracker's server may be down, or have deleted the run
            record = out_dir / trackers.RECORD
            continues = isinstance(logger, trackers.MLflow) and record.exists()
            new = f", delete {record} to start a new run of the tracker" if continues else ""
            raise UserError(f"logger={config.name} cannot start or continue a run ({_one_line(error)}). Correct the tracker's "
                            f"settings and logger.arguments={new}, or use logger=csv") from None
        return [file, _tolerate_errors(logger, config.name)]
    if config.name == "csv":
        return [file]
    mode = _log_in()
    if mode == "disabled":
        print("W&B is disabled in the user's settings (WANDB_MODE or `wandb disabled`): only metrics.csv holds the metrics",
              file=sys.stderr)
        return [file]
    return [file, _tolerate_errors(_wandb(config, out_dir, run, mode), config.name)]


def _custom_logger(config: LoggerConfig, tracker_run: TrackerRun) -> Logger:
    """Returns the logger that logger._target_ names. Raises UserError if the logger cannot be created.

    `tracker_run` is passed to the classes in trackers.py only.
    """
    if wrong := next((text for text in config.arguments if "=" not in text), None):
        raise UserError(f"logger.arguments= must have the form NAME=VALUE; got {wrong!r}")
    module, _, name = str(config._target_).rpartition(".")
    try:
        arguments = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in config.arguments)}
        if _is_tracker(config):
            arguments["tracker_run"] = tracker_run
        logger = getattr(importlib.import_module(module), name)(**arguments)
    except Exception as error:           # another package may raise anything
        raise UserError(f"logger={config.name} cannot create {config._target_} ({error!r}). Install the logger's package, "
                        "correct logger.arguments=, or use logger=csv") from error
    if not isinstance(logger, Logger):
        raise UserError("logger._target_= must name a Lightning logger class, such as lightning.pytorch.loggers.MLFlowLogger; "
                        f"got {config._target_}")
    return logger


def _tolerate_errors(logger: Logger, name: str) -> Logger:
    """Returns the logger, changed so that an error while it logs does not end the run. metrics.csv has all metrics anyway.

    The first error is printed. After an error nothing is logged for a while, because a server that is down may answer each
    attempt only after minutes.
    """
    wait_until = 0.0
    is_reported = False

    def attempt(method: Callable[..., object], *arguments: object, **named: object) -> None:
        nonlocal wait_until, is_reported
        start = time.monotonic()
        if start < wait_until:
            return
        try:
            method(*arguments, **named)
        except Exception as error:
            wait_until = time.monotonic() + PAUSE * (time.monotonic() - start)
            if not is_reported:
                is_reported = True
                text = f"logger={name} fails ({_one_line(error)}): training continues, and metrics.csv has all metrics"
                tqdm.write(labelled_line("WARNING", text, sys.stderr), file=sys.stderr)

    for method in ("log_metrics", "log_table", "finalize"):
        if hasattr(logger, method):
            setattr(logger, method, partial(attempt, getattr(logger, method)))
    return logger


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_tracker(config: LoggerConfig) -> bool:
    """Returns True if logger._target_ is a class in trackers.py, which gets the names of the run."""
    return str(config._target_).rpartition(".")[0] == TrackerRun.__module__


def norm_names(n_layer: int) -> tuple[str, ...]:
    """Returns the names of the metrics of trainer.grad_norms=true. Each is the gradient norm of a part of the model."""
    return tuple(f"grad_norm/{part}" for part in ("emb", *(f"blocks.{layer}" for layer in range(n_layer)), "ln_out", "head"))


def log_samples(loggers: Iterable[Logger], rows: Sequence[JsonMapping], step: int) -> None:
    """Logs samples as a table in the loggers that support tables. Each row has the keys step, prompt and text."""
    table = [[row[name] for name in SAMPLE_COLUMNS] for row in rows[-SAMPLES_SHOWN:]]
    for logger in loggers:
        if hasattr(logger, "log_table"):
            logger.log_table("samples", list(SAMPLE_COLUMNS), table, step=step)


def log_report(config: LoggerConfig, sweep: Path, rows: Sequence[JsonMapping], files: Iterable[Path]) -> None:
    """Logs a sweep's report as a W&B run in the group of the sweep: the rows as a table, and the files as an artifact.

    An error of W&B is printed, because the sweep has finished.
    """
    if config.name != "wandb":
        return
    import wandb

    try:
        _log_to_wandb(config, sweep, rows, files)
    except (UserError, wandb.errors.Error) as error:
        print(f"the sweep's report was not logged to W&B: {' '.join(str(error).split())}", file=sys.stderr)


def _log_to_wandb(config: LoggerConfig, sweep: Path, rows: Sequence[JsonMapping], files: Iterable[Path]) -> None:
    import wandb

    mode = _log_in()
    if mode == "disabled":
        return
    names = _Names.of(config, sweep.name, "")
    columns: list[str | int] = [*dict.fromkeys(name for row in rows for name in row)]
    with wandb.init(id=token_hex(4), project=names.project, group=names.group, name=f"{names.group}-report", job_type="report",
                    dir=_user_setting("root_dir") or sweep,
                    settings=wandb.Settings(silent=_silent(), mode=mode)) as run:
        table = [[row.get(str(name)) if row.get(str(name)) != "" else None for name in columns] for row in rows]
        artifact = wandb.Artifact(f"report-{re.sub('[^A-Za-z0-9_.-]', '_', str(names.group))}", "report")
        for file in files:
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.log({"report": wandb.Html((sweep / "report.html").read_text(encoding="utf-8"), inject=False),
                 "summary": wandb.Table(columns, table)})
    if mode == "offline":
        print(f"W&B is offline: {_upload_hint(sweep)}", file=sys.stderr)


class MetricsFile(Logger):
    """A logger that writes metrics.csv, with one row for each step that has metrics.

    A resumed run drops the rows after the checkpoint, keeps the columns and appends new columns. Every row names the kernel,
    because a resumed run may use a different kernel. `more` are columns that only some runs have.
    """

    def __init__(self, path: Path, kernel: str, more: Sequence[str] = (), resumed_at: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.kernel = kernel
        earlier = []                     # holds the rows up to the checkpoint, without a truncated last row
        if resumed_at is not None:
            earlier = [row for row in read_metrics(path) if None not in row.values() and int(row["step"]) <= resumed_at]
        self.columns = list(dict.fromkeys([*(earlier[0] if earlier else ()), "step", *COLUMNS, "kernel", *more]))
        write_file(path, lambda file: file.write(self._text(earlier, header=True)))

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Logs nothing, because config.yaml holds the configuration."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {name: metrics[name] for name in self.columns if name in metrics and name != "step"}
        if values:
            row = {"step": step or 0, **values, "kernel": self.kernel}
            append(self.path, self._text([row], header=not self.path.exists()))          # the user may have moved the file

    def _text(self, rows: Iterable[JsonMapping], header: bool = False) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


class _Names(NamedTuple):
    """The project, group and name of a W&B run."""

    project: str
    group: str | None
    name: str

    @classmethod
    def of(cls, config: LoggerConfig, group: str | None, name: str) -> "_Names":
        """Returns the names: from the options, or else from the user's W&B settings, or else `group`, `name` and PROJECT."""
        return cls(config.project or _user_setting("project") or PROJECT, config.group or _user_setting("run_group") or group,
                   config.run_name or _user_setting("run_name") or name)


def _wandb(config: LoggerConfig, out_dir: Path, run: JsonObject, mode: Mode) -> WandbLogger:
    import wandb

    earlier_id = _earlier_id(out_dir)
    names = _Names.of(config, out_dir.parent.name if _in_sweep(out_dir) else None, _default_name(out_dir, run))
    resume: Any = "allow" if earlier_id else None
    run_id = earlier_id or token_hex(4)
    if not _in_sweep(out_dir):           # the runs of a sweep, and its report, must not share the id in WANDB_RUN_ID
        run_id, resume = _user_setting("run_id") or run_id, _user_setting("resume") or resume
    try:
        experiment = wandb.init(
            id=run_id, resume=resume,
            project=names.project, group=names.group, name=names.name, dir=_user_setting("root_dir") or out_dir, config=run,
            settings=wandb.Settings(silent=_silent(), mode=mode))
    except wandb.errors.Error as error:
        remedies = [f"delete {out_dir / RECORD} to start a new W&B run in place of {earlier_id}"] * (run_id == earlier_id)
        raise UserError(f"W&B cannot start or continue a run ({' '.join(str(error).split())}): "
                        f"{', or '.join([*remedies, 'use WANDB_MODE=offline or logger=csv'])}") from None
    experiment.define_metric("trainer/global_step")      # as WandbLogger does for a run that it starts itself
    experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    record = {"id": experiment.id, "out_dir": str(out_dir.resolve())}
    (out_dir / RECORD).parent.mkdir(exist_ok=True)
    write_file(out_dir / RECORD, lambda file: file.write(json.dumps(record).encode()))
    folder = Path(experiment.dir).parent
    if mode == "offline" and not _in_sweep(out_dir):     # a sweep prints one hint for all runs
        hint = f"`wandb sync {quote(str(folder))}` uploads this run"
        if experiment.id == earlier_id:
            hint = (f"each part of a resumed run has a separate folder, and `wandb sync --id {earlier_id} "
                    f"{quote(str(folder.parent))}/*run-*-{earlier_id}` uploads all parts as one run")
        print(f"W&B is offline: {hint}", file=sys.stderr)
    return WandbLogger(project=names.project, save_dir=out_dir, experiment=experiment)


def _in_sweep(out_dir: Path) -> bool:
    return (out_dir.parent / SWEEP).is_file()


def _default_name(out_dir: Path, run: JsonObject) -> str:
    """Returns KERNEL-FOLDER, or in a sweep KERNEL-seedSEED-OPTIONS, where the folder's name gives the options."""
    if not _in_sweep(out_dir):
        return f"{run['kernel']['name']}-{out_dir.name}"
    others = [part for part in out_dir.name.split(",") if not part.startswith(("kernel=", "seed="))]
    return "-".join([run["kernel"]["name"], f"seed{run['seed']}", *others])


def _user_setting(setting: str) -> Any:
    """Returns a setting from a WANDB_* variable or a W&B settings file, or None if the user has not set it."""
    import wandb

    settings = wandb.setup().settings
    return getattr(settings, setting) if setting in settings.model_fields_set else None


def _silent() -> bool:
    silent = _user_setting("silent")
    return True if silent is None else bool(silent)


def _log_in() -> Mode:
    """Logs in to W&B, and returns its mode. First finishes a run of this process that is still open, as a login requires."""
    import wandb

    if wandb.run is not None:
        wandb.finish()
    settings = wandb.setup(wandb.Settings(silent=_silent())).settings
    if settings._noop:                   # mode=disabled sets this
        return "disabled"
    return "offline" if settings._offline or not _logged_in() else "online"


def _earlier_id(out_dir: Path) -> str | None:
    """Returns the W&B id that a resumed run continues, or None for a new run or a copy of a run that still exists."""
    record = _read_record(out_dir)
    if record is None:                   # an earlier version of timemix started the run
        return _last_id(out_dir)
    original = Path(record["out_dir"])
    if original != out_dir.resolve() and _read_record(original) == record:
        print(f"W&B starts a new run, because {out_dir} is a copy of {original}, which has the id {record['id']}",
              file=sys.stderr)
        return None
    return str(record["id"])


def _read_record(out_dir: Path) -> dict[str, str] | None:
    try:
        record = json.loads((out_dir / RECORD).read_bytes())
        return {"id": str(record["id"]), "out_dir": str(record["out_dir"])}
    except (OSError, ValueError, TypeError, KeyError):   # the file is missing or damaged
        return None


def _last_id(out_dir: Path) -> str | None:
    # W&B stores a run in the file run-ID.wandb
    files = sorted((out_dir / "wandb").glob("*run-*-*/run-*.wandb"))
    return files[-1].stem.removeprefix("run-") if files else None


def _upload_hint(sweep: Path) -> str:
    if root := _user_setting("root_dir"):   # this folder may hold other runs too
        return f"the sweep's runs and report are in {Path(root, 'wandb')}, and `wandb sync FOLDER` uploads one of them"
    parts = {folder: sorted(folder.glob("*run-*")) for folder in sorted(sweep.glob("*/wandb"))}
    continued = [folder for folder, several in parts.items() if len(several) > 1]
    shell = quote(str(sweep))
    if not continued:
        return f"`wandb sync {shell}/wandb/*run-* {shell}/*/wandb/*run-*` uploads all runs and the report"
    # One command uploads the report and the runs that were never resumed, and each resumed run has a command of its own
    unresumed = [quote(str(several[0])) for several in parts.values() if len(several) == 1]
    commands = [" ".join(["wandb sync", f"{shell}/wandb/*run-*", *unresumed]),
                *(f"wandb sync --id {_last_id(folder.parent)} {quote(str(folder))}/*run-*" for folder in continued)]
    return f"`{' && '.join(commands)}` uploads all runs and the report"


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"cannot log in to W&B ({error}). Check the network and the API key (`wandb login`), or use "
                        "WANDB_MODE=offline or logger=csv") from error
    except wandb.errors.UsageError:      # there is neither a key nor a terminal to prompt for one
        return False
