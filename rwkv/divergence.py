"""A run whose loss is no longer a finite number ends, in all its processes, before that reaches a checkpoint."""

import math
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from rwkv.processes import summed

SKIPPED = 20                             # losses in a row: fp16's scaler skips such a step, and the next one may be well again


class Diverged(ValueError):
    """The loss or the weights are not finite. What training has saved before is."""


class Divergence(Callback):
    """Raises Diverged. Losses are read every log_every steps and before a validation: reading each would wait for the GPU."""

    def __init__(self, out_dir: Path, log_every: int) -> None:
        self.out_dir, self.log_every = out_dir, log_every
        self._loss: Any = 0.0            # of the step so far, a share for each batch that it accumulates
        self._lr, self._not_finite_in_a_row = 0.0, 0
        self._unread: list[tuple[int, float, Tensor]] = []       # step, learning rate and loss

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        self._loss = self._loss + outputs["loss"].detach()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._unread.append((trainer.global_step, self._lr, self._loss))
        self._loss = 0.0
        if trainer.global_step % self.log_every == 0:
            self._read_losses(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._read_losses(trainer)

    def require_finite(self, trainer: lightning.Trainer, val_loss: float = 0.0) -> None:
        """What must hold before a checkpoint is written, called in all processes."""
        self._read_losses(trainer)
        if not math.isfinite(val_loss):
            raise Diverged(self._sentence("val/loss", trainer.global_step, self._lr))
        norm = torch.nn.utils.get_total_norm([weight.detach() for weight in trainer.lightning_module.parameters()])
        if summed(not norm.isfinite())[0]:
            raise Diverged(self._sentence("a weight", trainer.global_step, self._lr))

    def _read_losses(self, trainer: lightning.Trainer) -> None:
        if not self._unread:
            return
        losses = torch.stack([loss for _, _, loss in self._unread]).tolist()
        not_finite = summed(*(not math.isfinite(loss) for loss in losses))
        allowed = SKIPPED if getattr(trainer.precision_plugin, "scaler", None) is not None else 0
        for (step, lr, _), in_processes in zip(self._unread, not_finite, strict=True):
            self._not_finite_in_a_row = self._not_finite_in_a_row + 1 if in_processes else 0
            if self._not_finite_in_a_row > allowed:
                raise Diverged(self._sentence("train/loss", step, lr))
        self._unread.clear()

    def _sentence(self, what: str, step: int, lr: float) -> str:
        return (f"training diverged: {what} is not a finite number at step {step}, where the learning rate is {lr:.3g}; try a "
                "lower optim.lr, a longer optim.warmup_steps or a smaller optim.grad_clip in a new run; the checkpoints in "
                f"{self.out_dir} are of earlier steps and intact")
