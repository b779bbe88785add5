"""Chooses a run's device, number of processes and precision.

trainer.precision defaults to bf16-mixed on a GPU with bfloat16, and to 32-true elsewhere. On such a GPU matrix products are up
to 19 times as fast as in float32. trainer.precision=auto also chooses bf16-mixed on a CPU if a few milliseconds of matrix
products show that bfloat16 is clearly faster.
"""

import os
import time

import torch

from kernels.machine.cpu import multiplies_natively
from rwkv.config import GPUS, TrainConfig, TrainerConfig
from rwkv.distributed import is_launched, srun_tasks, world_size
from rwkv.errors import UserError

AUTO = "auto"
TF32 = "tf32"
TF32_CAPABILITY = 8                      # the first compute capability with TF32
N = 512                                  # the size of the square matrices in timed products
CALLS = 5                                # the number of timed products
FASTER = 1.3                             # the least speed-up that outweighs converting to bfloat16 and back


def device_for(accelerator: str) -> torch.device:
    """Returns the device of trainer.accelerator=auto|cpu|gpu. Raises UserError for gpu if torch finds no GPU."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer=gpu requires a CUDA device, but torch finds no CUDA device: use trainer=cpu")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def process_count(options: TrainerConfig, batch_size: int) -> int:
    """Returns the number of processes to start on this machine.

    Raises UserError if the options conflict with the launcher, the number of GPUs or `batch_size`.
    """
    if options.strategy == "single":
        return 1
    if (tasks := srun_tasks()) > 1:
        raise UserError(f"srun started {tasks} tasks, but each task would train the whole model by itself. Start one task per "
                        "machine: srun --ntasks-per-node=1 torchrun ... train.py ... (see docs/scale.md)")
    if options.num_nodes > 1:
        raise UserError("training on several machines requires torchrun. Run the same command on each machine: torchrun "
                        "--nnodes=N --nproc-per-node=M --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py "
                        "trainer.num_nodes=N ...")
    gpus = torch.cuda.device_count() if device_for(options.accelerator).type == "cuda" else 0
    count = options.devices or gpus
    if count == 0:
        raise UserError(f"trainer={options.strategy} on a CPU requires the number of processes, such as trainer.devices=2")
    if gpus and count > gpus:
        raise UserError(f"trainer.devices must be at most {gpus}, the number of CUDA devices; got {count}")
    _require_multiple(batch_size, count)
    return count


def is_planned_elsewhere(config: TrainConfig) -> bool:
    """Returns True if the plan is for other machines: plan= names a GPU, or the run needs more devices than this machine has.

    Without GPUs, this machine's devices are its cores. A plan for at most as many processes starts these processes here.
    """
    trainer = config.trainer
    if config.plan in GPUS:
        return True
    if not config.only_plans or is_launched() or trainer.strategy == "single" or trainer.accelerator == "cpu":
        return False
    return trainer.num_nodes > 1 or trainer.devices > (torch.cuda.device_count() or os.cpu_count() or 1)


def rows_per_process(batch_size: int, strategy: str, num_nodes: int) -> int:
    """Returns the number of a batch's rows for this process.

    Raises UserError if the number of processes is not a multiple of `num_nodes` or does not divide `batch_size`, or if
    strategy=single has several processes.
    """
    count = world_size()
    if count > 1 and strategy == "single":
        raise UserError("trainer.strategy=single requires one process, but torchrun started several processes: use trainer=ddp "
                        "or trainer=fsdp")
    if count % num_nodes:
        raise UserError(f"the number of processes must be a multiple of trainer.num_nodes={num_nodes}; got {count}")
    _require_multiple(batch_size, count)
    return batch_size // count


def _require_multiple(batch_size: int, count: int) -> None:
    if batch_size % count:
        raise UserError(f"data.batch_size must be a multiple of {count}, the number of processes; got {batch_size}")


def resolve_precision(precision: str | None, accelerator: str) -> str:
    """Returns the precision, with None and "auto" replaced by a choice for the accelerator.

    Raises UserError as device_for does, and for tf32 on a device without TF32.
    """
    device = device_for(accelerator) if precision in (None, AUTO, TF32) else None
    if device is None:
        return str(precision)
    if precision == TF32:
        _require_tf32(device)
        return TF32
    faster = (precision == AUTO or device.type == "cuda") and bfloat16_is_faster(device)
    return "bf16-mixed" if faster else "32-true"


def _require_tf32(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError("trainer.precision=tf32 requires a GPU, but this run is on a CPU: use trainer.precision=32-true")
    if torch.cuda.get_device_capability(device)[0] < TF32_CAPABILITY:
        raise UserError(f"trainer.precision=tf32 requires a GPU with compute capability {TF32_CAPABILITY}.0 or higher, but "
                        f"{torch.cuda.get_device_name(device)} is older: use trainer.precision=32-true or fp16-mixed")


def why_precision(precision: str, device: torch.device) -> str | None:
    """Returns a line that explains the precision on a GPU and names the alternatives, or None on a CPU."""
    if device.type != "cuda":
        return None
    if precision == "32-true":
        return ("products in float32" + ("; trainer.precision=bf16-mixed is several times as fast here"
                                         if bfloat16_is_faster(device) else ": this GPU does not multiply bfloat16"))
    return {"bf16-mixed": "products in bfloat16, weights in float32: the default where a GPU multiplies bfloat16; "
                          "trainer.precision=32-true computes in float32",
            TF32: "products of float32 rounded to TF32's 10 bits; trainer.precision=32-true does not round"}.get(precision)


def set_product_precision(precision: str, device: torch.device) -> None:
    """Enables TF32 in float32 matrix products on a GPU if `precision` is tf32; otherwise disables TF32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == TF32 else "highest")


def bfloat16_is_faster(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return (multiplies_natively(torch.bfloat16)
            and _seconds_per_product(torch.float32) > FASTER * _seconds_per_product(torch.bfloat16))


def _seconds_per_product(dtype: torch.dtype) -> float:
    x = torch.ones(N, N, dtype=dtype)
    times = []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    return min(times[1:])


def dtype_for(precision: str | None) -> torch.dtype:
    """Returns the dtype of the model's matrix products and of the operator's inputs."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision or "", torch.float32)
