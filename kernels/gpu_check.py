"""python3 -m kernels.gpu_check OUT_DIR: on a machine with a CUDA device, everything that needs one, in one command.

The conformance tests, both benchmarks, and a short training run with each kernel that runs there; train.py is started as
any user would start it, and nothing of it is imported. Each part has a time limit, and one that fails does not stop the
others. OUT_DIR gets summary.json (each part: ok or not, seconds, the end of its output), log.txt (everything that the parts
printed), timex.json and wkv.json (the benchmarks' data). Exit status: 0 all well, 1 a part failed, 2 no CUDA device.

--device cpu tries the same on a CPU; --only tests,bench-timex,bench-wkv,train runs some of the parts.
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

import torch

from kernels import _machine
from kernels._text import aligned
from kernels.registry import load, names, why_not
from kernels.select import selectable

TAIL_LINES = 20


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and the lines that it printed."""

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
    with tempfile.TemporaryDirectory() as scratch, (args.out_dir / "log.txt").open("w", encoding="utf-8") as log:
        chosen = [part for part in parts(args.device, args.out_dir, Path(scratch), args.steps) if _asked(part.name, args.only)]
        outcomes = []
        for part in chosen:
            outcomes.append(outcome(part))
            log.write(f"\n=== {part.name}: {' '.join(part.command)}\n" + "\n".join(outcomes[-1].output) + "\n")
            print(f"{part.name}: {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s", flush=True)
    return report(outcomes, args.device, args.out_dir)


def parts(device: str, out_dir: Path, scratch: Path, steps: int) -> Iterator[Part]:
    """Every part is a process of its own: Taichi has one arch per process, and a crash takes nothing else along."""
    python, results = sys.executable, out_dir.absolute()
    yield Part("tests", [python, "-m", "pytest", "tests/test_timex.py", "tests/test_wkv.py", "-W", "default",
                         "--device", device], 300)   # that machine's versions may warn of what ours do not
    for op in ("timex", "wkv"):
        bench = [python, "-m", "kernels.bench", op, "--device", device]
        yield Part(f"bench-{op}", [*bench, "--json", f"{results / op}.json"], 300)
    run = {"trainer": "gpu" if device == "cuda" else "cpu", "logger": "csv", "trainer.max_steps": steps,
           "trainer.sample_tokens": 40, "data.tokenizer": "byte", "data.val_fraction": 0.005,
           "data.cache_dir": scratch / "cache"}
    for name in trainable(device):
        options = {"kernel": name, "out_dir": scratch / name} | run
        yield Part(f"train-{name}", [python, "train.py", *(f"{key}={value}" for key, value in options.items())], 180)


def trainable(device: str) -> list[str]:
    """The kernels that a model can be trained with on `device`."""
    ops = {name: "wkv" if name in names("wkv") else "timex" for name in selectable()}
    return [name for name, op in ops.items() if why_not(op, name, device) is None and load(op, name).REQUIRES.wkv]


def outcome(part: Part) -> Outcome:
    """Runs one part to its end or its limit."""
    start, limit = time.perf_counter(), part.limit_s
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            code = subprocess.run(part.command, cwd=_machine.ROOT, stdout=output, stderr=subprocess.STDOUT,
                                  stdin=subprocess.DEVNULL, timeout=limit, check=False).returncode
            status = "ok" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    return Outcome(part.name, status == "ok", status, time.perf_counter() - start, lines)


def report(outcomes: list[Outcome], device: str, out_dir: Path) -> int:
    """Writes summary.json, prints the table; the exit status."""
    ok = all(outcome.ok for outcome in outcomes)
    short = [asdict(outcome) | {"output": outcome.output[-TAIL_LINES:]} for outcome in outcomes]
    summary = {"ok": ok, "device": device, "machine": _machine.describe(device), "parts": short}
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    rows = [["part", "status", "s"], *([outcome.part, outcome.status, f"{outcome.seconds:.0f}"] for outcome in outcomes)]
    print(f"\n{aligned(rows, left=2)}\n{'all well' if ok else 'NOT all well'}: {out_dir}")
    return 0 if ok else 1


def _asked(name: str, only: list[str]) -> bool:
    return not only or any(name == asked or name.startswith(f"{asked}-") for asked in only)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m kernels.gpu_check", description="Everything that needs a GPU, at once.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PART,...",
                        help="tests, bench, bench-timex, bench-wkv, train, train-NAME")
    parser.add_argument("--steps", type=int, default=20, help="steps of each training run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
