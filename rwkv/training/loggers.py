"""Loggers of metrics: metrics.csv in the run's directory, and W&B or the logger of Lightning that logger._target_ names. W&B
runs online if the user is logged in, otherwise offline. The user's own W&B settings, such as WANDB_PROJECT, win over our
defaults, and an option given to the program wins over both.
"""

import csv
import importlib
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NamedTuple

import yaml
from lightning.pytorch.loggers import Logger, WandbLogger

from rwkv.config import PREFERENCES, DataConfig, LoggerConfig
from rwkv.data.mixture import names_of, source_metric
from rwkv.distributed import rank
from rwkv.errors import UserError
from rwkv.io.atomic import append, write_file
from rwkv.report.numbers import reward_names
from rwkv.report.reading import METRICS, SWEEP, read_metrics
from rwkv.training.trackers import Filed

COLUMNS = ("train/loss", "val/loss", "val/bpb", "val/lost", "lr", "grad_norm", "tok_per_sec", "peak_mem")
PROJECT = "timemix"                      # in W&B
RECORD = Path("wandb", "timemix.json")   # in a run's directory: the id of its W&B run, and the directory's path
Mode = Literal["online", "offline", "disabled"]
GUARD_COLUMNS = ("guard/loss", "guard/bpb")           # of runs with tune.guard
SAMPLE_COLUMNS = ("step", "prompt", "text")
SAMPLES_SHOWN = 100                      # the latest samples: W&B uploads the whole table each time


def require(config: LoggerConfig) -> None:
    """Raises UserError if the logger's package cannot be imported or refuses a name. Called before long work."""
    if config._target_ is not None:
        _named(config, Filed(config.project, PROJECT, config.group, "run", Path(), continued=False))
        return
    if config.name != "wandb":
        return
    try:
        wandb = importlib.import_module("wandb")
    except Exception as error:           # a broken installation can raise any exception
        raise UserError(f"logger=wandb needs the package wandb, which cannot be imported ({error!r}): install it again (pip "
                        "install --force-reinstall wandb), or use logger=csv") from error
    try:
        names = _Names.of(config, None, "run")
        wandb.Settings(project=names.project, run_group=names.group, run_name=names.name, run_id=_users_own("run_id"))
    except (wandb.errors.UsageError, ValueError) as error:       # pydantic's ValidationError is a ValueError
        raise UserError("W&B refuses logger.project, logger.group, logger.run_name or one of its own settings, such as a "
                        f"WANDB_ variable: {' '.join(str(error).split())}") from None


def loggers(config: LoggerConfig, out_dir: Path, run: dict[str, Any], resumed_at: int | None = None) -> list[Logger]:
    """The loggers that the options choose; none in processes other than rank 0.

    run: the resolved configuration, which W&B shows and filters by. resumed_at: the step of the checkpoint that the run
    continues from.
    """
    if config.name == "none" or rank() > 0:
        return []
    norms = norm_names(run["model"]["n_layer"]) if run["trainer"]["grad_norms"] else ()
    guard = GUARD_COLUMNS if run["init_from"] and run["tune"]["guard"] else ()
    rewards = reward_names() if run["tune"]["objective"] in PREFERENCES else ()
    sources = [source_metric(name) for name in names_of(DataConfig(**run["data"]))]
    file = MetricsFile(out_dir / METRICS, run["kernel"]["name"], (*sources, *guard, *rewards, *norms), resumed_at)
    if config._target_ is not None:
        group = out_dir.parent.name if _in_sweep(out_dir) else None
        logger = _named(config, Filed(config.project, PROJECT, config.group or group,
                                      config.run_name or _default_name(out_dir, run), out_dir, resumed_at is not None))
        logger.log_hyperparams(run)
        return [file, logger]
    if config.name == "csv":
        return [file]
    mode = _mode()
    if mode == "disabled":
        print("W&B: disabled in its own settings (WANDB_MODE or `wandb disabled`); the metrics are only in metrics.csv",
              file=sys.stderr)
        return [file]
    return [file, _wandb(config, out_dir, run, mode)]


def _named(config: LoggerConfig, filed: Filed) -> Logger:
    """The logger that logger._target_ names; those of trackers.py get `filed`. Raises UserError where it cannot be made."""
    module, _, name = str(config._target_).rpartition(".")
    try:
        arguments = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in config.arguments)}
        if module == Filed.__module__:
            arguments["filed"] = filed
        logger = getattr(importlib.import_module(module), name)(**arguments)
    except Exception as error:           # whatever another package raises
        raise UserError(f"logger={config.name} cannot make {config._target_} ({error!r}): install its package, change "
                        "logger.arguments, or use logger=csv") from error
    if not isinstance(logger, Logger):
        raise UserError(f"logger._target_={config._target_} is no logger of Lightning: name a class such as "
                        "lightning.pytorch.loggers.MLFlowLogger")
    return logger


def norm_names(n_layer: int) -> tuple[str, ...]:
    """The metrics of trainer.grad_norms=true: the norm of the gradients of each part of the model."""
    return tuple(f"grad_norm/{part}" for part in ("emb", *(f"blocks.{layer}" for layer in range(n_layer)), "ln_out", "head"))


def log_samples(loggers: Iterable[Logger], rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Logs samples as a table in the loggers that have tables. rows: step, prompt and text of each."""
    table = [[row[name] for name in SAMPLE_COLUMNS] for row in rows[-SAMPLES_SHOWN:]]
    for logger in loggers:
        if hasattr(logger, "log_table"):
            logger.log_table("samples", list(SAMPLE_COLUMNS), table, step=step)


def log_report(config: LoggerConfig, sweep: Path, rows: Sequence[Mapping[str, Any]], files: Iterable[Path]) -> None:
    """Logs a sweep's report as a W&B run in the group of its runs: the rows as a table, and the files as an artifact."""
    if config.name != "wandb":
        return
    import wandb

    mode = _mode()
    if mode == "disabled":
        return
    names = _Names.of(config, sweep.name, "")
    columns: list[str | int] = [*dict.fromkeys(name for row in rows for name in row)]
    with wandb.init(project=names.project, group=names.group, name=f"{names.group}-report", job_type="report",
                    dir=_users_own("root_dir") or sweep,
                    settings=wandb.Settings(silent=_silent(), mode=mode)) as run:
        table = [[row.get(str(name)) if row.get(str(name)) != "" else None for name in columns] for row in rows]
        artifact = wandb.Artifact(f"report-{re.sub('[^A-Za-z0-9_.-]', '_', str(names.group))}", "report")
        for file in files:
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.log({"report": wandb.Html((sweep / "report.html").read_text(encoding="utf-8"), inject=False),
                 "summary": wandb.Table(columns, table)})
    if mode == "offline":
        print(f"W&B: offline; {_how_to_upload_all(sweep)}", file=sys.stderr)


class MetricsFile(Logger):
    """metrics.csv: one row for each step with metrics.

    A resumed run drops the rows of the steps after its checkpoint; it keeps the columns, and adds new ones after them. Every
    row names the kernel, since a resumed run may use another. more: columns that only some runs have.
    """

    def __init__(self, path: Path, kernel: str, more: Sequence[str] = (), resumed_at: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.kernel = kernel
        kept = []                        # rows up to the checkpoint, without a last row that a kill cut short
        if resumed_at is not None:
            kept = [row for row in read_metrics(path) if None not in row.values() and int(row["step"]) <= resumed_at]
        self.columns = list(dict.fromkeys([*(kept[0] if kept else ()), "step", *COLUMNS, "kernel", *more]))
        write_file(path, lambda file: file.write(self._text(kept, header=True)))

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is in config.yaml."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        known = {name: metrics[name] for name in self.columns if name in metrics and name != "step"}
        if known:
            append(self.path, self._text([{"step": step or 0, **known, "kernel": self.kernel}]))

    def _text(self, rows: Iterable[Mapping[str, Any]], header: bool = False) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


class _Names(NamedTuple):
    """What a W&B run is filed under."""

    project: str
    group: str | None
    name: str

    @classmethod
    def of(cls, config: LoggerConfig, group: str | None, name: str) -> "_Names":
        """The options, or else the user's W&B settings, or else our defaults. group, name: the defaults."""
        return cls(config.project or _users_own("project") or PROJECT, config.group or _users_own("run_group") or group,
                   config.run_name or _users_own("run_name") or name)


def _wandb(config: LoggerConfig, out_dir: Path, run: dict[str, Any], mode: Mode) -> WandbLogger:
    import wandb

    if wandb.run is not None:            # of an earlier training in the same process
        wandb.finish()
    earlier_id = _earlier_id(out_dir)
    names = _Names.of(config, out_dir.parent.name if _in_sweep(out_dir) else None, _default_name(out_dir, run))
    logger = WandbLogger(
        id=_users_own("run_id") or earlier_id, resume=_users_own("resume") or ("allow" if earlier_id else None),
        project=names.project, group=names.group, name=names.name, save_dir=_users_own("root_dir") or out_dir, config=run,
        settings=wandb.Settings(silent=_silent(), mode=mode))
    experiment = logger.experiment
    record = {"id": experiment.id, "out_dir": str(out_dir.resolve())}
    (out_dir / RECORD).parent.mkdir(exist_ok=True)
    write_file(out_dir / RECORD, lambda file: file.write(json.dumps(record).encode()))
    folder = Path(experiment.dir).parent
    if mode == "offline" and not _in_sweep(out_dir):     # a sweep prints this once, at its end
        how = f"`wandb sync {quote(str(folder))}` uploads this run"
        if experiment.id == earlier_id:
            how = (f"each part of a continued run is a folder of its own; `wandb sync --id {earlier_id} "
                   f"{quote(str(folder.parent))}/*run-*-{earlier_id}` uploads them into one run")
        print(f"W&B: offline; {how}", file=sys.stderr)
    return logger


def _in_sweep(out_dir: Path) -> bool:
    return (out_dir.parent / SWEEP).is_file()


def _default_name(out_dir: Path, run: dict[str, Any]) -> str:
    """KERNEL-FOLDER; in a sweep, whose folders are called after what is swept, KERNEL-seedSEED and the other swept options."""
    if not _in_sweep(out_dir):
        return f"{run['kernel']['name']}-{out_dir.name}"
    others = [part for part in out_dir.name.split(",") if not part.startswith(("kernel=", "seed="))]
    return "-".join([run["kernel"]["name"], f"seed{run['seed']}", *others])


def _users_own(setting: str) -> Any:
    """A value that a WANDB_* variable or a settings file of W&B sets; None for none."""
    import wandb

    settings = wandb.setup().settings
    return getattr(settings, setting) if setting in settings.model_fields_set else None


def _silent() -> bool:
    stated = _users_own("silent")
    return True if stated is None else bool(stated)


def _mode() -> Mode:
    """The mode of the user's own W&B settings; offline if nobody is logged in."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=_silent())).settings
    if settings._noop:                   # set by mode=disabled
        return "disabled"
    return "offline" if settings._offline or not _logged_in() else "online"


def _earlier_id(out_dir: Path) -> str | None:
    """The id under which a continued run goes on; None for a new run, and for a copy of a run that is still there."""
    record = _record_in(out_dir)
    if record is None:                   # runs of earlier versions have none
        return _id_of(out_dir)
    original = Path(record["out_dir"])
    if original != out_dir.resolve() and _record_in(original) == record:
        print(f"W&B: a new run, since {out_dir} is a copy of {original}, which has the id {record['id']}", file=sys.stderr)
        return None
    return str(record["id"])


def _record_in(out_dir: Path) -> dict[str, str] | None:
    """RECORD; None where it is missing or damaged."""
    try:
        record = json.loads((out_dir / RECORD).read_bytes())
        return {"id": str(record["id"]), "out_dir": str(record["out_dir"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _id_of(out_dir: Path) -> str | None:
    """The id of the last W&B run in a run's directory, from the name of its file, run-ID.wandb; None for none."""
    files = sorted((out_dir / "wandb").glob("*run-*-*/run-*.wandb"))
    return files[-1].stem.removeprefix("run-") if files else None


def _how_to_upload_all(sweep: Path) -> str:
    """One command for the report and all runs of a sweep, and one for each run that was continued."""
    if root := _users_own("root_dir"):   # where other runs may be too
        return f"its runs and its report are in {Path(root, 'wandb')}; `wandb sync FOLDER` uploads one of them"
    parts = {folder: sorted(folder.glob("*run-*")) for folder in sorted(sweep.glob("*/wandb"))}
    continued = [folder for folder, several in parts.items() if len(several) > 1]
    shell = quote(str(sweep))
    if not continued:
        return f"`wandb sync {shell}/wandb/*run-* {shell}/*/wandb/*run-*` uploads all runs and the report"
    whole = [quote(str(several[0])) for several in parts.values() if len(several) == 1]
    commands = [" ".join(["wandb sync", f"{shell}/wandb/*run-*", *whole]),
                *(f"wandb sync --id {_id_of(folder.parent)} {quote(str(folder))}/*run-*" for folder in continued)]
    return f"`{' && '.join(commands)}` uploads all runs and the report"


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"W&B refuses the API key ({error}): log in again with `wandb login`, or use logger=csv") from error
    except wandb.errors.UsageError:      # there is no key, and no terminal to prompt for one
        return False
