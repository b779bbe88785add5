"""Measures and logs training steps: loss, learning rate, throughput, gradient norms and memory."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from kernels.machine.memory import peak_memory
from rwkv.distributed import all_gather, all_sum, log, rank, world_size
from rwkv.io.json_types import StateDict
from rwkv.io.lines import count_of
from rwkv.model.base import Model
from rwkv.training.loggers import norm_names
from rwkv.training.sharding.strategy import total_norm
from rwkv.training.task import LanguageModel, TrainingBatch
from rwkv.training.tuning.preferences import REWARDS


@dataclass(eq=False)
class Metrics(Callback):
    """A callback that logs train/loss, lr, tok_per_sec, grad_norm and peak_mem every `log_every` steps.

    The metrics train/loss and, for pairs of answers, train/rewards_* are means over the steps since the previous row of
    metrics. The other metrics are those of the last step. Checkpoints hold the sums since the previous row, so that a resumed
    run logs the same means.

    grad_norm is measured before clipping. peak_mem is the peak memory of rank 0 in MiB. tok_per_sec excludes validation,
    sampling and the padding of trainer.tbptt's segments. `grad_norms` adds the gradient norm of each part of the model. After
    training, the callback prints the median milliseconds of the logged steps.
    """

    log_every: int
    grad_norms: bool = False
    latest: Mapping[str, float] = field(default_factory=dict)
    _interval_start: float = 0.0         # the time at which a logged step or a validation last ended
    _interval_tokens: int = 0            # tokens of this interval, with padding
    _interval_unpadded: int = 0          # tokens of this interval, without padding
    _tokens_per_step: int = 0
    _ms_per_token: list[float] = field(default_factory=list)
    _lr: float = 0.0
    _part_norms: dict[str, float] = field(default_factory=dict)
    _steps: int = 0                      # steps since the last row of metrics
    _loss: Tensor | float = 0.0          # sum of these steps' losses, over accumulated batches, on the device
    _rewards: Tensor = field(default_factory=lambda: torch.zeros(len(REWARDS)))    # sum of these steps' REWARDS

    def state_dict(self) -> StateDict:
        """Returns the sums of all processes. This is a collective operation."""
        sums = [float(self._loss), *self._rewards.tolist()]
        return {"steps": self._steps, "ranks": all_gather(sums)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._steps, ranks = state_dict["steps"], torch.tensor(state_dict["ranks"])
        sums = ranks[rank()] if len(ranks) == world_size() else ranks.mean(0)
        self._loss, self._rewards = float(sums[0]), sums[1:]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._rewards = self._rewards.to(pl_module.device)
        self._start_interval()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: object) -> None:
        if self.grad_norms and (trainer.global_step + 1) % self.log_every == 0:
            self._part_norms = gradient_norms(cast(Model, pl_module.model))

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._start_interval()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: TrainingBatch, batch_idx: int) -> None:
        assert isinstance(outputs, Mapping)
        task = cast(LanguageModel, pl_module)
        tokens = batch[0].numel() * world_size()
        self._interval_tokens += tokens
        self._interval_unpadded += getattr(batch, "tokens", tokens)
        self._loss = self._loss + outputs["loss"].detach()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._steps += 1
        if task.preferences is not None:
            self._rewards = self._rewards + task.rewards
        if trainer.global_step % self.log_every == 0:
            self._tokens_per_step = tokens * trainer.accumulate_grad_batches
            self._log(trainer, task)
            self._start_interval()
            self._steps, self._loss, self._rewards = 0, 0.0, torch.zeros_like(self._rewards)

    def exclude(self, seconds: float) -> None:
        """Excludes `seconds` of other work from the duration of the current interval."""
        self._interval_start += seconds

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if stage == "fit" and self._ms_per_token:
            ms_per_step = statistics.median(self._ms_per_token) * self._tokens_per_step
            log(f"median {ms_per_step:.1f} ms a step of {count_of(self._tokens_per_step, 'token')}")

    def _log(self, trainer: lightning.Trainer, task: LanguageModel) -> None:
        count = self._steps * world_size()
        loss = all_sum(float(self._loss))[0] / count
        seconds = time.perf_counter() - self._interval_start
        self._ms_per_token.append(1000 * (seconds / self._interval_tokens))
        metrics = {"train/loss": loss, "lr": self._lr, "tok_per_sec": self._interval_unpadded / seconds}
        if task.grad_norm is not None:
            metrics["grad_norm"] = float(task.grad_norm)
        metrics |= self._part_norms
        if task.preferences is not None:
            means = [total / count for total in all_sum(*self._rewards.tolist())]
            metrics |= {f"train/{name}": mean for name, mean in zip(REWARDS, means, strict=True)}
        metrics["peak_mem"] = peak_memory_mib(task.device)
        self.latest = metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)

    def _start_interval(self) -> None:
        self._interval_start = time.perf_counter()
        self._interval_tokens = 0
        self._interval_unpadded = 0


def peak_memory_mib(device: torch.device) -> float:
    """Returns the peak memory in MiB: of torch's allocations on a GPU, of this process on a CPU. Returns NaN on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    return peak_memory() / 2 ** 20


def gradient_norms(model: Model) -> dict[str, float]:
    """Returns the 2-norm of the gradients of each part of the model, by the names in loggers.norm_names.

    This function synchronises with the device once.
    """
    parts = [model.emb, *model.blocks, model.ln_out, model.head]
    norms = torch.stack([total_norm([parameter.grad for parameter in part.parameters() if parameter.grad is not None])
                         .to(model.emb.weight.device) for part in parts])        # without gradients a norm is on the CPU
    return dict(zip(norm_names(len(model.blocks)), norms.tolist(), strict=True))
