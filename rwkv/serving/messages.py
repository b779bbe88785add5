"""The messages between the process with HTTP and the process with the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.grammar import Grammar


@dataclass(frozen=True)
class Turn:
    """The end of a conversation whose state is kept.

    role: of the last message. tail: what the state has read after that message's text, such as a stop string; the rendered text
    of the next turn begins with it. tools, template: digests of those that the conversation was rendered with.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """A state that a client keeps, without its content, which the engine's process holds.

    id: "" for the state that all texts of an adapter begin with. owner: a digest of the key that made it. tokens: the number
    that it has read; None for a file that does not say. last_ids: as in PrefillResult. turn: None for a state that is not
    known to be a conversation's. refusal: the reason why no model of this server can use it. model: the adapter that has read
    it; "" for the checkpoint's own model.
    """

    id: str
    owner: str
    created: int                         # seconds since 1970
    tokens: int | None
    bytes: int
    last_ids: tuple[int, ...] = ()
    turn: Turn | None = None
    refusal: str | None = None
    model: str = ""


@dataclass(frozen=True)
class About:
    """Facts of the model for clients. trained_tokens: of the longest texts that it was trained with, where that is known."""

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None


@dataclass(frozen=True)
class Ready:
    """The model is loaded.

    tokenizer: its definition, for Tokenizer.from_dict. template: the chat template's name. plan: lines (subject, text) for
    people. states: those that states_dir= holds from earlier. state_bytes: the size of one state. sampling: the defaults of
    requests, by how the answer begins; those of False also hold for texts without a chat template. adapters: by name, the state
    that their texts begin with; None for the empty one.
    """

    about: About
    tokenizer: dict[str, Any]
    template: str
    plan: list[tuple[str, str]]
    states: list[SavedState]
    state_bytes: int
    sampling: Mapping[Think, Sampling]
    adapters: dict[str, SavedState | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The engine's process ends. mistake: it is a user's mistake, and the reason is one sentence."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """One text to generate. stream: send its pieces as they come, not all at the end.

    start: the state that it continues. save: keep its end as this state, whose tokens, bytes and last_ids are not yet known.
    model, owner: as in SavedState.
    """

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
    start: SavedState | None = None
    save: SavedState | None = None
    model: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Upload:
    """Keep the content of a state file as `state`. The Reply has that state with what the file says of it."""

    id: int
    state: SavedState
    content: bytes


@dataclass(frozen=True)
class Download:
    id: int
    state: SavedState


@dataclass(frozen=True)
class Drop:
    state: str


# What is sent to the engine; the texts of one HTTP request come together.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop


@dataclass(frozen=True)
class Reply:
    """To an Upload or a Download. error: why it cannot be done. state_gone: as in Event."""

    id: int
    value: SavedState | bytes | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """News of a text. finish_reason, the counts of tokens and prompt_logprobs come with the last one of it.

    state: its end, which was kept. error: why the text cannot be generated. state_gone: the state that it continues is gone.
    """

    id: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    state: SavedState | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass(frozen=True)
class Step:
    """The events of one step of the engine. state_bytes: of the clients' states in memory. gone: states dropped or lost."""

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
