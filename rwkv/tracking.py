"""Where metrics go: metrics.csv in the run's directory, and W&B, online where the user is logged in, else offline."""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from rwkv.config import LoggerConfig


def loggers(config: LoggerConfig, out_dir: Path, run: dict[str, Any]) -> list[Logger]:
    """`run` is the resolved configuration, the kernel by its resolved name: what W&B shows and filters by."""
    if config.name == "none":
        return []
    csv = CSVLogger(out_dir, name="", version="", flush_logs_every_n_steps=1)
    return [csv] if config.name == "csv" else [csv, _wandb(config, out_dir, run)]


def _wandb(config: LoggerConfig, out_dir: Path, run: dict[str, Any]) -> WandbLogger:
    import wandb

    offline = wandb.setup().settings._offline or not wandb.login(prompt=False)
    logger = WandbLogger(
        project=config.project, group=config.group, name=config.run_name or f"{run['kernel']['name']}-{out_dir.name}",
        save_dir=out_dir, offline=offline, config=run, settings=wandb.Settings(silent=True))
    if offline:
        print(f"W&B: offline; `wandb sync {Path(logger.experiment.dir).parent}` uploads this run", file=sys.stderr)
    return logger
