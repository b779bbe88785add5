"""Generates the continuations for generate.py, and writes them.

Standard output gets only the prompts, each followed by its continuation. A single continuation is printed while it is
generated. Several continuations are printed in the order of the prompts. out=FILE gets one JSON object per continuation.
Standard error gets the speed.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from rwkv.config import GenerateConfig, Sampling
from rwkv.generation.draft import Draft
from rwkv.generation.engine import Engine
from rwkv.generation.options import grammar_from
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.request import Request
from rwkv.generation.row import Row, Sample
from rwkv.generation.state_files import save_context
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.atomic import errors_of
from rwkv.io.lines import count_of, escape_controls
from rwkv.io.signals import StopRequest
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer

MIN_PREFILL_TOKENS = 64                  # with fewer prompt tokens, the prefill rate means nothing and is not printed
SEPARATOR = "---\n"                      # between two texts on standard output


def run_generation(model: Model, tokenizer: Tokenizer, config: GenerateConfig, prompts: Sequence[str],
                   context: PrefillResult | None = None, sampling: Sampling | None = None, stop: Sequence[str] = (),
                   draft: Draft | None = None) -> bool:
    """Generates and writes num_samples continuations per prompt, and returns True.

    After a signal such as Ctrl-C, the texts generated so far are written, and the function returns False.

    Args:
        sampling: replaces the sampling options of `config`.
        stop: stop strings in addition to those of `config`.
        draft: as for Engine.
    """
    stopping = StoppingCriteria(config.max_new_tokens, (*config.stop, *stop), config.stop_tokens)
    grammar = grammar_from(config)
    sampling = sampling or Sampling.from_config(config)
    jobs = ((prompt, config.seed + sample) for prompt in prompts for sample in range(config.num_samples))
    single = len(prompts) * config.num_samples == 1
    if len(prompts) > config.batch_size:             # an error in a later prompt precedes the work on earlier ones
        tokenizer.encode_batch(prompts)
    with ExitStack() as files, StopRequest() as request:
        out: TextIO | None = None
        n_written = 0
        while batch := list(itertools.islice(jobs, config.batch_size)):
            started = time.perf_counter()
            engine = Engine(model, tokenizer, draft=draft, checks_weights=False)
            rows = engine.add_all([Request(prompt, seed, stopping, sampling, config.logprobs or None, grammar=grammar,
                                           context=context) for prompt, seed in batch])
            samples = [row.sample for row in rows]
            clock = _Clock(engine, rows, started)
            if config.stream and single:
                _stream(samples[0], clock, request)
            else:
                _write_texts(samples, clock, request, n_written)
            report = clock.report()
            if config.out and out is None:           # not earlier, so that an error leaves the old file
                files.enter_context(errors_of(Path(config.out)))
                out = files.enter_context(Path(config.out).open("w", encoding="utf-8"))
            if file := out or (sys.stderr if config.logprobs else None):
                _write_json(samples, file)
            print(report, file=sys.stderr)
            if config.save_state:
                save_context(config.save_state, engine.context(), model, tokenizer)
            if request.requested:
                return False
            n_written += len(batch)
    return True


class _Clock:
    """Iterates over an engine, and times it.

    The reported rate covers only later steps, because the first step also prepares the weights.
    """

    def __init__(self, engine: Engine, rows: list[Row], started: float) -> None:
        self._engine = engine
        self._rows = rows
        self._started = started
        self._prefill_end = self._first_step_end = time.perf_counter()
        self._first_step_tokens = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        pieces = self._engine.step()
        self._first_step_end = time.perf_counter()
        self._first_step_tokens = self._tokens_written()
        yield from pieces
        yield from self._engine

    def report(self) -> str:
        finished = time.perf_counter()
        n_read = sum(len(row.prompt_ids) for row in self._rows)
        read_s = self._prefill_end - self._started
        n_written = self._tokens_written()
        line = f"read {count_of(n_read, 'token')} in {read_s:.2f} s"
        if n_read >= MIN_PREFILL_TOKENS:
            line += f" ({n_read / read_s:.0f} tokens/s)"
        line += f", wrote {n_written} in {finished - self._prefill_end:.2f} s"
        seconds = finished - self._first_step_end
        if n_written > self._first_step_tokens and seconds > 0:
            line += f" ({(n_written - self._first_step_tokens) / seconds:.0f} tokens/s after the first)"
        if self._engine.speculates:
            accepted = sum(row.accepted_tokens for row in self._rows)
            line += f", {accepted} of {count_of(sum(row.proposed_tokens for row in self._rows), 'proposed token')} accepted"
        return line

    def _tokens_written(self) -> int:
        return sum(len(row.sample.tokens) for row in self._rows)


def _stream(sample: Sample, clock: _Clock, stop: StopRequest) -> None:
    print(escape_controls(sample.prompt, sys.stdout), end="", flush=True)
    for _, piece in clock:
        if piece:
            print(escape_controls(piece, sys.stdout), end="", flush=True)
        if stop.requested:
            break
    print()


def _write_texts(samples: Sequence[Sample], clock: _Clock, stop: StopRequest, n_written: int) -> None:
    for _ in clock:
        if stop.requested:
            break
    for number, sample in enumerate(samples, start=n_written):
        print((SEPARATOR if number > 0 else "") + escape_controls(sample.prompt + sample.text, sys.stdout), flush=True)


def _write_json(samples: Sequence[Sample], file: TextIO) -> None:
    for sample in samples:
        entry = {"prompt": sample.prompt, "seed": sample.seed, "text": sample.text, "finish": sample.finish_reason,
                 "tokens": sample.tokens, "logprobs": sample.logprobs}
        print(json.dumps(entry, ensure_ascii=False), file=file, flush=True)
