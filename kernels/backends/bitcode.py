"""C functions in Taichi kernels: instructions of x86-64 CPUs that Taichi cannot express, without a compiler.

csrc/NAME.c is compiled to LLVM bitcode for each of the registry's LEVELS, and csrc/NAME.LEVEL.bc is kept beside it. Taichi
links the file for this CPU into a kernel and makes machine code of both together. A function takes addresses of numbers, and
has no result.

    python -m kernels.backends.bitcode [OPERATOR ...]

writes the files, of all operators by default. It needs clang 15, since Taichi 1.7.4 reads what LLVM 15 writes.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kernels import registry

CLANG = ("clang-15", "-O2", "-Wall", "-Wextra", "-Werror", "-Xclang", "-no-opaque-pointers", "-emit-llvm", "-c",
         "-fno-unroll-loops", "-fno-vectorize", "-fno-slp-vectorize")        # Taichi makes machine code in a third of the time
OPERATORS = ("decoding", "draw", "matvec")               # the others' C is in the library kernels/native
HASH = "SOURCE_HASH"                     # a macro in each source, for the name of a constant
INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)


def path_of(source: Path, of_level: str | None) -> Path:
    """The bitcode of a C source for that level."""
    return source.with_suffix(f".{of_level}.bc")


@cache
def function(source: Path, name: str) -> Callable[..., None]:
    """A C function, to be called in a kernel with numbers, of which it gets the addresses."""
    from kernels.backends.taichi import ti

    builder = ti.lang.source_builder.SourceBuilder()
    builder.bc, builder.mode = str(path_of(source, registry.level())), "bc"
    called, version = getattr(builder, name), version_of(source)

    def call(*arguments: Any) -> None:
        variable = ti.lang.impl.expr_init
        variable(version)
        called(*map(variable, arguments))

    call.__module__ = called.__module__  # Taichi warns of what is not its own
    return call


@cache
def version_of(source: Path) -> int:
    """A number that changes with the bitcode. Kernels contain it: of a file, Taichi's cache of kernels knows the name alone."""
    return int.from_bytes(hashlib.sha256(path_of(source, registry.level()).read_bytes()).digest()[:3], "big")


def sources() -> list[Path]:
    """The C sources of all operators that are compiled to bitcode."""
    return [source for operator in OPERATORS for source in sorted((Path(__file__).parents[1] / operator / "csrc").glob("*.c"))]


def name_of(source: Path) -> str:
    """A name that stands in the bitcode of a source: the hash of the source and of what it includes."""
    return "source_" + hashlib.sha256(b"".join(path.read_bytes() for path in _with_included(source))).hexdigest()


def compile_source(source: Path, of_level: str, output: Path) -> None:
    """Writes the bitcode of a source, in which stands the name of the source alone, and no folder."""
    flags = [f"-m{need.replace('_', '').replace('fma3', 'fma')}" for need in registry.LEVELS[of_level]]
    command = [*CLANG, *flags, f"-D{HASH}={name_of(source)}", source.name, "-o", str(output)]
    subprocess.run(command, check=True, cwd=source.parent)


def _with_included(source: Path) -> Iterator[Path]:
    yield source
    for name in INCLUDED.findall(source.read_text(encoding="ascii")):
        yield from _with_included((source.parent / name).resolve())


def main(argv: list[str] | None = None) -> int:
    from kernels.arguments import Parser

    parser = Parser("kernels.backends.bitcode", __doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", choices=sorted({source.parts[-3] for source in sources()}))
    operators = parser.parse_args(argv).operators
    if shutil.which(CLANG[0]) is None:
        parser.error(f"there is no {CLANG[0]} on the PATH: install clang 15")
    for source in sources():
        if operators and source.parts[-3] not in operators:
            continue
        for of_level in registry.LEVELS:
            compile_source(source, of_level, path_of(source, of_level))
    return 0


if __name__ == "__main__":
    sys.exit(main())
