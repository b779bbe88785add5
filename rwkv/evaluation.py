"""Evaluates a model: its loss on a text, read as one sequence, or on the answers of conversations, or its accuracy on last
words.

A text is evaluated as one sequence that follows the end-of-text token: each token is predicted once, from all tokens before it,
so bits per byte count every byte of the file. The file and its tokens are streamed (Tokenizer.encode_stream). If the tokenizer
loses too much of the text (rwkv/tokenizer/lost_bytes.py), metrics per byte or per word are omitted.

A last word is the part of a text after its last space. The word is right if each of its tokens is the most likely token after
the context and the word's previous tokens, and if the tokens encode the whole word; word perplexity is exp of the mean negative
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
from rwkv.tokenizer.lost_bytes import NOTHING, LossCounter, Lost
from rwkv.tokenizer.tokenizers import Tokenizer

MAX_LOGITS = 1 << 22                     # maximum logits computed at a time: 16 MiB in float32


@dataclass(frozen=True)
class TextScore:
    """The score of a text. tokens: the number of predicted tokens. bytes: the text's bytes in UTF-8. nats: the sum of the
    tokens' negative log-likelihoods. lost: the part of the text that the tokenizer loses.
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
    """Sums over last words or conversations.

    texts: their number. tokens: the number of predicted tokens. right: the number of texts with only right predictions. nats:
    the sum of the tokens' negative log-likelihoods. lost: the part of the predicted text that the tokenizer loses.
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
    """The ids of a sequence. counts: whether each id is predicted (the first is not). lost: the part of the predicted text that
    the tokenizer loses.
    """

    ids: list[int]
    counts: list[bool]
    lost: Lost = NOTHING

    @classmethod
    def ending(cls, context: list[int], ending: list[int], lost: Lost = NOTHING) -> "Scored":
        """A sequence of a context, at least one id, and an ending, which is predicted."""
        return cls([*context, *ending], [False] * len(context) + [True] * len(ending), lost)


def count_tokens(tokenizer: Tokenizer, path: Path, option: str = "data.path") -> tuple[int, Lost]:
    """The number of tokens that score_text predicts, at least 1, and the part of the text that the tokenizer loses.

    option: the option that names the path, for error messages.
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
    """Yields, for each chunk, the number of predictions, at most chunk_len, and the sum of their nats.

    start: the ids before the first predicted token, at least one id.
    """
    state = None
    previous = list(start)
    for ids in _regrouped(tokenizer.encode_stream(chunks(path)), chunk_len):
        tokens = torch.tensor([previous + ids], device=model.emb.weight.device)        # (1,T+1)
        with torch.no_grad():
            hidden, state = model.hidden(tokens[:, :-1], state)                      # (1,T,C)
            nats, _ = score_targets(model, hidden[0, len(previous) - 1:], tokens[0, len(previous):])
        yield len(ids), nats.sum().item()
        previous = ids[-1:]


def score_texts(model: Model, texts: Sequence[Scored], batch_size: int, chunk_len: int) -> Iterator[Score]:
    """Yields the score of each batch of sequences of similar length. Sequences that lose text count as wrong."""
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first:first + batch_size]
        nats, right = score_batch(model, batch, chunk_len)
        whole = torch.tensor([text.lost.bytes == 0 for text in batch])
        yield Score(len(batch), sum(sum(text.counts) for text in batch), int((right & whole).sum()), nats.sum().item(),
                    sum((text.lost for text in batch), NOTHING))


def score_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For targets (N,) after hidden (N,C): their nats, (N,) float64, and whether each is the most likely token, (N,) bool.

    The logits are computed in chunks of rows.
    """
    nats = []
    right = []
    rows = max(1, MAX_LOGITS // model.vocab_size)
    for hidden_chunk, target_chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.head(hidden_chunk).float()                                    # (rows,V)
        nats.append(torch.nn.functional.cross_entropy(logits, target_chunk, reduction="none").double())
        right.append(logits.argmax(-1) == target_chunk)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def score_together(model: Model, context: Sequence[int], endings: Sequence[Sequence[int]], chunk_len: int,
                   batch_size: int) -> tuple[Tensor, Tensor]:
    """The nats (N,) of N endings after one context, which is prefilled once, and whether all tokens of each are right, (N,)."""
    context_state = None
    for first in range(0, len(context) - 1, chunk_len):
        chunk = torch.tensor([context[first:min(first + chunk_len, len(context) - 1)]], device=model.emb.weight.device)
        _, context_state = model.hidden(chunk, context_state)
    scores = []
    for first in range(0, len(endings), batch_size):
        texts = [Scored.ending([context[-1]], [*ending]) for ending in endings[first:first + batch_size]]
        state = None if context_state is None else context_state.rows([0] * len(texts))
        scores.append(score_batch(model, texts, chunk_len, state))
    nats, right = zip(*scores, strict=True)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def score_batch(model: Model, texts: Sequence[Scored], chunk_len: int, state: State | None = None) -> tuple[Tensor, Tensor]:
    """For each of B sequences: the nats of its predicted tokens, (B,), and whether all these tokens are right, (B,).

    chunk_len: the maximum tokens of a row in one pass. state: the initial states of the rows; None for empty states. Rows are
    padded on the right, which does not affect earlier positions, because the model is causal.
    """
    device = model.emb.weight.device
    tokens, counts = _padded(texts)
    targets = tokens[:, 1:]
    nats = torch.zeros(targets.shape, dtype=torch.float64)
    right = torch.ones(targets.shape, dtype=torch.bool)
    for first in range(0, targets.shape[1], chunk_len):
        chunk = slice(first, min(first + chunk_len, targets.shape[1]))
        hidden, state = model.hidden(tokens[:, chunk].to(device), state)
        mask = counts[:, chunk]
        if mask.any():
            word_nats, word_right = score_targets(model, hidden[mask.to(device)], targets[:, chunk][mask].to(device))
            nats[:, chunk][mask] = word_nats.cpu()
            right[:, chunk][mask] = word_right.cpu()
    return nats.sum(1), right.all(1)


def _padded(texts: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """The padded tokens (B,T+1), and a mask (B,T): whether each token but the first is predicted."""
    longest = max(len(text.ids) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    counts = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, :len(text.ids)] = torch.tensor(text.ids)
        counts[row, :len(text.ids) - 1] = torch.tensor(text.counts[1:])
    return tokens, counts


def _regrouped(lists: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """The same ids, regrouped into lists of `size`; the last list may be shorter."""
    rest: list[int] = []
    for ids in lists:
        rest += ids
        whole = len(rest) - len(rest) % size
        for first in range(0, whole, size):
            yield rest[first:first + size]
        rest = rest[whole:]
    if rest:
        yield rest


def _exp(value: float) -> float | None:
    """exp(value); None beyond a float's range, because JSON has no infinity."""
    return math.exp(value) if value < 700 else None
