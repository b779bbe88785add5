"""trainer.precision=fp16-mixed: a step whose gradients overflow is repeated with a smaller loss scale until it is taken.

torch's GradScaler skips such a step and halves its scale. The step would then count, with its data and its place in the
schedule, and change no weight. So its batches are computed again, from the same states of trainer.tbptt.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ParallelStrategy

from rwkv.training.callbacks.divergence import Diverged
from rwkv.training.tbptt import Carried

MOST_TRIES = 30                          # of a step: a new run's scale, 2^16, is then far below 1


class LossScale:
    """The batches of the current step, and how often it may be tried. scaler: a GradScaler."""

    def __init__(self, trainer: lightning.Trainer, scaler: Any, carried: Carried) -> None:
        self._trainer, self._scaler, self._carried = trainer, scaler, carried
        self._batches: list[tuple[Any, int]] = []
        self._states = carried.states()

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Called before each batch of a step is computed."""
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._batches, self._states = [], self._carried.states()
        self._batches.append((batch, batch_idx))

    def step(self, take: Callable[[], None], optimizer: Any) -> None:
        """Calls take(), which computes the step's last batch and steps the optimiser, until the scaler has not skipped it.

        Raises Diverged after MOST_TRIES.
        """
        for attempt in range(MOST_TRIES):
            if attempt:
                self._compute_earlier_batches(optimizer)
            before = self._scaler.get_scale()
            take()
            if self._scaler.get_scale() >= before:       # a step that is taken never lowers the scale
                return
        step, scale = self._trainer.global_step + 1, self._scaler.get_scale()
        raise Diverged(f"training diverged: at step {step} the gradients in float16 are not finite, even with a loss scale of "
                       f"{scale:.3g}; try a lower optim.lr or trainer.precision=bf16-mixed in a new run; the checkpoints of "
                       "earlier steps are intact")

    def _compute_earlier_batches(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of all batches of the step but the last, as Lightning's loop computes them."""
        optimizer.zero_grad()
        self._carried.restore(self._states)
        strategy = self._trainer.strategy
        for batch, batch_idx in self._batches[:-1]:
            alone: AbstractContextManager[None] = (
                strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext())
            with alone:
                loss = strategy.training_step(batch, batch_idx)
                assert isinstance(loss, torch.Tensor)
                strategy.backward(loss / self._trainer.accumulate_grad_batches, optimizer)
