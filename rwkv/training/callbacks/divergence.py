"""Stops a run in all processes before a non-finite loss or weight reaches a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from rwkv.distributed import all_sum
from rwkv.training.errors import Diverged
from rwkv.training.sharding.strategy import ShardedStrategy, total_norm


@dataclass(eq=False)
class Divergence(Callback):
    """A callback that raises Diverged for a non-finite loss or weight.

    Losses are checked every log_every steps, before a validation and before a checkpoint. A check in each step would
    synchronise with the GPU each time.
    """

    log_every: int
    _lr: float = 0.0
    _loss: Tensor | float = 0.0          # the current step's loss, summed over accumulated batches
    _unchecked: list[tuple[int, float, Tensor]] = field(default_factory=list)    # (step, learning rate, loss)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: object, batch_idx: int) -> None:
        assert isinstance(outputs, Mapping)
        loss: Tensor = self._loss + outputs["loss"].detach()
        self._loss = loss
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._unchecked.append((trainer.global_step, self._lr, loss))
        self._loss = 0.0
        if trainer.global_step % self.log_every == 0:
            self._check_losses(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self._check_losses(trainer)

    def require_finite(self, trainer: lightning.Trainer, val_loss: float = 0.0) -> None:
        """Raises Diverged unless losses and weights are finite. All processes must call this before a checkpoint is written."""
        self._check_losses(trainer)
        if not math.isfinite(val_loss):
            raise _error("val/loss", trainer.global_step, self._lr, trainer)
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.reshard()
        norm = total_norm([weight.detach() for weight in trainer.lightning_module.parameters()])
        if all_sum(not norm.isfinite())[0]:
            raise _error("a weight", trainer.global_step, self._lr, trainer)

    def _check_losses(self, trainer: lightning.Trainer) -> None:
        if not self._unchecked:
            return
        losses = torch.stack([loss for _, _, loss in self._unchecked]).tolist()
        # Each count is the number of processes in which that loss is not finite
        counts = all_sum(*(not math.isfinite(loss) for loss in losses))
        for (step, lr, _), count in zip(self._unchecked, counts, strict=True):
            if count:
                raise _error("train/loss", step, lr, trainer)
        self._unchecked.clear()


def _error(quantity: str, step: int, lr: float, trainer: lightning.Trainer) -> Diverged:
    remedies = "a lower optim.lr= or a higher optim.warmup_steps="
    if not getattr(trainer.lightning_module, "optim_in_backward", False):            # which conflicts with clipping
        clip = "a lower optim.grad_clip=" if trainer.gradient_clip_val else "optim.grad_clip=1"
        remedies = f"a lower optim.lr=, a higher optim.warmup_steps= or {clip}"
    return Diverged(f"training diverged: {quantity} is not finite at step {step}, where the learning rate is {lr:.3g}. "
                    f"Start a new run with {remedies}")
