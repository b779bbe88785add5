"""Where metrics go: metrics.csv in the run's directory, and W&B, online where the user is logged in, else offline."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from rwkv.config import LoggerConfig
from rwkv.processes import rank


def loggers(config: LoggerConfig, out_dir: Path, run: dict[str, Any], resumed_at: int | None = None) -> list[Logger]:
    """`run` is the resolved configuration, the kernel by its resolved name: what W&B shows and filters by.

    resumed_at: the step of the checkpoint that the run continues from. Of several processes, the first logs for all.
    """
    if config.name == "none" or rank() > 0:
        return []
    file = MetricsFile(out_dir / "metrics.csv", resumed_at)
    return [file] if config.name == "csv" else [file, _wandb(config, out_dir, run)]


class MetricsFile(Logger):
    """One row for each step with metrics; a resumed run goes on where its checkpoint was, and drops what came after it."""

    COLUMNS = ("step", "train/loss", "val/loss", "val/bpb", "lr", "tok_per_sec", "peak_mem")

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        super().__init__()
        self.path = path
        kept = _rows_until(path, resumed_at) if resumed_at is not None and path.is_file() else []
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.COLUMNS).writeheader()
            csv.DictWriter(file, self.COLUMNS).writerows(kept)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is in config.yaml."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step or 0} | {name: metrics[name] for name in self.COLUMNS if name in metrics}
        if len(row) > 1:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.COLUMNS).writerow(row)


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if int(row["step"]) <= step]


def _wandb(config: LoggerConfig, out_dir: Path, run: dict[str, Any]) -> WandbLogger:
    import wandb

    if wandb.run is not None:            # that of the sweep's job before this one, in the same process
        wandb.finish()
    offline = wandb.setup(wandb.Settings(silent=True)).settings._offline or not _logged_in()
    before = _id_of(out_dir)
    logger = WandbLogger(
        id=before, resume="allow" if before else None,
        project=config.project, group=config.group, name=config.run_name or f"{run['kernel']['name']}-{out_dir.name}",
        save_dir=out_dir, config=run, settings=wandb.Settings(silent=True, mode="offline" if offline else "online"))
    if offline:
        print(f"W&B: offline; {_how_to_upload(Path(logger.experiment.dir).parent, before)}", file=sys.stderr)
    return logger


def _id_of(out_dir: Path) -> str | None:
    """Of the W&B run in a run's directory that is continued: the end of the names of its folders there."""
    folders = sorted((out_dir / "wandb").glob("*run-*-*"))
    return folders[-1].name.rpartition("-")[2] if folders else None


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
