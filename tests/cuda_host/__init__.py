"""Executes CUDA C++ on a CPU for tests: g++ compiles a .cu file with AddressSanitizer and UBSan, and each launch is a process.

    with on_the_cpu(host, order="descending"):           # the fixture `host` of conftest.py skips if why_not() returns a reason
        TimeX("cuda_v3")(w, k)           # w and k are on the CPU; the Python and .cu files are the implementation's own

Only Source.launch is replaced, so that padding, grids, kernel names and arguments of the implementation are tested. A launch
gets copies of its tensors with the same size and alignment. A LaunchError with a report is raised for errors that the
sanitizers find, for a wrong number or type of arguments, and for a barrier that not all threads reach. cuda_host.h and
cuda_host.cpp describe the rest.
"""

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.backends.cuda import Source

HERE = Path(__file__).parent
ORDERS = ("ascending", "descending", "shuffled")
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-g", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-fno-strict-aliasing")
SANITIZED = ("-O1", "-ftrivial-auto-var-init=pattern", "-fsanitize=address,undefined", "-fsanitize-sections=cuda_shared",
             "-fno-sanitize-recover=all")        # not for the scheduler, which sanitizers would slow down
RUN_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^()]*\)\s*)?(\w+)\s*\(')
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\(\d+\)\s+)?([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
NUMBERS = {"int": ("i", "i"), "float": ("f", "f")}       # type: letter of cuda_host.h, format of struct


class LaunchError(Exception):
    """Contains the report of a sanitizer, the scheduler or the compiler."""


@cache
def why_not() -> str | None:
    """Returns None if kernels can be executed here, or a sentence that says what is missing."""
    if sys.platform != "linux" or not COMPILER:
        return "CUDA kernels are executed on Linux with g++"
    with tempfile.TemporaryDirectory() as folder:
        main = Path(folder) / "main.cpp"
        main.write_text("int main() {}\n")
        try:
            subprocess.run([_compile(main, main.with_suffix(""), *SANITIZED)], check=True)
        except (LaunchError, subprocess.CalledProcessError) as error:
            return f"CUDA kernels are executed under g++'s sanitizers: {error}"
    return None


class Host:
    """Compiles each source once, into `folder`, and runs launches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = ORDERS[0]
        self.program = cache(self._program)
        self.runtime = cache(self._runtime)
        self.header = cache(self._header)

    def launch(self, source: Source, kernel: str, grid: object, block: object, *args: object, shared: int = 0) -> None:
        """Executes a launch on the CPU, with the arguments of Source.launch and results in the same tensors."""
        request = _request(kernel, grid, block, shared, ORDERS.index(self.order), args)
        process = subprocess.run([self.program(source)], input=request, capture_output=True, check=False, env=RUN_OPTIONS)
        if process.returncode:
            raise LaunchError(f"{source} {kernel} {grid} x {block}, {self.order}:\n{process.stderr.decode(errors='replace')}")
        _write_back([arg for arg in args if isinstance(arg, Tensor)], bytearray(process.stdout))

    def _program(self, source: Source) -> Path:
        """Compiles the file and its headers with a table of its kernels; syntax that exists only in CUDA is rewritten."""
        folder = self.folder / f"{source.path.stem}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        texts = dict(source.texts())
        for name, text in texts.items():
            replacement = HERE / name    # replaces inline assembly with C++
            text = replacement.read_text(encoding="utf-8") if replacement.exists() else text
            (folder / name).write_text(DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)cuda_host::dynamic_shared;", text))
        table = "".join(f'describe<{name}>("{name}"), ' for name in kernel_names(source))
        main = folder / "main.cpp"
        main.write_text(f'#include "{self.header()}"\n#include "{source.path.name}"\n'
                        f"namespace cuda_host {{ const Kernel KERNELS[] = {{{table}{{}}}}; }}\n")
        macros = [f"-D{name}={value}" for name, value in source.macros.items()]
        return _compile(main, folder / "program", *SANITIZED, "-I", str(HERE), *macros, str(self.runtime()))

    def _header(self) -> Path:
        """Precompiles cuda_host.h and the standard library, which takes as long as a small kernel."""
        header = self.folder / "host.h"
        header.write_text('#include "cuda_host.h"\n')
        _compile(header, self.folder / "host.h.gch", *SANITIZED, "-I", str(HERE))
        return header

    def _runtime(self) -> Path:
        return _compile(HERE / "cuda_host.cpp", self.folder / "cuda_host.o", "-c", "-O2")


def kernel_names(source: Source) -> list[str]:
    return [name for _, text in source.texts() for name in KERNEL.findall(text)]


@contextmanager
def on_the_cpu(host: Host, order: str = ORDERS[0]) -> Iterator[None]:
    """Lets CUDA implementations run on CPU tensors within the block; the threads of a CUDA block take turns in `order`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "order", order)
        patch.setattr(Source, "launch", lambda source, *args, **options: host.launch(source, *args, **options))
        patch.setattr("kernels.operator.check", lambda *args: None)        # the check refuses a machine without a GPU
        yield


def _compile(source: Path, result: Path, *options: str) -> Path:
    assert COMPILER
    process = subprocess.run([COMPILER, *FLAGS, str(source), *options, "-o", str(result)], capture_output=True, text=True,
                             check=False)
    if process.returncode:
        raise LaunchError(f"g++ on {source}:\n{process.stderr}")
    return result


def _request(kernel: str, grid: object, block: object, shared: int, order: int, args: tuple[object, ...]) -> bytes:
    types, values = zip(*(_value(arg) for arg in args), strict=True)
    sizes = struct.pack("8I", *_three(grid), *_three(block), shared, order)
    return b"".join([_text(kernel), sizes, _text("".join(types)), *values])


def _value(arg: object) -> tuple[str, bytes]:
    if isinstance(arg, Tensor):
        assert arg.is_contiguous()
        header = struct.pack("=IQQ", arg.element_size(), arg.data_ptr(), arg.nbytes)
        return "p", header + _bytes(arg).numpy().tobytes()
    letter, code = NUMBERS[type(arg).__name__]
    return letter, struct.pack(code, arg)


def _write_back(tensors: list[Tensor], data: bytearray) -> None:
    for tensor in tensors:
        part, data = data[:tensor.nbytes], data[tensor.nbytes:]
        _bytes(tensor).copy_(torch.frombuffer(part, dtype=torch.uint8))
    assert not data


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of the tensor through .data, so that autograd does not count a write as a change of a saved tensor."""
    return tensor.data.view(-1).view(torch.uint8)


def _three(size: object) -> tuple[int, ...]:
    sizes = size if isinstance(size, tuple) else (size,)
    return *sizes, *(1,) * (3 - len(sizes))


def _text(text: str) -> bytes:
    return struct.pack("I", len(text)) + text.encode()
