"""The progress bar of a run."""

import sys
import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from rwkv.distributed import rank
from rwkv.training.callbacks.metrics import Metrics

SHOWN = ("train/loss", "val/loss", "val/bpb", "tok_per_sec")      # of the metrics


class ProgressBar(Callback):
    """A progress bar over optimiser steps on standard error; where that is not a terminal, a line every half minute."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._bar: tqdm | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if rank() > 0:
            return
        interval = 0.2 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(total=trainer.max_steps, initial=trainer.global_step, unit="step", mininterval=interval,
                         maxinterval=2 * interval, dynamic_ncols=True, file=sys.stderr)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._bar is not None and trainer.global_step > self._bar.n:
            if time.time() - self._bar.last_print_t >= self._bar.mininterval:      # it is about to be drawn
                self._show(trainer)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.set_description_str("validating")

    def on_validation_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.set_description_str("")

    def on_exception(self, *_: Any) -> None:
        self._close()

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._bar is not None:
            self._show(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._close()

    def _show(self, trainer: lightning.Trainer) -> None:
        assert self._bar is not None
        metrics = {**trainer.callback_metrics, **self.metrics.latest}
        shown = [f"{name} {float(metrics[name]):.4g}" for name in SHOWN if name in metrics]
        self._bar.set_postfix_str(", ".join(shown), refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
