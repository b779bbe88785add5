"""Measures the time of a training step in train.py, and how much of it the matrix products take.

    python -m benchmarks.training [--only NAME,...] [--losses STEPS] [--json FILE]

A training step in train.py, the bare step (without Lightning, loader, log and checkpoint) and its matrix products alone are
measured alternately. The table shows medians.

    float32, bfloat16          6 layers, 384 wide, 8192 tokens of vocabulary, 4 windows of 512 (not on Windows)
    rwkv7_float32, rwkv7_bfloat16      the same for RWKV-7
    losses, rwkv7_losses       the loss after --losses STEPS of these steps, in float32 and bf16-mixed; takes tens of minutes
    head                       the peak memory of a step with 65,536 tokens of vocabulary, with and without the chunked loss

On a CPU without fast bfloat16 products, the bfloat16 parts would take hundreds of times as long, and are skipped unless --only
names them. `around_a_step` is the time of a step between two checkpoints, plus 1/500 of a checkpoint's time, minus the time of
the bare step. Noise can make the difference negative. The last line of standard output is the result as JSON. --json FILE
updates the measured parts of FILE and keeps the others, each with its commit.
"""

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks import _turns
from benchmarks._main import measure_parts, run_program
from kernels.arguments import Parser, at_least, some_of
from kernels.bench.results import Report, output_file
from kernels.machine.cpu import why_slow
from rwkv.config import TrainerConfig

ROOT = Path(__file__).parent.parent
SHAPE = ["model.n_layer=6", "model.n_embd=384", "model.ctx_len=512", "data.vocab_size=8192", "data.batch_size=4",
         "data.val_fraction=0.002", "trainer.val_every=100000", "trainer.log_every=1"]
GENERATIONS = {"": "rwkv4", "rwkv7_": "rwkv7"}            # the prefix of a part's name
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}
PARTS = ("float32", "bfloat16", "rwkv7_float32", "rwkv7_bfloat16", "head", "losses", "rwkv7_losses")
IN_BFLOAT16 = ("bfloat16", "losses")     # suffixes of the parts that compute products in bfloat16
TOKENS = 4 * 512                         # per step in that shape
STEPS = {"32-true": 72, "bf16-mixed": 168}       # several turns
SAVED_EVERY, WARM = 8, 6
TURNS = {"32-true": 16.0, "bf16-mixed": 8.0}       # seconds, at least five steps


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        measure_parts(_parts(args, Path(scratch)), args.json)


def _parts(args: argparse.Namespace, scratch: Path) -> dict[str, Callable[[], Report]]:
    parts = {f"{prefix}{name}": lambda generation=generation, name=name: throughput(generation, PRECISIONS[name], scratch)
             for prefix, generation in GENERATIONS.items() for name in PRECISIONS}
    parts["head"] = lambda: {name: _median_of_three("head", name) for name in ("chunked", "whole")}
    if args.losses:
        parts |= {f"{prefix}losses": lambda generation=generation: losses(args.losses, generation, scratch)
                  for prefix, generation in GENERATIONS.items()}
    slow = why_slow(torch.bfloat16, torch.device("cpu"))
    if slow and not args.only:
        parts = {name: part for name, part in parts.items() if not name.endswith(IN_BFLOAT16)}
        print(f"without {', '.join(name for name in PARTS if name.endswith(IN_BFLOAT16))}: {slow}", flush=True)
    return {name: part for name, part in parts.items() if not args.only or name in args.only}


def throughput(generation: str, precision: str, scratch: Path) -> Report:
    """Returns the milliseconds of a step in train.py, of the bare step and of its products; tokens per second; and ratios."""
    out_dir = scratch / f"{generation}-{precision}"
    command = train_command(out_dir, *SHAPE, f"model.generation={generation}", f"trainer.precision={precision}",
                             f"trainer.max_steps={STEPS[precision]}",
                             f"trainer.checkpoint_every={SAVED_EVERY}")
    printed = _turns.run_alternately(command, scratch, _job_command("steps", generation, precision), ROOT, TURNS[precision])
    alone = [json.loads(line) for line in printed.splitlines() if line.endswith("}")][WARM:]
    ms = _step_times(out_dir) | {name: median(step[name] for step in alone) for name in ("bare", "matmuls")}
    return {"precision": precision, "ms": ms, "tok_per_sec": 1000 * TOKENS / ms["step"],
            "of_matmuls": ms["matmuls"] / ms["step"], "around_a_step": (ms["step"] + ms["saving"] - ms["bare"]) / ms["bare"]}


def _step_times(out_dir: Path) -> Report:
    ms = {int(row["step"]): 1000 * TOKENS / float(row["tok_per_sec"]) for row in metrics(out_dir) if row["tok_per_sec"]}
    steps = [ms[step] for step in ms if step > WARM and (step - 1) % SAVED_EVERY]    # a step's time includes the save before it
    saves = [ms[step] for step in ms if step > WARM and not (step - 1) % SAVED_EVERY]
    return {"step": median(steps), "saving": (median(saves) - median(steps)) / TrainerConfig().checkpoint_every}


def losses(steps: int, generation: str, scratch: Path) -> Report:
    """Returns the mean train/loss of the last tenth of the steps, by precision."""
    means = {}
    for name, precision in PRECISIONS.items():
        run = train(scratch / f"losses-{generation}-{name}", *SHAPE, f"model.generation={generation}",
                    f"trainer.precision={precision}", f"trainer.max_steps={steps}", "trainer.checkpoint_every=100000")
        means[name] = mean([float(row["train/loss"]) for row in run if row["train/loss"]][-(steps // 10):])
    return means


def train(out_dir: Path, *options: str) -> list[dict[str, str]]:
    """Trains a run, and returns the rows of its metrics.csv. The run becomes runs/latest in the parent of `out_dir`."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    _turns.run_to_end(train_command(out_dir, *options), out_dir.parent)
    return metrics(out_dir)


def train_command(out_dir: Path, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "logger=csv", "trainer=cpu", "trainer.sample_tokens=0",
            f"out_dir={out_dir.resolve()}", f"data.cache_dir={ROOT / '.cache'}", *map(_make_path_absolute, options)]


def _make_path_absolute(option: str) -> str:
    key, _, value = option.partition("=")
    return f"{key}={Path(value).resolve()}" if key == "data.path" and Path(value).exists() else option


def metrics(out_dir: Path) -> list[dict[str, str]]:
    with (out_dir / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _median_of_three(*arguments: str) -> Any:
    """Returns the result with the median peak of three runs, because the memory of a process varies by a fifth."""
    runs = [json.loads(_turns.run_to_end(_job_command(*arguments), ROOT).splitlines()[-1]) for _ in range(3)]
    return sorted(runs, key=lambda run: float(run["peak_mb"]))[1]


def _job_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks._training_job", *arguments]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.training", __doc__)
    parser.add_argument("--only", type=some_of(PARTS), default=[], metavar="NAME,...", help=", ".join(PARTS))
    parser.add_argument("--losses", type=at_least(1), metavar="STEPS")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    if not args.losses and any(name.endswith("losses") for name in args.only):
        parser.error("--only losses and rwkv7_losses require --losses STEPS")
    return args


if __name__ == "__main__":
    run_program(main)
