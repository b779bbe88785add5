"""Measures the GPU resources of WKV-7's triton_v1 without a GPU: registers, shared memory, spills, by head width and dtype.

Writing the table takes minutes. Write the table again after an intended change of the numbers:

    PYTHONPATH=. python tests/triton_resources.py > tests/triton_resources.txt
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
TABLE = TESTS / "triton_resources.txt"
WRITE = f"PYTHONPATH=. python tests/triton_resources.py > tests/{TABLE.name}"
ARCHS = (80, 90, 100, 120)
HEADS = tuple(f"{N},{dtype}" for dtype in ("bfloat16", "float32") for N in (64, 128, 256))
NAMES = {"KEEP=False OUTPUT=True": "forward", "KEEP=True OUTPUT=False": "states", "KEEP=True OUTPUT=True": "reverse"}


class Kernel(NamedTuple):
    name: str
    arch: str
    head: str


class Resources(NamedTuple):
    """Counts the registers and spilled bytes per thread, the bytes of shared memory, and the warps per program."""

    registers: int
    shared: int
    spilled: int
    warps: int


def measure(arch: int, heads: Sequence[str], cache: Path) -> dict[Kernel, Resources]:
    """Returns the resources of each kernel for each head, such as "64,bfloat16". `cache` is a folder for Triton's files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    resources: dict[Kernel, Resources] = {}
    for head in heads:
        proc = subprocess.run([sys.executable, TESTS / "kernels" / "triton_cubins.py", str(arch), head], text=True, check=False,
                              capture_output=True, cwd=TESTS.parent, env=environment | {"TRITON_CACHE_DIR": str(cache)})
        assert proc.returncode == 0, proc.stderr
        resources |= by_kernel(json.loads(proc.stdout), arch, head)
    return resources


def by_kernel(facts: dict[str, dict[str, Any]], arch: int, head: str) -> dict[Kernel, Resources]:
    """Returns the resources of the cubins of one head by kernel. `facts` is the output of kernels/triton_cubins.py."""
    return {Kernel(_short(name), f"sm_{arch}", head):
            Resources(needs["registers"], needs["shared"], needs["spilled"], needs["warps"]) for name, needs in facts.items()}


def version() -> str:
    return importlib.metadata.version("triton")


def read_table() -> tuple[str, dict[Kernel, Resources]]:
    """Returns Triton's version and the numbers of the committed table."""
    lines = [line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    (_, written_by), *rows = lines
    return written_by, {Kernel(*row[:3]): Resources(*map(int, row[3:])) for row in rows}


def write_table() -> Iterator[str]:
    yield "# The resources of kernels/wkv7/triton_v1.py. triton_resources.py writes this table, test_triton.py reads it."
    yield f"Triton {version()}"
    yield f"# {'kernel':18}{'arch':8}{'head':14}{'registers':>10}{'shared':>10}{'spilled':>10}{'warps':>7}"
    with tempfile.TemporaryDirectory() as cache:
        for arch in ARCHS:
            for kernel, used in measure(arch, HEADS, Path(cache)).items():
                yield f"{kernel.name:20}{kernel.arch:8}{kernel.head:14}" \
                      f"{used.registers:10}{used.shared:10}{used.spilled:10}{used.warps:7}"


def _short(name: str) -> str:
    """Returns a kernel's name with the variant of its constants: "scan_forward", "prepare_backward" or "gradients"."""
    kernel = name.split()[0]
    scan = re.search(r"KEEP=\w+ OUTPUT=\w+", name)
    if scan:
        return f"{kernel}_{NAMES[scan[0]]}"
    return kernel if "BACKWARD" not in name else f"{kernel}_{'backward' if 'BACKWARD=True' in name else 'forward'}"


if __name__ == "__main__":
    for line in write_table():
        print(line, flush=True)
