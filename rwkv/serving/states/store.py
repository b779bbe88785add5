"""The content of clients' saved states, in the engine's process: in bounded memory and, with states_dir=, in a bounded folder.

Without a folder, the least recently used states are evicted when memory is full. With a folder, each state is written when it
is saved, memory caches the states used last, and the least recently used files are deleted when the folder is full. An API key
whose states take no more than an equal share of the space loses none to other keys.
"""

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from rwkv.chat.messages import ROLES
from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.fair_lru import FairLRU
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.states import LONGEST_HEADER, StateFormat, metadata_of
from rwkv.io.atomic import write_file
from rwkv.serving.log import say
from rwkv.serving.messages import FolderChanges, SavedState, Turn
from rwkv.serving.states.folder import STATE, files_in

SERVER_KEY = "timemix-serve"             # the key of ServerMetadata in a file's metadata
MAX_UNWRITTEN = 8                        # most states waiting to be written


Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class ServerMetadata(msgspec.Struct, omit_defaults=True):
    """The server's entry in a state file's metadata. adapter: the adapter's digest. name: SavedState.model. The other fields
    are as in SavedState."""

    owner: str = ""
    created: Number | None = None
    tokens: Number | None = None
    bytes: Number = 0
    turn: Turn | None = None
    adapter: str | None = None
    name: str = ""


class StateGone(UserError):
    """The requested state was evicted or lost."""


class StateStore:
    """The saved states. formats: the StateFormat of each model, by name. digests: the hash of each adapter's trained values, by
    name.

    initial: the states that were in the folder at the start, including those of other models. folder.claim() must have been
    called before.
    """

    def __init__(self, config: ServeConfig, formats: Mapping[str, StateFormat], digests: Mapping[str, str]) -> None:
        self._formats = formats
        self._digests = {"": "", **digests}
        self._memory_limit = config.states_mib * MIB
        self._folder_limit = config.states_dir_mib * MIB
        self._folder = Path(config.states_dir) if config.states_dir else None
        self._in_memory: dict[str, PrefillResult] = {}
        self._memory = FairLRU[str]()
        self._files = FairLRU[str]()
        self._unwritten: dict[str, Future[None]] = {}
        self._writer = ThreadPoolExecutor(1)             # writes in a thread, so that the engine does not wait for the disk
        self._gone: list[str] = []
        self._ignored: set[str] = set()                  # names of files that are not states, or that this server has deleted
        self.initial = self._scan(self._folder) if self._folder else []

    @property
    def nbytes(self) -> int:
        """The size of the states in memory, in bytes."""
        return self._memory.total

    def put(self, state: SavedState, context: PrefillResult) -> None:
        self._settle()
        if self._folder:
            self._write(self._folder, state, context)
        self._remember(state, context)

    def upload(self, state: SavedState, content: bytes) -> SavedState:
        """Saves the content of a state file under the id of `state`. Raises UserError if no model of this server can use it."""
        try:
            metadata = metadata_of(content)
        except ValueError:
            metadata = {}                # StateFormat.read will raise an error
        entry = _server_metadata(metadata)
        model = self._model_name(entry, metadata)
        context = self._formats[model].read(content, "the file")
        saved = replace(state, bytes=context.nbytes(), last_ids=context.last_ids, tokens=entry.tokens, turn=entry.turn,
                        model=model)
        self.put(saved, context)
        return saved

    def get(self, state: SavedState) -> PrefillResult:
        """The content of a saved state. Raises StateGone if it was evicted or lost."""
        state_id = state.id
        self._settle()
        if state_id in self._files:
            self._files.use(state_id)
        if state_id in self._in_memory:
            self._memory.use(state_id)
            return self._in_memory[state_id]
        if self._folder is None or state_id not in self._files:
            raise StateGone(f"state {state_id} was evicted: memory for states is full (states_mib=)")
        path = self._path(self._folder, state_id)
        try:
            self._settle(state_id)
            context = self._formats[state.model].read(path.read_bytes(), str(path))
            os.utime(path)                               # after a restart, file times are the order of use
        except (OSError, UserError) as error:
            self._files.remove(state_id)
            self._gone.append(state_id)
            say("states", f"{path} is lost: {error}")
            reason = "has changed or is damaged" if isinstance(error, UserError) else "cannot be read"
            raise StateGone(f"state {state_id} is lost: its file {reason}") from None
        self._remember(state, context)
        return context

    def content(self, state: SavedState) -> bytes:
        """The state as a state file's content, without its owner, for the client. Raises StateGone."""
        return self._content(replace(state, owner=""), self.get(state))

    def drop(self, state_id: str) -> None:
        self._forget(state_id)
        if self._folder and state_id in self._files:
            self._delete(self._folder, state_id)

    def sync(self, new: Iterable[str], lost: Iterable[str]) -> FolderChanges:
        """Adds states that another server has written to the folder, and drops states whose files it has deleted."""
        if self._folder is None:
            return FolderChanges([], [])
        self._settle()
        folder = self._folder
        unknown = [name for name in new if name not in self._ignored and Path(name).stem not in self._files]
        states = self._scan(folder, [name for name in unknown if (folder / name).is_symlink() or (folder / name).exists()])
        gone = [state_id for state_id in lost if state_id in self._files and state_id not in self._unwritten
                and not self._path(folder, state_id).exists()]
        for state_id in gone:
            self._files.remove(state_id)
            self._forget(state_id)
        return FolderChanges(states, gone)

    def take_gone(self) -> list[str]:
        """Returns and forgets the ids of the states evicted or lost since the last call."""
        gone = self._gone
        self._gone = []
        return gone

    def close(self) -> None:
        self._writer.shutdown()

    def _remember(self, state: SavedState, context: PrefillResult) -> None:
        self._in_memory[state.id] = context
        self._memory.add(state.id, state.owner, context.nbytes())
        while self._memory.total > self._memory_limit:
            victim = self._memory.victim(self._memory_limit)
            self._forget(victim)
            if victim not in self._files:
                self._gone.append(victim)

    def _forget(self, state_id: str) -> None:
        self._in_memory.pop(state_id, None)
        self._memory.remove(state_id)

    def _write(self, folder: Path, state: SavedState, context: PrefillResult) -> None:
        content = self._content(state, context)
        self._files.add(state.id, state.owner, len(content))
        while self._files.total > self._folder_limit and len(self._files) > 1:
            victim = self._files.victim(self._folder_limit)
            self._forget(victim)
            self._delete(folder, victim)
            self._gone.append(victim)
        self._unwritten[state.id] = self._writer.submit(write_file, self._path(folder, state.id),
                                                        lambda file: file.write(content))
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._settle(next(iter(self._unwritten)))

    def _settle(self, wanted: str | None = None) -> None:
        """Handles finished writes, and waits for the write of `wanted`. A state whose write failed stays only in memory."""
        for state_id, future in [*self._unwritten.items()]:
            if not (future.done() or state_id == wanted):
                continue
            del self._unwritten[state_id]
            if error := future.exception():
                say("states", f"{state_id} cannot be written to {self._folder}: {error}; the state is only in memory")
                self._files.remove(state_id)
                if state_id not in self._in_memory:
                    self._gone.append(state_id)

    def _delete(self, folder: Path, state_id: str) -> None:
        """Deletes a state's file. A pending write is done first, because the writer has only one thread."""
        self._files.remove(state_id)
        self._unwritten.pop(state_id, None)
        self._ignored.add(self._path(folder, state_id).name)
        self._writer.submit(self._path(folder, state_id).unlink, missing_ok=True)

    @staticmethod
    def _path(folder: Path, state_id: str) -> Path:
        return folder / f"{state_id}.safetensors"

    def _scan(self, folder: Path, names: Iterable[str] | None = None) -> list[SavedState]:
        """The states in the files with these names, or in all files if names is None. Files that are not states are ignored
        from now on."""
        names = [path.name for path in folder.iterdir()] if names is None else [*names]
        self._ignored.update(name for name in names if STATE.fullmatch(name))
        states = []
        for path, size in files_in(folder, STATE, "states", names):
            state_id = path.stem
            try:
                with path.open("rb") as file:
                    metadata = metadata_of(file.read(LONGEST_HEADER))
                state = self._describe(state_id, metadata)
            except (OSError, ValueError) as error:
                say("states", f"skipped {path}: {error}")
                continue
            self._files.add(state_id, state.owner, size)
            self._ignored.discard(path.name)
            states.append(state)
        return states

    def _describe(self, state_id: str, metadata: dict[str, str]) -> SavedState:
        entry = _server_metadata(metadata)
        state = SavedState(state_id, entry.owner, entry.created or int(time.time()), entry.tokens, entry.bytes, turn=entry.turn)
        try:
            model = self._model_name(entry, metadata)
            self._formats[model].require_same(state_id, metadata)
        except UserError as error:
            return replace(state, refusal=str(error))
        return replace(state, last_ids=self._formats[model].last_ids(state_id, metadata), model=model)

    def _model_name(self, entry: ServerMetadata, metadata: dict[str, str]) -> str:
        """The name of the model that has read a file's state. Raises UserError if this server does not have that model.

        The adapter's digest decides, so that an adapter can be renamed. LoRA adapters that differ only in alpha share a digest;
        among these, the fingerprint of the weights decides. Models with equal digests and equal fingerprints are equal, and the
        name in the file decides. A file that another program wrote has only the fingerprint, which several adapters may share.
        """
        same = [name for name, format in self._formats.items() if format.identity["model"] == metadata.get("model")]
        if entry.adapter is None:
            names = same or [""]
        else:
            trained = [name for name, digest in self._digests.items() if digest == entry.adapter]
            names = [name for name in trained if name in same] or trained
        if not names:
            raise UserError("the state requires the adapter that read it: load that adapter with adapters=")
        return entry.name if entry.name in names else names[0]

    def _content(self, state: SavedState, context: PrefillResult) -> bytes:
        entry = ServerMetadata(state.owner, state.created, state.tokens, state.bytes, state.turn, self._digests[state.model],
                      state.model)
        return self._formats[state.model].content(context, {SERVER_KEY: msgspec.json.encode(entry).decode()})


def _server_metadata(metadata: dict[str, str]) -> ServerMetadata:
    """The server's entry in a state file's metadata. Raises UserError if it is damaged."""
    try:
        entry = msgspec.json.decode(metadata.get(SERVER_KEY, "{}"), type=ServerMetadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        entry = None
    if entry is None or (entry.turn and entry.turn.role not in ROLES):
        raise UserError("the file's metadata are damaged")
    return entry
