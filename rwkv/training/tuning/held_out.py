"""Selects prompts from the validation split of a tuned run, and generates the model's continuations of these prompts.

The prompt of a conversation is everything before the first trained answer. The prompt of a document is the document's
beginning.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from rwkv.chat.encoding import decode_with_special_names
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

N_PROMPTS = 3
SEARCHED = 1000                          # at most this many documents or conversations are searched for prompts
DOCUMENT_PROMPT = 32                     # the prompt of a document has this many tokens, but at most half of the document


class Prompt(NamedTuple):
    """The token ids of a prompt and of the reference continuation in the data."""

    ids: list[int]
    reference: list[int]


def select_prompts(data: Corpus, longest: int, length: int) -> list[Prompt]:
    """Returns N_PROMPTS prompts from the validation split.

    The first prompts of at most `longest` tokens are preferred to longer prompts. The reference continuation of a document has
    at most `length` tokens. The reference continuation of a conversation is the whole answer.
    """
    all_prompts = _conversation_prompts(data.conversations[1]) if data.conversations else _document_prompts(data.val, length)
    candidates = islice((prompt for prompt in all_prompts if prompt.ids and prompt.reference), SEARCHED)
    fitting: list[Prompt] = []
    longer: list[Prompt] = []
    for prompt in candidates:
        (fitting if len(prompt.ids) <= longest else longer).append(prompt)
        if len(fitting) == N_PROMPTS:
            break
    return [*fitting, *longer][:N_PROMPTS]


def generate_continuations(model: Model, tokenizer: Tokenizer, config: TrainConfig, held_out: list[Prompt]) -> list[str]:
    """Returns the greedy continuation of each prompt, at most trainer.sample_tokens long. Raises ValueError as Engine does."""
    stop = template_of(config.data).stop if config.data.name == "chat" else ()
    engine = Engine(model, tokenizer)
    stopping = StoppingCriteria(config.trainer.sample_tokens, stop)
    rows = engine.add_all([Request(prompt.ids, config.seed, stopping, Sampling(temperature=0.0)) for prompt in held_out])
    engine.run()
    return [row.sample.text for row in rows]


def visible_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of the token ids, without end_of_text."""
    return decode_with_special_names(tokenizer, [token for token in ids if token != tokenizer.end_of_text])


def _conversation_prompts(split: Tokenised) -> Iterator[Prompt]:
    # Of each pair of answers, only the chosen answer is used
    for begin, end in islice(_spans(split.tokens), 0, None, 2 if split.paired else 1):
        is_target = split.learnt[begin:end].astype(bool)
        answer = int(is_target.argmax())
        rest = np.flatnonzero(~is_target[answer:])
        answer_end = answer + int(rest[0]) if len(rest) else end - begin
        ids = split.tokens[begin:end].tolist()
        yield Prompt(ids[:answer], ids[answer:answer_end])


def _document_prompts(tokens: TokenArray, length: int) -> Iterator[Prompt]:
    for begin, end in _spans(tokens):
        cut = begin + min(DOCUMENT_PROMPT, (end - begin) // 2)
        yield Prompt(tokens[begin:cut].tolist(), tokens[cut:min(end, cut + length)].tolist())


def _spans(tokens: TokenArray) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of the first SEARCHED documents or conversations. An array without starts is one document."""
    starts = tokens.starts[:SEARCHED + 1].tolist() or [0]
    return pairwise(starts if len(starts) > SEARCHED else [*starts, len(tokens)])
