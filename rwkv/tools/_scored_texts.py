"""Reads and tokenises the files that rwkv.tools.evaluate scores by last words or by answers."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rwkv.chat.encoding import encode, for_tokenizer, visible_text
from rwkv.chat.interface import ChatTemplate
from rwkv.data.sources.chat import holds_conversations, parts_of
from rwkv.data.sources.jsonl import entries
from rwkv.errors import UserError
from rwkv.evaluation import EvaluatedSequence
from rwkv.io.json_lines import parse, text_of
from rwkv.io.lines import count_of
from rwkv.io.utf8 import open_file, require_file
from rwkv.tokenizer.lost_bytes import LossCounter
from rwkv.tokenizer.tokenizers import Tokenizer


def read_last_words(tokenizer: Tokenizer, path: Path, start: Sequence[int]) -> list[EvaluatedSequence]:
    """Reads lines {"text": ...} and marks each text's last word as scored.

    Raises UserError with the number of the first bad line.
    """
    require_file(path)
    counter = LossCounter(tokenizer)
    with open_file(path) as file:
        words = [_last_word(tokenizer, counter, line, f"line {number} of data.path={path}", start)
                 for number, line in enumerate(file, start=1) if line.strip()]
    if not words:
        raise UserError(f"data.path={path} is empty: expected lines such as " '{"text": "..."}')
    return words


def holds_answers(path: Path) -> bool:
    """Returns True if the file contains conversations, and False if its first line is invalid: read_last_words reports that."""
    require_file(path)
    with suppress(UserError):
        return path.suffix.lower() == ".jsonl" and holds_conversations(path)
    return False


def read_answers(tokenizer: Tokenizer, path: Path, template: ChatTemplate) -> list[EvaluatedSequence]:
    """Reads conversations, as data=chat does, and marks their answers as scored. Prints how many have no answer."""
    require_file(path)
    template = for_tokenizer(template, tokenizer)
    counter = LossCounter(tokenizer)
    conversations, omitted = [], 0
    for entry, where, _ in entries(path):
        parts = parts_of(entry, where, template)
        if not any(is_answer for _, is_answer in parts):
            omitted += 1
            continue
        try:
            pieces = [(ids, is_answer) for ids, (_, is_answer) in
                      zip(encode(tokenizer, [text for text, _ in parts]), parts, strict=True)]
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        answers = [(visible_text(text), ids) for (text, is_answer), (ids, _) in zip(parts, pieces, strict=True) if is_answer]
        lost = counter.count([text for text, _ in answers], [ids for _, ids in answers])
        if pieces[-1][0][-1:] != [tokenizer.end_of_text]:
            pieces.append(([tokenizer.end_of_text], parts[-1][1]))
        ids = [token for piece, _ in pieces for token in piece]
        is_scored = [is_answer for piece, is_answer in pieces for _ in piece]
        conversations.append(EvaluatedSequence(ids, [False, *is_scored[1:]], lost))
    if not conversations:
        raise UserError(f"data.path={path} must have a conversation with an answer on each line, but the file contains no "
                        "answer")
    if omitted:
        print(f"omitted: {count_of(omitted, 'conversation')} without an answer to score", file=sys.stderr)
    return conversations


def _last_word(tokenizer: Tokenizer, counter: LossCounter, line: bytes, where: str, start: Sequence[int]) -> EvaluatedSequence:
    context, _, word = text_of(parse(line, where), "text", where).rstrip().rpartition(" ")
    if not context.strip():
        raise UserError(f"{where} must have at least two words, because the last word is predicted from the others")
    try:
        before = tokenizer.encode(context)
        whole = tokenizer.encode(f"{context} {word}")
        can_continue = whole[:len(before)] == before          # this is False if a token spans the context's end
        ids = whole[len(before):] if can_continue else tokenizer.encode(f" {word}")
        return EvaluatedSequence.with_ending([*start, *before], ids, counter.count([f" {word}"], [ids]))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
