"""trainer.precision=auto: bf16-mixed where the machine multiplies bfloat16 clearly faster than float32, else 32-true.

A GPU says so; of a CPU no library tells for all of them, so it is measured, in a few milliseconds.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from rwkv.config import DataConfig, TrainConfig, TrainerConfig
from rwkv.distributed import world_size
from rwkv.errors import UserError


def device_for(accelerator: str) -> torch.device:
    """The device that trainer=auto|cpu|gpu means here. Raises ValueError for gpu where torch sees none."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer=gpu needs a CUDA device, and torch sees none: use trainer=cpu")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def process_count(config: TrainConfig) -> int:
    """How many processes a run is to have on this machine, where they have not been launched yet.

    Raises ValueError where that many cannot be, or cannot work together.
    """
    options, gpus = config.trainer, torch.cuda.device_count() if device_for(config.trainer.accelerator).type == "cuda" else 0
    if options.strategy == "single":
        return 1
    if options.num_nodes > 1:
        raise UserError("several machines need torchrun, with the same command on each: torchrun --nnodes=N "
                        "--nproc-per-node=M --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py trainer.num_nodes=N ...")
    _require_gpus(options, gpus)
    count = options.devices or gpus
    if count == 0:
        raise UserError(f"trainer={options.strategy} on a CPU needs the number of processes: trainer.devices=2")
    if gpus and count > gpus:
        raise UserError(f"trainer.devices={count} is more than the {gpus} CUDA devices that torch sees")
    _require_multiple(config.data.batch_size, count)
    return count


def share(config: TrainConfig) -> DataConfig:
    """This process's part of each batch: what all of them read together is data.batch_size. Raises ValueError as above."""
    count = world_size()
    if count > 1 and config.trainer.strategy == "single":
        raise UserError("torchrun started several processes: say how they work together, trainer=ddp or trainer=fsdp")
    if count % config.trainer.num_nodes:
        raise UserError(f"trainer.num_nodes={config.trainer.num_nodes} machines cannot have {count} processes, as many each")
    _require_gpus(config.trainer, torch.cuda.device_count())
    _require_multiple(config.data.batch_size, count)
    return replace(config.data, batch_size=config.data.batch_size // count)


def _require_gpus(options: TrainerConfig, gpus: int) -> None:
    if options.strategy == "fsdp" and not gpus:
        raise UserError("trainer=fsdp needs CUDA devices, and there are none: use trainer=ddp, which runs on CPUs too")


def _require_multiple(batch_size: int, count: int) -> None:
    if batch_size % count:
        raise UserError(f"data.batch_size={batch_size} is what all processes read together: it must be a multiple of {count}")


AUTO = "auto"
N, CALLS = 512, 5                        # of a square product, and how often it is timed
FASTER = 1.3                             # what products must gain, since converting to bfloat16 and back takes time as well


def with_precision(config: TrainConfig) -> TrainConfig:
    """The configuration with auto decided for the device of this run. Raises ValueError where that device is not there."""
    if config.trainer.precision != AUTO:
        return config
    halves = halves_are_faster(device_for(config.trainer.accelerator))
    return replace(config, trainer=replace(config.trainer, precision="bf16-mixed" if halves else "32-true"))


def halves_are_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    whole, half = (min(list(_seconds(dtype))[1:]) for dtype in (torch.float32, torch.bfloat16))
    return whole > FASTER * half


def _seconds(dtype: torch.dtype) -> Iterator[float]:
    x = torch.ones(N, N, dtype=dtype)
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        x @ x
        yield time.perf_counter() - start


def dtype_for(precision: str) -> torch.dtype:
    """The dtype of what the model's matrix products give, and so of k and v."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)
