"""What generate.py writes: one text as it comes, or many, each when it is finished; as text or as lines of JSON.

The text alone goes to standard output, with the prompt before it; out=FILE gets one JSON object per text.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rwkv.config import GenerateConfig, whole_number
from rwkv.generation import LARGEST_SEED, Ending, Writer
from rwkv.interrupt import Interrupt
from rwkv.json_lines import parse, text_of
from rwkv.model import RWKV
from rwkv.prefill import Context
from rwkv.sampling import Sampling
from rwkv.state_file import require_file, save_context
from rwkv.tokenizer import Tokenizer
from rwkv.utf8 import decode

SEPARATOR = "---\n"                      # between two texts on standard output


def check(config: GenerateConfig) -> tuple[Ending, Sampling]:
    """The options that say when a text ends and how tokens are chosen. Raises ValueError for those that do not fit."""
    if config.prompt is not None and config.prompts is not None:
        raise ValueError("prompt= and prompts= are both given: use one of them")
    if config.save_state and (config.prompts is not None or config.num_samples > 1):
        raise ValueError("save_state= keeps what one text has read: use it with one prompt and num_samples=1")
    if config.state:
        require_file(config.state)
    whole_number("seed", config.seed, most=LARGEST_SEED + 1 - config.num_samples)
    ending = Ending(config.max_new_tokens, config.stop, config.stop_tokens)
    return ending, Sampling(config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty,
                            config.presence_penalty, config.frequency_penalty, dict(map(_bias, config.logit_bias)),
                            tuple(config.banned), config.order)


def prompts_of(config: GenerateConfig) -> list[str]:
    """prompt=, `-` for standard input; or what prompts=FILE holds: one per line, or {"prompt": ...} per line of a .jsonl."""
    if config.prompts is None:
        return [sys.stdin.read() if config.prompt == "-" else config.prompt or ""]
    path = Path(config.prompts)
    if not path.is_file():
        raise ValueError(f"no file of prompts at {path}: prompts= names one, with a prompt on each line")
    content = path.read_bytes()
    prompts = _from_json(content, path) if path.suffix == ".jsonl" else _from_text(content, path)
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one on each line")
    return prompts


def write(model: RWKV, tokenizer: Tokenizer, config: GenerateConfig, prompts: Sequence[str],
          how: tuple[Ending, Sampling], context: Context | None = None) -> bool:
    """Writes every text that the options ask for; False where Ctrl-C ended it, with what there was written."""
    jobs = [(prompt, config.seed + sample) for prompt in prompts for sample in range(config.num_samples)]
    with _output(config.out) as out, Interrupt() as interrupt:
        for start in range(0, len(jobs), config.batch_size):
            some_prompts, seeds = zip(*jobs[start:start + config.batch_size], strict=True)
            began = time.perf_counter()
            writer = Writer(model, tokenizer, some_prompts, seeds, *how, context, n_logprobs=config.logprobs)
            read_s = time.perf_counter() - began
            _show(writer, config.stream and len(jobs) == 1, start, interrupt)
            _report(writer, config, out, read_s, time.perf_counter() - began - read_s)
            if config.save_state:
                save_context(config.save_state, writer.context(), model, tokenizer)
            if interrupt.asked:
                return False
    return True


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias is TOKEN_ID:NUMBER, as in logit_bias=198:-5; got {text!r}") from None


def _show(writer: Writer, stream: bool, start: int, interrupt: Interrupt) -> None:
    """Texts on standard output, in the order of their prompts; where Ctrl-C ends them, as far as they came."""
    if stream:
        print(writer.samples[0].prompt, end="", flush=True)
    for _, piece in writer:
        if stream and piece:
            print(piece, end="", flush=True)
        if interrupt.asked:
            break
    if stream:
        print()
        return
    for index, sample in enumerate(writer.samples, start):
        print(SEPARATOR * (index > 0) + sample.prompt + sample.text, flush=True)


def _report(writer: Writer, config: GenerateConfig, out: TextIO | None, read_s: float, written_s: float) -> None:
    for sample in writer.samples:
        line = json.dumps(asdict(sample), ensure_ascii=False)
        if out is not None:
            print(line, file=out, flush=True)
        elif config.logprobs:
            print(line, file=sys.stderr)
    read, written = writer.prompt_tokens, sum(len(sample.tokens) for sample in writer.samples)
    print(f"read {read} tokens in {read_s:.2f} s ({read / read_s:.0f} tokens/s), wrote {written} in {written_s:.2f} s "
          f"({written / max(written_s, 1e-9):.0f} tokens/s)", file=sys.stderr)


@contextmanager
def _output(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with Path(path).open("w", encoding="utf-8") as file:
        yield file


def _from_json(content: bytes, path: Path) -> list[str]:
    found = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            found.append(text_of(parse(line, where), "prompt", where))
    return found


def _from_text(content: bytes, path: Path) -> list[str]:
    lines = (line.removesuffix("\r") for line in decode(content, str(path)).split("\n"))
    return [line for line in lines if line]
