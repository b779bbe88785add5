"""Runs all checks and measurements of a GPU in ten minutes.

    python -m benchmarks.gpu_check OUT [--budget SECONDS] [--only PART,...] [--device cpu]

The program is made for a GPU machine that is available for only ten minutes. The parts run in order of value, each in a process
with a time limit. A part that does not fit into the remaining budget is not started. Each measurement is written immediately as
a line of OUT/results.jsonl, so that a stopped part keeps its measurements. OUT/log.txt has the output of all parts. Several
calls with different --only may use the same folder.

    machine     rates of matrix products and of a copy; the host's time for one operation
    right       the fused layers, the loss and decoding compared with PyTorch's formulas, generated tokens with those of a CPU,
                and every kernel with float64
    train       training steps: tokens/s, host time, launches, peak memory, the longest kernels; in bf16-mixed, float32 and
                tf32, with CUDA graphs, and without the fused layers
    decode      a step of 1 to 512 rows with sampling, in bfloat16, int8, int4 and float32; prefill
    wkv7        forward and backward of every kernel      wkv4    the same for RWKV-4
    serve       1, 16 and 64 concurrent requests: by the engine alone, and for clients of serve.py
    programs    train.py, generate.py, chat.py, evaluate and serve.py, as a user calls them
    resume      a run resumed from a checkpoint is bit-identical to the uninterrupted run
    peers       flash-linear-attention, if it is installed; published rates of other programs are in PUBLISHED
    shards      trainer=ddp, trainer=fsdp and activation checkpointing on one GPU
    compiled    training steps with trainer.compile=true
    tests       the tests of kernels/

The exit status is 0 if all parts succeeded and every result is right, 2 without a CUDA device or for a wrong argument, else 1.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from benchmarks._main import run_program
from kernels.arguments import path_of
from kernels.bench.text import aligned
from kernels.machine.hardware import ROOT, describe

RESULTS, LOG = "results.jsonl", "log.txt"
TAIL_LINES = 6                           # last lines of the log, shown for a failed part
LEAST_S = 5.0                            # a part is not started if less time is left
BUDGET_S = 540.0                         # the ten minutes of make gpu-check, less one in reserve
PATIENCE = {"cuda": 1.0, "cpu": 4.0}     # factors of BUDGET_S and of the limits of parts
DEADLINE = "--deadline"                  # option of a part's process, which is stopped after this many seconds
PUBLISHED = (                            # rates published by the authors, for other GPUs
    {"peer": "RWKV-LM train_temp", "shape": "rwkv7 12x768, 16 x 512", "on": "RTX 5090", "ktok_s": 99.5},
    {"peer": "RWKV-LM", "shape": "rwkv7 7.2b", "on": "32 H100", "mfu": 0.37},
    {"peer": "RWKV-LM", "kernel": "wkv7", "shape": [8, 4096, 64, 64], "on": "H100", "forward_and_backward_ms": 17},
    {"peer": "wind_rwkv", "kernel": "wkv7", "shape": [8, 4096, 64, 64], "on": "H100", "forward_and_backward_ms": 8},
    {"peer": "flash-linear-attention", "kernel": "wkv7", "shape": [8, 4096, 64, 64], "on": "H100",
     "forward_and_backward_ms": 64},
    {"peer": "Albatross", "decode": "rwkv7 7.2b fp16", "on": "RTX 5090", "tok_s": {"1": 145, "320": 9650, "960": 10250}})


TRAINING = ("lightning", "torchdata")
PROGRAMS = (*TRAINING, "hydra", "omegaconf", "antlr4")
SERVER = ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "llguidance")


class Part(NamedTuple):
    """A part of benchmarks/_gpu_parts, with a time limit in seconds and the packages that it requires.

    The limits add up to more than the budget, because few parts reach their limit. On a CPU, which may be busy, the limits are
    multiplied by PATIENCE.
    """

    name: str
    limit_s: float
    packages: tuple[str, ...] = ()


PARTS = (Part("machine", 40), Part("right", 110), Part("train", 140, TRAINING), Part("decode", 110), Part("wkv7", 50),
         Part("serve", 80), Part("programs", 100, PROGRAMS), Part("resume", 80, PROGRAMS), Part("wkv4", 40), Part("peers", 60),
         Part("shards", 60, PROGRAMS), Part("compiled", 80, TRAINING), Part("tests", 240))


class Rows:
    """A file of results. Each row is on disk when `add` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS

    def add(self, **row: Any) -> None:
        complete = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if complete else "\n") + json.dumps(row) + "\n")     # starts a new line after a truncated line
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Returns the rows so far, without truncated lines."""
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
        rows = []
        for line in filter(None, lines):
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    unknown = [name for name in args.only if name not in {part.name for part in PARTS}]
    if unknown:
        print(f"gpu-check has no part {unknown[0]!r}; the parts are: {', '.join(part.name for part in PARTS)}")
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check requires a CUDA device, but torch finds none: use a GPU machine, or --device cpu for a trial")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.out)
    rows.add(part="call", machine=describe(args.device), device=args.device)
    chosen = [part for part in PARTS if not args.only or part.name in args.only]
    if missing := not_installed([*PROGRAMS, *SERVER]):
        print(f"not installed: {missing}", flush=True)
    budget = PATIENCE[args.device] * BUDGET_S if args.budget is None else args.budget
    print(f"at most {budget:.0f} s for {', '.join(part.name for part in chosen)}; results go to {rows.path}", flush=True)
    end = time.monotonic() + budget
    for part in chosen:
        command = [sys.executable, "-m", "benchmarks._gpu_parts", part.name]
        run_part(part, command, args.out, args.device, end - time.monotonic())
    return report(rows)


def run_part(part: Part, command: list[str], out: Path, device: str, left_s: float) -> None:
    """Runs a part within its limit and the remaining seconds, and adds a row with the status of the part."""
    rows = Rows(out)
    limit = min(PATIENCE[device] * part.limit_s, left_s)
    missing = not_installed(part.packages)
    reason = f"not installed: {missing}" if missing else "the budget is spent" if limit < LEAST_S else ""
    if reason:
        rows.add(part=part.name, status=f"not started: {reason}")
        print(f"{part.name}: not started, {reason}", flush=True)
        return
    start = time.monotonic()
    with (out / LOG).open("ab") as log:
        log.write(f"\n=== {part.name}\n".encode())
        log.flush()
        before = log.tell()
        status = run_command([*command, str(out), "--device", device, DEADLINE, str(limit)], limit, log)
    rows.add(part=part.name, status=status, seconds=round(time.monotonic() - start, 1))
    print(f"{part.name}: {status} in {time.monotonic() - start:.0f} s", flush=True)
    if status != "ok":
        with (out / LOG).open("rb") as log:
            log.seek(before)
            print("\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]), flush=True)


def run_command(command: list[str], limit_s: float, log: BinaryIO) -> str:
    """Runs a command, and returns "ok", "failed with status N" or "stopped after N s".

    In the end the process group is killed, because a surviving process would slow down the next part.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        code = process.wait(timeout=limit_s)
        return "ok" if code == 0 else f"failed with status {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def not_installed(packages: Sequence[str]) -> str:
    """Lists the packages that are not installed."""
    return ", ".join(package for package in packages if importlib.util.find_spec(package) is None)


def report(rows: Rows) -> int:
    """Prints the status of each part, the training steps and the wrong results. Returns the exit status."""
    all_rows = rows.read()
    statuses = {row["part"]: row for row in all_rows if "status" in row and "program" not in row}
    wrong = [row for row in all_rows if row.get("wrong") or "error" in row]
    table = [["part", "status", "s", "results"]]
    for name, row in statuses.items():
        results = sum(other.get("part") == name and "status" not in other for other in all_rows)
        table.append([name, row["status"], f"{row.get('seconds', 0):.0f}", str(results)])
    print(f"\n{aligned(table, left=2)}\n")
    steps = [[row["model"], row["way"], f"{row['ktok_s']:.1f}", f"{row['ms']:.1f}", str(row.get("launches", "")),
              f"{row['peak_mb']:,.0f}"] for row in all_rows if row.get("part") == "train" and "ktok_s" in row]
    if steps:
        print(aligned([["training", "", "thousand tokens/s", "ms", "launches", "peak MB"], *steps], left=2) + "\n")
    for row in wrong:
        print(f"WRONG  {json.dumps({key: value for key, value in row.items() if key not in ('errors', 'tail')})[:300]}")
    well = not wrong and all(row["status"] == "ok" for row in statuses.values())
    print(f"{'all well' if well else 'NOT all well'}: {rows.path}")
    return 0 if well else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Runs all GPU checks.")
    parser.add_argument("out", type=path_of)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial run, with small shapes")
    parser.add_argument("--budget", type=float,
                        help=f"seconds for all parts; default: {BUDGET_S:.0f}, on a CPU {PATIENCE['cpu'] * BUDGET_S:.0f}")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PART,...",
                        help=", ".join(part.name for part in PARTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
