"""Implements trainer=fsdp with torch's FSDP2. Each process holds a shard of every weight, gradient and optimiser state.

While a block is computed, the block's matrices are gathered in the dtype of the products. After the block's backward pass, the
gradients are reduce-scattered. All other parameters (embedding, head, vectors, adapters, trained states) stay gathered in
float32 during a step, because they are used outside of blocks or must not be rounded.

Lightning's ModelParallelStrategy creates the device mesh and sets up the model. This module replaces Lightning's checkpoints,
which block training and are written in place, and Lightning's gradient accumulation, which reduces gradients after every batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rwkv.checkpoint.formats import _fsdp_folder, _torch_file
from rwkv.config import TrainerConfig
from rwkv.distributed import RANK0_TIMEOUT, world_size
from rwkv.io.json_types import StateDict
from rwkv.model.base import Model
from rwkv.training.device import dtype_for
from rwkv.training.sharding.saving import Saving

WEIGHTS, STATES = "state_dict", "optimizer_states"       # Lightning's checkpoints have these keys


class ShardedStrategy(ModelParallelStrategy):
    """The Lightning strategy of trainer=fsdp. A thread of rank 0 calls `after_save` when a checkpoint is complete."""

    def __init__(self, options: TrainerConfig) -> None:
        super().__init__(data_parallel_size=world_size(), tensor_parallel_size=1)
        self.options = options
        self.after_save: Callable[[], None] = lambda: None
        self._saving: Saving | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        self._group = distributed.new_group(backend="gloo", timeout=RANK0_TIMEOUT)       # the writer threads use this group

    def shard(self, task: nn.Module, model: Model) -> None:
        """Shards the weights of task.model."""
        mesh = self.device_mesh["data_parallel"]
        dtype = dtype_for(self.options.precision)
        products = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(torch.cuda.is_available()) if self.options.offload else OffloadPolicy()
        common: dict[str, Any] = {"mesh": mesh, "offload_policy": offload,
                                  "shard_placement_fn": lambda weight: _placement(weight, mesh.size())}
        fully_shard(task, ignored_params={weight for block in model.blocks for weight in _matrices(model, block)}, **common)
        for block in model.blocks:
            fully_shard(block, ignored_params={weight for weight in block.parameters() if isinstance(weight, DTensor)},
                        mp_policy=products, reshard_after_forward=self.options.reshard, **common)
        for name in ("training_step", "validation_step"):
            register_fsdp_forward_method(task, name)

    def model_to_device(self) -> None:
        if self.options.offload:         # FSDP moves the weights to the GPU
            self.lightning_module._device = self.root_device     # type: ignore[union-attr]
        else:
            super().model_to_device()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disables gradient reduction in the `with` block, for all batches of a step except the last."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def reshard(self) -> None:
        """Frees gathered weights, so that parameters() are shards. A validation leaves weights outside of blocks gathered."""
        assert isinstance(self.model, nn.Module)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # Checkpoints

    def lightning_module_state_dict(self) -> StateDict:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        return (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: StateDict, filepath: str | Path, storage_options: object = None) -> None:
        """Waits until the previous checkpoint is complete, and starts writing this one. Raises UserError as finish() does."""
        self.finish()
        self._saving = Saving(checkpoint, Path(filepath), self._group, self.after_save)

    def finish(self) -> None:
        """Waits until the current checkpoint has been written. Raises UserError if writing fails.

        This is a collective operation.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def on_exception(self, exception: BaseException) -> None:
        if self._saving is not None:
            self._saving.wait_alone()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> StateDict:
        """Returns a checkpoint's dictionary with this process's shards. Any number of processes may have written it."""
        path = Path(checkpoint_path)
        if path.is_dir():
            return _fsdp_folder.read(path, lambda place, shape, dtype: _empty_shard(self._parameter(place), shape, dtype))
        content = _torch_file.load(path)
        assert self.lightning_module is not None
        weights = [(WEIGHTS, name) for name, _ in self.lightning_module.named_parameters() if name in content[WEIGHTS]]
        states = [(STATES, number, "state", index, name) for number, state in enumerate(content[STATES])
                  for index, values in state["state"].items() for name, value in values.items() if value.dim()]
        for place in (*weights, *states):
            value = _fsdp_folder.value_at(content, place)
            _fsdp_folder.insert(content, place, _shard_of(self._parameter(place), value))
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint[WEIGHTS], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint[STATES], strict=True):
            optimizer.load_state_dict(state)

    def _parameter(self, place: _fsdp_folder.Place) -> DTensor:
        """Returns the parameter whose weight or optimiser state is at this place in a checkpoint."""
        if place[0] == WEIGHTS:
            assert self.lightning_module is not None
            parameter: Tensor = self.lightning_module.get_parameter(str(place[1]))
        else:
            _, optimizer, _, number, _ = place
            groups = self.optimizers[int(optimizer)].param_groups
            parameter = [weight for group in groups for weight in group["params"]][int(number)]
        assert isinstance(parameter, DTensor)
        return parameter


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor in all processes if `tensor` is sharded, by a collective operation, or else `tensor`."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the 2-norm of all tensors together. The tensors may be sharded."""
    return full_tensor(torch.nn.utils.get_total_norm(tensors))


def _matrices(model: Model, block: nn.Module) -> list[nn.Parameter]:
    group = model.generation.group
    return [weight for name, weight in block.named_parameters()
            if weight.dim() == 2 and group(f"blocks.0.{name}".replace(".base.", ".")) != "vector"]


def _placement(weight: Tensor, processes: int) -> Shard | None:
    # None shards the first axis. Weights of shape (1,1,C) are sharded along the last axis if torch supports that
    use_last = weight.dim() > 1 and weight.shape[0] == 1 and weight.shape[-1] % processes == 0
    return Shard(weight.dim() - 1) if use_last else None


def _shard_of(parameter: DTensor, value: Tensor) -> DTensor:
    share = _empty_shard(parameter, tuple(value.shape), value.dtype)
    sizes, offsets = compute_local_shape_and_global_offset(share.shape, share.device_mesh, share.placements)
    slices = tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
    share.to_local().copy_(value[slices])
    return share


def _empty_shard(parameter: DTensor, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    """Returns an uninitialised tensor with the parameter's device and placement. Unsharded axes may be shorter."""
    part = parameter.detach()[tuple(slice(None if size == whole else size)
                                    for size, whole in zip(shape, parameter.shape, strict=True))]
    share = torch.empty_like(part, dtype=dtype)
    assert isinstance(share, DTensor)
    return share
