"""A Request describes one sequence to generate, with all options.

This module does not import torch, because the HTTP process of serve.py creates requests, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rwkv.config import LARGEST_SEED, Pooling, Sampling, require_type, whole_number
from rwkv.generation.grammar import Grammar
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_types import JsonObject

if TYPE_CHECKING:
    from rwkv.generation.prefix_cache import Key, PrefillResult

Entry = JsonObject                       # {"token": id, "text": ..., "logprob": ..., "top": [likeliest tokens, same keys]}


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate. Raises UserError for a value that is out of range or of the wrong type.

    Attributes:
        prompt: a text or its token ids.
        n_logprobs: the number of likeliest tokens returned at each token, besides the token itself, each with a
            log-probability. None turns log-probabilities off.
        prompt_logprobs: returns log-probabilities of the prompt tokens, too, except the first.
        context: the prefill result of the text before the prompt.
        context_key: the cache key of the context, with length 0. A request with a context and no key does not use the cache.
        earlier: ids that the context has read. repetition_penalty counts these ids like those of the prompt.
        keep_context: sets Row.final_context when the sequence has ended.
        pooling: the way to compute Row.embedding after prefill; None for no embedding.
    """

    prompt: str | Sequence[int]
    seed: int = 0
    stopping: StoppingCriteria = field(default_factory=StoppingCriteria)
    sampling: Sampling = field(default_factory=Sampling)
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    context: "PrefillResult | None" = None
    context_key: "Key | None" = None
    earlier: Sequence[int] = ()
    keep_context: bool = False
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        require_type("grammar", self.grammar, (Grammar, type(None)), 'a Grammar, such as Grammar.regex("[0-9]+"), or None')
        object.__setattr__(self, "seed", whole_number("seed", self.seed, most=LARGEST_SEED))
        if self.n_logprobs is not None:
            object.__setattr__(self, "n_logprobs", whole_number("logprobs", self.n_logprobs))

    @property
    def prompt_text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Returns the prompt's ids, or () if the prompt is a string."""
        return () if isinstance(self.prompt, str) else self.prompt

    @property
    def uses_cache(self) -> bool:
        return self.context is None or self.context_key is not None

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Returns n_logprobs for the prompt tokens, or None unless prompt_logprobs is set."""
        return (self.n_logprobs or 0) if self.prompt_logprobs else None

    def shares_prefill(self, other: "Request") -> bool:
        """Returns True if one prefill can serve both requests, provided that the prompts have the same ids."""
        return (self.context is other.context and self.context_key == other.context_key and self.pooling == other.pooling
                and self.n_prompt_logprobs == other.n_prompt_logprobs)
