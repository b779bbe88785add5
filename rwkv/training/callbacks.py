"""What happens around training steps: throughput, a clean Ctrl-C, and a progress bar that shows the loss.

Gradient norms of each part of a model.
"""

import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from tqdm import tqdm

from rwkv.distributed import all_sum, rank, world_size
from rwkv.model.base import Model
from rwkv.training.checkpoints import Checkpoints
from rwkv.training.loggers import norm_names

SHOWN = ("train/loss", "val/loss", "val/bpb", "tok_per_sec")      # in the progress bar


class Interrupted(Exception):
    """Training was asked to stop, stopped between two steps, and saved a checkpoint."""


class StopCleanly(Callback):
    """At the first Ctrl-C or SIGTERM training ends with a checkpoint; a second one stops at once.

    It ends after the step at hand, or in the middle of a validation, which then begins anew when the run is continued.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints, self.asked = checkpoints, False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        between_steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if between_steps and not self.checkpoints.validation_follows(trainer):
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._stop_if_asked(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop_if_asked(self, trainer: lightning.Trainer) -> None:
        """All processes, where one was asked."""
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            self.checkpoints.save_last(trainer)
            raise Interrupted

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if rank() == 0:
            print("\nstopping after this step (Ctrl-C again stops at once) ...", file=sys.stderr)


class Metrics(Callback):
    """train/loss, tok_per_sec, lr, grad_norm (before clipping) and peak_mem (MiB) every `log_every` steps.

    Timing excludes validation and sampling; the padding of trainer.tbptt's segments does not count as tokens. grad_norms: log
    the norm of each part of the model as well. After training it prints the median milliseconds of the logged steps. With
    several processes, peak_mem is the first one's.
    """

    def __init__(self, log_every: int, grad_norms: bool = False) -> None:
        self.log_every, self.grad_norms = log_every, grad_norms
        self._tokens, self._counted, self._since, self._lr = 0, 0, 0.0, 0.0
        self._ms_per_token: list[float] = []
        self._tokens_per_step = 0
        self._norms: dict[str, float] = {}
        self._loss: Any = 0.0            # of the step so far, a share for each batch that it accumulates
        self.latest: Mapping[str, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restart()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        if self.grad_norms and (trainer.global_step + 1) % self.log_every == 0:
            self._norms = gradient_norms(cast(Model, pl_module.model))

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restart()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        tokens = batch[0].numel() * world_size()
        self._tokens, self._counted = self._tokens + tokens, self._counted + getattr(batch, "counted", tokens)
        self._loss = self._loss + outputs["loss"].detach()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step_loss, self._loss = self._loss, 0.0
        if trainer.global_step % self.log_every == 0:
            loss = all_sum(step_loss.item())[0] / world_size()
            self._tokens_per_step = batch[0].numel() * world_size() * trainer.accumulate_grad_batches
            metrics = {"train/loss": loss, "lr": self._lr} | self._speed() | self._of_gradients(pl_module) | {
                "peak_mem": peak_memory_mib(pl_module.device)}
            self.latest = metrics
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.global_step)
            self._restart()

    def leave_out(self, seconds: float) -> None:
        """Of the time since the last metrics: nothing was trained in it."""
        self._since += seconds

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if stage == "fit" and self._ms_per_token and rank() == 0:
            ms_per_token = statistics.median(self._ms_per_token)
            print(f"median {ms_per_token * self._tokens_per_step:.1f} ms a step of {self._tokens_per_step:,} tokens",
                  file=sys.stderr)

    def _speed(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._since
        seconds_per_token = seconds / self._tokens
        self._ms_per_token.append(1000 * seconds_per_token)
        return {"tok_per_sec": self._counted / seconds}

    def _of_gradients(self, task: Any) -> dict[str, float]:
        total = {} if task.grad_norm is None else {"grad_norm": float(task.grad_norm)}
        return total | self._norms

    def _restart(self) -> None:
        self._tokens, self._counted, self._since = 0, 0, time.perf_counter()


class Bar(Callback):
    """A progress bar over optimiser steps on standard error; every half minute a line where that is no terminal."""

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
        self._bar.set_postfix_str(_short({**trainer.callback_metrics, **self.metrics.latest}), refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(metrics[name]):.4g}" for name in SHOWN if name in metrics)


def peak_memory_mib(device: torch.device) -> float:
    """The most memory used so far, in MiB: the GPU's where the model is on one, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    if sys.platform == "linux":          # getrusage counts what the process was before it became this program
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2 ** 10
    if sys.platform == "win32":
        return float("nan")              # the standard library cannot tell there
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20


def gradient_norms(model: Model) -> dict[str, float]:
    """By the names of rwkv.tracking.norm_names: the 2-norm of all gradients of that part. One wait for the device."""
    parts = [model.emb, *model.blocks, model.ln_out, model.head]
    norms = torch.stack([_norm(part) for part in parts])
    return dict(zip(norm_names(len(model.blocks)), norms.tolist(), strict=True))


def _norm(part: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
