"""Measures the GPU resources of the CUDA kernels with ptxas, without a GPU: registers, shared memory, spills.

    PYTHONPATH=. python tests/cuda_resources.py > tests/cuda_resources.txt      # after an intended change of the numbers
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kernels.backends.cuda import Source, compile_cubin, compiler_version

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "cuda_resources.txt"
ARCHS = ("sm_80", "sm_90", "sm_120")
WIDE = 128                               # channels of a head, in addition to the 64 of released models
KERNEL = re.compile(r"Compiling entry function '(\w+)'(.*?Used \d+ registers.*?)$", re.DOTALL | re.MULTILINE)


class Kernel(NamedTuple):
    source: str
    name: str
    arch: str


class Resources(NamedTuple):
    """Counts the registers per thread, the bytes of static shared memory per block, and the bytes of spills.

    A launch may add shared memory.
    """

    registers: int
    shared: int
    spilled: int


def sources() -> list[Source]:
    """Returns every `Source` of kernels/*/cuda_*.py, and the variants for wider heads and bfloat16 that a source has."""
    modules = [importlib.import_module(f"kernels.{path.parent.name}.{path.stem}")
               for path in sorted(ROOT.glob("kernels/*/cuda_*.py"))]
    result = [value for module in modules for value in vars(module).values() if isinstance(value, Source)]
    result += [source.variant(N=WIDE) for source in result if "N" in source.macros]
    return [*result, *(source.variant(BFLOAT16=1) for source in result if "BFLOAT16" in source.macros)]


def is_wide(source: Source) -> bool:
    """Returns True if the source is a variant for wide heads, which takes a minute to compile."""
    return source.macros.get("N") == WIDE


def name_of(source: Source) -> str:
    """Returns the source's file and macros, as a name without spaces."""
    macros = ",".join(f"{macro}={value}" for macro, value in source.macros.items())
    return source.path.relative_to(ROOT / "kernels").as_posix() + (macros and f":{macros}")


def measure(source: Source, arch: str) -> dict[Kernel, Resources]:
    """Returns the resources of every kernel in `source`. Raises KernelUnavailable if the source does not compile."""
    _, report = compile_cubin(source, arch)
    resources = {Kernel(name_of(source), name, arch): _resources(text) for name, text in KERNEL.findall(report)}
    assert resources, f"no kernel in ptxas's report:\n{report}"
    return resources


def read_table() -> tuple[str, dict[Kernel, Resources]]:
    """Returns the compiler's version and the numbers of the committed table."""
    lines = [line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    (_, version), *rows = lines
    return version, {Kernel(source, name, arch): Resources(*map(int, numbers)) for name, arch, *numbers, source in rows}


def write_table() -> Iterator[str]:
    yield "# The resources of every CUDA kernel by ptxas. cuda_resources.py writes this table, test_cuda_compile.py reads it."
    yield f"NVRTC {compiler_version()}"
    yield f"# {'kernel':14}{'arch':8}{'registers':>10}{'shared':>10}{'spilled':>10}   source and macros"
    for source in sources():
        for kernel, used in (row for arch in ARCHS for row in sorted(measure(source, arch).items())):
            yield f"{kernel.name:16}{kernel.arch:8}{used.registers:10}{used.shared:10}{used.spilled:10}   {kernel.source}"


def _resources(text: str) -> Resources:
    registers, shared, spilled = (re.search(pattern, text) for pattern in
                                  (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes spill stores"))
    assert registers
    assert spilled
    return Resources(int(registers[1]), int(shared[1]) if shared else 0, int(spilled[1]))


if __name__ == "__main__":
    print("\n".join(write_table()))
