"""Stores the content of clients' saved states in the engine's process, in limited memory and optionally in a limited folder.

Without states_dir=, the store evicts the least recently used states when memory is full. With states_dir=, the store writes
each saved state to a file, caches the states used last in memory, and deletes the least recently used files when the folder is
full. An API key whose states take at most an equal share of the space loses no states to other keys.
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
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.state_files import LONGEST_HEADER, StateFormat, metadata_of
from rwkv.io.atomic import write_file
from rwkv.serving.log import say
from rwkv.serving.messages import FolderChanges, SavedState, Turn
from rwkv.serving.states.folder_lock import STATE, files_in

SERVER_KEY = "timemix-serve"             # the key of ServerMetadata in a file's metadata
MAX_UNWRITTEN = 8                        # maximum states that wait to be written


Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class ServerMetadata(msgspec.Struct, omit_defaults=True):
    """The server's entry in a state file's metadata. The fields without a description are those of SavedState.

    Attributes:
        adapter: the digest of the adapter's trained values; None if another program wrote the file.
        name: the adapter's name, SavedState.model.
    """

    owner: str = ""
    created: Number | None = None
    tokens: Number | None = None
    bytes: Number = 0
    turn: Turn | None = None
    adapter: str | None = None
    name: str = ""


class StateGone(UserError):
    """Raised if the requested state was evicted or lost."""


class StateStore:
    """A store of saved states. The folder must have been locked with folder_lock.claim().

    The attribute `initial` has the states that were in the folder at the start, including states of other models.

    Args:
        formats: the StateFormat of each model, by name.
        digests: the hash of each adapter's trained values, by name.
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
        self._writer = ThreadPoolExecutor(1)             # a thread, so that the engine does not wait for the disk
        self._gone: list[str] = []
        self._ignored: set[str] = set()                  # names of files that are not states, or that are to be deleted
        self.initial = self._scan(self._folder) if self._folder else []

    @property
    def nbytes(self) -> int:
        """The size in bytes of the states in memory."""
        return self._memory.total

    def put(self, state: SavedState, context: PrefillResult) -> None:
        self._collect_writes()
        if self._folder:
            self._write(self._folder, state, context)
        self._remember(state, context)

    def upload(self, state: SavedState, content: bytes) -> SavedState:
        """Saves the content of a state file under the id of `state`. Raises UserError if no model can use the state."""
        try:
            metadata = metadata_of(content)
        except ValueError:
            metadata = {}                # StateFormat.read raises an error that names the file
        entry = _server_metadata(metadata)
        model = self._model_name(entry, metadata)
        context = self._formats[model].read(content, "the file")
        saved = replace(state, bytes=context.nbytes(), last_ids=context.last_ids, tokens=entry.tokens, turn=entry.turn,
                        model=model)
        self.put(saved, context)
        return saved

    def get(self, state: SavedState) -> PrefillResult:
        """Returns the content of a saved state. Raises StateGone if the state was evicted or lost."""
        state_id = state.id
        self._collect_writes()
        if state_id in self._files:
            self._files.use(state_id)
        if state_id in self._in_memory:
            self._memory.use(state_id)
            return self._in_memory[state_id]
        if self._folder is None or state_id not in self._files:
            raise StateGone(f"state {state_id} was evicted, because the memory for states (states_mib=) is full")
        path = self._path(self._folder, state_id)
        try:
            self._collect_writes(state_id)
            context = self._formats[state.model].read(path.read_bytes(), str(path))
            os.utime(path)                               # a restarted server takes the order of use from the file times
        except (OSError, UserError) as error:
            self._files.remove(state_id)
            self._gone.append(state_id)
            say("states", f"{path} is lost: {error}")
            reason = "has changed or is damaged" if isinstance(error, UserError) else "cannot be read"
            raise StateGone(f"state {state_id} is lost, because its file {reason}") from None
        self._remember(state, context)
        return context

    def content(self, state: SavedState) -> bytes:
        """Returns the state as the content of a state file without the owner, for the client. Raises StateGone."""
        return self._content(replace(state, owner=""), self.get(state))

    def drop(self, state_id: str) -> None:
        self._forget(state_id)
        if self._folder and state_id in self._files:
            self._delete(self._folder, state_id)

    def sync(self, new: Iterable[str], lost: Iterable[str]) -> FolderChanges:
        """Adds the states that other servers have written to the folder, and drops those whose files they have deleted."""
        if self._folder is None:
            return FolderChanges([], [])
        self._collect_writes()
        folder = self._folder
        new_names = [name for name in new if name not in self._ignored and Path(name).stem not in self._files]
        states = self._scan(folder, [name for name in new_names if (folder / name).is_symlink() or (folder / name).exists()])
        gone = [state_id for state_id in lost if state_id in self._files and state_id not in self._unwritten
                and not self._path(folder, state_id).exists()]
        for state_id in gone:
            self._files.remove(state_id)
            self._forget(state_id)
        return FolderChanges(states, gone)

    def take_gone(self) -> list[str]:
        """Returns the ids of the states that were evicted or lost since the last call."""
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
            self._collect_writes(next(iter(self._unwritten)))

    def _collect_writes(self, awaited_id: str | None = None) -> None:
        """Handles finished writes, and waits for the write of `awaited_id`. A state whose write failed stays only in memory."""
        for state_id, future in [*self._unwritten.items()]:
            if not (future.done() or state_id == awaited_id):
                continue
            del self._unwritten[state_id]
            if error := future.exception():
                say("states", f"{state_id} cannot be written to {self._folder}: {error}. The state is only in memory")
                self._files.remove(state_id)
                if state_id not in self._in_memory:
                    self._gone.append(state_id)

    def _delete(self, folder: Path, state_id: str) -> None:
        """Deletes a state's file. The writer finishes a pending write first, because it has only one thread."""
        path = self._path(folder, state_id)
        self._files.remove(state_id)
        self._unwritten.pop(state_id, None)
        self._ignored.add(path.name)
        self._writer.submit(self._unlink, path)

    def _unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._ignored.discard(path.name)                 # the name is random, and so never used again

    @staticmethod
    def _path(folder: Path, state_id: str) -> Path:
        return folder / f"{state_id}.safetensors"

    def _scan(self, folder: Path, names: Iterable[str] | None = None) -> list[SavedState]:
        """Returns the states in the files with these names, or in all files if `names` is None.

        Later calls of sync() ignore the files that turn out not to be states.
        """
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
        """Returns the name of the model that has read a file's state. Raises UserError if this server does not have the model.

        The adapter's digest decides, so that an adapter can be renamed. LoRA adapters that differ only in alpha share a digest.
        Among these, the fingerprint of the weights decides. If several models also share the fingerprint, they are equal, and
        the name in the file decides. A file of another program has only the fingerprint, which several adapters may share.
        """
        same_weights = [name for name, state_format in self._formats.items()
                        if state_format.identity["model"] == metadata.get("model")]
        if entry.adapter is None:
            names = same_weights or [""]
        else:
            same_digest = [name for name, digest in self._digests.items() if digest == entry.adapter]
            names = [name for name in same_digest if name in same_weights] or same_digest
        if not names:
            raise UserError("the state requires the adapter with which the state was made: load that adapter with adapters=")
        return entry.name if entry.name in names else names[0]

    def _content(self, state: SavedState, context: PrefillResult) -> bytes:
        entry = ServerMetadata(state.owner, state.created, state.tokens, state.bytes, state.turn, self._digests[state.model],
                               state.model)
        return self._formats[state.model].serialize(context, {SERVER_KEY: msgspec.json.encode(entry).decode()})


def _server_metadata(metadata: dict[str, str]) -> ServerMetadata:
    """Returns the server's entry in a state file's metadata. Raises UserError if the entry is damaged."""
    try:
        entry = msgspec.json.decode(metadata.get(SERVER_KEY, "{}"), type=ServerMetadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        entry = None
    if entry is None or (entry.turn and entry.turn.role not in ROLES):
        raise UserError("the metadata in the state file is damaged")
    return entry
