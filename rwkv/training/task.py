"""The LightningModule: training and validation steps, metrics, optimiser, gradient clipping, and its part of a checkpoint.

Metrics: train/loss and val/loss in nats per token; val/loss/NAME of each source of data=mix; val/bpb, bits per byte of the
validation text, unless the tokenizer loses too much of it (rwkv/tokenizer/lost.py); val/lost, the share that it loses, if it
loses any. Validation reads the whole split or its first trainer.val_tokens tokens: as windows, each from the empty state, or as
conversations, which are whole or packed into rows. With tune.objective=dpo and ipo the losses are means over pairs of answers,
and rewards are logged (tuning/preferences.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor

from kernels.machine.allocator import give_back_free_blocks
from rwkv.checkpoint.content import ENTRY
from rwkv.config import OptimConfig
from rwkv.data.conversations import Packed, Whole
from rwkv.data.documents import Segments
from rwkv.data.mixed_windows import SourceBatch
from rwkv.data.mixture import source_metric
from rwkv.data.pairs import Pairs
from rwkv.distributed import all_sum, rank, world_size
from rwkv.errors import UserError
from rwkv.model.base import Model
from rwkv.model.loss import IGNORED, head_loss
from rwkv.report.numbers import REWARDS
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.loss_scale import LossScale
from rwkv.training.optim import OPTIMISERS, lr_factor, parameter_groups, update_in_backward
from rwkv.training.sharding import Sharded, total_norm
from rwkv.training.tbptt import Carried, hidden_of_segments

ValidationBatch = tuple[Tensor, Tensor] | Packed | Whole | Pairs | SourceBatch
CARRIED = "carried"                      # key in a checkpoint of the states of trainer.tbptt's document streams


class LanguageModel(lightning.LightningModule):
    """Batches are (x, y), both (B,T) int64: y holds the token after each of x, or -100 for a target that does not count.

    With trainer.tbptt, training batches are Segments, and each row's state carries over from the step before. Batches of
    conversations are Packed.
    """

    def __init__(self, model: Model, optim: OptimConfig, max_steps: int, val_bytes_per_token: float | None,
                 val_lost: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        self.max_steps = max_steps
        self.val_bytes_per_token = val_bytes_per_token
        self.val_lost = val_lost
        self.entry: dict[str, Any] = {}  # what every checkpoint has under ENTRY: the run and the tokenizer
        self.carried = Carried()
        self.loss_scale: LossScale | None = None         # with fp16-mixed
        self.tuned = not all(parameter.requires_grad for parameter in model.parameters())
        self.strict_loading = not self.tuned     # a checkpoint lacks the frozen weights
        self.sharded = False             # with trainer=fsdp
        self.grad_norm: Tensor | None = None     # of the last step, before clipping; None if gradients are not clipped
        self.sources: Sequence[str] = ()         # the names of data=mix's sources
        self.optim_in_backward = False
        self.preferences: Any = None     # Preferences, for an objective of pairs
        self.rewards = torch.zeros(len(REWARDS))         # weighted means over this process's batches of the current step
        self.on_validation_epoch_start()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, Sharded):
            self.sharded = True
            self.trainer.strategy.shard(self, self.model)

    def training_step(self, batch: tuple[Tensor, Tensor] | Packed | Segments | Pairs, batch_idx: int) -> Tensor:
        if isinstance(batch, Pairs):
            loss, rewards = self.preferences.loss(self.model, batch, "train")
            parts = self.trainer.accumulate_grad_batches
            before = self.rewards if batch_idx % parts else torch.zeros_like(rewards)
            self.rewards = before + rewards * (batch.weight / parts)
            return batch.weight * loss
        if isinstance(batch, Segments):
            return self.loss_of_segments(batch)
        if isinstance(batch, Packed):
            return batch.weight * self.loss(*batch[:3])
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor, starts: Tensor | None = None) -> Tensor:
        """starts (B,T) bool: where texts begin, for rows with several texts; None for windows."""
        return self._head_loss(self.model.forward_features(x, starts), y)

    def loss_of_segments(self, batch: Segments) -> Tensor:
        """The batch's loss times its weight. Its mean over a step's processes and batches is the mean over all targets."""
        hidden, state = hidden_of_segments(self.model, batch.x, batch.starts_document,
                                           self.carried.before(batch.part, self.model, len(batch.x)),
                                           by_block=self.sharded)
        self.carried.after(batch.part, state)
        return batch.weight * self._head_loss(hidden, batch.y)

    def loss_of_whole(self, batch: Whole) -> Tensor:
        """The mean loss of whole conversations, each read from the empty state. It takes the memory of one slice of batch.T."""
        state = self.model.empty_state(len(batch.x))
        nats = torch.zeros((), device=batch.x.device)
        for x, y in zip(batch.x.split(batch.T, 1), batch.y.split(batch.T, 1), strict=True):
            hidden, state = self.model.hidden(x, state)
            nats = nats + self._head_loss(hidden, y) * (y != IGNORED).sum()
        return nats / (batch.y != IGNORED).sum().clamp(min=1)

    def _head_loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        """l2_wrap and confidence_penalty change the gradient and not the value."""
        optim = self.optim
        return head_loss(hidden.flatten(0, 1), self.model.head.weight, y.flatten(), optim.l2_wrap, optim.confidence_penalty)

    def on_validation_epoch_start(self) -> None:
        self._nats = 0.0                 # sums of a validation
        self._tokens = 0
        self._rewards = torch.zeros(len(REWARDS))
        self._of_source = [[0.0, 0.0] for _ in self.sources]         # nats and tokens
        self._own: ValidationBatch | None = None         # this process's batch of the next round

    def validation_step(self, batch: ValidationBatch, batch_idx: int) -> None:
        """Each of n processes computes every n-th batch, all at the same time, and the sums are added up at the end.

        With trainer=fsdp each forward pass gathers the weights from all processes. So if the last round has fewer batches
        than processes, the processes without one compute the last batch too, and do not count it.
        """
        turn = batch_idx % world_size()
        if turn == rank():
            self._own = batch
        if turn + 1 < world_size() and batch_idx + 1 < self.trainer.num_val_batches[0]:
            return
        read = self._own or batch
        rewards = torch.zeros(len(REWARDS))
        if isinstance(read, Pairs):
            loss, rewards = self.preferences.loss(self.model, read, "val")
            count = len(read.numbers)
        else:
            inputs = read[:2] if isinstance(read, SourceBatch) else read[:3]
            loss = self.loss_of_whole(read) if isinstance(read, Whole) else self.loss(*inputs)
            count = int((read[1] != IGNORED).sum())
        if self._own is not None:
            self._nats += loss.item() * count
            self._tokens += count
            self._rewards += rewards.cpu() * count
            if isinstance(read, SourceBatch):
                sums = self._of_source[read.source]
                sums[0] += loss.item() * count
                sums[1] += count
        self._own = None

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.trainer.global_step))
        for name, value in self.validation_metrics().items():
            self.log(name, value)

    def validation_metrics(self) -> dict[str, float]:
        """The metrics over the batches of all processes since on_validation_epoch_start."""
        nats, tokens = all_sum(self._nats, self._tokens)
        loss = nats / max(tokens, 1)
        metrics = {"val/loss": loss}
        for name, sums in zip(self.sources, self._of_source, strict=True):
            of_source, count = all_sum(*sums)
            metrics[source_metric(name)] = of_source / max(count, 1)
        if self.preferences is not None:
            sums = all_sum(*self._rewards.tolist())
            metrics |= {f"val/{name}": total / max(tokens, 1) for name, total in zip(REWARDS, sums, strict=True)}
        if self.val_bytes_per_token is not None:
            metrics["val/bpb"] = loss / math.log(2) / self.val_bytes_per_token
        if self.val_lost:
            metrics["val/lost"] = self.val_lost
        return metrics

    def configure_optimizers(self) -> Any:
        optim = self.optim
        groups = parameter_groups(self.model, optim)
        scaler = getattr(self._trainer.precision_plugin, "scaler", None) if self._trainer is not None else None
        self.loss_scale = None if scaler is None else LossScale(self.trainer, scaler, self.carried)
        optimizer = OPTIMISERS[optim.name](groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=scaler is None)
        if self.optim_in_backward:
            update_in_backward(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(optim, self.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Replaces the optimiser options that Lightning has loaded from the checkpoint by those of this run."""
        optimizer = self.trainer.optimizers[0]
        schedule = self.trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        configured = parameter_groups(self.model, self.optim)
        schedule.base_lrs = [options["lr"] for options in configured]
        factor = lr_factor(self.optim, self.max_steps)(schedule.last_epoch)
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            parameters = group["params"]
            group.update(options, params=parameters, initial_lr=options["lr"], lr=options["lr"] * factor)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.loss_scale is not None:
            self.loss_scale.begin(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def take() -> None:
            super(LanguageModel, self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        take() if self.loss_scale is None else self.loss_scale.step(take, optimizer)

    def on_after_backward(self) -> None:
        if self.model.gives_back:        # what the first block's backward pass leaves free
            give_back_free_blocks()

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """Clips by the total norm. Lightning's own clipping refuses fused optimisers in mixed precision, because of a loss
        scaling that bf16 does not have. With fp16 the optimiser is not fused, and gradients are already unscaled here.
        """
        if gradient_clip_val:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.grad_norm = norm = total_norm(gradients)
            if self.device.type != "cpu" or not norm <= gradient_clip_val:       # on a GPU, comparing would wait for the device
                torch.nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[ENTRY] = self.entry
        if self.tuned:                   # the frozen weights are in the file of init_from=
            checkpoint["state_dict"] = {name: parameter.detach() for name, parameter in self.named_parameters()
                                        if parameter.requires_grad}
        carried = self.carried.state_dict()
        if carried:
            checkpoint[CARRIED] = carried

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint's tokenizer differs, so that its ids mean other text."""
        before = checkpoint.get(ENTRY, {}).get("tokenizer")
        if self.entry and before and before != self.entry["tokenizer"]:
            was, now = (Tokenizer.from_dict(description) for description in (before, self.entry["tokenizer"]))
            if was.hash == now.hash:
                raise UserError(f"the run was trained with texts that end at {was.end_line()}, and now they would end at "
                                f"{now.end_line()}: leave data.end_of_text out to resume")
            hashes = [was.hash[:12], now.hash[:12]]
            raise UserError(f"the run was trained with a tokenizer of hash {hashes[0]}, and data.tokenizer gives one of hash "
                            f"{hashes[1]} now: the text or the file that it is made from has changed; put it back to resume")
        self.carried.load_state_dict(checkpoint.get(CARRIED, {}))
