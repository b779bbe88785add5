"""Compares RWKV-7 and RWKV-4 after the same training time.

    python -m benchmarks.generations [--only NAME] [--shakespeare FILE [--nanogpt FOLDER]] [--precision P] [--seeds N,...]

    stdlib              train.py's default run, with model=tiny and with model=rwkv7_tiny
    --shakespeare FILE  experiment=shakespeare_char on that text, with RWKV-4 and with RWKV-7 of the same width and depth
    --nanogpt FOLDER    nanoGPT's CPU recipe too; both RWKV models then train for nanoGPT's time. FOLDER is a clone with
                        data/shakespeare_char prepared from the same text. --precision 32-true: RWKV in float32, like nanoGPT

Two programs first train alternately, which measures the ratio of their step times. Then the first trains for a fixed number of
steps, and the second for as many steps as fit in the same time, with each seed. The last line of standard output is the result
as JSON. --json FILE updates the measured parts of FILE and keeps the others, each with its commit. Does not run on Windows.
"""

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import _turns
from benchmarks._main import measure_parts, run_program
from benchmarks.training import metrics, train, train_command
from kernels.arguments import Parser, at_least, existing_file, existing_folder
from kernels.bench.results import output_file

TURN_S, TIMED_STEPS, WARM = 4.0, 300, 6
STEPS = {"stdlib": 1000, "shakespeare": 2000}       # steps of RWKV-4, or of nanoGPT if it takes part
ENDLESS = 1_000_000
NEVER = ["trainer.val_every=1000000", "trainer.checkpoint_every=1000000"]
NANOGPT = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--log_interval=1", "--block_size=64",
           "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"]
OFFICIAL_RATES = ["optim.time_mix_lr_scale=1", "optim.time_decay_lr_scale=2", "optim.time_first_lr_scale=3"]     # RWKV-7's
SEEDED = "import sys; seed = sys.argv.pop(1); exec(open('train.py').read().replace('manual_seed(1337', f'manual_seed({seed}'))"


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.generations", __doc__)
    parser.add_argument("--only", choices=("stdlib", "shakespeare"))
    parser.add_argument("--shakespeare", type=existing_file, metavar="FILE")
    parser.add_argument("--nanogpt", type=existing_folder, metavar="FOLDER")
    parser.add_argument("--precision", choices=("auto", "32-true", "bf16-mixed"), default="auto")
    parser.add_argument("--seeds", type=_seeds, default=["0", "1", "2"], metavar="SEED,...")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    if not args.shakespeare and (args.only == "shakespeare" or args.nanogpt):
        parser.error("--only shakespeare and --nanogpt require --shakespeare FILE")
    measure_parts(_parts(args), args.json)


def _parts(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    same = ["experiment=shakespeare_char", f"data.path={args.shakespeare}", f"trainer.precision={args.precision}"]
    rwkv7 = [*same, "model.generation=rwkv7", "model.head_size=32", *OFFICIAL_RATES]
    parts = {"stdlib": lambda: compare(["model=tiny"], ["model=rwkv7_tiny"], STEPS["stdlib"], args.seeds)}
    if args.shakespeare:
        parts["shakespeare"] = lambda: compare(same, rwkv7, STEPS["shakespeare"], args.seeds, args.nanogpt)
    return {name: part for name, part in parts.items() if args.only in (None, name)}


def _seeds(text: str) -> list[str]:
    return [str(at_least(0)(seed)) for seed in text.split(",")]


def compare(rwkv4: Sequence[str], rwkv7: Sequence[str], steps: int, seeds: Sequence[str],
            nanogpt: Path | None = None) -> dict[str, Any]:
    """Returns each model's final loss and bits per byte, milliseconds per step, and number of steps.

    nanoGPT trains for `steps` steps, or RWKV-4 if nanoGPT is not measured. The others train for the same time.
    """
    options = {"rwkv4": rwkv4, "rwkv7": rwkv7}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ms = _median_step_times(folder, options)
        if nanogpt:
            ms["nanogpt"] = ms["rwkv4"] * _nanogpt_ratio(folder, rwkv4, nanogpt)
        allowed = steps * ms["nanogpt" if nanogpt else "rwkv4"]
        lengths = {name: round(allowed / step_ms) for name, step_ms in ms.items()}
        runs = {name: [_final_losses(train(folder / f"{name}-{seed}", *options[name], f"seed={seed}", *_steps(lengths[name])))
                       for seed in seeds] for name in options}
        if nanogpt:
            runs["nanogpt"] = [_nanogpt_end(nanogpt, folder, seed, steps) for seed in seeds]
    return {"ms": ms, "steps": lengths, "runs": runs,
            "mean": {name: {key: mean(run[key] for run in ends) for key in ends[0]} for name, ends in runs.items()}}


def _median_step_times(folder: Path, options: dict[str, Sequence[str]]) -> dict[str, float]:
    first, second = options
    folders = {name: folder / f"timed-{name}" for name in options}
    _turns.run_alternately(train_command(folders[first], *options[first], *_steps(TIMED_STEPS), *NEVER), folder,
                           train_command(folders[second], *options[second], *_steps(ENDLESS), *NEVER), folder, TURN_S)
    return {name: _median_step_ms(folders[name]) for name in options}


def _nanogpt_ratio(folder: Path, rwkv4: Sequence[str], nanogpt: Path) -> float:
    """Returns nanoGPT's step time relative to RWKV-4's. Both train alternately."""
    out_dir = folder / "timed-beside-nanogpt"
    printed = _turns.run_alternately(train_command(out_dir, *rwkv4, *_steps(TIMED_STEPS), *NEVER), folder,
                                     _nanogpt_command(folder, "0", ENDLESS), nanogpt, TURN_S)
    return median([float(ms) for ms in re.findall(r"time ([0-9.]+)ms", printed)][WARM:]) / _median_step_ms(out_dir)


def _nanogpt_command(folder: Path, seed: str, steps: int) -> list[str]:
    """Returns the command of nanoGPT's recipe, with a validation at the end on as much text as timemix's.

    SEEDED sets the seed, because nanoGPT's train.py has no option for the seed.
    """
    return [sys.executable, "-u", "-c", SEEDED, seed, *NANOGPT, f"--max_iters={steps}", f"--lr_decay_iters={steps}",
            f"--eval_interval={steps}", "--eval_iters=150", f"--out_dir={folder / 'nanogpt'}"]


def _nanogpt_end(nanogpt: Path, folder: Path, seed: str, steps: int) -> dict[str, float]:
    printed = _turns.run_to_end(_nanogpt_command(folder, seed, steps), nanogpt)
    loss = float(re.findall(r"val loss ([0-9.]+)", printed)[-1])
    return {"val_loss": loss, "val_bpb": loss / math.log(2)}          # a character of this text is a byte


def _steps(steps: int) -> list[str]:
    return [f"trainer.max_steps={steps}"]


def _median_step_ms(out_dir: Path) -> float:
    import yaml

    config = yaml.safe_load((out_dir / "config.yaml").read_text(encoding="utf-8"))
    tokens = config["data"]["batch_size"] * config["model"]["ctx_len"]
    return median(1000 * tokens / float(row["tok_per_sec"]) for row in metrics(out_dir) if row["tok_per_sec"])


def _final_losses(run: list[dict[str, str]]) -> dict[str, float]:
    last = [row for row in run if row["val/loss"]][-1]
    return {"val_loss": float(last["val/loss"]), "val_bpb": float(last["val/bpb"])}


if __name__ == "__main__":
    run_program(main)
