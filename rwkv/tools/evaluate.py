"""How well a checkpoint predicts a file: `python -m rwkv.tools.evaluate checkpoint=runs/latest data.path=FILE`.

FILE.jsonl, lines of {"text": ...}: accuracy and perplexity of the last word of each, as LAMBADA has it. Any other file: loss in
nats per token, perplexity per token and bits per byte of its text, the state carried along (rwkv/evaluation.py defines them).
The last line of standard output is the result as JSON, which out=FILE holds as well. Options: EvaluateConfig in rwkv/config.py.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kernels.select import select
from rwkv import cli
from rwkv.checkpoint import computed_in, read_checkpoint
from rwkv.checkpoint_tokenizer import tokenizer_of
from rwkv.config import EvaluateConfig
from rwkv.evaluation import TextScore, WordScore, count_tokens, read_last_words, score_last_words, score_text
from rwkv.model import RWKV
from rwkv.tokenizer import Tokenizer


def main(config: EvaluateConfig, line: cli.CommandLine) -> None:
    path, out = _files(config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    wkv = select(config.kernel.name, device, computed_in(config.dtype))
    checkpoint = read_checkpoint(config.checkpoint)
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    start = tokenizer.encode(config.start) if config.start else [tokenizer.end_of_text]

    evaluate = last_words if path.suffix == ".jsonl" else text
    score = evaluate(config, tokenizer, start, lambda: RWKV.from_checkpoint(checkpoint, wkv, device, config.dtype))
    result = {"data": str(path), "checkpoint": str(checkpoint.path), "tokenizer": tokenizer.kind,
              "tokenizer_hash": tokenizer.hash, "kernel": wkv.name, "device": device, "dtype": config.dtype, **score}
    written = json.dumps(result, allow_nan=False) + "\n"
    print(written, end="", flush=True)
    if out:
        _write(out, written)


def text(config: EvaluateConfig, tokenizer: Tokenizer, start: Sequence[int], load: Callable[[], RWKV]) -> dict[str, Any]:
    """The whole file is tokenised once before the model is loaded, so that what is wrong with it is said at once."""
    path = Path(str(config.data.path))
    model_tokens, size = count_tokens(tokenizer, path), path.stat().st_size
    model, nats, since = load(), 0.0, time.perf_counter()
    with _bar(model_tokens, "token") as bar:
        for count, more in score_text(model, tokenizer, path, start, config.chunk_len):
            nats += more
            _advance(bar, count, f"loss {nats / (bar.n + count):.4f}")
    return {"task": "text", **TextScore(model_tokens, size, _finite(nats)).as_dict(), "seconds": time.perf_counter() - since}


def last_words(config: EvaluateConfig, tokenizer: Tokenizer, start: Sequence[int], load: Callable[[], RWKV]) -> dict[str, Any]:
    """All texts are read and tokenised before the model is loaded."""
    words = read_last_words(tokenizer, Path(str(config.data.path)), start)
    model, total, since = load(), WordScore(0, 0, 0.0), time.perf_counter()
    with _bar(len(words), "text") as bar:
        for score in score_last_words(model, words, config.batch_size, config.chunk_len):
            total = WordScore(total.words + score.words, total.right + score.right, total.nats + score.nats)
            _advance(bar, score.words, f"accuracy {total.right / total.words:.3f}")
    _finite(total.nats)
    return {"task": "last_word", **total.as_dict(), "seconds": time.perf_counter() - since}


def _files(config: EvaluateConfig) -> tuple[Path, Path | None]:
    """What is read and, perhaps, written. Raises ValueError where there is nothing to read, or no folder to write into."""
    if not config.data.path:
        raise ValueError("there is nothing to evaluate on: give data.path=FILE, a text in UTF-8, or FILE.jsonl with lines of "
                         '{"text": "..."}')
    out = Path(config.out) if config.out else None
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"cannot write out={out}: it is a folder, or there is no folder {out.parent}")
    return Path(config.data.path), out


def _write(out: Path, written: str) -> None:
    try:
        out.write_text(written, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write out={out}: {error.strerror}; the result is on standard output alone") from error


def _bar(total: int, unit: str) -> tqdm:
    """On standard error; every half minute a line where that is no terminal."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, unit=unit, mininterval=interval, maxinterval=2 * interval, dynamic_ncols=True, file=sys.stderr)


def _advance(bar: tqdm, count: int, shown: str) -> None:
    bar.set_postfix_str(shown, refresh=False)
    bar.update(count)


def _finite(nats: float) -> float:
    if not math.isfinite(nats):
        raise ValueError("the model's predictions are not finite numbers: its training diverged, or its weights are damaged")
    return nats


if __name__ == "__main__":
    cli.run(main, EvaluateConfig, "evaluate")
