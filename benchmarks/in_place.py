"""Measures the first byte, memory and speed of large files that are used in place.

    python -m benchmarks.in_place [--shape SHAPE] [--variants VARIANT,...] [--repeats N] [--json FILE]

Variants of a random model in a released shape are compared: the size of the file, the seconds from the start of generate.py to
the first output byte, the memory besides the mapped file (the peak of RssAnon, of which importing torch takes 0.15 GiB), and
the tokens per second after the first byte. The table shows medians. Runs on Linux only.

    DTYPE            variant: a .safetensors file in this dtype
    DTYPE/pth        variant: a bfloat16 .pth file, converted to this dtype at each start
    DTYPE/convert    variant: `timemix convert` from that .pth to a .safetensors file, with the seconds in total and the memory

The starts alternate with a process that only imports torch and reads the largest file: the lower bound. The last line
of standard output is the result as JSON.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import tables
from benchmarks._main import run_program
from benchmarks._random_model import SHAPES, random_checkpoint
from benchmarks.first_token import ROOT
from kernels.arguments import Parser, at_least, some_of
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.checkpoint.files import write_checkpoint

STARTS = ("bfloat16", "bfloat16/pth", "int8", "int8/pth", "int4", "int4/pth")
VARIANTS = (*STARTS, "int8/convert", "int4/convert")
LOWER_BOUND = "import torch, read"
READ = """import sys, torch
buffer = bytearray(2**26)
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.readinto(buffer):
        pass
print(".", flush=True)"""
PROMPT = "The first thing that"
NEW_TOKENS = 64
INTERVAL = 0.01                          # seconds between two samples of a process's memory
GIB = 2**30


class Start(NamedTuple):
    """The measurements of one start.

    Attributes:
        first_byte: seconds to the first output byte.
        memory: peak of RssAnon in bytes.
        tokens_per_second: rate after the first byte.
    """

    first_byte: float
    memory: int
    tokens_per_second: float = 0.0


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.in_place", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--variants", type=some_of(VARIANTS), default=STARTS, metavar="VARIANT,...",
                        help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N")
    parser.add_argument("--tokens", type=at_least(2), default=NEW_TOKENS, metavar="N", help="tokens of each text")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="folder for temporary files; default: the system's")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = {variant: _write(Path(folder), args.shape, variant) for variant in args.variants}
        starts = _measure(files, Path(folder), args.repeats, args.tokens)
        report = {"machine": hardware.describe("cpu"), "shape": args.shape,
                  "variants": {variant: _summary(files.get(variant), each) for variant, each in starts.items()}}
    print(tables.in_place(report, aligned), flush=True)
    publish(report, args.json)


def _write(folder: Path, shape: str, variant: str) -> Path:
    """Writes the file that a variant reads, and returns its path. All variants with a suffix share one .pth file."""
    dtype, _, suffix = variant.partition("/")
    suffix = suffix and "pth"
    path = folder / (f"model.{suffix}" if suffix else f"{dtype}.safetensors")
    if not path.exists():
        write_checkpoint(random_checkpoint(shape), path, None if suffix else dtype)
        print(f"{path.name}: {path.stat().st_size / GIB:.2f} GiB", file=sys.stderr, flush=True)
    return path


def _measure(files: dict[str, Path], folder: Path, repeats: int, tokens: int) -> dict[str, list[Start]]:
    largest = max(files.values(), key=lambda file: file.stat().st_size)
    read = [sys.executable, "-c", READ, str(largest)]
    starts = defaultdict(list)
    for turn in range(repeats + 1):      # the first start fills the caches
        measured = {LOWER_BOUND: _measure_start(read, folder, 0, 0)}
        for variant, file in files.items():
            dtype, _, suffix = variant.partition("/")
            if suffix == "convert":
                target = folder / "converted.safetensors"
                target.unlink(missing_ok=True)
                convert = [sys.executable, "-m", "rwkv.tools.convert", str(file), str(target), "--dtype", dtype]
                measured[variant] = _measure_start(convert, folder, 0, 0, wait=True)
                continue
            generate = [sys.executable, "generate.py", f"checkpoint={file}", "tokenizer=world", f"prompt={PROMPT}",
                        f"max_new_tokens={tokens}", f"dtype={dtype}", "device=cpu"]
            measured[variant] = _measure_start(generate, folder, len(PROMPT), tokens)
        if turn:
            for variant, start in measured.items():
                starts[variant].append(start)
    return starts


def _summary(file: Path | None, starts: list[Start]) -> dict[str, float]:
    first_bytes, memory, speeds = zip(*starts, strict=True)
    return {"file_gib": file.stat().st_size / GIB if file else 0.0, "first_byte_s": median(first_bytes),
            "beside_file_gib": median(memory) / GIB, "tokens_per_second": median(speeds)}


def _measure_start(command: list[str], home: Path, echoed: int, tokens: int, wait: bool = False) -> Start:
    """Runs a command to its end, and returns its measurements.

    Args:
        echoed: number of bytes that the command prints before the generated text.
        wait: True if first_byte is the time to the end of the command.
    """
    environment = os.environ | {"HOME": str(home)}
    began = time.perf_counter()
    first = last = read = peak = 0.0
    with (tempfile.TemporaryFile() as errors,
          subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors) as process):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        while process.poll() is None:
            part = process.stdout.read()
            if part:
                read += len(part)
                last = time.perf_counter()
                first = first or (last if read > echoed else 0.0)
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(INTERVAL)
        if process.returncode or not (first or wait):
            errors.seek(0)
            sys.exit(f"the command failed or printed no output: {' '.join(command)}\n{errors.read().decode(errors='replace')}")
    if wait:
        return Start(time.perf_counter() - began, int(peak))
    return Start(first - began, int(peak), (tokens - 1) / (last - first) if last > first else 0.0)


def _anonymous_bytes(pid: int) -> int:
    try:
        match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return 1024 * int(match[1]) if match else 0


if __name__ == "__main__":
    run_program(main)
