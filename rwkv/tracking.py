"""Where metrics go: metrics.csv in the run's directory, and W&B, online where the user is logged in, else offline."""

import csv
import importlib
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, WandbLogger

from rwkv.config import LoggerConfig
from rwkv.formats._atomic import write_file
from rwkv.processes import rank

METRICS = ("train/loss", "val/loss", "val/bpb", "lr", "grad_norm", "tok_per_sec", "matmul_share", "peak_mem")
Mode = Literal["online", "offline", "disabled"]
SAMPLES = ("step", "prompt", "text")
SAMPLES_SHOWN = 100                      # of the latest in W&B's table, which is sent whole each time


def require(config: LoggerConfig) -> None:
    """Raises ValueError where logger=wandb and the package cannot be imported: before the run does anything long."""
    if config.name != "wandb":
        return
    try:
        importlib.import_module("wandb")
    except Exception as error:           # a broken installation raises whatever its first broken part does
        raise ValueError(f"logger=wandb needs the package wandb, which cannot be imported ({error!r}): install it again (pip "
                         "install --force-reinstall wandb), or use logger=csv") from error


def loggers(config: LoggerConfig, out_dir: Path, run: dict[str, Any], resumed_at: int | None = None) -> list[Logger]:
    """`run` is the resolved configuration, the kernel by its resolved name: what W&B shows and filters by.

    resumed_at: the step of the checkpoint that the run continues from. Of several processes, the first logs for all.
    """
    if config.name == "none" or rank() > 0:
        return []
    norms = norm_names(run["model"]["n_layer"]) if run["trainer"]["grad_norms"] else ()
    file = MetricsFile(out_dir / "metrics.csv", run["kernel"]["name"], norms, resumed_at)
    if config.name == "csv":
        return [file]
    mode = _mode()
    if mode == "disabled":
        print("W&B: disabled in its own settings (WANDB_MODE or `wandb disabled`); the metrics are in metrics.csv alone",
              file=sys.stderr)
        return [file]
    return [file, _wandb(config, out_dir, run, mode)]


def norm_names(n_layer: int) -> tuple[str, ...]:
    """What trainer.grad_norms=true logs: the norm of the gradients of each part of the model."""
    return tuple(f"grad_norm/{part}" for part in ("emb", *(f"blocks.{layer}" for layer in range(n_layer)), "ln_out", "head"))


def log_samples(loggers: Iterable[Logger], rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """To W&B, as a table; they are in a file of their own anyway. rows: of SAMPLES each."""
    table = [[row[name] for name in SAMPLES] for row in rows[-SAMPLES_SHOWN:]]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table("samples", list(SAMPLES), table, step=step)


def log_report(config: LoggerConfig, sweep: Path, rows: Sequence[Mapping[str, Any]], files: Iterable[Path]) -> None:
    """A W&B run of a sweep's own, in the group of its runs: the report's rows as a table, and its files as they are."""
    import wandb

    mode = _mode()
    if mode == "disabled":
        return
    group = config.group or sweep.name
    columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
    with wandb.init(project=config.project, group=group, name=f"{group}-report", job_type="report", dir=sweep,
                    settings=wandb.Settings(silent=True, mode=mode)) as run:
        table = [[row.get(str(name)) if row.get(str(name)) != "" else None for name in columns] for row in rows]
        artifact = wandb.Artifact(f"report-{re.sub('[^A-Za-z0-9_.-]', '_', group)}", "report")
        for file in files:
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.log({"report": wandb.Html((sweep / "report.html").read_text(encoding="utf-8"), inject=False),
                 "summary": wandb.Table(columns, table)})
        folder = Path(run.dir).parent
    if mode == "offline":
        print(f"W&B: offline; {_how_to_upload(folder, None)}", file=sys.stderr)


class MetricsFile(Logger):
    """One row for each step with metrics; a resumed run goes on where its checkpoint was, and drops what came after it.

    It keeps its columns, and has new ones after them. `kernel` stands in each row, since a resumed run may have another.
    """

    def __init__(self, path: Path, kernel: str, norms: Sequence[str] = (), resumed_at: int | None = None) -> None:
        super().__init__()
        self.path, self.kernel = path, kernel
        kept = _rows_until(path, resumed_at) if resumed_at is not None and path.is_file() else []
        self.columns = list(dict.fromkeys([*(kept[0] if kept else ()), "step", *METRICS, "kernel", *norms]))
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
            with self.path.open("ab") as file:
                file.write(self._text([{"step": step or 0, **known, "kernel": self.kernel}]))

    def _text(self, rows: Iterable[Mapping[str, Any]], header: bool = False) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    """Without a last row that a kill cut short."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and int(row["step"]) <= step]


def _wandb(config: LoggerConfig, out_dir: Path, run: dict[str, Any], mode: Mode) -> WandbLogger:
    import wandb

    if wandb.run is not None:            # that of a run before this one, in the same process
        wandb.finish()
    before = _id_of(out_dir)
    logger = WandbLogger(
        id=before, resume="allow" if before else None,
        project=config.project, group=config.group, name=config.run_name or f"{run['kernel']['name']}-{out_dir.name}",
        save_dir=out_dir, config=run, settings=wandb.Settings(silent=True, mode=mode))
    if mode == "offline":
        print(f"W&B: offline; {_how_to_upload(Path(logger.experiment.dir).parent, before)}", file=sys.stderr)
    return logger


def _mode() -> Mode:
    """What the user's own settings of W&B say, and offline where nobody is logged in."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings._noop:                   # mode=disabled
        return "disabled"
    return "offline" if settings._offline or not _logged_in() else "online"


def _id_of(out_dir: Path) -> str | None:
    """Of the W&B run in a run's directory that is continued: the name of its file, run-ID.wandb, says it whole."""
    files = sorted((out_dir / "wandb").glob("*run-*-*/run-*.wandb"))
    return files[-1].stem.removeprefix("run-") if files else None


def _how_to_upload(folder: Path, before: str | None) -> str:
    if before is None:
        return f"`wandb sync {folder}` uploads this run"
    return (f"a run continued offline is a folder for each part; `wandb sync --id {before} {folder.parent}/*run-*` uploads "
            "them into one run")


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except wandb.errors.AuthenticationError as error:
        raise ValueError(f"W&B refuses the API key ({error}): log in again with `wandb login`, or use logger=csv") from error
    except wandb.errors.UsageError:      # no key, and nobody to ask for one
        return False
