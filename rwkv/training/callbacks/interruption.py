"""Stops a run cleanly: Ctrl-C, SIGTERM and the other signals of rwkv/io/signals.py stop training between two steps."""

import signal
from contextlib import suppress

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rwkv.distributed import log
from rwkv.io.signals import StopRequest
from rwkv.training.callbacks.checkpoints import Checkpoints
from rwkv.training.errors import Interrupted


class StopCleanly(Callback):
    """A callback that stops training at the first signal, after the current step, and saves a checkpoint.

    A later Ctrl-C stops training immediately. A signal during a validation stops the validation and saves the state before the
    validation. The resumed run then repeats the validation.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._stop = StopRequest(on_signal=_announce_stop)

    def on_train_start(self, *_: object) -> None:
        self._stop.install()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: object, batch_idx: int) -> None:
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if between_steps and not self.checkpoints.validation_follows(trainer):
            self._stop_if_requested(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self._stop_if_requested(trainer)

    def on_validation_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self._stop_if_requested(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._stop.restore()

    def _stop_if_requested(self, trainer: lightning.Trainer) -> None:
        if trainer.strategy.reduce_boolean_decision(self._stop.requested, all=False):
            self.checkpoints.save_last(trainer)
            self.checkpoints.finish(trainer)
            raise Interrupted


def _announce_stop(number: int) -> None:
    with suppress(RuntimeError):         # the signal may interrupt a write to standard error
        log(f"\nreceived {signal.Signals(number).name}: training stops after this step; press Ctrl-C to stop immediately ...")
