"""What lets a run grow: over several processes, with less memory for activations, and compiled."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.utils.checkpoint import checkpoint

from kernels.registry import missing_compiler
from rwkv.config import DataConfig, TrainConfig, TrainerConfig
from rwkv.model import RWKV, Block
from rwkv.processes import launched, world_size


def device_for(accelerator: str) -> torch.device:
    """The device that trainer=auto|cpu|gpu means here. Raises ValueError for gpu where torch sees none."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("trainer=gpu needs a CUDA device, and torch sees none: use trainer=cpu")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def process_count(config: TrainConfig) -> int:
    """How many processes a run is to have on this machine, where they have not been launched yet.

    Raises ValueError where that many cannot be, or cannot work together.
    """
    options, gpus = config.trainer, torch.cuda.device_count() if device_for(config.trainer.accelerator).type == "cuda" else 0
    if options.strategy == "single":
        return 1
    if options.num_nodes > 1:
        raise ValueError("several machines need torchrun, with the same command on each: torchrun --nnodes=N "
                         "--nproc-per-node=M --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py trainer.num_nodes=N ...")
    _require_gpus(options, gpus)
    count = options.devices or gpus
    if count == 0:
        raise ValueError(f"trainer={options.strategy} on a CPU needs the number of processes: trainer.devices=2")
    if gpus and count > gpus:
        raise ValueError(f"trainer.devices={count} is more than the {gpus} CUDA devices that torch sees")
    _require_multiple(config.data.batch_size, count)
    return count


def share(config: TrainConfig) -> DataConfig:
    """This process's part of each batch: what all of them read together is data.batch_size. Raises ValueError as above."""
    count = world_size()
    if count > 1 and config.trainer.strategy == "single":
        raise ValueError("torchrun started several processes: say how they work together, trainer=ddp or trainer=fsdp")
    if count % config.trainer.num_nodes:
        raise ValueError(f"trainer.num_nodes={config.trainer.num_nodes} machines cannot have {count} processes, as many each")
    _require_gpus(config.trainer, torch.cuda.device_count())
    _require_multiple(config.data.batch_size, count)
    return replace(config.data, batch_size=config.data.batch_size // count)


def _require_gpus(options: TrainerConfig, gpus: int) -> None:
    if options.strategy == "fsdp" and not gpus:
        raise ValueError("trainer=fsdp needs CUDA devices, and there are none: use trainer=ddp, which runs on CPUs too")


def _require_multiple(batch_size: int, count: int) -> None:
    if batch_size % count:
        raise ValueError(f"data.batch_size={batch_size} is what all processes read together: it must be a multiple of {count}")


def strategy_for(config: TrainerConfig) -> dict[str, Any]:
    """Lightning's arguments for the processes there are."""
    shared = {"devices": world_size() // config.num_nodes, "num_nodes": config.num_nodes, "use_distributed_sampler": False}
    if config.strategy == "fsdp":
        return shared | {"strategy": FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")}
    return shared | ({"strategy": DDPStrategy()} if config.strategy == "ddp" and launched() else {})


def precision_for(config: TrainerConfig, device: torch.device) -> dict[str, Any]:
    """Lightning's arguments for the precision. Its own fp16 on a CPU would silently be bf16."""
    if config.precision == "fp16-mixed" and config.strategy != "fsdp":
        return {"plugins": [MixedPrecision("16-mixed", device.type)]}
    return {"precision": config.precision.replace("fp16", "16")}


def prepare_blocks(model: RWKV, config: TrainerConfig) -> RWKV:
    """trainer.activation_checkpointing and trainer.compile, block by block; names and values of the weights stay."""
    if config.compile and (compiler := missing_compiler()):
        raise ValueError(f"trainer.compile=true needs a C++ compiler, and there is no {compiler} on the PATH: install it, or "
                         "leave trainer.compile out")
    for block in model.blocks:
        if config.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.compile:
            block.forward = _compiled(block.forward)
    return model


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For training alone: where no gradients are wanted, torch 2.13 cannot trace functions that have their own."""
    compiled = torch.compile(forward)
    return lambda *inputs: (compiled if torch.is_grad_enabled() else forward)(*inputs)
