"""Measures the time from the start of generate.py to its first token.

    python -m benchmarks.first_token [--repeats N] [--json FILE]

Each measurement starts a new process, which reads a bfloat16 file in the shape of the 169M model and a short prompt. These
processes alternate with a process that only imports torch and reads the file into memory: the lower bound. The table
shows medians. "cold" means without Taichi's cache of compiled kernels, "packed" that the file itself is in int4. Runs on Linux
only. The last line of standard output is the result as JSON.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from benchmarks import tables
from benchmarks._main import run_program
from kernels.arguments import Parser, at_least
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.checkpoint.files import checkpoint_of, write_checkpoint
from rwkv.config import ModelConfig
from rwkv.model import rwkv4

ROOT = Path(__file__).parent.parent
SHAPE, VOCAB_SIZE = ModelConfig(n_layer=12, n_embd=768, ctx_len=1024), 65536
PROMPT = "The first thing that"
READ = """\
import sys, torch
torch.from_file(sys.argv[1], size=int(sys.argv[2]), dtype=torch.uint8).clone()
print(".", flush=True)
"""
DTYPES = ("float32", "bfloat16", "int8", "int4")


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.first_token", __doc__)
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        seconds = _measure(Path(folder), args.repeats)
    report = {"machine": hardware.describe("cpu"), "seconds": seconds}
    print(tables.first_token(report, aligned), flush=True)
    publish(report, args.json)


def _measure(folder: Path, repeats: int) -> dict[str, float]:
    file = folder / "model.pth"
    packed = folder / "packed.safetensors"
    generator = torch.Generator().manual_seed(0)
    checkpoint = checkpoint_of({name: torch.randn(shape, generator=generator) / 50
                                for name, shape in rwkv4.shapes(SHAPE, VOCAB_SIZE).items()})
    write_checkpoint(checkpoint, file, "bfloat16")
    write_checkpoint(checkpoint, packed, "int4")
    read = [sys.executable, "-c", READ, str(file), str(file.stat().st_size)]
    seconds = defaultdict(list)
    for turn in range(repeats + 1):      # the first start fills Taichi's cache and the page cache
        times = {"import torch, read": _seconds_to_first_output(read, folder)}
        times |= {dtype: _seconds_to_first_output(_generate(file, dtype), folder) for dtype in DTYPES}
        times["int4, packed"] = _seconds_to_first_output(_generate(packed, "int4"), folder)
        times["float32, cold"] = _seconds_to_first_output(_generate(file, "float32"), folder / f"cold{turn}")
        if turn:
            for name, s in times.items():
                seconds[name].append(s)
    return {name: median(times) for name, times in seconds.items()}


def _generate(file: Path, dtype: str) -> list[str]:
    return [sys.executable, "generate.py", f"checkpoint={file}", "tokenizer=world", f"prompt={PROMPT}", "max_new_tokens=20",
            f"dtype={dtype}"]


def _seconds_to_first_output(command: list[str], home: Path) -> float:
    """Returns the seconds from the start of a process to its first output after the prompt.

    `home` is the folder of the process's caches.
    """
    home.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"HOME": str(home)}
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        echoed = len(PROMPT) if "generate.py" in command else 0
        read = b""
        while len(read) <= echoed and (part := os.read(process.stdout.fileno(), 1 << 16)):
            read += part
        seconds = time.perf_counter() - began
        process.communicate()
    if process.returncode or len(read) <= echoed:
        sys.exit(f"the command failed or printed no output: {' '.join(command)}")
    return seconds


if __name__ == "__main__":
    run_program(main)
