"""Measures the loss by position in the context for RWKV-4 and RWKV-7.

    python -m benchmarks.positions [--contexts T,...] [--widths C,...] [--tokens N,...] [--out FOLDER] [OPTION=VALUE ...]

train.py runs for each architecture, width, context length and number of tokens, with the same recipe and 8,192 tokens per step.
OPTION=VALUE are further options of train.py for all runs, such as data=text data.path=FILE. Each run has a folder in --out. A
run whose folder has results is not trained again, so that the runs can be trained a few at a time.

Prints a row for each run in --out: the mean nats per token of the validation split's windows, and the means at positions 0, 1,
2 to 3, 4 to 7, and so on. The last line of standard output is the result as JSON.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks import tables
from benchmarks._main import run_program
from benchmarks.training import ROOT, train
from kernels.arguments import Parser, any_sizes, path_of, some_of
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import GENERATIONS, DataConfig
from rwkv.data.prepare import prepare
from rwkv.errors import UserError
from rwkv.pretrained import RWKV

STEP_TOKENS = 8192
READ_TOKENS = 65536                      # maximum tokens of the validation split
LOSSES = "positions.json"                # file in the folder of a run
CHUNK = 1024                             # number of rows whose logits are computed together


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    for tokens, T, C, generation in product(args.tokens, args.contexts, args.widths, args.generation):
        run = measure_run(args.out, generation, C, T, tokens, args.options)
        print(f"{generation}, {C} wide, context {T}, {tokens:,} tokens: {run['nats']['mean']:.4f} nats", flush=True)
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in args.out.glob(f"*/{LOSSES}")]
    report = {"machine": hardware.describe("cpu"),
              "runs": sorted(runs, key=lambda run: (run["tokens"], run["width"], run["context"], run["generation"]))}
    print(tables.positions(report, aligned))
    publish(report, args.json)


def measure_run(out: Path, generation: str, C: int, T: int, tokens: int, options: list[str]) -> dict[str, Any]:
    """Returns a run's options and mean nats per token by position. Trains the run first if its folder has no results."""
    folder = out / f"{generation}-{C}-{T}-{tokens}"
    losses = folder / LOSSES
    if losses.exists():
        saved: dict[str, Any] = json.loads(losses.read_text(encoding="utf-8"))
        if saved["options"] != options:
            raise UserError(f"{folder} has results for different options ({saved['options']}); got {options}: choose another "
                            "--out")
        return saved
    train(folder, f"model.generation={generation}", f"model.n_embd={C}", f"model.ctx_len={T}",
          f"data.batch_size={max(1, STEP_TOKENS // T)}", f"trainer.max_tokens={tokens}", "trainer.val_every=1000000", *options)
    nats = losses_by_position(folder, T)
    run = {"generation": generation, "width": C, "context": T, "tokens": tokens, "options": options,
           "nats": {"mean": mean(nats), **by_octave(nats)}}
    losses.write_text(json.dumps(run) + "\n", encoding="utf-8")
    return run


@torch.no_grad()
def losses_by_position(folder: Path, T: int) -> list[float]:
    """Returns the mean nats at each of T positions. The means are over the validation windows, each from the empty state."""
    checkpoint = read_checkpoint(folder)
    assert checkpoint.run is not None
    model = RWKV.from_pretrained(folder)
    val = prepare(DataConfig(**checkpoint.run["data"]), T).val
    windows = max(1, min(READ_TOKENS, len(val) - 1) // T)
    nats = []
    for start in range(0, windows * T, T):
        ids = torch.tensor(val[start:start + T + 1], dtype=torch.int64)
        hidden = model.hidden(ids[None, :-1])[0][0]
        nats.append(torch.cat([cross_entropy(rows @ model.head.weight.T, targets, reduction="none")
                               for rows, targets in zip(hidden.split(CHUNK), ids[1:].split(CHUNK), strict=True)]))
    return list(torch.stack(nats).double().mean(0).tolist())


def by_octave(losses: list[float]) -> dict[str, float]:
    """Returns the means over the positions 0, 1, 2 to 3, 4 to 7, and so on."""
    means = {}
    first = 0
    while first < len(losses):
        end = min(max(1, 2 * first), len(losses))
        means[str(first) if end == first + 1 else f"{first}-{end - 1}"] = mean(losses[first:end])
        first = end
    return means


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.positions", __doc__)
    parser.add_argument("--generation", type=some_of(GENERATIONS), default=GENERATIONS, metavar="NAME,...")
    parser.add_argument("--contexts", type=any_sizes, default=(128, 512, 2048), metavar="T,...")
    parser.add_argument("--widths", type=any_sizes, default=(192, 384), metavar="C,...", help="multiples of 64")
    parser.add_argument("--tokens", type=any_sizes, default=(2_000_000,), metavar="N,...", help="of each run")
    parser.add_argument("--out", type=path_of, default=ROOT / "runs" / "positions", metavar="FOLDER")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
