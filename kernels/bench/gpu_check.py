"""python3 -m kernels.bench.gpu_check OUT_DIR: everything that needs a CUDA device, in one command.

The parts are the tests of kernels/, every operator's benchmark, a short training run of RWKV-4 and of RWKV-7 with each of
their kernels that runs there, and a run of each that is then sampled, evaluated and tuned; train.py and the others are started
as programs, and nothing of them is imported. Each command has a time limit; a failing part does not stop the others.
OUT_DIR gets summary.json (for each part: ok, seconds, the last lines of its output), log.txt (all output), figures if
matplotlib is installed, and for each operator the benchmark's data OP.json; copied to benchmarks/results/OP-cuda.json, they
appear in the README's tables.
Exit status: 0 all parts are ok, 1 a part failed, 2 no CUDA device.

--device cpu tries the same on a CPU. --only tests,bench-timex,train runs some of the parts; summary.json keeps the others'
earlier results, so that several short calls add up to one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.arguments import path_of
from kernels.bench import plot
from kernels.bench.results import exit_status
from kernels.bench.text import aligned
from kernels.machine import hardware
from kernels.registry import load, operators, why_not
from kernels.select import folder, selectable

TAIL_LINES = 20
MODELS = {"wkv4": "tiny", "wkv7": "rwkv7_tiny"}          # the model that trains with each kernel of the operator
TUNED = {"tiny": ("full", "lora"), "rwkv7_tiny": ("full", "lora", "state")}
STEPS = 20                               # of each training run


@dataclass(frozen=True)
class Part:
    """Commands, each run if those before it succeeded, and the time limit of each."""

    name: str
    commands: list[list[str]]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and the lines of its output."""

    part: str
    ok: bool
    status: str
    seconds: float
    output: list[str]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none: run it where there is one, or try it with --device cpu")
        return 2
    args.out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, (args.out_dir / "log.txt").open("a", encoding="utf-8") as log:
        every = list(parts(args.device, args.out_dir, Path(scratch)))
        unknown = [name for name in args.only if not any(_asked(part.name, [name]) for part in every)]
        if unknown:
            print(f"gpu-check has no part {unknown[0]!r}; there are: {', '.join(part.name for part in every)}")
            return 2
        chosen = [part for part in every if _asked(part.name, args.only)]
        outcomes = []
        for part in chosen:
            outcomes.append(outcome(part))
            log.write(f"\n=== {part.name}: {outcomes[-1].status}\n" + "\n".join(outcomes[-1].output) + "\n")
            print(f"{part.name}: {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s", flush=True)
    return report(outcomes, args.device, args.out_dir)


def parts(device: str, out_dir: Path, scratch: Path) -> Iterator[Part]:
    """All parts; each runs in a process of its own, because Taichi has one arch per process and a kernel may crash it."""
    python = sys.executable
    results = out_dir.absolute()
    tests = [python, "-m", "pytest", "tests/kernels", "--device", device, "-m", "not soak or implementation"]
    yield Part("tests", [[*tests, "-W", "default"]], 560)        # other versions of torch may warn where ours does not
    for op in operators():
        bench = [python, "-m", "kernels.bench", op, "--device", device, "--sweep"]
        figures = ["--plot", str(results)] if plot.available() else []
        yield Part(f"bench-{op}", [[*bench, "--json", f"{results / op}.json", *figures]], 560)
    for operator, model in MODELS.items():
        for name in trainable(operator, device):
            folder = scratch / model / name
            yield Part(f"train-{model}-{name}", [training(device, scratch, folder, model=model, kernel=name)], 180)
        yield Part(f"use-{model}", used(device, scratch, model), 180)


def training(device: str, scratch: Path, folder: Path, **options: str) -> list[str]:
    """train.py for some steps, with these options beside those that all runs have."""
    every = {"trainer": "gpu" if device == "cuda" else "cpu", "logger": "csv", "trainer.max_steps": STEPS,
             "trainer.sample_tokens": 40, "data.tokenizer": "byte", "data.val_fraction": 0.005,
             "data.cache_dir": scratch / "cache", "out_dir": folder}
    return [sys.executable, "train.py", *(f"{key}={value}" for key, value in (every | options).items())]


def used(device: str, scratch: Path, model: str) -> list[list[str]]:
    """A model trained, sampled in float32 and bfloat16, evaluated and tuned."""
    python = sys.executable
    folder = scratch / model / "used"
    saved = [f"checkpoint={folder}", f"device={device}"]
    text = {"init_from": str(folder), "data": "text", "data.path": "README.md", "data.val_fraction": "0.05"}
    return [training(device, scratch, folder, model=model),
            *([python, "generate.py", *saved, "prompt=def f(", "num_samples=3", "max_new_tokens=40", f"dtype={dtype}"]
              for dtype in ("float32", "bfloat16")),
            [python, "-m", "rwkv.tools.evaluate", *saved, "data.path=README.md"],
            *(training(device, scratch, scratch / model / tune, tune=tune, **text) for tune in TUNED[model])]


def trainable(operator: str, device: str) -> list[str]:
    ops = {name: folder(operator, name) for name in selectable(operator)}
    return [name for name, op in ops.items() if why_not(op, name, device) is None and load(op, name).REQUIRES.wkv]


def outcome(part: Part) -> Outcome:
    """Runs one part until it ends or a command fails or reaches its limit."""
    start = time.perf_counter()
    status = "ok"
    lines: list[str] = []
    for command in part.commands:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            try:
                code = subprocess.run(command, cwd=hardware.ROOT, stdout=output, stderr=subprocess.STDOUT,
                                      stdin=subprocess.DEVNULL, timeout=part.limit_s, check=False).returncode
                status = "ok" if code == 0 else f"failed with status {code}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {part.limit_s:.0f} s"
            output.seek(0)
            lines += [f"$ {' '.join(command)}", *output.read().splitlines()]
        if status != "ok":
            break
    return Outcome(part.name, status == "ok", status, time.perf_counter() - start, lines)


def report(outcomes: list[Outcome], device: str, out_dir: Path) -> int:
    """Writes summary.json, prints a table of the parts, and returns the exit status."""
    file = out_dir / "summary.json"
    parts = earlier(file) | {outcome.part: asdict(outcome) | {"output": outcome.output[-TAIL_LINES:]} for outcome in outcomes}
    ok = all(part["ok"] for part in parts.values())
    summary = {"ok": ok, "device": device, "machine": hardware.describe(device), "parts": list(parts.values())}
    file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    rows = [["part", "status", "s"], *([name, part["status"], f"{part['seconds']:.0f}"] for name, part in parts.items())]
    print(f"\n{aligned(rows, left=2)}\n\n{'all well' if ok else 'NOT all well'}: {out_dir}")
    return 0 if ok else 1


def earlier(file: Path) -> dict[str, dict[str, Any]]:
    """The parts in the summary of an earlier call, perhaps with another --only."""
    return {part["part"]: part for part in json.loads(file.read_text(encoding="utf-8"))["parts"]} if file.exists() else {}


def _asked(name: str, only: list[str]) -> bool:
    return not only or any(name == asked or name.startswith(f"{asked}-") for asked in only)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m kernels.bench.gpu_check",
                                     description="Everything that needs a GPU, at once.")
    parser.add_argument("out_dir", type=path_of)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PART,...",
                        help="tests, bench, bench-OP, train, train-MODEL, train-MODEL-NAME, use, use-MODEL")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(exit_status(main))
