"""python -m benchmarks.generation [--generation rwkv7] [--shape L,C,V] [--dtype ...] [--batch 1,8] [--prompt 512] [--json FILE]

Tokens per second of prefill and decode, time to the first token, load time and peak memory for each dtype. Rates stand beside
their limit in the same run: the model's matrix products alone, on the same weights. The weights are random, because the time
does not depend on them. Each dtype runs in a process of its own, so that peak memory is its own.

--peers PYTHON adds PyPI's rwkv and, for RWKV-4, transformers, from an environment that has them (make peers), on the same
checkpoint.
The last line of standard output is the result as JSON.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backends.allocator import keep_large_blocks
from kernels.bench import hardware
from kernels.bench.results import exit_status, output_file, publish
from kernels.bench.text import aligned
from kernels.select import select
from rwkv.config import ModelConfig
from rwkv.generation.decoder import Decoder
from rwkv.generation.prefill import prefill
from rwkv.model.base import generation
from rwkv.model.quantized import Int8Linear
from rwkv.pretrained import RWKV

DTYPES = ("float32", "bfloat16", "int8")
PEERS = {"rwkv4": (*(("rwkv", dtype) for dtype in DTYPES), ("transformers", "float32"), ("transformers", "bfloat16")),
         "rwkv7": (("rwkv7", "float32"), ("rwkv7", "bfloat16"))}
SHAPES = {"rwkv4": [12, 768, 50277], "rwkv7": [12, 768, 65536]}
ROUNDS = 7                               # in each the work and its limit in turns
ROUND_S = 0.6                            # seconds of either


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.measure is not None:
        print(json.dumps(measure(args.checkpoint, args.measure, args.batch, args.prompt)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shape = args.shape or SHAPES[args.generation]
        checkpoint = write_checkpoint(Path(folder), args.generation, shape)
        rows = [row for dtype in args.dtype for row in _in_a_process(args, checkpoint, dtype)]
        peers = [row for peer in PEERS[args.generation] for row in _peer(args, checkpoint, *peer)] if args.peers else []
    report = {"generation": args.generation, "shape": dict(zip("LCV", shape, strict=True)), "prompt": args.prompt,
              "rows": rows + peers, "machine": hardware.describe("cpu")}
    print(table(report))
    publish(report, args.json)
    return 0


def measure(checkpoint: Path, dtype: str, batches: list[int], prompt: int) -> list[dict[str, Any]]:
    """One dtype's results, as rows of plain data."""
    keep_large_blocks()
    began = time.perf_counter()
    model = RWKV.from_pretrained(checkpoint, dtype=dtype)
    load_s = time.perf_counter() - began
    tokens = torch.randint(model.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    prefill(model, tokens[:, :8])        # compiles the kernels
    began = time.perf_counter()
    Decoder(model, prefill(model, tokens).state).step(tokens[:, 0])
    first_s = time.perf_counter() - began
    peak_mib = _peak_mib()               # before the inputs of the matrix products exist
    rows = [_row(f"decode, batch {B}", dtype, B, *_rates(_decode(model, B), _products(model, B), B)) for B in batches]
    rates = _rates(lambda: prefill(model, tokens), _prefill_products(model, prompt), prompt)
    rows.append(_row(f"prefill {prompt}", dtype, 1, *rates))
    return [row | {"load_s": load_s, "first_token_s": first_s, "peak_mib": peak_mib} for row in rows]


def _peak_mib() -> float:
    """The process' peak resident memory in MiB; NaN on Windows, which does not report it."""
    try:
        import resource
    except ModuleNotFoundError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def write_checkpoint(folder: Path, name: str, shape: Sequence[int]) -> Path:
    """Writes a random model of the generation as a .pth, and beside it as a Hugging Face directory; returns the .pth."""
    L, C, V = shape
    torch.manual_seed(0)
    config = ModelConfig(generation=name, n_layer=L, n_embd=C)
    model = RWKV(config, V, select(generation(config).OPERATOR, "reference")).init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, C ** -0.5)
    model.save_pretrained(folder / "model.pth", dtype="float16" if name == "rwkv4" else "bfloat16")
    model.save_pretrained(folder / "huggingface", dtype="float32")
    return folder / "model.pth"


def table(report: dict[str, Any]) -> str:
    head = ["", "dtype", "tokens/s", "limit", "of limit", "load s", "first token s", "peak MiB"]
    return aligned([head, *map(_cells, report["rows"])], left=2)


def _cells(row: dict[str, Any]) -> list[str]:
    wall = row.get("wall")
    limit = [f"{wall:.1f}", f"{row['tokens_per_s'] / wall:.0%}"] if wall else ["", ""]
    return [f"{row['of']}: {row['what']}", row["dtype"], f"{row['tokens_per_s']:.1f}", *limit,
            f"{row['load_s']:.2f}", f"{row['first_token_s']:.2f}", f"{row['peak_mib']:.0f}"]


def _rates(work: Callable[[], Any], products: Callable[[], Any], tokens: int) -> tuple[float, float]:
    """Tokens per second of the work and of its matrix products: medians of rounds in which the two take turns."""
    rounds = [(_seconds(work), _seconds(products)) for _ in range(ROUNDS)]
    return tokens / median(one for one, _ in rounds), tokens / median(other for _, other in rounds)


def _seconds(function: Callable[[], Any]) -> float:
    """Mean seconds of a call, over ROUND_S seconds of calls."""
    calls, began = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - began < ROUND_S:
        function()
        calls += 1
    return (time.perf_counter() - began) / calls


def _decode(model: RWKV, B: int) -> Callable[[], Tensor]:
    decoder, tokens = Decoder(model, model.empty_state(B)), torch.arange(B)
    return lambda: decoder.step(tokens)


def _products(model: nn.Module, rows: int) -> Callable[[], None]:
    """A function that multiplies `rows` rows by every matrix of the model."""
    products = [_product(module, rows) for module in model.modules() if isinstance(module, nn.Linear | Int8Linear)]

    @torch.inference_mode()
    def multiply() -> None:
        for product in products:
            product()

    return multiply


def _prefill_products(model: RWKV, rows: int) -> Callable[[], None]:
    """The same, with the head applied to the last position only."""
    blocks, head = _products(model.blocks, rows), _product(model.head, 1)

    def multiply() -> None:
        blocks()
        head()

    return multiply


def _product(module: nn.Linear | Int8Linear, rows: int) -> Callable[[], Tensor]:
    x = torch.rand(rows, module.in_features)
    if isinstance(module, Int8Linear):
        return lambda: module.product(x)
    weight = module.weight.detach()
    x = x.to(weight.dtype)
    return lambda: F.linear(x, weight)


def _row(what: str, dtype: str, B: int, tokens_per_s: float, wall: float) -> dict[str, Any]:
    return {"of": "timemix", "what": what, "dtype": dtype, "batch": B, "tokens_per_s": tokens_per_s, "wall": wall}


def _in_a_process(args: argparse.Namespace, checkpoint: Path, dtype: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.generation", "--measure", dtype, "--checkpoint", str(checkpoint),
               "--batch", ",".join(map(str, args.batch)), "--prompt", str(args.prompt)]
    return _last_line(command, hardware.ROOT)


def _peer(args: argparse.Namespace, checkpoint: Path, peer: str, dtype: str) -> list[dict[str, Any]]:
    script = hardware.ROOT / "benchmarks" / "peer_generation.py"
    return _last_line([str(args.peers), "-I", str(script), peer, dtype, str(checkpoint.parent),
                       ",".join(map(str, args.batch)), str(args.prompt)], checkpoint.parent)


def _last_line(command: list[str], folder: Path) -> list[dict[str, Any]]:
    output = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return rows


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description="Speed of prefill and decode.")
    parser.add_argument("--generation", choices=PEERS, default="rwkv4")
    parser.add_argument("--shape", type=_numbers, metavar="L,C,V", help="layers, width, vocabulary")
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=list(DTYPES), metavar="NAME,...")
    parser.add_argument("--batch", type=_numbers, default=[1, 8], metavar="B,...")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="of an environment with PyPI's rwkv and transformers")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result here as well")
    parser.add_argument("--measure", choices=DTYPES, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(exit_status(main))
