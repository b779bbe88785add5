"""Shows the progress of a run as a bar, or as lines outside a terminal."""

import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from tqdm import tqdm

from rwkv.distributed import rank
from rwkv.training.callbacks.metrics import Metrics

FIRST_LINE = 3.0                         # the first interval between lines outside a terminal, in seconds
LAST_LINE = 30.0                         # the longest such interval, in seconds
UNKNOWN_SIZE = {"ncols": 80, "nrows": 24}           # characters; assumed if a terminal does not report its size
# The bar and the metrics next to it fit into 80 columns
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
POSTFIX = {"train/loss": "train {}", "val/loss": "val {}", "tok_per_sec": "{} tokens/s"}


@dataclass(eq=False)
class ProgressBar(Callback):
    """A callback that shows progress bars of optimiser steps and validation batches on standard error.

    Outside a terminal, the callback prints lines instead: every few seconds at first, and every half minute later.
    """

    metrics: Metrics
    _bar: tqdm | None = None
    _validation: tqdm | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        """Creates the bar in this hook, so that the bar's clock starts with the first step."""
        if rank() == 0 and self._bar is None:
            self._bar = bar(total=trainer.max_steps, initial=trainer.global_step, bar_format=FORMAT)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if self._bar is not None and trainer.global_step > self._bar.n:
            # The bar is about to be drawn. With TQDM_DISABLE in the environment, tqdm creates a bar without these fields
            if not self._bar.disable and time.time() - self._bar.last_print_t >= self._bar.mininterval:
                self._show(trainer)
            _advance(self._bar, trainer.global_step - self._bar.n)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if rank() == 0:
            batches = sum(trainer.num_val_batches)
            self._validation = bar(total=batches if math.isfinite(batches) else None, desc="validating", unit="batch",
                                   leave=False)

    def on_validation_batch_end(self, *_: object) -> None:
        if self._validation is not None:
            _advance(self._validation, 1)

    def on_validation_end(self, *_: object) -> None:
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def on_exception(self, *_: object) -> None:
        self._close()

    def on_train_end(self, trainer: lightning.Trainer, *_: object) -> None:
        if self._bar is not None:
            self._show(trainer)
        self._close()                    # the next output must start on its own line

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._close()

    def _show(self, trainer: lightning.Trainer) -> None:
        assert self._bar is not None
        metrics: dict[str, Tensor | float] = {**trainer.callback_metrics, **self.metrics.latest}
        parts = [text.format(_format_number(float(metrics[name]))) for name, text in POSTFIX.items() if name in metrics]
        self._bar.set_postfix_str(", ".join(parts), refresh=False)

    def _close(self) -> None:
        self.on_validation_end()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _format_number(value: float) -> str:
    # Shows four significant digits, or all digits before the point: 4.144, 12,345
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def bar(**options: Any) -> tqdm:
    """Returns a progress bar on standard error that prints lines instead outside a terminal."""
    terminal = sys.stderr.isatty()
    interval = 0.2 if terminal else FIRST_LINE
    has_size = not terminal or os.get_terminal_size(sys.stderr.fileno()).columns > 0
    size = {"dynamic_ncols": True} if has_size else UNKNOWN_SIZE
    return tqdm(mininterval=interval, maxinterval=2 * interval, miniters=1, file=sys.stderr, position=None if terminal else 0,
                **size, **options)


def _advance(bar: tqdm, steps: float) -> None:
    """Advances the bar. Outside a terminal, each printed line doubles the interval to the next line, up to LAST_LINE."""
    if bar.update(steps) and bar.mininterval >= FIRST_LINE:
        bar.mininterval = min(LAST_LINE, 2 * bar.mininterval)
