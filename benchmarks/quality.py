"""Measures the accuracy that quantisation costs, in bits per byte of a text.

    python -m benchmarks.quality TEXT CHECKPOINT [CHECKPOINT ...] [--tokenizer NAME] [--json FILE]

Prints bits per byte of the text for each checkpoint in each dtype (for a quantised GGUF file also with its blocks), and the
increase over float32. Chunks are short enough for the matrix products of decoding, which round their inputs in int4.
The last line of standard output is the result as JSON.
"""

from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks._main import read_text, run_program
from kernels.arguments import Parser, existing, existing_file, from_home
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from kernels.matvec import MOST_ROWS
from rwkv.checkpoint.files import Checkpoint, read_checkpoint, tokenizer_of
from rwkv.config import BLOCKS
from rwkv.errors import UserError
from rwkv.evaluation import TextScore, count_tokens, score_text
from rwkv.model.base import n_parameters
from rwkv.model.operators import operator_for
from rwkv.pretrained import RWKV, compute_dtype
from rwkv.tokenizer.tokenizers import Tokenizer

DTYPES = ("float32", "bfloat16", "int8", "int4")


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.quality", __doc__)
    parser.add_argument("text", type=existing_file, metavar="TEXT")
    parser.add_argument("checkpoints", nargs="+", type=existing, metavar="CHECKPOINT")
    parser.add_argument("--tokenizer", type=from_home, metavar="NAME", help="tokenizer of checkpoints that have none")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    read_text(args.text)                 # raises UserError before anything is measured
    tokenizers = [tokenizer_of(read_checkpoint(path), args.tokenizer, option="--tokenizer") for path in args.checkpoints]
    for tokenizer in tokenizers:
        _, lost = count_tokens(tokenizer, args.text)
        if lost.too_much:
            raise UserError(f"{lost.describe(str(args.text))}. Bits per byte would ignore the lost text: use another text")
    rows = [row for path, tokenizer in zip(args.checkpoints, tokenizers, strict=True)
            for row in _rows(read_checkpoint(path), tokenizer, args.text)]
    report = {"machine": hardware.describe("cpu"), "rows": rows}
    print(tables.quality(report, aligned), flush=True)
    publish(report, args.json)


def _rows(checkpoint: Checkpoint, tokenizer: Tokenizer, text: Path) -> list[dict[str, Any]]:
    config = checkpoint.config
    parameters = n_parameters(config, checkpoint.vocab_size)
    has_blocks = any(tensor.has_blocks() for tensor in checkpoint.weights.stored.values())
    dtypes = (*DTYPES, BLOCKS) if has_blocks else DTYPES
    by_dtype = {dtype: _bits_per_byte(checkpoint, dtype, tokenizer, text) for dtype in dtypes}
    return [{"generation": config.generation, "parameters": parameters, "dtype": dtype, "bits_per_byte": bits,
             "more": bits / by_dtype["float32"] - 1} for dtype, bits in by_dtype.items()]


def _bits_per_byte(checkpoint: Checkpoint, dtype: str, tokenizer: Tokenizer, text: Path) -> float:
    wkv = operator_for(checkpoint.config, "auto", "cpu", compute_dtype(dtype, "cpu"))
    model = RWKV.from_checkpoint(checkpoint, wkv, dtype=dtype)
    passes = list(score_text(model, tokenizer, text, [tokenizer.end_of_text], MOST_ROWS))
    score = TextScore(sum(count for count, _ in passes), text.stat().st_size, sum(nats for _, nats in passes))
    bits: float = score.as_dict()["bits_per_byte"]
    return bits


if __name__ == "__main__":
    run_program(main)
