"""Measures speculative decoding on a CPU, as the option draft= does it.

    python -m benchmarks.speculation [--shapes L,C,V ...] [--dtypes int8,...] [--json FILE]
    python -m benchmarks.speculation --draft TEXT CHECKPOINT DRAFT [--dtypes int8,...] [--tokenizer NAME] [--tokens N]

Without --draft, the program times a pass over 1, 4, 5 or 8 proposed tokens of one sequence, with the logits and the state after
each token, by default at the 1.5b and 7.2b shapes with random weights. Models of two and four layers are timed alternately, and
the time of all layers is extrapolated. `cost` is the time of an additional token relative to a step, pass_cost in
rwkv/generation/proposal_cost.py.

With --draft, the program continues pieces of TEXT at temperatures 0 and 1, alternately with and without a draft (ngram, or a
checkpoint), measures tokens per second, the fraction of proposed tokens that were accepted, and tokens per pass, and fails if
the draft changes the generated text. Two models to measure can be trained on the standard library:

    python train.py model=rwkv7_tiny model.n_layer=8 model.n_embd=512 trainer.max_tokens=8000000 out_dir=runs/target
    python train.py model=rwkv7_tiny model.n_layer=4 model.n_embd=192 trainer.max_tokens=8000000 out_dir=runs/draft

The last line of standard output is the result as JSON.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import _random_model
from benchmarks._main import read_text, run_program
from kernels.arguments import Parser, at_least, from_home, sizes_of, some_of
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.bench.timing import time_alternately
from kernels.machine import allocator, hardware, threads
from kernels.select import select
from rwkv.checkpoint.files import read_checkpoint, tokenizer_of
from rwkv.config import NGRAM, ModelConfig, Sampling
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder
from rwkv.generation.draft import Draft, ModelDraft, NGram
from rwkv.generation.engine import Engine
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import generation
from rwkv.model.decoding.c_step import why_not
from rwkv.model.quantized import to_int4, to_int8
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer

SHAPES = tuple((*_random_model.SHAPES[name], _random_model.VOCAB_SIZE) for name in ("1.5b", "7.2b"))
DTYPES = ("bfloat16", "int8", "int4")
TOKENS = (1, 4, 5, 8)                    # tokens of a pass
LAYERS = (2, 4)                          # numbers of layers of the timed models
BUDGET_S = 3.0                           # seconds of each pass
PROMPT = 128                             # tokens of a prompt


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    rows = measure_draft(args, *args.draft) if args.draft else measure_passes(args)
    columns = list(rows[0])
    print(aligned([columns, *([_cell(row[column]) for column in columns] for row in rows)], left=2), flush=True)
    publish({"machine": hardware.describe("cpu"), "rows": rows}, args.json)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.speculation", __doc__)
    parser.add_argument("--draft", nargs=3, type=from_home, metavar=("TEXT", "CHECKPOINT", "DRAFT"))
    parser.add_argument("--shapes", nargs="+", type=sizes_of("L,C,V"), default=SHAPES, metavar="L,C,V")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=DTYPES, metavar="DTYPE,...")
    parser.add_argument("--tokenizer", type=from_home, metavar="NAME", help="of checkpoints without one")
    parser.add_argument("--prompts", type=at_least(1), default=10, metavar="N", help="number of pieces of TEXT; default 10")
    parser.add_argument("--tokens", type=at_least(1), default=128, metavar="N", help="tokens of a continuation; default 128")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args(argv)


def measure_passes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each shape and dtype: milliseconds by number of tokens, and the relative cost of a token."""
    rows = []
    for L, C, V in args.shapes:
        for dtype in args.dtypes:
            work = {}
            for layers in LAYERS:
                model = random_model(layers, C, V, dtype)
                for n in TOKENS:
                    work[layers, n] = partial(_pass, CDecoder(model, model.empty_state(1)), [*range(n)])
            seconds = {key: median(samples) for key, samples in time_alternately(work, "cpu", BUDGET_S).items()}
            few, many = LAYERS
            ms = {n: 1000 * (seconds[few, n] + (L - few) * (seconds[many, n] - seconds[few, n]) / (many - few))
                  for n in TOKENS}
            rows.append({"shape": f"{L} x {C}", "dtype": dtype, **{f"{n} tokens, ms": time for n, time in ms.items()},
                         **{f"cost of {n}": (ms[n] / ms[1] - 1) / (n - 1) for n in TOKENS if n > 1}})
    return rows


@torch.no_grad()
def random_model(L: int, C: int, V: int, dtype: str) -> RWKV:
    """Returns an RWKV-7 model with random weights, made in bfloat16 because of its size."""
    config = ModelConfig(generation="rwkv7", n_layer=L, n_embd=C)
    module = generation(config)
    weights = {name: torch.empty(shape, dtype=torch.bfloat16 if len(shape) == 2 else torch.float32).normal_(0, C ** -0.5)
               for name, shape in module.shapes(config, V).items()}
    model = RWKV.with_weights(module.with_default_widths(config), select(module.OPERATOR, "reference"), weights)
    model = model.requires_grad_(False).eval()
    if dtype == "bfloat16":
        return model.to(torch.bfloat16)
    return (to_int8 if dtype == "int8" else to_int4)(model)


def _pass(decoder: CDecoder, tokens: Sequence[int]) -> None:
    decoder.read_ahead([tokens])
    decoder.drop_ahead()


def measure_draft(args: argparse.Namespace, text: str, path: str, draft_path: str) -> list[dict[str, Any]]:
    """Returns a row for each dtype and temperature. Raises UserError if the draft does not fit, or changes a text."""
    checkpoint = read_checkpoint(path)
    tokenizer = tokenizer_of(checkpoint, args.tokenizer, option="--tokenizer")
    ids = tokenizer.encode(read_text(Path(text)))
    if len(ids) < args.prompts * PROMPT:
        raise UserError(f"{text} must have at least {args.prompts * PROMPT} tokens for {args.prompts} prompts; got {len(ids)}")
    starts = [i * (len(ids) - PROMPT) // args.prompts for i in range(args.prompts)]
    rows = []
    for dtype in args.dtypes:
        model = RWKV.from_pretrained(path, dtype=dtype)
        if reason := why_not(model):
            raise UserError(f"a draft requires decoding by the compiled C code: {reason}")
        draft: Draft = NGram()
        if draft_path != NGRAM:
            draft = ModelDraft(RWKV.from_pretrained(draft_path, dtype=dtype), model, tokenizer)
        for temperature in (0.0, 1.0):
            sampling, stopping = Sampling(temperature=temperature), StoppingCriteria(args.tokens)
            requests = [Request(ids[start:start + PROMPT], seed, stopping, sampling) for seed, start in enumerate(starts)]
            rows.append({"draft": str(draft), "dtype": dtype, "temperature": temperature,
                         **_alternate(model, tokenizer, requests, draft)})
    return rows


def _alternate(model: RWKV, tokenizer: Tokenizer, requests: Sequence[Request], draft: Draft) -> dict[str, float]:
    ratios, rates, plain_rates = [], [], []
    proposed = accepted = tokens = passes = 0
    for i, request in enumerate(requests):
        engines = {True: Engine(model, tokenizer, draft=draft), False: Engine(model, tokenizer)}
        rows = {drafted: engine.add_all([request])[0] for drafted, engine in engines.items()}
        seconds = {}
        steps = {}
        for drafted in (True, False) if i % 2 else (False, True):
            began = time.perf_counter()
            steps[drafted] = 0
            while engines[drafted].unfinished:
                engines[drafted].step()
                steps[drafted] += 1
            seconds[drafted] = time.perf_counter() - began
        if rows[True].sample != rows[False].sample:
            raise UserError(f"the draft changes the text of prompt {i}. This is a bug of timemix: please report it")
        n = len(rows[True].sample.tokens)
        proposed += rows[True].proposed_tokens
        accepted += rows[True].accepted_tokens
        tokens += n
        passes += steps[True]
        rates.append(n / seconds[True])
        plain_rates.append(n / seconds[False])
        ratios.append(seconds[False] / seconds[True])
    return {"tokens/s": median(rates), "without": median(plain_rates), "ratio": median(ratios), "least ratio": min(ratios),
            "accepted": accepted / max(1, proposed), "proposed per token": proposed / max(1, tokens),
            "tokens per pass": tokens / max(1, passes)}


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    threads.wait_briefly()
    allocator.keep_large_blocks()
    run_program(main)
