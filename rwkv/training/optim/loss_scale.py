"""Repeats a step of trainer.precision=fp16-mixed whose gradients overflow, with smaller and smaller loss scales.

torch's GradScaler skips such a step and halves the loss scale. A skipped step uses up data and a position in the schedule
without changing a weight. Therefore this module recomputes the step's batches. With trainer.tbptt, the recomputation begins
with the states before the step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy

from rwkv.training.errors import Diverged
from rwkv.training.tbptt import CarriedStates

MAX_ATTEMPTS = 30                        # after this many attempts, the initial scale of 2^16 is far below 1


class LossScale:
    """Stores the batches of the current step and repeats the step if gradients overflow."""

    def __init__(self, trainer: lightning.Trainer, scaler: torch.amp.GradScaler, carried: CarriedStates) -> None:
        self._trainer, self._scaler, self._carried = trainer, scaler, carried
        self._batches: list[tuple[object, int]] = []
        self._states = carried.states()

    def begin(self, batch: object, batch_idx: int) -> None:
        """Records a batch. Call this method before each batch of a step."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._batches, self._states = [], self._carried.states()
        self._batches.append((batch, batch_idx))

    def step(self, take_step: Callable[[], None], optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Calls take_step() until the scaler does not skip the step. Raises Diverged after MAX_ATTEMPTS attempts.

        `take_step` computes the step's last batch and steps the optimiser.
        """
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                self._compute_earlier_batches(optimizer)
            scale = self._scaler.get_scale()
            take_step()
            if self._scaler.get_scale() >= scale:        # only a skipped step lowers the scale
                return
        step, scale = self._trainer.global_step + 1, self._scaler.get_scale()
        raise Diverged(f"training diverged: the float16 gradients of step {step} are not finite, even with a loss scale of "
                       f"{scale:.3g}. Start a new run with a lower optim.lr= or with trainer.precision=bf16-mixed")

    def _compute_earlier_batches(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        optimizer.zero_grad()
        self._carried.restore(self._states)
        strategy = self._trainer.strategy
        for batch, batch_idx in self._batches[:-1]:
            no_sync: AbstractContextManager[None] = (
                strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext())
            with no_sync:
                loss = strategy.training_step(batch, batch_idx)
                assert isinstance(loss, torch.Tensor)
                strategy.backward(loss / self._trainer.accumulate_grad_batches, None)
