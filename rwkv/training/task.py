"""Implements the LightningModule: training and validation steps, metrics, optimiser, gradient clipping and checkpoint entries.

The metrics are:

    train/loss, val/loss    nats per token; with tune.objective=dpo or ipo a mean over pairs
    val/loss/NAME           nats per token of a source of data=mix
    val/bpb                 bits per byte of the validation text; omitted if the tokenizer loses too much of the text
                            (rwkv/tokenizer/lost_bytes.py)
    val/lost                the fraction of the text that the tokenizer loses; omitted if 0

With tune.objective=dpo or ipo, rewards are logged too (tuning/preferences.py). Validation covers the whole split or the first
trainer.val_tokens tokens. The split consists of windows, each from the empty state, or of conversations, which are whole or
packed into rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from kernels.machine.allocator import give_back_free_blocks
from rwkv.checkpoint.content import ENTRY
from rwkv.config import OptimConfig
from rwkv.data.conversations import Packed, Whole
from rwkv.data.mixture import source_metric
from rwkv.data.mixture.windows import SourceBatch
from rwkv.data.pairs import Pairs
from rwkv.data.tbptt_segments import Segments
from rwkv.distributed import all_sum, rank, world_size
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, StateDict
from rwkv.model.base import Model
from rwkv.model.loss import IGNORED, head_loss
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.optim.loss_scale import LossScale
from rwkv.training.optim.optimisers import OPTIMISERS, lr_factor, parameter_groups, update_in_backward
from rwkv.training.sharding.strategy import ShardedStrategy, total_norm
from rwkv.training.tbptt import CarriedStates, forward_segments
from rwkv.training.tuning.preferences import REWARDS, Preferences

TrainingBatch = tuple[Tensor, Tensor] | Packed | Segments | Pairs
ValidationBatch = tuple[Tensor, Tensor] | Packed | Whole | Pairs | SourceBatch
CARRIED = "carried"                      # a checkpoint holds the states of trainer.tbptt's streams under this key


class LanguageModel(lightning.LightningModule):
    """The model in training. A batch is a pair (x, y), both (B,T) int64: y[b,t] is the token after x[b,t], or -100 if ignored.

    With trainer.tbptt, training batches are Segments instead, and each row's state carries over from the previous step. Batches
    of conversations are Packed.

    Args:
        entry: a description of the run and the tokenizer, which every checkpoint stores under the key ENTRY.
        sources: the names of the sources of data=mix.
        preferences: the preference objective. None means likelihood.
    """

    def __init__(self, model: Model, optim: OptimConfig, max_steps: int, val_bytes_per_token: float | None,
                 val_lost: float = 0.0, *, entry: JsonMapping | None = None, sources: Sequence[str] = (),
                 optim_in_backward: bool = False, preferences: Preferences | None = None) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        self.max_steps = max_steps
        self.val_bytes_per_token = val_bytes_per_token
        self.val_lost = val_lost
        self.entry = dict(entry or {})
        self.carried = CarriedStates()
        self.loss_scale: LossScale | None = None         # exists with trainer.precision=fp16-mixed
        self.tuned = not all(parameter.requires_grad for parameter in model.parameters())
        self.strict_loading = not self.tuned     # checkpoints lack frozen weights
        self.sharded = False             # becomes True if trainer=fsdp shards the weights
        self.grad_norm: Tensor | None = None     # the norm in the last step, before clipping; None without clipping
        self.sources = sources
        self.optim_in_backward = optim_in_backward
        self.preferences = preferences
        self.rewards = torch.zeros(len(REWARDS))         # weighted means over this process's batches of the step
        self.on_validation_epoch_start()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.sharded = True
            self.trainer.strategy.shard(self, self.model)

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        if isinstance(batch, Pairs):
            assert self.preferences is not None
            loss, rewards = self.preferences.loss(self.model, batch, "train")
            batches = self.trainer.accumulate_grad_batches
            previous = self.rewards if batch_idx % batches else torch.zeros_like(rewards)
            self.rewards = previous + rewards * (batch.weight / batches)
            return batch.weight * loss
        if isinstance(batch, Segments):
            return self.segments_loss(batch)
        if isinstance(batch, Packed):
            return batch.weight * self.loss(*batch[:3])
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor, starts: Tensor | None = None) -> Tensor:
        """Returns the mean loss of a batch. `starts` (B,T) bool: where sequences start in packed rows; None for windows."""
        return self._loss_at_head(self.model.forward_features(x, starts), y)

    def segments_loss(self, batch: Segments) -> Tensor:
        """Returns a batch's weighted loss. The mean over a step's processes and batches is then the mean over all targets."""
        hidden, state = forward_segments(self.model, batch.x, batch.starts_document,
                                         self.carried.state_before(batch.part, self.model, len(batch.x)),
                                         by_block=self.sharded)
        self.carried.set_state_after(batch.part, state)
        return batch.weight * self._loss_at_head(hidden, batch.y)

    def conversation_loss(self, batch: Whole) -> Tensor:
        """Returns the mean loss of whole conversations, each from the empty state, computed in chunks of batch.T tokens."""
        state = self.model.empty_state(len(batch.x))
        nats = torch.zeros((), device=batch.x.device)
        for x, y in zip(batch.x.split(batch.T, 1), batch.y.split(batch.T, 1), strict=True):
            hidden, state = self.model.hidden(x, state)
            nats = nats + self._loss_at_head(hidden, y) * (y != IGNORED).sum()
        return nats / (batch.y != IGNORED).sum().clamp(min=1)

    def _loss_at_head(self, hidden: Tensor, y: Tensor) -> Tensor:
        optim = self.optim               # l2_wrap and confidence_penalty change the gradient of the loss, but not the value
        return head_loss(hidden.flatten(0, 1), self.model.head.weight, y.flatten(), optim.l2_wrap, optim.confidence_penalty)

    def on_validation_epoch_start(self) -> None:
        self._nats = 0.0                 # this and the next three are sums over one validation
        self._tokens = 0
        self._rewards = torch.zeros(len(REWARDS))
        self._source_sums = [[0.0, 0.0] for _ in self.sources]       # the nats and tokens of each source
        self._next_batch: ValidationBatch | None = None  # the batch of this process in the next round

    def validation_step(self, batch: ValidationBatch, batch_idx: int) -> None:
        """Validates in rounds. In a round, each of the n processes computes one of n batches.

        With trainer=fsdp each forward pass gathers the weights from all processes. If the last round has fewer batches than
        processes, the remaining processes compute the last batch too, without counting the result.
        """
        owner = batch_idx % world_size()
        if owner == rank():
            self._next_batch = batch
        if owner + 1 < world_size() and batch_idx + 1 < self.trainer.num_val_batches[0]:
            return
        current = self._next_batch or batch
        rewards = torch.zeros(len(REWARDS))
        if isinstance(current, Pairs):
            assert self.preferences is not None
            loss, rewards = self.preferences.loss(self.model, current, "val")
            count = len(current.numbers)
        else:
            inputs = current[:2] if isinstance(current, SourceBatch) else current[:3]
            loss = self.conversation_loss(current) if isinstance(current, Whole) else self.loss(*inputs)
            count = int((current[1] != IGNORED).sum())
        if self._next_batch is not None:
            self._nats += loss.item() * count
            self._tokens += count
            self._rewards += rewards.cpu() * count
            if isinstance(current, SourceBatch):
                sums = self._source_sums[current.source]
                sums[0] += loss.item() * count
                sums[1] += count
        self._next_batch = None

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.trainer.global_step))
        for name, value in self.validation_metrics().items():
            self.log(name, value)

    def validation_metrics(self) -> dict[str, float]:
        """Returns the metrics over the batches of all processes since on_validation_epoch_start."""
        nats, tokens = all_sum(self._nats, self._tokens)
        loss = nats / max(tokens, 1)
        metrics = {"val/loss": loss}
        for name, sums in zip(self.sources, self._source_sums, strict=True):
            source_nats, count = all_sum(*sums)
            metrics[source_metric(name)] = source_nats / max(count, 1)
        if self.preferences is not None:
            sums = all_sum(*self._rewards.tolist())
            metrics |= {f"val/{name}": total / max(tokens, 1) for name, total in zip(REWARDS, sums, strict=True)}
        if self.val_bytes_per_token is not None:
            metrics["val/bpb"] = loss / math.log(2) / self.val_bytes_per_token
        if self.val_lost:
            metrics["val/lost"] = self.val_lost
        return metrics

    def configure_optimizers(self) -> OptimizerLRScheduler:
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
        """Sets the optimiser's options to the options of this run, because a checkpoint restores the earlier options."""
        optimizer = self.trainer.optimizers[0]
        schedule = self.trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        configured = parameter_groups(self.model, self.optim)
        schedule.base_lrs = [options["lr"] for options in configured]
        factor = lr_factor(self.optim, self.max_steps)(schedule.last_epoch)
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            parameters = group["params"]
            group.update(options, params=parameters, initial_lr=options["lr"], lr=options["lr"] * factor)

    def on_train_batch_start(self, batch: TrainingBatch, batch_idx: int) -> None:
        if self.loss_scale is not None:
            self.loss_scale.begin(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer | LightningOptimizer,
                       optimizer_closure: Callable[[], object] | None = None) -> None:
        def take_step() -> None:
            super(LanguageModel, self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        take_step() if self.loss_scale is None else self.loss_scale.step(take_step, optimizer)

    def on_after_backward(self) -> None:
        if self.model.returns_free_memory:       # the backward pass of the first block has freed memory
            give_back_free_blocks()

    def configure_gradient_clipping(self, optimizer: Optimizer, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """Clips gradients by the total norm.

        Lightning's own clipping refuses fused optimisers in mixed precision because of loss scaling. However, bf16 has no loss
        scaling. With fp16, the optimiser is not fused, and the gradients are already unscaled here.
        """
        if gradient_clip_val:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.grad_norm = norm = total_norm(gradients)
            if self.device.type != "cpu" or not norm <= gradient_clip_val:       # a GPU comparison would synchronise
                torch.nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)

    def state_dict(self, *args: Any, **options: Any) -> StateDict:       # type: ignore[override]
        """Returns the weights, without frozen ones, which are in the file of init_from=."""
        if self.tuned:
            return {name: parameter.detach() for name, parameter in self.named_parameters() if parameter.requires_grad}
        return super().state_dict(*args, **options)

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        checkpoint[ENTRY] = self.entry
        carried = self.carried.state_dict()
        if carried:
            checkpoint[CARRIED] = carried

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Raises UserError if the tokenizer has changed, because token ids would then stand for different text."""
        saved_tokenizer = checkpoint.get(ENTRY, {}).get("tokenizer")
        if self.entry and saved_tokenizer and saved_tokenizer != self.entry["tokenizer"]:
            saved, current = (Tokenizer.from_dict(description) for description in (saved_tokenizer, self.entry["tokenizer"]))
            if saved.hash == current.hash:
                raise UserError(f"documents ended with {saved.end_line() or '<|endoftext|>'} when the run started, but now end "
                                f"with {current.end_line() or '<|endoftext|>'}. To resume the run, omit data.end_of_text=")
            raise UserError(f"the run was trained with a tokenizer whose hash is {saved.hash[:12]}, but the hash of "
                            f"data.tokenizer= is now {current.hash[:12]}. To resume the run, restore the original tokenizer "
                            "file, or the text from which the tokenizer was made")
        self.carried.load_state_dict(checkpoint.get(CARRIED, {}))
