"""The messages between the process that serves HTTP and the process with the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.request import Entry, Request
from rwkv.io.json_types import JsonObject


@dataclass(frozen=True)
class Turn:
    """The end of a conversation whose state is saved.

    role: of the last message. tail: the text that the state has read after that message, such as a stop string; the next turn,
    once rendered, begins with it. tools, template: digests of the tools and the template that rendered the conversation.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """A client's saved state, without its content, which is in the engine's process.

    id: "" for the state that all sequences of an adapter begin with. owner: a digest of the API key that made it. tokens: the
    number it has read; None for a file without that number. last_ids: as in PrefillResult. turn: None unless the state is known
    to be a conversation's. refusal: why no model of this server can use it. model: the adapter that has read it; "" for the
    checkpoint's model.
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
class ModelInfo:
    """Facts about the model for clients. width: of its hidden state. trained_tokens: sequence length in training; None if
    unknown. device: cpu or cuda."""

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None
    width: int
    device: str


class Defaults(NamedTuple):
    """The defaults of a request. stop: strings that end a sequence. max_tokens: None for the server's limit."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Ready:
    """The model is loaded.

    tokenizer: its definition, for Tokenizer.from_dict. template: the chat template's name. plan: printed lines
    (subject, text). states: those in states_dir= at the start. state_bytes: the size of one state. defaults: of requests, by
    how the answer begins and whether there are tools; the entry of (False, False) also serves prompts without a chat template.
    adapters: by name, the state that the adapter's sequences begin with; None for the empty one.
    """

    model_info: ModelInfo
    tokenizer: JsonObject
    template: str
    plan: list[tuple[str, str]]
    states: list[SavedState]
    state_bytes: int
    defaults: Mapping[tuple[Think, bool], Defaults]
    adapters: dict[str, SavedState | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The engine's process ends. mistake: a user's mistake; the reason is then one sentence."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """A sequence to generate. id: set when it is queued. stream: send its text as it comes, not all at the end.

    start: the state that it continues. save: where to save its final state, with tokens, bytes and last_ids filled in. model,
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
    """A state file to save as `state`. The Reply has that state with the file's metadata.

    layout: of a tuned state, as in state_layout=.
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
class SyncFolder:
    """New files in states_dir=, perhaps of another server, and states whose files it may have deleted."""

    id: int
    new: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class FolderChanges:
    """Answers a SyncFolder. gone: ids."""

    new: list[SavedState]
    gone: list[str]


# Messages to the engine; the sequences of one HTTP request come together.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop | SyncFolder

ReplyValue = SavedState | bytes | FolderChanges | None


@dataclass(frozen=True)
class Reply:
    """Answers an Upload, a Download or a SyncFolder. error: why it failed. state_gone: as in Event."""

    id: int
    value: ReplyValue = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """The new part of a sequence. Its last Event has finish_reason, stop, the counts of tokens, prompt_logprobs, state and
    embedding.

    stop: the stop string that ended it. proposed_tokens, accepted_tokens: of its draft. state: its saved final state. error:
    the reason if it failed. state_gone: because the state that it continues is gone.
    """

    id: int
    text: str = ""
    logprobs: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: list[Entry] = field(default_factory=list)
    state: SavedState | None = None
    embedding: list[float] | None = None
    error: str | None = None
    state_gone: bool = False


@dataclass(frozen=True)
class Step:
    """The events of one step of the engine. state_bytes: of clients' states in memory. gone: ids of states evicted or lost."""

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
