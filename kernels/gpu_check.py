"""python3 -m kernels.gpu_check OUT_DIR: on a machine with a CUDA device, everything that needs one, in one command.

The conformance tests, every operator's benchmark, and a short training run with each kernel that runs there; train.py is
started as any user would start it, and nothing of it is imported. Each part has a time limit, and one that fails does not
stop the others. OUT_DIR gets summary.json (each part: ok or not, seconds, the end of its output; the verdicts of
kernels/verdicts.py), log.txt (everything that the parts printed), timex.json, wkv.json and the other operators' (the
benchmarks' data: copied to benchmarks/results/ as timex-cuda.json and so on, they are in the READMEs' tables), and figures
where matplotlib is installed.
Exit status: 0 all parts ran well, whatever the verdicts; 1 a part failed, 2 no CUDA device.

--device cpu tries the same on a CPU, --shape with small benchmarks of timex and wkv. --only tests,bench-timex,train runs
some of the parts; what OUT_DIR's summary.json says of the others stays, so that several short calls add up to one. --peer-ms
FORWARD,BACKWARD gives what RWKV-CUDA's own v3 took, run by hand on the same GPU at B=32 C=768 T=768 (its
depthwise_conv1d/run.py prints both).
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

from kernels import _machine, plot
from kernels._results import read
from kernels._subjects import subject_of
from kernels._text import aligned
from kernels.registry import load, names, operators, why_not
from kernels.select import selectable
from kernels.verdicts import as_data, text, verdicts

TAIL_LINES = 20
OVER_TIME = ("B", "C", "T")
TESTS = ("test_cuda*.py", "test_triton*.py")                 # beside every operator's own


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
    with tempfile.TemporaryDirectory() as scratch, (args.out_dir / "log.txt").open("a", encoding="utf-8") as log:
        every = parts(args.device, args.out_dir, Path(scratch), args.steps, args.shape)
        chosen = [part for part in every if _asked(part.name, args.only)]
        outcomes = []
        for part in chosen:
            outcomes.append(outcome(part))
            log.write(f"\n=== {part.name}: {' '.join(part.command)}\n" + "\n".join(outcomes[-1].output) + "\n")
            print(f"{part.name}: {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s", flush=True)
    return report(outcomes, args.device, args.out_dir, args.peer_ms)


def parts(device: str, out_dir: Path, scratch: Path, steps: int, shape: str | None = None) -> Iterator[Part]:
    """Every part is a process of its own: Taichi has one arch per process, and a crash takes nothing else along."""
    python, results = sys.executable, out_dir.absolute()
    patterns = (*(f"test_{op}.py" for op in operators()), *TESTS)
    tests = [str(path) for pattern in patterns for path in sorted((_machine.ROOT / "tests").glob(pattern))]
    yield Part("tests", [python, "-m", "pytest", *tests, "-W", "default",      # that machine's versions may warn of what ours
                         "--device", device], 560)                             # do not
    for op in operators():
        small = ["--shape", shape] if shape and subject_of(op).AXES == OVER_TIME else []
        bench = [python, "-m", "kernels.bench", op, "--device", device, *(small or ["--sweep"])]
        figures = [] if plot.why_not(results) else ["--plot", str(results)]
        yield Part(f"bench-{op}", [*bench, "--json", f"{results / op}.json", *figures], 560)
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


def report(outcomes: list[Outcome], device: str, out_dir: Path, peer_ms: tuple[float, float] | None = None) -> int:
    """Writes summary.json, prints the parts and the verdicts; the exit status."""
    file = out_dir / "summary.json"
    parts = earlier(file) | {outcome.part: asdict(outcome) | {"output": outcome.output[-TAIL_LINES:]} for outcome in outcomes}
    found = verdicts(read([path for op in operators() if (path := out_dir / f"{op}.json").exists()]), peer_ms)
    ok = all(part["ok"] for part in parts.values())
    summary = {"ok": ok, "device": device, "machine": _machine.describe(device), "verdicts": as_data(found),
               "parts": list(parts.values())}
    file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    rows = [["part", "status", "s"], *([name, part["status"], f"{part['seconds']:.0f}"] for name, part in parts.items())]
    print(f"\n{aligned(rows, left=2)}\n\n{text(found)}\n\n{'all well' if ok else 'NOT all well'}: {out_dir}")
    return 0 if ok else 1


def earlier(file: Path) -> dict[str, dict[str, Any]]:
    """The parts that an earlier call with another --only left in the summary."""
    return {part["part"]: part for part in json.loads(file.read_text(encoding="utf-8"))["parts"]} if file.exists() else {}


def _asked(name: str, only: list[str]) -> bool:
    return not only or any(name == asked or name.startswith(f"{asked}-") for asked in only)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m kernels.gpu_check", description="Everything that needs a GPU, at once.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PART,...",
                        help="tests, bench, bench-OP, train, train-NAME")
    parser.add_argument("--steps", type=int, default=20, help="steps of each training run")
    parser.add_argument("--shape", metavar="B,C,T", help="this shape alone of timex and wkv, for a trial")
    parser.add_argument("--peer-ms", type=_two, metavar="FORWARD,BACKWARD", help="RWKV-CUDA's own v3 on the same GPU")
    return parser.parse_args(argv)


def _two(text: str) -> tuple[float, float]:
    forward, backward = (float(number) for number in text.split(","))
    return forward, backward


if __name__ == "__main__":
    sys.exit(main())
