"""Evaluates a checkpoint on a file: loss, or accuracy of last words.

  python -m rwkv.tools.evaluate data.path=FILE.txt
  python -m rwkv.tools.evaluate checkpoint=FILE.pth data.path=FILE.txt
  python -m rwkv.tools.evaluate data.path=lambada_test.jsonl out=result.json
  python -m rwkv.tools.evaluate data.path=CONVERSATIONS.jsonl

FILE.jsonl, lines of {"text": ...}: accuracy and perplexity of each text's last
word, as in LAMBADA. FILE.jsonl, conversations as for data=chat of train.py:
loss and perplexity of the answers, with the checkpoint's chat template or
data.template=. Any other file: loss in nats per token, perplexity per token and
bits per byte, with the state carried over. If the tokenizer loses more than 1 %
of the text, metrics per byte and per word are null. The last line of standard
output is the result as JSON, which out=FILE also saves. Texts and paths are
taken verbatim: commas, quotes and equals signs need no escaping.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from rwkv import cli
from rwkv.chat.turn_templates import chat_template
from rwkv.checkpoint.option_files import require_files
from rwkv.config import EvaluateConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.output_file import require_writable
from rwkv.io.utf8 import require_file
from rwkv.tokenizer.lost_bytes import NOTHING, WITHHELD, Lost, percent
from rwkv.tokenizer.tokenizers import Tokenizer

if TYPE_CHECKING:                        # these modules import PyTorch
    from rwkv import evaluation
    from rwkv.model.base import Model


def main(config: EvaluateConfig, line: cli.CommandLine) -> None:
    path, out = _data_and_output_paths(config)
    from rwkv import evaluation
    from rwkv.data.sources.jsonl import begins_with_object
    from rwkv.pretrained import open_checkpoint, template_choice, template_line
    from rwkv.tools._scored_texts import holds_answers, read_answers, read_last_words

    opened = open_checkpoint(config)
    tokenizer = opened.tokenizer
    opened.print_notes()
    start = tokenizer.encode(config.start) if config.start else [tokenizer.end_of_text]

    # Tokenises all texts before loading the model, so that errors in the file are reported early
    if config.data.template or holds_answers(path):
        choice = template_choice(opened.checkpoint, config.data.template)
        answers = read_answers(tokenizer, path, chat_template(choice.template))
        _warn_lost(sum((answer.lost for answer in answers), NOTHING), "the answers")
        print(f"chat template: {template_line(opened.checkpoint, choice)}", file=sys.stderr)
        score = evaluate("answers", answers, config, opened.model())
    elif path.suffix.lower() == ".jsonl":
        words = read_last_words(tokenizer, path, start)
        _warn_lost(sum((word.lost for word in words), NOTHING), "the last words")
        score = evaluate("last_word", words, config, opened.model())
    else:
        tokens, lost = evaluation.count_tokens(tokenizer, path)
        if begins_with_object(path):
            print(f"WARNING: {path} is JSON, and is evaluated as plain text, with its keys and escapes. Only a file named "
                  "FILE.jsonl is evaluated by the texts or conversations on its lines", file=sys.stderr)
        _warn_lost(lost, "the text")
        score = evaluate_text(path, tokenizer, start, config.chunk_len, tokens, lost, opened.model())
    result = {"data": str(path), "checkpoint": str(opened.checkpoint.path), "tokenizer": tokenizer.kind,
              "tokenizer_hash": tokenizer.hash, "kernel": opened.wkv.name, "device": opened.device,
              "dtype": opened.dtype, **score}
    text = json.dumps(result, allow_nan=False) + "\n"
    print(text, end="", flush=True)
    if out:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write out={out}: {error.strerror}. The result is only on standard output") from error


def evaluate_text(path: Path, tokenizer: Tokenizer, start: Sequence[int], chunk_len: int, tokens: int, lost: Lost,
                  model: "Model") -> JsonObject:
    from rwkv import evaluation

    started = time.perf_counter()
    nats = 0.0
    with _bar(tokens, "token") as bar:
        for count, pass_nats in evaluation.score_text(model, tokenizer, path, start, chunk_len):
            nats += pass_nats
            _advance(bar, count, f"loss {nats / (bar.n + count):.4f}")
    _require_finite(nats)
    score = evaluation.TextScore(tokens, lost.of, nats, lost)
    return {"task": "text", **score.as_dict(), "seconds": time.perf_counter() - started}


def evaluate(task: str, texts: Sequence["evaluation.EvaluatedSequence"], config: EvaluateConfig, model: "Model") -> JsonObject:
    """Scores tokenised texts and returns the metrics. `task` is last_word or answers."""
    from rwkv import evaluation

    started = time.perf_counter()
    total = evaluation.Score()
    answers = task == "answers"
    with _bar(len(texts), "conversation" if answers else "text") as bar:
        for score in evaluation.score_texts(model, texts, config.batch_size, config.chunk_len):
            total += score
            mean = f"loss {total.nats / total.tokens:.4f}" if answers else f"accuracy {total.right / total.texts:.3f}"
            _advance(bar, score.texts, mean)
    _require_finite(total.nats)
    numbers = total.answer_metrics() if answers else total.word_metrics()
    return {"task": task, **numbers, "seconds": time.perf_counter() - started}


def _warn_lost(lost: Lost, text: str) -> None:
    if lost.bytes:
        effect = (f"above {percent(WITHHELD)}, metrics per byte and per word are null" if lost.too_much else
                  "lost text counts as if predicted with certainty")
        print(f"WARNING: {lost.describe(text)}; {effect}", file=sys.stderr)


def _data_and_output_paths(config: EvaluateConfig) -> tuple[Path, Path | None]:
    if not config.data.path:
        raise UserError("evaluate requires data.path=FILE: a UTF-8 text, or FILE.jsonl with lines such as "
                        '{"text": "..."}')
    require_writable("out", config.out, (config.checkpoint, config.tokenizer, config.lora, config.data.path,
                                         config.data.template))
    require_files(config, config.data.template)
    require_file(Path(config.data.path))
    return Path(config.data.path), Path(config.out) if config.out else None


def _bar(total: int, unit: str) -> tqdm:
    """Returns a progress bar on standard error. Outside a terminal it prints a line every 30 seconds."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, unit=unit, mininterval=interval, maxinterval=2 * interval, dynamic_ncols=True, file=sys.stderr)


def _advance(bar: tqdm, count: int, postfix: str) -> None:
    bar.set_postfix_str(postfix, refresh=False)
    bar.update(count)


def _require_finite(nats: float) -> None:
    if not math.isfinite(nats):
        raise UserError("the model's predictions are not finite: the training diverged, or the weights are damaged")


if __name__ == "__main__":
    cli.run(main, EvaluateConfig, "evaluate", __doc__)
