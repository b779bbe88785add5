"""Makes the libraries of kernels/native: csrc/*.c of all packages, for every level, by zig's clang, with no other compiler.

    python -m kernels.native.build [--zig PYTHON] [--sanitize] [SYSTEM-MACHINE ...]

--zig is the Python of an environment with `ziglang` of the version below, by default this one; `make native` makes it.
--sanitize makes libraries that end the process at undefined behaviour, with a line that names it (UBSan); make soak runs
tests with one. The same sources give the same bytes in any folder. A library contains a hash of all that it is made of, by
which a test finds one that has to be made again.
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
PER_LIBRARY = ("kernels/native/csrc/levels.c", "kernels/native/csrc/threads.c")          # compiled once, not for each level
SYSTEMS = {"linux": "linux-gnu.2.28", "macos": "macos.11.0", "windows": "windows-gnu"}   # as zig names them
NOT_SANITIZED = "-fno-sanitize=all"
FLAGS = ("-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", NOT_SANITIZED, "-Wall", "-Wextra", "-Werror",
         "-Wno-unused-command-line-argument")
SANITIZED = (*(flag for flag in FLAGS if flag != NOT_SANITIZED), "-O1", "-fsanitize=undefined")
OF_LEVEL = {"avx2": ("-mavx2", "-mfma", "-mf16c"),
            "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
            "neon": (), "neondot": ("-Xclang", "-target-feature", "-Xclang", "+dotprod")}
OF_LEVEL["avx512bf16"] = (*OF_LEVEL["avx512"], "-mavx512bf16")


def sources() -> list[str]:
    """The sources in a csrc folder of this package and of those beside it, headers among them, as paths below their folder."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    return sorted(path.relative_to(ROOT).as_posix() for package in packages for path in package.glob("**/csrc/*.[ch]"))


def name_of_sources() -> str:
    """The text in a library that identifies its sources: a hash of them and of how they are compiled."""
    whole = hashlib.sha256(repr((ZIG, SYSTEMS, FLAGS, OF_LEVEL, LEVELS)).encode())
    for source in sources():
        whole.update(f"\n{source}\n".encode() + (ROOT / source).read_bytes())
    return f"timemix sources {whole.hexdigest()}"


def build(target: Target, output: Path, zig: str = sys.executable, sanitize: bool = False) -> None:
    """Writes the library of a target. sanitize: one that ends the process at undefined behaviour.

    Raises subprocess.CalledProcessError where the compiler does not accept a source.
    """
    compiler = (zig, "-m", "ziglang", "cc", "-target", f"{target.machine}-{SYSTEMS[target.system]}")
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        always = SANITIZED if sanitize else FLAGS
        for i, (source, flags) in enumerate(_pieces(target)):
            objects.append(str(Path(folder) / f"{i}.o"))
            subprocess.run([*compiler, *always, *flags, "-c", source, "-o", objects[-1]], check=True, cwd=ROOT)
        options = {"macos": f"-Wl,-install_name,@rpath/{target.path.name}", "windows": "-Wl,/Brepro"}     # no time inside
        library = Path(folder) / target.path.name        # the linker writes this name into it
        linked = ("-fsanitize=undefined",) if sanitize else ()
        subprocess.run([*compiler, *linked, "-shared", "-s", options.get(target.system, "-Wl,--as-needed"), *objects,
                        "-o", str(library)], check=True, cwd=ROOT)
        new = output.with_suffix(".new")
        new.write_bytes(library.read_bytes())
        new.replace(output)              # a process that has the old file open keeps it: written into, it would crash it


def _pieces(target: Target) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each source with its flags, once for each level."""
    for source in sources():
        if source in PER_LIBRARY:
            digest = name_of_sources().rpartition(" ")[2]
            yield source, (f'-DSOURCES="{digest}"',)
        elif source.endswith(".c"):
            for level in LEVELS[target.machine]:
                yield source, (f"-DLEVEL={level}", *OF_LEVEL[level])


def _version_of(zig: str) -> str:
    """The version of ziglang beside that Python; empty where there is none."""
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
        parser.error(f"unknown target {unknown.pop()!r}; there are: {', '.join(names)}")
    options.zig = str(Path(options.zig).absolute())
    if _version_of(options.zig) != ZIG:
        parser.error(f"{options.zig} has no ziglang {ZIG}: run make native, or pip install ziglang=={ZIG}")
    for name in options.targets or names:
        names[name].path.parent.mkdir(exist_ok=True)
        print(f"{name}: {len([*_pieces(names[name])])} objects, {names[name].path.relative_to(ROOT)}", flush=True)
        build(names[name], names[name].path, options.zig, options.sanitize)
    return 0


if __name__ == "__main__":
    sys.exit(main())
