"""What the process with HTTP and the process with the engine send each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.grammar import Grammar


@dataclass(frozen=True)
class Turn:
    """Where a conversation stands whose state is kept.

    role: of the message that was read last. tail: what was read after its text, as of a stop string, which the text of what
    follows begins with. tools, template: digests of what the conversation was shown with.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """What is known of a state that a client keeps; the engine's process holds it.

    owner: a digest of the key that made it. tokens: those that it has read; None for a file that does not say. last_ids: as of
    PrefillResult. turn: None where it is not known to be that of a conversation. refusal: why it cannot be used here. model:
    the adapter that has read it; "" for the checkpoint's own. id: "" for the beginning of all texts of an adapter.
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
    """What clients are told of the model.

    generation: its name. parameters: their number. trained_tokens: of the longest texts that it was trained with; None where
    nothing says it.
    """

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None


@dataclass(frozen=True)
class Ready:
    """The model is loaded.

    tokenizer: its definition, for Tokenizer.from_dict. template: the chat template's name. plan: lines (subject, text) for
    people. states: those that were kept before the server began. state_bytes: of one. sampling: the options that a request does
    not give, by how its answers begin; those of False are for texts without a chat template, too. adapters: by name the state
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
    """The engine's process ends, for this reason. mistake: it is the user's, and the reason says all."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """One text to generate. stream: its pieces are sent as they come, else all at the end. grammar: what it may be.

    start: the state that it continues. save: its end is kept as this state, whose tokens, bytes and last_ids are not yet known.
    model: the adapter's name, "" for the checkpoint's own. owner: as of SavedState.
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
    """Asks that a file's content is kept as `state`; the Reply has that state as it was found to be."""

    id: int
    state: SavedState
    content: bytes


@dataclass(frozen=True)
class Download:
    """Asks for the file of a state."""

    id: int
    state: SavedState


@dataclass(frozen=True)
class Drop:
    state: str


# What is sent to the engine; the texts of one HTTP request come together.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop


@dataclass(frozen=True)
class Reply:
    """To an Upload or a Download. error: why it cannot be done. state_gone: as of Event."""

    id: int
    value: SavedState | bytes | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """What is new of a text. finish_reason, the counts of tokens and prompt_logprobs come with the last one of it.

    state: what was kept of its end. error: why the text cannot be generated. state_gone: for want of the state that it follows.
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
    """The events of one step of the engine, what the cache holds, and of the states that clients keep those in memory.

    gone: states that are not kept any more, for want of room.
    """

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
