"""What the process with HTTP and the process with the engine send each other."""

from dataclasses import dataclass, field
from typing import Any

from rwkv.config import Sampling
from rwkv.generation.grammar import Grammar


@dataclass(frozen=True)
class Ready:
    """The model is loaded.

    tokenizer: its definition, for Tokenizer.from_dict. template: the chat template's name. plan: lines (subject, text) for
    people.
    """

    tokenizer: dict[str, Any]
    template: str
    plan: list[tuple[str, str]]


@dataclass(frozen=True)
class Failed:
    """The engine's process ends, for this reason. mistake: it is the user's, and the reason says all."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """One text to generate. stream: its pieces are sent as they come, else all at the end. grammar: what it may be."""

    id: int
    prompt: list[int]
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling
    stream: bool
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass
class Event:
    """What is new of a text. finish_reason, the counts of tokens and prompt_logprobs come with the last one of it.

    error: why the text cannot be generated.
    """

    id: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """The events of one step of the engine, and the state of the cache."""

    events: list[Event]
    cache_bytes: int
    cache_entries: int
