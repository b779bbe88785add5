"""Declares the messages between the HTTP process and the engine's process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.generation.request import Entry, Request
from rwkv.io.json_types import JsonObject


@dataclass(frozen=True)
class Turn:
    """A description of how the conversation of a saved state ended.

    Attributes:
        role: the role of the last message.
        tail: text that the state has read after the last message, such as a stop string; the rendered next turn begins with it.
        tools: a digest of the conversation's tools.
        template: a digest of the conversation's chat template.
    """

    role: str
    tail: str
    tools: str
    template: str


@dataclass(frozen=True)
class SavedState:
    """A record of a client's saved state. The engine's process has the state's content.

    Attributes:
        id: the state's id; "" for the state from which all sequences of an adapter begin.
        owner: a digest of the API key that saved the state.
        tokens: the number of tokens that the state has read; None if the state's file does not have the number.
        bytes: the size of the state.
        last_ids: the last token ids that the state has read; () if unknown.
        turn: how the state's conversation ended; None if no conversation is known.
        refusal: the reason why no model of this server can use the state; None if a model can.
        model: the name of the adapter that has read the state; "" for the checkpoint's model.
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
    """Facts about the model for clients.

    Attributes:
        trained_tokens: the sequence length in training; None if unknown.
        width: the size of the hidden state.
        device: cpu or cuda.
    """

    generation: str
    parameters: int
    dtype: str
    trained_tokens: int | None
    width: int
    device: str


class Defaults(NamedTuple):
    """The default options of a request. If `max_tokens` is None, the endpoint's own default applies."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Ready:
    """Tells the HTTP process that the model is loaded.

    Attributes:
        tokenizer: the tokenizer's definition, for Tokenizer.from_dict.
        template: the chat template's name.
        plan: lines to print, as (subject, text).
        states: the saved states in the folder states_dir=.
        state_bytes: the size of one state.
        defaults: a request's default options, by (`think`, whether there are tools); (False, False) serves plain prompts too.
        adapters: for each name, the state from which the adapter's sequences begin; None for the empty state.
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
    """Tells the HTTP process that the engine's process ends.

    Attributes:
        reason: one sentence if the user made a mistake, otherwise a traceback.
        mistake: whether the user made a mistake.
    """

    reason: str
    mistake: bool


@dataclass(frozen=True)
class Generate:
    """Asks the engine to generate one sequence.

    Attributes:
        request: the request, without the context that the engine's process adds.
        model: the adapter's name; "" for the checkpoint's model.
        owner: a digest of the client's API key.
        start: the saved state that the sequence continues.
        save: the record for the sequence's final state; the engine sets `tokens`, `bytes` and `last_ids`.
        stream: whether to send the text while it is generated, rather than at the end.
        id: the sequence's number, which the queue sets.
    """

    request: Request
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
    """Asks the engine to save a state file under the id of `state`. The Reply has `state` with the file's metadata.

    `layout` is the layout of a trained initial state, as in state_layout=.
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
    """Tells the engine what other servers may have changed in the folder states_dir=.

    Attributes:
        new: names of unknown files.
        lost: ids of states without a file.
    """

    id: int
    new: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class FolderChanges:
    """The result of a SyncFolder. `gone` has the ids of states whose files were deleted."""

    new: list[SavedState]
    gone: list[str]


# One list has all sequences of an HTTP request, because they start together.
ToEngine = list[Generate] | Cancel | Upload | Download | Drop | SyncFolder

ReplyValue = SavedState | bytes | FolderChanges | None


@dataclass(frozen=True)
class Reply:
    """The engine's answer to an Upload, a Download or a SyncFolder.

    Attributes:
        error: the reason for a failure.
        state_gone: whether the failure is that the state is gone.
    """

    id: int
    value: ReplyValue = None
    error: str | None = None
    state_gone: bool = False


@dataclass
class Event:
    """Tells the HTTP process what the engine has generated of a sequence since the last Event.

    Only the sequence's final Event has finish_reason, stop, the token counts, prompt_logprobs, state and embedding.

    Attributes:
        stop: the stop string that ended the sequence.
        proposed_tokens: how many tokens the draft proposed.
        accepted_tokens: how many proposed tokens were accepted.
        state: the saved final state.
        error: the reason why the sequence failed; None if it did not fail.
        state_gone: whether the sequence failed because the state to continue is gone.
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
    """The events of one step of the engine.

    Attributes:
        cache_bytes: the memory of the prefix cache.
        cache_entries: the number of prefixes in the cache.
        state_bytes: the memory of clients' saved states.
        gone: ids of the states that were evicted or lost since the last Step.
    """

    events: list[Event]
    cache_bytes: int
    cache_entries: int
    state_bytes: int = 0
    gone: tuple[str, ...] = ()
