"""What Lightning trains: the loss, the metrics, the optimiser's groups and the schedule.

Metrics: train/loss and val/loss in nats per token; val/bpb, bits per byte of the validation text. Validation reads the whole
split in windows, the state reset at each.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from rwkv.checkpoint import ENTRY, describe
from rwkv.config import OptimConfig
from rwkv.loss import IGNORED, head_loss
from rwkv.model import RWKV
from rwkv.processes import rank, summed, world_size
from rwkv.tokenizer import Tokenizer

LR_SCALES = {"time_decay": 2.0, "time_first": 3.0}       # RWKV-LM's, relative to everything else


class LanguageModel(lightning.LightningModule):
    """Batches are (x, y), (B,T) int64 each; y is x one token on, -100 where nothing is to be predicted."""

    def __init__(self, model: RWKV, optim: OptimConfig, max_steps: int, val_bytes_per_token: float) -> None:
        super().__init__()
        self.model, self.optim, self.max_steps = model, optim, max_steps
        self.val_bytes_per_token = val_bytes_per_token
        self.entry: dict[str, Any] = {}
        self._nats, self._tokens = 0.0, 0

    def describe(self, run: dict[str, Any], tokenizer: Tokenizer) -> None:
        """What every checkpoint carries beside the weights, so that generate.py needs nothing else."""
        self.entry = describe(run, self.model.vocab_size, tokenizer)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch, l2_wrap=self.optim.l2_wrap)

    def loss(self, x: Tensor, y: Tensor, l2_wrap: float = 0.0) -> Tensor:
        hidden, _ = self.model.hidden(x)
        return head_loss(hidden.flatten(0, 1), self.model.head.weight, y.flatten(), l2_wrap)

    def on_validation_epoch_start(self) -> None:
        self._nats, self._tokens = 0.0, 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Of several processes, each takes every so many-th batch; they add up at the end."""
        if batch_idx % world_size() != rank():
            return
        n_tokens = int((batch[1] != IGNORED).sum())
        self._nats += self.loss(*batch).item() * n_tokens
        self._tokens += n_tokens

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.trainer.global_step))
        nats, tokens = summed(self._nats, self._tokens)
        loss = nats / max(tokens, 1)
        self.log("val/loss", loss)
        self.log("val/bpb", loss / math.log(2) / self.val_bytes_per_token)

    def configure_optimizers(self) -> Any:
        optim = self.optim
        groups = parameter_groups(self.model, optim)
        scaled = self._trainer is not None and getattr(self._trainer.precision_plugin, "scaler", None) is not None
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=not scaled)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(optim, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """By norm. Lightning's own refuses a fused optimiser in mixed precision, for a loss scaling that bf16 does not have.

        With fp16's the optimiser is not fused, and gradients come here unscaled.
        """
        if gradient_clip_val:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if self.device.type != "cpu" or not norm <= gradient_clip_val:       # elsewhere, looking would wait for the device
                torch.nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[ENTRY] = self.entry

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError where a run would go on with ids that mean other text."""
        before = checkpoint.get(ENTRY, {}).get("tokenizer")
        if self.entry and before and before != self.entry["tokenizer"]:
            hashes = [Tokenizer.from_dict(description).hash[:12] for description in (before, self.entry["tokenizer"])]
            raise ValueError(f"the run was trained with a tokenizer of hash {hashes[0]}, and data.tokenizer gives one of hash "
                             f"{hashes[1]} now: the text or the file that it is made from has changed; put it back to resume")


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Weight decay on matrices alone; time_decay learns at twice and time_first at three times the rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        scale = LR_SCALES.get(name.rpartition(".")[2], 1.0)
        decay = optim.weight_decay if parameter.squeeze().dim() >= 2 else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    return [{"params": parameters, "lr": optim.lr * scale, "weight_decay": decay}
            for (scale, decay), parameters in groups.items()]


def lr_factor(optim: OptimConfig, max_steps: int) -> Callable[[int], float]:
    """The learning rate at a step as a multiple of optim.lr: a linear rise, then the fall to min_lr at max_steps."""
    lowest = optim.min_lr / optim.lr

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        progress = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
        if optim.schedule == "cosine":
            return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2
        return lowest ** progress if optim.schedule == "exponential" else 1.0

    return factor


def n_parameters(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
