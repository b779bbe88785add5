"""What happens around training steps: throughput, a clean Ctrl-C, and a progress bar that shows the loss."""

import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tqdm import tqdm

LAST = Path("checkpoints") / "last.ckpt"
SHOWN = ("train/loss", "val/loss", "val/bpb", "tok_per_sec")      # in the progress bar


class Interrupted(Exception):
    """Training was asked to stop, stopped between two steps, and saved a checkpoint."""


class StopCleanly(Callback):
    """Training ends with a checkpoint: at its last step, and at the first Ctrl-C or SIGTERM; a second one stops at once.

    Saved in hooks, while the loaders still know where they are: after fit has returned they do not.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, self.asked = checkpoint, False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        if self.asked and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted

    def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.asked and trainer.global_step:
            trainer.save_checkpoint(self.checkpoint)
            raise Interrupted

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.save_checkpoint(self.checkpoint)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print("\nstopping after this step (Ctrl-C again stops at once) ...", file=sys.stderr)


class Metrics(Callback):
    """train/loss, tok_per_sec, lr and peak_mem (MiB) every `log_every` steps; validation is not in the time.

    At the end it says the median milliseconds of a step, of those that were logged.
    """

    def __init__(self, log_every: int) -> None:
        self.log_every, self._tokens, self._since, self._lr = log_every, 0, 0.0, 0.0
        self._ms_per_token: list[float] = []
        self._tokens_per_step = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restart()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restart()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        self._tokens += batch[0].numel()
        if trainer.global_step % self.log_every == 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            loss, seconds = outputs["loss"].item(), time.perf_counter() - self._since
            self._ms_per_token.append(1000 * seconds / self._tokens)
            self._tokens_per_step = batch[0].numel() * trainer.accumulate_grad_batches
            metrics = {"train/loss": loss * trainer.accumulate_grad_batches, "tok_per_sec": self._tokens / seconds,
                       "lr": self._lr, "peak_mem": peak_memory_mib(pl_module.device)}
            pl_module.log_dict(metrics, logger=False)    # for the bar; Lightning would log them again at every step
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.global_step)
            self._restart()

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if stage == "fit" and self._ms_per_token:
            median = statistics.median(self._ms_per_token) * self._tokens_per_step
            print(f"median {median:.1f} ms a step of {self._tokens_per_step:,} tokens", file=sys.stderr)

    def _restart(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()


class Bar(Callback):
    """A progress bar over optimiser steps on standard error; every half minute a line where that is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        interval = 0.2 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(total=trainer.max_steps, initial=trainer.global_step, unit="step", mininterval=interval,
                         maxinterval=2 * interval, dynamic_ncols=True, file=sys.stderr)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._bar is not None and trainer.global_step > self._bar.n:
            self._bar.set_postfix_str(_short(trainer.callback_metrics), refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.set_description_str("validating")

    def on_validation_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.set_description_str("")

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(metrics[name]):.4g}" for name in SHOWN if name in metrics)


def checkpoints(out_dir: Path, every: int) -> list[ModelCheckpoint]:
    """checkpoints/last.ckpt every so many steps, and checkpoints/best.ckpt by val/loss."""
    folder = out_dir / LAST.parent
    shared: dict[str, Any] = {"dirpath": folder, "auto_insert_metric_name": False, "enable_version_counter": False}
    return [ModelCheckpoint(filename="last", every_n_train_steps=every, save_on_train_epoch_end=False, **shared),
            ModelCheckpoint(filename="best", monitor="val/loss", **shared)]


def peak_memory_mib(device: torch.device) -> float:
    """The most memory used so far, in MiB: the GPU's where the model is on one, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    if sys.platform == "win32":
        return float("nan")              # the standard library cannot tell there
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2 ** 20 if sys.platform == "darwin" else used / 2 ** 10
