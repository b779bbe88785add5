"""How well a model predicts a text with the state carried along, and the last words of many texts.

A text is one sequence after the end-of-text token: every token of it is predicted exactly once, from all before it, and so
every byte of the file counts. Neither the file nor its tokens are in memory as a whole (Tokenizer.encode_stream).

A last word is what follows the last space. It is right where each of its tokens is the likeliest after the context and those
before it; the perplexity over words is exp of the mean negative log-likelihood of a whole word. Sources: LAMBADA, Paperno et
al. 2016 (arXiv:1606.06031); EleutherAI/lm-evaluation-harness, lm_eval/tasks/lambada (split, accuracy, perplexity);
BlinkDL/ChatRWKV, v2/benchmark.py (the word encoded apart from its context; it begins each text with a newline: start="\\n").

Legend: B rows, T positions, C channels, N predictions.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv.corpus.files import chunks, open_file
from rwkv.json_lines import parse, text_of
from rwkv.model import RWKV
from rwkv.tokenizer import Tokenizer

LOGITS = 1 << 22                         # at a time: 16 MiB in float32


@dataclass(frozen=True)
class TextScore:
    """Of `tokens` predictions, which make up `bytes` of UTF-8; `nats` is the sum of their negative log-likelihoods."""

    tokens: int
    bytes: int
    nats: float

    def as_dict(self) -> dict[str, float | int | None]:
        loss = self.nats / self.tokens
        return {"tokens": self.tokens, "bytes": self.bytes, "loss": loss, "perplexity": _exp(loss),
                "bits_per_byte": self.nats / math.log(2) / self.bytes}


@dataclass(frozen=True)
class WordScore:
    """Of `words` last words: how many were `right`, and the sum of their negative log-likelihoods."""

    words: int
    right: int
    nats: float

    def as_dict(self) -> dict[str, float | int | None]:
        return {"words": self.words, "accuracy": self.right / self.words, "perplexity": _exp(self.nats / self.words)}


@dataclass(frozen=True)
class LastWord:
    """Ids: `context`, never empty, and `word`, what is to be predicted after it."""

    context: list[int]
    word: list[int]


def read_text(path: Path) -> Iterator[str]:
    """The text of a file, piece by piece. Raises ValueError where it cannot be read or is not UTF-8, with the place."""
    _require_file(path)
    return chunks(path)


def count_tokens(tokenizer: Tokenizer, path: Path) -> int:
    """How many tokens score_text will predict. Raises ValueError for what would stop it: other encodings, no text at all."""
    tokens = sum(len(ids) for ids in tokenizer.encode_stream(read_text(path)))
    if not tokens:
        raise ValueError(f"data.path={path} is empty: there is nothing to predict")
    return tokens


def score_text(model: RWKV, tokenizer: Tokenizer, path: Path, start: Sequence[int],
               chunk_len: int) -> Iterator[tuple[int, float]]:
    """Passes of at most `chunk_len` predictions: how many, and the sum of their nats. `start`: ids before the first one."""
    state, before = None, list(start)
    for ids in _regrouped(tokenizer.encode_stream(read_text(path)), chunk_len):
        tokens = torch.tensor([before + ids], device=model.emb.weight.device)        # (1,T+1)
        with torch.no_grad():
            hidden, state = model.hidden(tokens[:, :-1], state)                      # (1,T,C)
            nats, _ = predicted(model, hidden[0, len(before) - 1:], tokens[0, len(before):])
        yield len(ids), nats.sum().item()
        before = ids[-1:]


def read_last_words(tokenizer: Tokenizer, path: Path, start: Sequence[int]) -> list[LastWord]:
    """The texts of a file with one {"text": ...} on each line. Raises ValueError with the number of the first wrong line."""
    _require_file(path)
    with open_file(path) as file:
        found = [_last_word(tokenizer, line, f"line {number} of data.path={path}", start)
                 for number, line in enumerate(file, start=1) if line.strip()]
    if not found:
        raise ValueError(f"data.path={path} is empty: expected lines of " '{"text": "..."}')
    return found


def score_last_words(model: RWKV, words: Sequence[LastWord], batch_size: int, chunk_len: int) -> Iterator[WordScore]:
    """The score of one batch after the other, texts of similar length together."""
    ordered = sorted(words, key=lambda word: len(word.context) + len(word.word))
    for at in range(0, len(ordered), batch_size):
        nats, right = _score_batch(model, ordered[at:at + batch_size], chunk_len)
        yield WordScore(len(nats), int(right.sum()), nats.sum().item())


def predicted(model: RWKV, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of targets (N,) after hidden (N,C): nats (N,) float64, and whether the target is the likeliest (N,) bool.

    The logits (N,V) exist for some rows at a time.
    """
    nats, likeliest = [], []
    rows = max(1, LOGITS // model.vocab_size)
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.head(part).float()
        nats.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none").double())
        likeliest.append(logits.argmax(-1) == wanted)
    return torch.cat(nats), torch.cat(likeliest)


@torch.no_grad()
def _score_batch(model: RWKV, words: Sequence[LastWord], chunk_len: int) -> tuple[Tensor, Tensor]:
    """The nats of each word (B,), and whether it is right (B,).

    Rows are filled up on the right, where nothing that counts can see it; passes take at most chunk_len positions.
    """
    device = model.emb.weight.device
    tokens, counts = _padded(words)
    nats, right = torch.zeros(tokens[:, 1:].shape, dtype=torch.float64), torch.ones(tokens[:, 1:].shape, dtype=torch.bool)
    state = None
    for at in range(0, nats.shape[1], chunk_len):
        part = slice(at, min(at + chunk_len, nats.shape[1]))
        hidden, state = model.hidden(tokens[:, part].to(device), state)
        here = counts[:, part]
        if here.any():
            found = predicted(model, hidden[here.to(device)], tokens[:, 1:][:, part][here].to(device))
            nats[:, part][here], right[:, part][here] = (each.cpu() for each in found)
    return nats.sum(1), right.all(1)


def _padded(words: Sequence[LastWord]) -> tuple[Tensor, Tensor]:
    """Tokens (B,T+1), and where the prediction of the next token counts (B,T)."""
    longest = max(len(word.context) + len(word.word) for word in words)
    tokens = torch.zeros(len(words), longest, dtype=torch.long)
    counts = torch.zeros(len(words), longest - 1, dtype=torch.bool)
    for row, word in enumerate(words):
        ids = word.context + word.word
        tokens[row, :len(ids)] = torch.tensor(ids)
        counts[row, len(word.context) - 1:len(ids) - 1] = True
    return tokens, counts


def _last_word(tokenizer: Tokenizer, line: bytes, where: str, start: Sequence[int]) -> LastWord:
    context, _, word = text_of(parse(line, where), "text", where).rstrip().rpartition(" ")
    if not context.strip():
        raise ValueError(f"{where} has no word before its last one: nothing to predict it from")
    try:
        return LastWord([*start, *tokenizer.encode(context)], tokenizer.encode(f" {word}"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _regrouped(parts: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """The same ids in lists of `size`, the last one perhaps shorter."""
    rest: list[int] = []
    for part in parts:
        rest += part
        whole = len(rest) - len(rest) % size
        yield from (rest[at:at + size] for at in range(0, whole, size))
        rest = rest[whole:]
    if rest:
        yield rest


def _require_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"data.path={path} is not a file: it is read twice, so it can be neither a folder nor a pipe")


def _exp(value: float) -> float | None:
    """None where it is beyond a float's range: JSON has no infinity."""
    return math.exp(value) if value < 700 else None
