"""Describes the machine of a measurement, and measures how fast it multiplies matrices, copies memory and reads memory."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.machine.memory import available_memory

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("numpy", "taichi", "triton")
MATMUL_N = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}        # much larger than any cache


def describe(device: str) -> dict[str, Any]:
    """Returns the processor, its vector instructions, GPU, number of threads, versions, commit and time, as JSON data."""
    machine = {"cpu": cpu_model(), "instructions": torch.backends.cpu.get_cpu_capability(),
               "threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.machine()}",
               "python": platform.python_version(), "torch": torch.__version__}
    machine |= {name: version for name in PACKAGES if (version := _version(name))}
    if device == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return machine | {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def cpu_model() -> str:
    """Returns the processor's model name on Linux, and its architecture on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str | None:
    """Returns the checked-out commit, followed by + if files have changed, or None without git or a clone of this program.

    An installed package may be in the repository of another project, whose commit says nothing. Without optional locks, git
    does not write the index, which the user may be writing at the same time.
    """
    if not (ROOT / ".git").exists():
        return None
    try:
        head, changes = (subprocess.run(["git", "--no-optional-locks", *args], cwd=ROOT, capture_output=True, text=True,
                                        check=True).stdout.strip()
                         for args in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def free_bytes(device: str) -> int | None:
    """Returns the bytes of memory that can still be allocated on the device, or None if the number is unknown."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()


def matmul(device: str) -> tuple[Callable[[], Any], int]:
    """Returns a function that multiplies two float32 matrices without TF32, and its number of floating-point operations."""
    n = MATMUL_N[device]
    left = torch.randn(n, n, device=device)
    right = torch.randn(n, n, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        torch.mm(left, right, out=out)
        torch.set_float32_matmul_precision(before)

    return multiply, 2 * n**3


def copy(device: str) -> tuple[Callable[[], Any], int]:
    """Returns a function that copies a tensor larger than any cache, and the number of bytes that it reads and writes."""
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = source.clone()              # empty_like would not map the memory before the first timed copy
    return lambda: target.copy_(source), 2 * COPY_BYTES[device]


def read(device: str) -> tuple[Callable[[], Any], int]:
    """Returns a function that sums a tensor, with all threads, and the tensor's size in bytes, which exceeds all caches."""
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    return source.sum, COPY_BYTES[device]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
