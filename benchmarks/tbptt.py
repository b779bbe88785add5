"""python -m benchmarks.tbptt [--segments 1 4 8] [--json FILE]

Peak memory and time of one training step over K segments of 512 tokens, with exact gradients between them, beside the same
tokens as one sequence: L6 C384 V8192, one row, float32. The two losses are compared first. Memory is torch's peak beyond
weights and gradients. The last line of standard output is the result as JSON.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks._main import run_program
from kernels.arguments import Parser, at_least
from kernels.bench.peak_memory import extra_bytes
from kernels.bench.results import output_file, publish
from kernels.machine import hardware
from kernels.machine.allocator import keep_large_blocks
from kernels.select import select
from rwkv.config import ModelConfig, OptimConfig
from rwkv.data.documents import Segments
from rwkv.pretrained import RWKV
from rwkv.training.task import LanguageModel

B, T, VOCABULARY, REPEATS = 1, 512, 8192, 3


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    keep_large_blocks()
    wkv = select("wkv4", args.kernel, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    model = RWKV(ModelConfig(n_layer=6, n_embd=384, ctx_len=T), VOCABULARY, wkv).init_weights()
    task = LanguageModel(model, OptimConfig(), 1, 1.0)
    rows = [row for K in args.segments for row in _measure(task, K)]
    report = {"machine": hardware.describe("cpu"), "kernel": wkv.name, "rows": rows}
    print(table(report), flush=True)
    publish(report, args.json)


def table(report: dict[str, Any]) -> str:
    """The report as text for the terminal."""
    rows = [f"{'K':>3}  {'':14}{'peak MiB':>10}{'ms':>10}{'tok/s':>8}"]
    for row in report["rows"]:
        tokens = row["K"] * T * B / row["ms"] * 1000
        rows.append(f"{row['K']:3}  {row['of']:14}{row['peak_bytes'] / 2 ** 20:10.0f}{row['ms']:10.0f}{tokens:8.0f}")
    return "\n".join(rows)


def _measure(task: LanguageModel, K: int) -> list[dict[str, Any]]:
    tokens = torch.randint(VOCABULARY, (B, K * T + 1))
    x = tokens[:, :-1].clone()
    y = tokens[:, 1:].clone()
    opens = torch.arange(K).expand(B, K) == 0
    batch = Segments(x.view(B, K, T), y.view(B, K, T), opens, 0, 1.0, x.numel())
    forms = {"segments": lambda: task.loss_of_segments(batch), "one sequence": lambda: task.loss(x, y)}
    losses = [form().item() for form in forms.values()]
    assert abs(losses[0] - losses[1]) < 1e-5, f"segments and one sequence disagree: {losses}"
    return [{"K": K, "of": name} | _cost(form) for name, form in forms.items()]


def _cost(loss: Any) -> dict[str, Any]:
    def step() -> tuple[()]:
        loss().backward()
        return ()

    step()                               # allocates the gradients
    return {"peak_bytes": extra_bytes(step, "cpu"), "ms": median(_milliseconds(step) for _ in range(REPEATS))}


def _milliseconds(step: Any) -> float:
    since = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - since)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.tbptt", __doc__)
    parser.add_argument("--segments", type=at_least(1), nargs="+", default=[1, 4, 8], metavar="K")
    parser.add_argument("--kernel", default="auto", metavar="NAME")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
