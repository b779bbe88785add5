"""python -m benchmarks.generations [--shakespeare FILE] [--seeds 0,1,2] [--json FILE]: RWKV-7 beside RWKV-4 in the same time.

    stdlib              train.py's default run, with model=tiny and with model=rwkv7_tiny
    --shakespeare FILE  experiment=shakespeare_char on that text, with RWKV-4 and with RWKV-7 of the same width and depth

First both train in turns for a while, which gives the ratio of their steps' times; then RWKV-7 gets as many steps as fit the
time of RWKV-4's, and both train to their end with each seed. The last line of standard output is the result as JSON. Not on
Windows.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import _turns
from benchmarks.training import ROOT, metrics, train, train_command
from kernels.bench import hardware
from kernels.bench.results import exit_status, output_file, publish

TURN_S, TIMED_STEPS = 4.0, 300
NO_TIME_RATES = ["optim.time_mix_lr_scale=1", "optim.time_decay_lr_scale=1", "optim.time_first_lr_scale=3"]     # RWKV-4's alone


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stdlib", "shakespeare"))
    parser.add_argument("--shakespeare", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=lambda text: text.split(","), default=["0", "1", "2"])
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"machine": hardware.describe("cpu")}
    if args.only != "shakespeare":
        report["stdlib"] = compare(["model=tiny"], ["model=rwkv7_tiny"], 1000, args.seeds)
    if args.shakespeare and args.only != "stdlib":
        same = ["experiment=shakespeare_char", f"data.path={args.shakespeare}"]
        rwkv7 = ["model.generation=rwkv7", "model.head_size=32", *NO_TIME_RATES]
        report["shakespeare"] = compare(same, [*same, *rwkv7], 2000, args.seeds)
    publish(report, args.json)


def compare(rwkv4: Sequence[str], rwkv7: Sequence[str], steps: int, seeds: Sequence[str]) -> dict[str, Any]:
    """The loss and bits per byte of both generations at their end, RWKV-4's after `steps`, and what led to RWKV-7's steps."""
    with tempfile.TemporaryDirectory() as folder:
        ms = _step_times(Path(folder), rwkv4, rwkv7)
        lengths = {"rwkv4": steps, "rwkv7": round(steps * ms["rwkv4"] / ms["rwkv7"])}
        runs = {name: [_end(train(Path(folder) / f"{name}-{seed}", *options, f"seed={seed}",
                                  f"trainer.max_steps={lengths[name]}")) for seed in seeds]
                for name, options in (("rwkv4", rwkv4), ("rwkv7", rwkv7))}
    found = {"ms": ms, "steps": lengths, "runs": runs,
             "mean": {name: {key: mean(run[key] for run in ends) for key in ends[0]} for name, ends in runs.items()}}
    print(json.dumps(found), flush=True)
    return found


def _step_times(folder: Path, rwkv4: Sequence[str], rwkv7: Sequence[str]) -> dict[str, float]:
    """The median milliseconds of a step of each, trained in turns."""
    many = [f"trainer.max_steps={20 * TIMED_STEPS}", "trainer.val_every=1000000", "trainer.checkpoint_every=1000000"]
    few = [f"trainer.max_steps={TIMED_STEPS}", *many[1:]]
    folders = {"rwkv4": folder / "timed-4", "rwkv7": folder / "timed-7"}
    _turns.beside(train_command(folders["rwkv4"], *rwkv4, *few), ROOT,
                  train_command(folders["rwkv7"], *rwkv7, *many), ROOT, TURN_S)
    return {name: median(1 / float(row["tok_per_sec"]) for row in metrics(out_dir) if row["tok_per_sec"])
            * 1000 * _tokens(out_dir) for name, out_dir in folders.items()}


def _tokens(out_dir: Path) -> int:
    """The tokens of a step of the run."""
    import yaml

    config = yaml.safe_load((out_dir / "config.yaml").read_text(encoding="utf-8"))
    return int(config["data"]["batch_size"]) * int(config["model"]["ctx_len"])


def _end(run: list[dict[str, str]]) -> dict[str, float]:
    last = [row for row in run if row["val/loss"]][-1]
    return {"val_loss": float(last["val/loss"]), "val_bpb": float(last["val/bpb"])}


if __name__ == "__main__":
    sys.exit(exit_status(main))
