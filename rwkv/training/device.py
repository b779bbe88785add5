"""Where a run trains: its device, the number of its processes, and its precision.

trainer.precision=auto is bf16-mixed where the device multiplies bfloat16 clearly faster than float32, else 32-true. A GPU
reports whether it does; on a CPU that has instructions for it, a few milliseconds of matrix products measure it.
"""

import time

import torch

from kernels.machine.cpu import multiplies
from rwkv.config import TrainerConfig
from rwkv.distributed import world_size
from rwkv.errors import UserError

AUTO = "auto"
N = 512                                  # rows of the square matrices whose product is timed
CALLS = 5                                # timed products
FASTER = 1.3                             # the speed-up that pays for converting to bfloat16 and back


def device_for(accelerator: str) -> torch.device:
    """The device of trainer.accelerator=auto|cpu|gpu on this machine. Raises UserError for gpu if torch finds no GPU."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer=gpu needs a CUDA device, and torch finds none: use trainer=cpu")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def process_count(options: TrainerConfig, batch_size: int) -> int:
    """The number of processes to start on this machine. Raises UserError if there cannot be so many."""
    if options.strategy == "single":
        return 1
    if options.num_nodes > 1:
        raise UserError("several machines need torchrun, with the same command on each: torchrun --nnodes=N "
                        "--nproc-per-node=M --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py trainer.num_nodes=N ...")
    gpus = torch.cuda.device_count() if device_for(options.accelerator).type == "cuda" else 0
    _require_gpus(options.strategy, gpus)
    count = options.devices or gpus
    if count == 0:
        raise UserError(f"trainer={options.strategy} on a CPU needs the number of processes: trainer.devices=2")
    if gpus and count > gpus:
        raise UserError(f"trainer.devices={count} is more than the {gpus} CUDA devices that torch finds")
    _require_multiple(batch_size, count)
    return count


def share(batch_size: int, strategy: str, num_nodes: int) -> int:
    """This process's number of the batch_size rows that all processes read. Raises UserError if it is not a whole number."""
    count = world_size()
    if count > 1 and strategy == "single":
        raise UserError("torchrun started several processes, and trainer=single trains in one: use trainer=ddp or trainer=fsdp")
    if count % num_nodes:
        raise UserError(f"{count} processes cannot be divided equally among trainer.num_nodes={num_nodes} machines")
    _require_gpus(strategy, torch.cuda.device_count())
    _require_multiple(batch_size, count)
    return batch_size // count


def _require_gpus(strategy: str, gpus: int) -> None:
    if strategy == "fsdp" and not gpus:
        raise UserError("trainer=fsdp needs CUDA devices, and there are none: use trainer=ddp, which runs on CPUs too")


def _require_multiple(batch_size: int, count: int) -> None:
    if batch_size % count:
        raise UserError(f"data.batch_size={batch_size} are the rows of all processes together: give a multiple of {count}")


def resolved_precision(precision: str, accelerator: str) -> str:
    """The precision, with auto resolved for the accelerator. Raises UserError as device_for does."""
    if precision != AUTO:
        return precision
    return "bf16-mixed" if bfloat16_is_faster(device_for(accelerator)) else "32-true"


def bfloat16_is_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return multiplies(torch.bfloat16) and _seconds(torch.float32) > FASTER * _seconds(torch.bfloat16)


def _seconds(dtype: torch.dtype) -> float:
    """The shortest of CALLS times of a matrix product on the CPU, after one product that warms up."""
    x = torch.ones(N, N, dtype=dtype)
    times = []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    return min(times[1:])


def dtype_for(precision: str) -> torch.dtype:
    """The dtype of the model's matrix products, and so of the operator's inputs."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)
