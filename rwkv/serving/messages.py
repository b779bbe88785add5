"""The messages between the process that serves HTTP and the process with the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.request import Request


@dataclass(frozen=True)
class Turn:
    """The end of a conversation whose state is kept.

    role: of the last message. tail: the text that the state has read after that message, such as a stop string; the rendered
    next turn begins with it. tools, template: digests of the tools and the template that rendered the conversation.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """Describes a state that a client keeps. Its content is in the engine's process.

    id: "" for the state that all texts of an adapter begin with. owner: a digest of the API key that made it. tokens: how many
    it has read; None for a file that does not state it. last_ids: as in PrefillResult. turn: None if the state is not known to
    be a conversation's. refusal: why no model of this server can use it. model: the adapter that has read it; "" for the
    checkpoint's own model.
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
    """Facts about the model for clients. width: of its hidden state. trained_tokens: length of the longest texts it was trained
    with; None if unknown. device: cpu or cuda."""

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None
    width: int
    device: str


class Defaults(NamedTuple):
    """What counts where a request does not say it. stop: strings that end a text. max_tokens: None for the server's limit."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Ready:
    """Says that the model is loaded.

    tokenizer: its definition, for Tokenizer.from_dict. template: the chat template's name. plan: lines (subject, text) for
    people. states: those that states_dir= already holds. state_bytes: the size of one state. defaults: of requests, by how the
    answer begins and whether there are tools; the entry of (False, False) is also for texts without a chat template. adapters:
    by name, the state that the adapter's texts begin with; None for the empty one.
    """

    about: About
    tokenizer: dict[str, Any]
    template: str
    plan: list[tuple[str, str]]
    states: list[SavedState]
    state_bytes: int
    defaults: Mapping[tuple[Think, bool], Defaults]
    adapters: dict[str, SavedState | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """Says that the engine's process ends. mistake: it is a user's mistake, and the reason is one sentence."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """Asks for one sequence. id: set when it is queued. stream: send its pieces as they come, not all at the end.

    start: the state that it continues. save: keep its end as this state; tokens, bytes and last_ids are filled in then. model,
    owner: as in SavedState.
    """

    request: Request                     # without the context, which is in the engine's process
    model: str
    owner: str
    start: SavedState | None = None
    save: SavedState | None = None
    stream: bool = False
    id: int = -1


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Upload:
    """Asks to keep the content of a state file as `state`. The Reply has that state, with what the file says about it.

    layout: of a tuned state, as state_layout=.
    """

    id: int
    state: SavedState
    content: bytes
    layout: str | None = None


@dataclass(frozen=True)
class Download:
    id: int
    state: SavedState


@dataclass(frozen=True)
class Drop:
    state: str


@dataclass(frozen=True)
class Look:
    """Names files of states_dir= that another server may have written, and states whose files it may have deleted."""

    id: int
    new: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """Answers a Look. gone: ids."""

    new: list[SavedState]
    gone: list[str]


# What is sent to the engine; the texts of one HTTP request come together.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop | Look


@dataclass(frozen=True)
class Reply:
    """Answers an Upload, a Download or a Look. error: why it cannot be done. state_gone: as in Event."""

    id: int
    value: SavedState | bytes | Seen | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """What is new in a text. Its last Event has finish_reason, stop, the counts of tokens, prompt_logprobs, state and
    embedding.

    stop: the stop string that ended the text. state: the state kept at the text's end. error: why the text cannot be generated.
    state_gone: because the state that it continues is gone.
    """

    id: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    state: SavedState | None = None
    embedding: list[float] | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass(frozen=True)
class Step:
    """The events of one step of the engine. state_bytes: of clients' states in memory. gone: ids of states dropped or lost."""

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
