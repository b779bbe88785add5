"""generate.py around the engine: checks the options, reads the prompts, and writes the texts.

Standard output gets only the texts, each prompt before its continuation. A single text is written while it is generated,
several texts in the order of their prompts. out=FILE gets one JSON object per text, and standard error the speed.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from rwkv.config import GenerateConfig, Sampling, whole_number
from rwkv.errors import UserError
from rwkv.generation.engine import LARGEST_SEED, Engine
from rwkv.generation.grammar import Grammar
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.row import Row, Sample
from rwkv.generation.states import require_file, save_context
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_lines import parse, text_of
from rwkv.io.output_file import require_writable
from rwkv.io.signals import StopRequest
from rwkv.io.utf8 import decode, read_text
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer

LEAST_READ = 64                          # tokens of prompts; the time for fewer says nothing about the speed
SEPARATOR = "---\n"                      # between two texts on standard output


def check_config(config: GenerateConfig) -> None:
    """Raises UserError where an option is wrong or two options do not fit together. Needs no model."""
    if config.prompt is not None and config.prompts is not None:
        raise UserError("prompt= and prompts= are both given: use one of them")
    if config.save_state and (config.prompts is not None or config.num_samples > 1):
        raise UserError("save_state= saves the state of one text: use it with one prompt and num_samples=1")
    if config.state:
        require_file(config.state)
    read = config.checkpoint, config.tokenizer, config.prompts
    require_writable("out", config.out, (*read, config.state))
    require_writable("save_state", config.save_state, read)
    if config.out and config.save_state and Path(config.out).resolve() == Path(config.save_state).resolve():
        raise UserError("out= and save_state= name the same file, and the state would replace the texts: use two files")
    whole_number("seed", config.seed, most=LARGEST_SEED + 1 - config.num_samples)
    StoppingCriteria(config.max_new_tokens, config.stop, config.stop_tokens)
    if grammar := grammar_from(config):
        grammar.check()


def grammar_from(config: GenerateConfig) -> Grammar | None:
    """The grammar of the texts; None for any text. Raises UserError for two such options, and for a missing or wrong file."""
    given = [name for name in ("json_schema", "grammar", "regex") if getattr(config, name) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(f'{name}=' for name in given)} are both given: use one of them")
    if config.regex is not None:
        return Grammar.regex(config.regex)
    if config.grammar is not None:
        return Grammar.lark(read_text(Path(config.grammar), f"grammar={config.grammar}"))
    if config.json_schema is None:
        return None
    source = f"json_schema={config.json_schema}"
    try:
        schema = json.loads(read_text(Path(config.json_schema), source))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{source} is not JSON: {error}") from None
    return Grammar.json_schema(schema)


def prompts_from(config: GenerateConfig) -> list[str]:
    """The prompt of prompt=TEXT (`-`: standard input), or those of prompts=FILE: its lines, or {"prompt": ...} on each line of
    a .jsonl file.

    Raises UserError where the file is missing, holds no prompt, or has a line that is not one.
    """
    if config.prompts is None:
        if config.prompt == "-":
            return [decode(sys.stdin.buffer.read(), "standard input").replace("\r\n", "\n")]
        return [config.prompt or ""]
    path = Path(config.prompts)
    if not path.is_file():
        raise UserError(f"no file of prompts at {path}: prompts= names one, with a prompt on each line")
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(content.split(b"\n"), start=1)]
        prompts = [text_of(parse(line, where), "prompt", where) for where, line in lines if line.strip()]
    else:
        prompts = [prompt for line in decode(content, str(path)).split("\n") if (prompt := line.removesuffix("\r"))]
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one on each line")
    return prompts


def run_generation(model: Model, tokenizer: Tokenizer, config: GenerateConfig, prompts: Sequence[str],
                   context: PrefillResult | None = None, sampling: Sampling | None = None) -> bool:
    """Generates and writes num_samples texts for each prompt. sampling: replaces the configuration's options.

    After a signal such as Ctrl-C it writes the texts so far and returns False.
    """
    stopping = StoppingCriteria(config.max_new_tokens, config.stop, config.stop_tokens)
    grammar = grammar_from(config)
    sampling = sampling or Sampling.of(config)
    jobs = ((prompt, config.seed + sample) for prompt in prompts for sample in range(config.num_samples))
    single = len(prompts) * config.num_samples == 1
    with (Path(config.out).open("w", encoding="utf-8") if config.out else nullcontext() as out,
          StopRequest() as stop):
        written = 0
        while batch := list(itertools.islice(jobs, config.batch_size)):
            texts, seeds = zip(*batch, strict=True)
            started = time.perf_counter()
            engine = Engine(model, tokenizer)
            rows = engine.add_all(texts, seeds, stopping, sampling, context, config.logprobs, grammar=grammar)
            samples = [row.sample for row in rows]
            clock = _Clock(engine, rows, started)
            if config.stream and single:
                _stream(samples[0], clock, stop)
            else:
                _write_texts(samples, clock, stop, written)
            report = clock.report()
            if file := out or (sys.stderr if config.logprobs else None):
                _write_json(samples, file)
            print(report, file=sys.stderr)
            if config.save_state:
                save_context(config.save_state, engine.context(), model, tokenizer)
            if stop.requested:
                return False
            written += len(batch)
    return True


class _Clock:
    """Measures an engine's run. The first step also prepares the weights, so the rate is that of the later steps.

    Iterating over it iterates over the engine.
    """

    def __init__(self, engine: Engine, rows: list[Row], started: float) -> None:
        self._engine = engine
        self._rows = rows
        self._started = started
        self._read = self._first = time.perf_counter()
        self._written_first = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        pieces = self._engine.step()
        self._first = time.perf_counter()
        self._written_first = self._written()
        yield from pieces
        yield from self._engine

    def report(self) -> str:
        """One line: the tokens read and written, the times, and the rates, if enough was measured."""
        finished = time.perf_counter()
        read = sum(len(row.prompt_ids) for row in self._rows)
        read_s = self._read - self._started
        written = self._written()
        said = f"read {read} token{'s' * (read != 1)} in {read_s:.2f} s"
        if read >= LEAST_READ:
            said += f" ({read / read_s:.0f} tokens/s)"
        said += f", wrote {written} in {finished - self._read:.2f} s"
        seconds = finished - self._first
        if written > self._written_first and seconds > 0:
            said += f" ({(written - self._written_first) / seconds:.0f} tokens/s after the first)"
        return said

    def _written(self) -> int:
        return sum(len(row.sample.tokens) for row in self._rows)


def _stream(sample: Sample, clock: _Clock, stop: StopRequest) -> None:
    print(sample.prompt, end="", flush=True)
    for _, piece in clock:
        if piece:
            print(piece, end="", flush=True)
        if stop.requested:
            break
    print()


def _write_texts(samples: Sequence[Sample], clock: _Clock, stop: StopRequest, written: int) -> None:
    """Generates all texts, then writes them; `written` is the number of texts written before."""
    for _ in clock:
        if stop.requested:
            break
    for number, sample in enumerate(samples, start=written):
        print((SEPARATOR if number > 0 else "") + sample.prompt + sample.text, flush=True)


def _write_json(samples: Sequence[Sample], file: TextIO) -> None:
    for sample in samples:
        entry = {"prompt": sample.prompt, "seed": sample.seed, "text": sample.text, "finish": sample.finish_reason,
                 "tokens": sample.tokens, "logprobs": sample.logprobs}
        print(json.dumps(entry, ensure_ascii=False), file=file, flush=True)
