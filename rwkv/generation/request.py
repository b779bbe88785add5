"""One sequence to generate, with all its options.

Does not import torch, because serve.py's HTTP process creates requests, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rwkv.config import LARGEST_SEED, Pooling, Sampling, whole_number
from rwkv.generation.grammar import Grammar
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_types import JsonObject

if TYPE_CHECKING:
    from rwkv.generation.prefill import PrefillResult
    from rwkv.generation.prefix_cache import Key

Entry = JsonObject                       # {"token": id, "text": ..., "logprob": ..., "top": [the same of the likeliest, ...]}


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate. Raises UserError for a value out of range or of another type.

    prompt: a text or its token ids. n_logprobs: also return the log-probability of each token and of this many likeliest
    tokens; None for no log-probabilities. prompt_logprobs: also return them for the prompt's tokens except the first. grammar:
    constrains the continuation. context: the result of what precedes the prompt. context_key: the cache key, of length 0, of
    that context; without it the cache is not used. earlier: ids that the context has read; repetition_penalty counts them like
    the prompt's. keep_context: set Row.final_context when the sequence has ended. pooling: set Row.embedding after prefill.
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
        object.__setattr__(self, "seed", whole_number("seed", self.seed, most=LARGEST_SEED))
        if self.n_logprobs is not None:
            object.__setattr__(self, "n_logprobs", whole_number("logprobs", self.n_logprobs))

    @property
    def prompt_text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """() for a prompt that is a text."""
        return () if isinstance(self.prompt, str) else self.prompt

    @property
    def uses_cache(self) -> bool:
        return self.context is None or self.context_key is not None

    @property
    def n_prompt_logprobs(self) -> int | None:
        """n_logprobs for the prompt; None if not requested."""
        return (self.n_logprobs or 0) if self.prompt_logprobs else None

    def shares_prefill(self, other: "Request") -> bool:
        """Whether one prefill serves both requests, if their prompts have the same ids."""
        return (self.context is other.context and self.context_key == other.context_key and self.pooling == other.pooling
                and self.n_prompt_logprobs == other.n_prompt_logprobs)
