"""python -m benchmarks.loading [--peers PYTHON] [--repeats N] [--json FILE]

Time and peak memory of loading a float16 .pth with the shape of the 169M model as float32 and bfloat16, and of converting it,
beside PyPI's `rwkv` and transformers (`make peers` creates their environment). Each job is a process of its own, in turns;
medians. First every converted weight is read back and compared. Linux only (/proc). The last line of standard output is the
result as JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import tables
from benchmarks._main import run_program
from kernels.arguments import Parser, at_least, program
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.checkpoint.files import checkpoint_of, read_checkpoint, write_checkpoint
from rwkv.config import ModelConfig
from rwkv.model import rwkv4

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SHAPE = ModelConfig(n_layer=12, n_embd=768, ctx_len=1024)
VOCAB_SIZE = 50277
PEER_JOBS = {"rwkv": ".pth", "rwkv-convert": ".pth", "transformers": ""}
OUR_JOBS = {"timemix": ".pth", "timemix-convert": ".pth"}


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.pth"
        write_checkpoint(_random_checkpoint(), source, "float16")
        write_checkpoint(read_checkpoint(source), source.with_suffix(""))
        _verify(source)
        report = {"machine": hardware.describe("cpu"), "weights_bytes": read_checkpoint(source).weights.nbytes,
                  "results": _measure(source, args.peers, args.repeats)}
    print(tables.loading(report, aligned), flush=True)
    publish(report, args.json)


def _random_checkpoint() -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = rwkv4.shapes(SHAPE, VOCAB_SIZE)
    return checkpoint_of({name: torch.randn(shape, generator=generator) / 50 for name, shape in shapes.items()})


def _verify(source: Path) -> None:
    """Asserts that every tensor, converted to float32 and read back, equals its float16 original."""
    converted = source.with_name("verified.safetensors")
    write_checkpoint(read_checkpoint(source), converted, "float32")
    before = read_checkpoint(source).weights
    after = read_checkpoint(converted).weights
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    converted.unlink()


def _measure(source: Path, peers: Path, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    jobs = [(job, sys.executable, suffix) for job, suffix in OUR_JOBS.items()]
    jobs += [(job, str(peers), suffix) for job, suffix in PEER_JOBS.items()] if peers.exists() else []
    for _ in range(repeats):
        for dtype in ("float32", "bfloat16"):
            for job, python, suffix in jobs:
                runs[f"{job} {dtype}"].append(_run(python, job, source.with_suffix(suffix), dtype))
    return {name: {key: median(run[key] for run in found) for key in found[0]} | {"weights_bytes": _bytes(name.split()[1])}
            for name, found in runs.items()}


def _run(python: str, job: str, source: Path, dtype: str) -> dict[str, float]:
    script = Path(__file__).with_name("_loading_job.py")
    target = source.with_name("converted.pth")
    ours: dict[str, Any] = {"env": {"PYTHONPATH": str(ROOT)}} if job in OUR_JOBS else {}
    command = [python, str(script), job, str(source), str(target), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **ours)
    if done.returncode:
        sys.exit(f"{job} failed:\n{done.stderr}")
    target.unlink(missing_ok=True)
    return json.loads(done.stdout.splitlines()[-1])


def _bytes(dtype: str) -> int:
    elements = sum(torch.Size(shape).numel() for shape in rwkv4.shapes(SHAPE, VOCAB_SIZE).values())
    return elements * getattr(torch, dtype).itemsize


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.loading", __doc__)
    parser.add_argument("--peers", type=program, default=PEERS, metavar="PYTHON",
                        help="of an environment with PyPI's rwkv and transformers")
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
