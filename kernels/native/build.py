"""Builds the C libraries in kernels/native/lib from the csrc folders of all packages, for every level, with zig's clang.

    python -m kernels.native.build [--zig PYTHON] [--sanitize] [SYSTEM-MACHINE ...]

    --zig       the Python of an environment that contains the required version of `ziglang`. The default is this Python.
                `make native` creates that environment.
    --sanitize  enables UBSan, which reports undefined behaviour and aborts. `make soak` tests a library with UBSan.

Builds are reproducible in any folder. A library contains a hash of the sources, flags and compiler version, and a test compares
the hash with the sources.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernels.arguments import from_home
from kernels.native import LEVELS, TARGETS, Target

ROOT = Path(__file__).parents[2]
ZIG = "0.17.1"
PER_LIBRARY = ("kernels/native/csrc/levels.c", "kernels/native/csrc/threads.c")          # compiled once, not once per level
SYSTEMS = {"linux": "linux-gnu.2.28", "macos": "macos.11.0", "windows": "windows-gnu"}   # zig's names of the systems
NOT_SANITIZED = "-fno-sanitize=all"
FLAGS = ("-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", NOT_SANITIZED, "-Wall", "-Wextra", "-Werror",
         "-Wno-unused-command-line-argument")
SANITIZED = (*(flag for flag in FLAGS if flag != NOT_SANITIZED), "-O1", "-fsanitize=undefined")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
LEVEL_FLAGS = {"avx2": AVX2, "avxvnni": (*AVX2, "-mavxvnni"), "avx512": AVX512, "avx512bf16": (*AVX512, "-mavx512bf16"),
               "neon": (), "neondot": ("-Xclang", "-target-feature", "-Xclang", "+dotprod")}


def sources() -> list[str]:
    """Returns the paths of all C sources and headers in the packages' csrc folders, relative to the project root."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    return sorted(path.relative_to(ROOT).as_posix() for package in packages for path in package.glob("**/csrc/*.[ch]"))


def sources_id() -> str:
    """Returns the text that identifies a library's sources, with a hash of sources, flags and compiler version."""
    digest = hashlib.sha256(repr((ZIG, SYSTEMS, FLAGS, LEVEL_FLAGS, LEVELS)).encode())
    for source in sources():
        digest.update(f"\n{source}\n".encode() + (ROOT / source).read_bytes())
    return f"timemix sources {digest.hexdigest()}"


def build(target: Target, output: Path, zig: str = sys.executable, sanitize: bool = False) -> None:
    """Builds a target's library, with UBSan if `sanitize`. Raises subprocess.CalledProcessError on a compiler error."""
    compiler = (zig, "-m", "ziglang", "cc", "-target", f"{target.machine}-{SYSTEMS[target.system]}")
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        common = SANITIZED if sanitize else FLAGS
        for i, (source, flags) in enumerate(_sources_and_flags(target)):
            objects.append(str(Path(folder) / f"{i}.o"))
            subprocess.run([*compiler, *common, *flags, "-c", source, "-o", objects[-1]], check=True, cwd=ROOT)
        options = {"macos": f"-Wl,-install_name,@rpath/{target.path.name}", "windows": "-Wl,/Brepro"}     # no timestamp
        library = Path(folder) / target.path.name        # the linker stores this file name in the library
        runtime = ("-fsanitize=undefined",) if sanitize else ()
        subprocess.run([*compiler, *runtime, "-shared", "-s", options.get(target.system, "-Wl,--as-needed"), *objects,
                        "-o", str(library)], check=True, cwd=ROOT)
        new = output.with_suffix(".new")
        new.write_bytes(library.read_bytes())
        new.replace(output)              # running processes keep the old file; overwriting it would crash them


def _sources_and_flags(target: Target) -> Iterator[tuple[str, tuple[str, ...]]]:
    for source in sources():
        if source in PER_LIBRARY:
            digest = sources_id().rpartition(" ")[2]
            yield source, (f'-DSOURCES="{digest}"',)
        elif source.endswith(".c"):
            for level in LEVELS[target.machine]:
                yield source, (f"-DLEVEL={level}", *LEVEL_FLAGS[level])


def _version_of(zig: str) -> str:
    try:
        return subprocess.run([zig, "-m", "ziglang", "version"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def main(argv: list[str] | None = None) -> int:
    from kernels.arguments import Parser

    names = {f"{target.system}-{target.machine}": target for target in TARGETS}
    parser = Parser("kernels.native.build", __doc__)
    parser.add_argument("targets", nargs="*", metavar="SYSTEM-MACHINE")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--zig", metavar="PYTHON", type=from_home, default=sys.executable)
    options = parser.parse_args(argv)
    unknown = set(options.targets) - set(names)
    if unknown:
        parser.error(f"the target {unknown.pop()!r} is unknown: choose from {', '.join(names)}")
    options.zig = str(Path(options.zig).absolute())
    if _version_of(options.zig) != ZIG:
        parser.error(f"{options.zig} does not have ziglang {ZIG}: run make native, or pip install ziglang=={ZIG}")
    for name in options.targets or names:
        names[name].path.parent.mkdir(exist_ok=True)
        print(f"{name}: {len([*_sources_and_flags(names[name])])} objects, {names[name].path.relative_to(ROOT)}", flush=True)
        build(names[name], names[name].path, options.zig, options.sanitize)
    return 0


if __name__ == "__main__":
    sys.exit(main())
