"""Evaluation: the loss of a model on a text with the state carried along, or on the answers of conversations, and its
accuracy on the last words of many texts.

A text is one sequence after the end-of-text token: each of its tokens is predicted once, from all tokens before it, so bits per
byte count every byte of the file. Neither the file nor its tokens are in memory as a whole (Tokenizer.encode_stream).
Where the tokenizer loses too much of the text (rwkv/tokenizer/lost.py), no number per byte or per word is given.

A last word is the text after the last space. It is right if each of its tokens is the most likely one after the context and
the word's tokens before it, and if the tokens encode the whole word; the perplexity over words is exp of the mean negative
log-likelihood of a word. Sources: LAMBADA, Paperno et al. 2016 (arXiv:1606.06031); EleutherAI/lm-evaluation-harness,
lm_eval/tasks/lambada (split, accuracy, perplexity); BlinkDL/ChatRWKV, v2/benchmark.py (the word is encoded apart from its
context; each text begins with a newline: start="\\n").

Legend: B rows, T positions, C channels, N predictions, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv.errors import UserError
from rwkv.io.utf8 import chunks, require_file
from rwkv.model.base import Model
from rwkv.model.state import State
from rwkv.tokenizer.lost import NOTHING, LossCounter, Lost
from rwkv.tokenizer.tokenizers import Tokenizer

MAX_LOGITS = 1 << 22                     # computed at a time: 16 MiB in float32


@dataclass(frozen=True)
class TextScore:
    """A text of `tokens` predicted tokens and `bytes` of UTF-8. nats: the sum of the tokens' negative log-likelihoods.

    lost: the part of the text that the tokenizer loses.
    """

    tokens: int
    bytes: int
    nats: float
    lost: Lost = NOTHING

    def as_dict(self) -> dict[str, float | int | None]:
        loss = self.nats / self.tokens
        bits_per_byte = None if self.lost.too_much else self.nats / math.log(2) / self.bytes
        return {"tokens": self.tokens, "bytes": self.bytes, "loss": loss, "perplexity": _exp(loss),
                "bits_per_byte": bits_per_byte, **_counts(self.lost)}


@dataclass(frozen=True)
class Score:
    """Sums over `texts` last words or conversations, with `tokens` predicted tokens.

    right: texts whose predicted tokens are all right. nats: the sum of the tokens' negative log-likelihoods. lost: the part of
    the predicted text that the tokenizer loses.
    """

    texts: int = 0
    tokens: int = 0
    right: int = 0
    nats: float = 0.0
    lost: Lost = NOTHING

    def __add__(self, other: "Score") -> "Score":
        return Score(self.texts + other.texts, self.tokens + other.tokens, self.right + other.right, self.nats + other.nats,
                     self.lost + other.lost)

    def word_metrics(self) -> dict[str, float | int | None]:
        perplexity = None if self.lost.too_much else _exp(self.nats / self.texts)
        return {"words": self.texts, "accuracy": self.right / self.texts, "perplexity": perplexity, **_counts(self.lost)}

    def answer_metrics(self) -> dict[str, float | int | None]:
        loss = self.nats / self.tokens
        return {"conversations": self.texts, "tokens": self.tokens, "loss": loss, "perplexity": _exp(loss),
                **_counts(self.lost)}


def _counts(lost: Lost) -> dict[str, int]:
    return {"lost_bytes": lost.bytes, "unknown_tokens": lost.unknown}


class Scored(NamedTuple):
    """The ids of a text, and whether each is to be predicted; the first is not. lost: the lost part of the predicted text."""

    ids: list[int]
    counts: list[bool]
    lost: Lost = NOTHING

    @classmethod
    def ending(cls, context: list[int], ending: list[int], lost: Lost = NOTHING) -> "Scored":
        """An ending that is predicted after a context of at least one id."""
        return cls([*context, *ending], [False] * len(context) + [True] * len(ending), lost)


def count_tokens(tokenizer: Tokenizer, path: Path, option: str = "data.path") -> tuple[int, Lost]:
    """The number of tokens that score_text will predict, at least 1, and the part of the text that the tokenizer loses.

    option: the name of the option that gives the path, for errors.
    """
    require_file(path, option)
    counter = LossCounter(tokenizer)
    tokens = 0
    lost = NOTHING
    for text, ids in tokenizer.encode_pieces(chunks(path, option=option)):
        tokens += len(ids)
        lost += counter.count([text], [ids])
    if not tokens:
        why = lost.describe("it") if lost.bytes else "it is empty"
        raise UserError(f"{option}={path} has nothing to predict: {why}")
    return tokens, lost


def score_text(model: Model, tokenizer: Tokenizer, path: Path, start: Sequence[int],
               chunk_len: int) -> Iterator[tuple[int, float]]:
    """Yields the number of predictions in each pass, at most chunk_len, and the sum of their nats.

    start: the ids before the first predicted token, at least one.
    """
    state = None
    before = list(start)
    for ids in _regrouped(tokenizer.encode_stream(chunks(path)), chunk_len):
        tokens = torch.tensor([before + ids], device=model.emb.weight.device)        # (1,T+1)
        with torch.no_grad():
            hidden, state = model.hidden(tokens[:, :-1], state)                      # (1,T,C)
            nats, _ = score_targets(model, hidden[0, len(before) - 1:], tokens[0, len(before):])
        yield len(ids), nats.sum().item()
        before = ids[-1:]


def score_texts(model: Model, texts: Sequence[Scored], batch_size: int, chunk_len: int) -> Iterator[Score]:
    """Yields the score of each batch of texts of similar length. A text that the tokenizer cannot hold whole counts
    as wrong."""
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first:first + batch_size]
        nats, right = score_batch(model, batch, chunk_len)
        whole = torch.tensor([text.lost.bytes == 0 for text in batch])
        yield Score(len(batch), sum(sum(text.counts) for text in batch), int((right & whole).sum()), nats.sum().item(),
                    sum((text.lost for text in batch), NOTHING))


def score_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For targets (N,) after hidden (N,C): their nats (N,), float64, and whether each is the most likely token (N,), bool.

    The logits are computed for a part of the rows at a time.
    """
    nats = []
    right = []
    rows = max(1, MAX_LOGITS // model.vocab_size)
    for some_hidden, some_targets in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.head(some_hidden).float()                                     # (rows,V)
        nats.append(torch.nn.functional.cross_entropy(logits, some_targets, reduction="none").double())
        right.append(logits.argmax(-1) == some_targets)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def score_together(model: Model, context: Sequence[int], endings: Sequence[Sequence[int]], chunk_len: int,
                   batch_size: int) -> tuple[Tensor, Tensor]:
    """The nats (N,) of each ending after the same context, and whether all its tokens are right (N,). Reads the context once.
    """
    before = None
    for first in range(0, len(context) - 1, chunk_len):
        part = torch.tensor([context[first:min(first + chunk_len, len(context) - 1)]], device=model.emb.weight.device)
        _, before = model.hidden(part, before)
    found = []
    for first in range(0, len(endings), batch_size):
        texts = [Scored.ending([context[-1]], [*ending]) for ending in endings[first:first + batch_size]]
        state = None if before is None else before.rows([0] * len(texts))
        found.append(score_batch(model, texts, chunk_len, state))
    nats, right = zip(*found, strict=True)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def score_batch(model: Model, texts: Sequence[Scored], chunk_len: int, state: State | None = None) -> tuple[Tensor, Tensor]:
    """The nats of the predicted tokens of each text (B,), and whether all are right (B,).

    chunk_len: the most tokens of a row that a pass reads. state: the state of each row before its text; None for empty ones.
    Rows are padded on the right, which changes no earlier position: the model is causal.
    """
    device = model.emb.weight.device
    tokens, counts = _padded(texts)
    targets = tokens[:, 1:]
    nats = torch.zeros(targets.shape, dtype=torch.float64)
    right = torch.ones(targets.shape, dtype=torch.bool)
    for first in range(0, targets.shape[1], chunk_len):
        part = slice(first, min(first + chunk_len, targets.shape[1]))
        hidden, state = model.hidden(tokens[:, part].to(device), state)
        mask = counts[:, part]
        if mask.any():
            word_nats, word_right = score_targets(model, hidden[mask.to(device)], targets[:, part][mask].to(device))
            nats[:, part][mask] = word_nats.cpu()
            right[:, part][mask] = word_right.cpu()
    return nats.sum(1), right.all(1)


def _padded(texts: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """Tokens (B,T+1), and whether the token that follows each of the first T counts, (B,T) bool."""
    longest = max(len(text.ids) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    counts = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, :len(text.ids)] = torch.tensor(text.ids)
        counts[row, :len(text.ids) - 1] = torch.tensor(text.counts[1:])
    return tokens, counts


def _regrouped(parts: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """The same ids in lists of `size`; the last list may be shorter."""
    rest: list[int] = []
    for part in parts:
        rest += part
        whole = len(rest) - len(rest) % size
        for first in range(0, whole, size):
            yield rest[first:first + size]
        rest = rest[whole:]
    if rest:
        yield rest


def _exp(value: float) -> float | None:
    """exp(value); None beyond a float's range, because JSON has no infinity."""
    return math.exp(value) if value < 700 else None
