"""What Lightning trains: the loss, the metrics, the optimiser's groups and the schedule.

Metrics: train/loss and val/loss in nats per token; val/bpb, bits per byte of the validation text. Validation reads the whole
split in windows, the state reset at each.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from rwkv.checkpoint import ENTRY, describe
from rwkv.config import ORTHOGONAL, SCALED, OptimConfig
from rwkv.lanes import Segments
from rwkv.loss import IGNORED, head_loss
from rwkv.model import RWKV
from rwkv.muon import Muon
from rwkv.processes import rank, summed, world_size
from rwkv.segments import Carried, hidden_of_segments
from rwkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

CARRIED = "carried"                      # key in a checkpoint: the states of trainer.tbptt's lanes
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "muon": Muon, "normuon": partial(Muon, row_beta=0.95)}


class LanguageModel(lightning.LightningModule):
    """Batches are (x, y), (B,T) int64 each; y is x one token on, -100 where nothing is to be predicted.

    With trainer.tbptt those of training are Segments, which carry their rows' state on from the step before.
    """

    def __init__(self, model: RWKV, optim: OptimConfig, max_steps: int, val_bytes_per_token: float) -> None:
        super().__init__()
        self.model, self.optim, self.max_steps = model, optim, max_steps
        self.val_bytes_per_token = val_bytes_per_token
        self.entry: dict[str, Any] = {}
        self.carried = Carried()
        self.grad_norm: Tensor | None = None     # of the last step, before clipping; None where nothing clips
        self._nats, self._tokens = 0.0, 0
        self._own: tuple[Tensor, Tensor] | None = None       # the batch that this process takes, of those that all take next

    def describe(self, run: dict[str, Any], tokenizer: Tokenizer) -> None:
        """What every checkpoint carries beside the weights, so that generate.py needs nothing else."""
        self.entry = describe(run, self.model.vocab_size, tokenizer)

    def training_step(self, batch: tuple[Tensor, Tensor] | Segments, batch_idx: int) -> Tensor:
        if isinstance(batch, Segments):
            return self.loss_of_segments(batch)
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self._head_loss(self.model.hidden_alone(x), y)

    def loss_of_segments(self, batch: Segments) -> Tensor:
        """Over all processes and batches of a step, the mean of these is the mean over all its targets that count."""
        hidden, state = hidden_of_segments(self.model, batch.x, batch.opens,
                                           self.carried.before(batch.part, self.model, len(batch.x)))
        self.carried.after(batch.part, state)
        return batch.weight * self._head_loss(hidden, batch.y)

    def _head_loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        """What the options add to its gradient is not in its value."""
        optim = self.optim
        return head_loss(hidden.flatten(0, 1), self.model.head.weight, y.flatten(), optim.l2_wrap, optim.confidence_penalty)

    def on_validation_epoch_start(self) -> None:
        self._nats, self._tokens, self._own = 0.0, 0, None

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Of several processes, each takes every so many-th batch, all at the same time; they add up at the end.

        With trainer=fsdp each pass gathers the weights from all of them. So where the last batches are not enough for all,
        those without one compute the last batch's loss too, and do not count it.
        """
        turn, last = batch_idx % world_size(), batch_idx + 1 == self.trainer.num_val_batches[0]
        if turn == rank():
            self._own = batch
        if turn + 1 < world_size() and not last:
            return
        loss = self.loss(*(self._own or batch)).item()
        if self._own is not None:
            n_tokens = int((self._own[1] != IGNORED).sum())
            self._nats += loss * n_tokens
            self._tokens += n_tokens
        self._own = None

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
        optimizer = OPTIMISERS[optim.name](groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=not scaled)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(optim, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """What Lightning loads from a checkpoint has the options of the run before: those of this one take their place."""
        optimizer, schedule = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        configured = parameter_groups(self.model, self.optim)
        schedule.base_lrs = [options["lr"] for options in configured]
        factor = lr_factor(self.optim, self.max_steps)(schedule.last_epoch)
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            parameters = group["params"]
            group.update(options, params=parameters, initial_lr=options["lr"], lr=options["lr"] * factor)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """By norm. Lightning's own refuses a fused optimiser in mixed precision, for a loss scaling that bf16 does not have.

        With fp16's the optimiser is not fused, and gradients come here unscaled.
        """
        if gradient_clip_val and isinstance(self.trainer.strategy, FSDPStrategy):
            sharded = cast("FullyShardedDataParallel", self.trainer.strategy.model)
            self.grad_norm = sharded.clip_grad_norm_(gradient_clip_val)      # of all shares: here are one process's
        elif gradient_clip_val:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.grad_norm = norm = torch.nn.utils.get_total_norm(gradients)
            if self.device.type != "cpu" or not norm <= gradient_clip_val:       # elsewhere, looking would wait for the device
                torch.nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[ENTRY] = self.entry
        checkpoint.update({CARRIED: carried} if (carried := self.carried.state_dict()) else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError where a run would go on with ids that mean other text."""
        before = checkpoint.get(ENTRY, {}).get("tokenizer")
        if self.entry and before and before != self.entry["tokenizer"]:
            hashes = [Tokenizer.from_dict(description).hash[:12] for description in (before, self.entry["tokenizer"])]
            raise ValueError(f"the run was trained with a tokenizer of hash {hashes[0]}, and data.tokenizer gives one of hash "
                             f"{hashes[1]} now: the text or the file that it is made from has changed; put it back to resume")
        self.carried.load_state_dict(checkpoint.get(CARRIED, {}))


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Weight decay on matrices alone; the rate scaled by the parameter's name. muon and normuon have matrices in blocks."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        orthogonal = optim.name in ORTHOGONAL and _in_the_stream(name, parameter)
        lr = optim.matrix_lr if orthogonal else optim.lr * lr_scale(name.rpartition(".")[2], optim)
        decay = optim.weight_decay if parameter.squeeze().dim() >= 2 else 0.0
        groups.setdefault((lr, decay, orthogonal), []).append(parameter)
    theirs = {"orthogonal": True, "momentum": optim.matrix_momentum, "iterations": optim.matrix_iterations,
              "every": optim.matrix_every}
    adamws = {"betas": optim.betas, "eps": optim.eps}
    return [{"params": parameters, "lr": lr, "weight_decay": decay} | (theirs if orthogonal else adamws)
            for (lr, decay, orthogonal), parameters in groups.items()]


def _in_the_stream(name: str, parameter: Tensor) -> bool:
    """Of a block's matrices, those whose products are not gates: gates learn as well by AdamW, which costs less."""
    return parameter.dim() == 2 and name.startswith("blocks.") and not name.endswith("receptance.weight")


def lr_scale(name: str, optim: OptimConfig) -> float:
    """The rate of a parameter, as a multiple of optim.lr; `name` without its module's."""
    return next((float(getattr(optim, f"{scaled}_lr_scale")) for scaled in SCALED if name.startswith(scaled)), 1.0)


def lr_factor(optim: OptimConfig, max_steps: int) -> Callable[[int], float]:
    """The learning rate at a step as a multiple of optim.lr: a linear rise, then the fall to min_lr at max_steps."""
    lowest = optim.min_lr / optim.lr

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        progress = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
        if optim.schedule == "cosine":
            return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2
        if optim.schedule == "linear":
            return lowest + (1 - lowest) * (1 - progress)
        return lowest ** progress if optim.schedule == "exponential" else 1.0

    return factor
