"""Computes a model's loss on a text, its loss on the answers of conversations, or its accuracy on last words (LAMBADA).

A text is evaluated as one sequence that follows the end-of-text token. Each token is predicted once, from all tokens before it,
so bits per byte count every byte of the file. The file and its tokens are streamed (Tokenizer.encode_stream). If the tokenizer
loses too much of the text (rwkv/tokenizer/lost_bytes.py), metrics per byte or per word are omitted.

A last word is the part of a text after its last space. The word is right if each of its tokens is the most likely token after
the context and the word's previous tokens, and if the tokens encode the whole word. Word perplexity is exp of the mean negative
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
    """The loss of a model on a text.

    Attributes:
        tokens: number of predicted tokens.
        bytes: length of the text in UTF-8.
        nats: sum of the tokens' negative log-likelihoods.
        lost: the part of the text that the tokenizer cannot represent.
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
    """The summed results of several texts. A text is a context with a last word, or a conversation.

    Attributes:
        texts: number of texts.
        tokens: number of predicted tokens.
        right: number of texts in which every prediction is right.
        nats: sum of the tokens' negative log-likelihoods.
        lost: the part of the predicted text that the tokenizer cannot represent.
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


class EvaluatedSequence(NamedTuple):
    """A sequence of token ids to evaluate.

    Attributes:
        counts: for each id, whether the prediction of this id counts. The first id is never predicted.
        lost: the part of the predicted text that the tokenizer cannot represent.
    """

    ids: list[int]
    counts: list[bool]
    lost: Lost = NOTHING

    @classmethod
    def with_ending(cls, context: list[int], ending: list[int], lost: Lost = NOTHING) -> "EvaluatedSequence":
        """Returns the sequence of a context, which has at least one id, and an ending, whose ids are predicted."""
        return cls([*context, *ending], [False] * len(context) + [True] * len(ending), lost)


def count_tokens(tokenizer: Tokenizer, path: Path, option: str = "data.path") -> tuple[int, Lost]:
    """Returns the number of tokens that score_text predicts, and the part of the text that the tokenizer cannot represent.

    Raises UserError if there is no token to predict. `option` is the option that names the path, for error messages.
    """
    require_file(path, option)
    counter = LossCounter(tokenizer)
    tokens = 0
    lost = NOTHING
    for text, ids in tokenizer.encode_pieces(chunks(path, option=option)):
        tokens += len(ids)
        lost += counter.count([text], [ids])
    if not tokens:
        why = lost.describe("the text") if lost.bytes else "the file is empty"
        raise UserError(f"{option}={path} has no tokens to predict: {why}")
    return tokens, lost


def score_text(model: Model, tokenizer: Tokenizer, path: Path, start: Sequence[int],
               chunk_len: int) -> Iterator[tuple[int, float]]:
    """Yields, for each chunk of at most `chunk_len` tokens, their number and the sum of their negative log-likelihoods.

    `start` are the ids before the first predicted token, at least one.
    """
    state = None
    previous = list(start)
    for ids in _regroup(tokenizer.encode_stream(chunks(path)), chunk_len):
        tokens = torch.tensor([previous + ids], device=model.emb.weight.device)        # (1,T+1)
        with torch.no_grad():
            hidden, state = model.hidden(tokens[:, :-1], state)                      # (1,T,C)
            nats, _ = score_targets(model, hidden[0, len(previous) - 1:], tokens[0, len(previous):])
        yield len(ids), nats.sum().item()
        previous = ids[-1:]


def score_texts(model: Model, texts: Sequence[EvaluatedSequence], batch_size: int, chunk_len: int) -> Iterator[Score]:
    """Yields the score of each batch of sequences of similar length.

    A sequence counts as wrong if the tokenizer cannot represent all of its predicted text.
    """
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first:first + batch_size]
        nats, right = score_batch(model, batch, chunk_len)
        whole = torch.tensor([text.lost.bytes == 0 for text in batch])
        yield Score(len(batch), sum(sum(text.counts) for text in batch), int((right & whole).sum()), nats.sum().item(),
                    sum((text.lost for text in batch), NOTHING))


def score_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the targets' negative log-likelihoods, and whether each target is the most likely token.

    The logits are computed in chunks of rows, to save memory.

    Args:
        hidden (N,C): the model's output before its head.
        targets (N,): the id that follows each row.

    Returns:
        (N,) float64 and (N,) bool.
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
def score_endings(model: Model, context: Sequence[int], endings: Sequence[Sequence[int]], chunk_len: int,
                  batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns the negative log-likelihoods (N,) of N endings, and whether all tokens of each ending are right (N,).

    All endings follow the same context, which is prefilled once.
    """
    context_state = None
    for first in range(0, len(context) - 1, chunk_len):
        chunk = torch.tensor([context[first:min(first + chunk_len, len(context) - 1)]], device=model.emb.weight.device)
        _, context_state = model.hidden(chunk, context_state)
    scores = []
    for first in range(0, len(endings), batch_size):
        texts = [EvaluatedSequence.with_ending([context[-1]], [*ending]) for ending in endings[first:first + batch_size]]
        state = None if context_state is None else context_state.rows([0] * len(texts))
        scores.append(score_batch(model, texts, chunk_len, state))
    nats, right = zip(*scores, strict=True)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def score_batch(model: Model, texts: Sequence[EvaluatedSequence], chunk_len: int,
                state: State | None = None) -> tuple[Tensor, Tensor]:
    """Returns the negative log-likelihood of each sequence's predicted tokens (B,), and whether all of them are right (B,).

    Rows are padded on the right. The padding does not affect earlier positions, because the model is causal.

    Args:
        chunk_len: maximum number of tokens of a row in one forward pass.
        state: the initial states of the rows; None for empty states.
    """
    device = model.emb.weight.device
    tokens, counts = _pad(texts)
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


def _pad(texts: Sequence[EvaluatedSequence]) -> tuple[Tensor, Tensor]:
    """Returns the padded tokens (B,T+1), and for each token but the first whether its prediction counts (B,T)."""
    longest = max(len(text.ids) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    counts = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, :len(text.ids)] = torch.tensor(text.ids)
        counts[row, :len(text.ids) - 1] = torch.tensor(text.counts[1:])
    return tokens, counts


def _regroup(lists: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Yields the same ids in lists of `size`, of which the last may be shorter."""
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
    """Returns exp(value), or None beyond a float's range, because JSON has no infinity."""
    return math.exp(value) if value < 700 else None
