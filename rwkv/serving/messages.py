"""The messages between the HTTP process and the engine's process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.request import Entry, Request
from rwkv.io.json_types import JsonObject


@dataclass(frozen=True)
class Turn:
    """How the conversation of a saved state ended.

    role: the role of the last message. tail: the text that the state has read after that message, such as a stop string; the
    rendered next turn begins with this text. tools, template: digests of the tools and the chat template of the conversation.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """A client's saved state, without its content, which is in the engine's process.

    id: "" for the state from which all sequences of an adapter begin. owner: a digest of the API key that saved it. tokens: the
    number of tokens that the state has read; None if the state's file does not say. bytes: the size of the state. last_ids: as
    in PrefillResult. turn: how the state's conversation ended; None if no conversation is known. refusal: the reason why no
    model of this server can use the state; None if a model can. model: the name of the adapter that has read it; "" for the
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
    """Facts about the model, for clients. width: the size of the hidden state. trained_tokens: the sequence length in training;
    None if unknown. device: cpu or cuda."""

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None
    width: int
    device: str


class Defaults(NamedTuple):
    """The default options of a request. stop: stop strings. max_tokens: None for the server's limit."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Ready:
    """Tells the HTTP process that the model is loaded.

    tokenizer: the tokenizer's definition, for Tokenizer.from_dict. template: the chat template's name. plan: the lines to
    print, as (subject, text). states: the saved states found in states_dir=. state_bytes: the size of one state. defaults: the
    default options of requests, by (how the answer begins, whether there are tools); the entry (False, False) also applies to
    prompts without a chat template. adapters: for each name, the state from which the adapter's sequences begin; None for the
    empty state.
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
    """Tells the HTTP process that the engine's process ends. reason: one sentence if a user's mistake caused this, otherwise a
    traceback. mistake: whether it was a user's mistake."""

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """A sequence to generate. id: its number, set by the queue. stream: whether to send the text while it is generated, or all
    at the end.

    start: the saved state that the sequence continues. save: the record under which the sequence's final state is saved; the
    engine fills in tokens, bytes and last_ids. model, owner: as in SavedState.
    """

    request: Request                     # without a context, which only the engine's process has
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
    """A state file to save under the id of `state`. The Reply has `state`, completed with the file's metadata.

    layout: the layout of a tuned state, as in state_layout=.
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
    """What other servers may have changed in states_dir=. new: names of unknown files. lost: ids of states without a file."""

    id: int
    new: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class FolderChanges:
    """The result of a SyncFolder. gone: the ids of states whose files were deleted."""

    new: list[SavedState]
    gone: list[str]


# Messages to the engine. The sequences of one HTTP request are sent as one list.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop | SyncFolder

ReplyValue = SavedState | bytes | FolderChanges | None


@dataclass(frozen=True)
class Reply:
    """The answer to an Upload, a Download or a SyncFolder. error: the reason for a failure. state_gone: as in Event."""

    id: int
    value: ReplyValue = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """What has been generated of a sequence since its last Event. Only the final Event of a sequence has finish_reason, stop,
    the token counts, prompt_logprobs, state and embedding.

    stop: the stop string that ended the sequence. proposed_tokens, accepted_tokens: counts of draft tokens. state: the saved
    final state. error: the reason if the sequence failed. state_gone: whether the sequence failed because the state that it
    continues is gone.
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
    """The events of one step of the engine. cache_bytes, cache_entries: size of the prefix cache. state_bytes: memory of
    clients' states. gone: the ids of states evicted or lost since the last Step."""

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
