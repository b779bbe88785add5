"""Prompts from a run's validation split, and how its model continues them: a tuned run shows this before and after training.

Of a conversation, the prompt is all that stands before the first learnt answer; of a document, it is the beginning.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from rwkv.chat.rendered import shown
from rwkv.config import Sampling, TrainConfig
from rwkv.data.conversations import Tokenised
from rwkv.data.prepare import Corpus
from rwkv.data.sources.chat import template_of
from rwkv.data.token_array import TokenArray
from rwkv.generation.engine import Engine
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer

SHOWN = 3
SEARCHED = 1000                          # texts among which SHOWN are chosen
OPENING = 32                             # tokens of a document that are its prompt, but at most half of them


class Prompt(NamedTuple):
    """The ids of a prompt, and of what follows it in the data."""

    ids: list[int]
    reference: list[int]


def prompts(data: Corpus, longest: int, length: int) -> list[Prompt]:
    """SHOWN prompts of the validation split: the first ones of at most `longest` tokens, then the first longer ones.

    length: the number of tokens of a document's reference; the reference to a conversation's prompt is the whole answer.
    """
    found = _of_conversations(data.conversations[1]) if data.conversations else _of_documents(data.val, length)
    searched = islice((prompt for prompt in found if prompt.ids and prompt.reference), SEARCHED)
    fitting: list[Prompt] = []
    others: list[Prompt] = []
    for prompt in searched:
        (fitting if len(prompt.ids) <= longest else others).append(prompt)
        if len(fitting) == SHOWN:
            break
    return [*fitting, *others][:SHOWN]


def continuations(model: Model, tokenizer: Tokenizer, config: TrainConfig, found: list[Prompt]) -> list[str]:
    """The likeliest text after each prompt, at most trainer.sample_tokens long. Raises ValueError as Engine does."""
    stop = template_of(config.data).stop if config.data.name == "chat" else ()
    engine = Engine(model, tokenizer)
    stopping = StoppingCriteria(config.trainer.sample_tokens, stop)
    rows = engine.add_all([Request(prompt.ids, config.seed, stopping, Sampling(temperature=0.0)) for prompt in found])
    engine.run()
    return [row.sample.text for row in rows]


def readable(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids, without end_of_text."""
    return shown(tokenizer, [token for token in ids if token != tokenizer.end_of_text])


def _of_conversations(split: Tokenised) -> Iterator[Prompt]:
    """Of pairs of answers only the chosen ones are read."""
    for begin, end in islice(_texts(split.tokens), 0, None, 2 if split.paired else 1):
        learnt = split.learnt[begin:end].astype(bool)
        first = int(learnt.argmax())
        after = np.flatnonzero(~learnt[first:])
        last = first + int(after[0]) if len(after) else end - begin
        ids = split.tokens[begin:end].tolist()
        yield Prompt(ids[:first], ids[first:last])


def _of_documents(tokens: TokenArray, length: int) -> Iterator[Prompt]:
    for begin, end in _texts(tokens):
        cut = begin + min(OPENING, (end - begin) // 2)
        yield Prompt(tokens[begin:cut].tolist(), tokens[cut:min(end, cut + length)].tolist())


def _texts(tokens: TokenArray) -> Iterator[tuple[int, int]]:
    """Where each of the first texts begins and ends; an array without starts is one text."""
    starts = tokens.starts[:SEARCHED + 1].tolist() or [0]
    return pairwise(starts if len(starts) > SEARCHED else [*starts, len(tokens)])
