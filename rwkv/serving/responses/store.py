"""Stores responses in limited memory and, with states_dir=, also in files."""

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from rwkv.config import MIB, ServeConfig
from rwkv.fair_lru import FairLRU
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject
from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.http.errors import ApiError
from rwkv.serving.log import say
from rwkv.serving.responses.items import input_items
from rwkv.serving.states.folder_lock import RESPONSE, files_in


class StoredResponse(msgspec.Struct):
    """A stored response.

    Attributes:
        owner: a digest of the client's API key.
        input: the items of the request.
        state: the id of the final state.
        kept: whether the state remains when the response is dropped.
    """

    owner: str
    response: JsonObject
    input: list[JsonObject]
    state: str | None = None
    kept: bool = False


class Responses:
    """A store of responses in at most responses_mib MiB of memory. With states_dir=, each response also has a file.

    When memory is full, the store evicts the least recently used response. API keys that use at most an equal share lose no
    responses to other keys.
    """

    def __init__(self, config: ServeConfig, engine: RemoteEngine) -> None:
        self._limit = config.responses_mib * MIB
        self._engine = engine
        self._folder = Path(config.states_dir) if config.states_dir and self.has_room else None
        self._stored: dict[str, bytes] = {}
        self._lru = FairLRU[str]()
        self._items: dict[tuple[str, str], list[str]] = {}   # (owner, item id) -> ids of the responses that have the item
        self._on_disk: set[str] = set()  # ids of responses that have a file
        self._ignored: set[str] = set()  # names of files that are not responses, or that this server has deleted
        if self._folder:
            self.sync({path.name for path in self._folder.iterdir()})

    @property
    def has_room(self) -> bool:
        """Returns False if the server stores no responses."""
        return self._limit > 0

    def sync(self, names: set[str]) -> None:
        """Adds responses that another server has written, and drops responses whose files are gone.

        `names` has the names of all files in the folder.
        """
        if self._folder is None:
            return
        self._ignored &= names           # else the names of all deleted files would stay in memory
        new = [name for name in names if (match := RESPONSE.fullmatch(name)) and name not in self._ignored
               and match[1] not in self._stored]
        self._ignored.update(new)
        for path, _ in files_in(self._folder, RESPONSE, "responses", new):
            try:
                stored = _read(path.read_bytes(), path.stem)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ApiError) as error:
                say("responses", f"skipped {path}: {error}")
            else:
                self._ignored.discard(path.name)
                self._on_disk.add(path.stem)
                self._remember(stored, msgspec.json.encode(stored))
        for response_id in [stored_id for stored_id in self._on_disk if f"{stored_id}.json" not in names]:
            if not (self._folder / f"{response_id}.json").exists():
                self._on_disk.discard(response_id)
                if response_id in self._stored:
                    self._forget(response_id)

    def get(self, response_id: str, owner: str, field: str | None = None) -> StoredResponse:
        """Returns the stored response. Raises ApiError if the owner has no such response.

        `field` is the request's field that names the response.
        """
        content = self._stored.get(response_id)
        stored = msgspec.json.decode(content, type=StoredResponse) if content else None
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"the response {response_id[:100]!r} was never stored, was deleted or evicted, or belongs to "
                                "another API key", field, "response_not_found")
        with suppress(KeyError):         # long requests run in a thread, so the response may have been evicted meanwhile
            self._lru.use(response_id)
        return stored

    def resolve(self, items: list[JsonObject], owner: str) -> list[JsonObject]:
        """Returns a request's input with stored items of the owner in place of references.

        Raises ApiError for an unknown item, and for items that together exceed the memory for responses.
        """
        decoded: dict[str, dict[str, JsonObject]] = {}   # response id -> item id -> item
        sizes: dict[str, int] = {}
        resolved, total = [], 0
        for place, item in enumerate(items):
            item_id = item.get("id")
            if item.get("type") == "item_reference" and isinstance(item_id, str):
                item = self._item(item_id, owner, f"input[{place}]", decoded)
                if item_id not in sizes:
                    sizes[item_id] = len(msgspec.json.encode(item))
                total += sizes[item_id]
                if total > self._limit:
                    raise ApiError(400, f"input[{place}]: the referenced items exceed {self._limit // MIB} MiB together",
                                   f"input[{place}]")
            resolved.append(item)
        return resolved

    def _item(self, item_id: str, owner: str, where: str, decoded: dict[str, dict[str, JsonObject]]) -> JsonObject:
        response_ids = self._items.get((owner, item_id))
        response_id = response_ids[-1] if response_ids else ""
        content = self._stored.get(response_id)
        if content is None:
            raise ApiError(404, f"{where}: the item {item_id[:100]!r} is unknown: its response was never stored, was deleted "
                                "or evicted, or belongs to another API key. Send the item itself", where, "item_not_found")
        with suppress(KeyError):         # as in get()
            self._lru.use(response_id)
        if response_id not in decoded:
            decoded[response_id] = _items(msgspec.json.decode(content, type=StoredResponse))
        return decoded[response_id][item_id]

    async def put(self, stored: StoredResponse) -> bool:
        """Stores a response. Returns False if it exceeds the memory on its own, and then drops only its state."""
        response_id = stored.response["id"]
        content = msgspec.json.encode(stored)
        if len(content) > self._limit:
            self._drop_state(stored)
            return False
        if self._folder:
            path = self._folder / f"{response_id}.json"
            try:
                await asyncio.to_thread(write_file, path, lambda file: file.write(content))
                self._on_disk.add(response_id)
            except OSError as error:
                say("responses", f"{path} cannot be written: {error}. The response is only in memory")
        self._remember(stored, content)
        return True

    def drop(self, response_id: str) -> None:
        self._drop_state(self._forget(response_id))
        if self._folder:
            path = self._folder / f"{response_id}.json"
            self._on_disk.discard(response_id)
            self._ignored.add(path.name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                say("responses", f"{path} cannot be deleted: {error.strerror}")

    def _drop_state(self, stored: StoredResponse) -> None:
        state = self._engine.states.get(stored.state or "")
        if state is not None and not stored.kept:
            self._engine.drop(state)

    def _remember(self, stored: StoredResponse, content: bytes) -> None:
        response_id = stored.response["id"]
        if response_id in self._stored:  # sync() may have read the file before put() got here
            self._forget(response_id)
        self._stored[response_id] = content
        for item_id in _items(stored):
            self._items.setdefault((stored.owner, item_id), []).append(response_id)
        self._lru.add(response_id, stored.owner, len(content))
        while self._lru.total > self._limit:
            self.drop(self._lru.victim(self._limit))

    def _forget(self, response_id: str) -> StoredResponse:
        stored = msgspec.json.decode(self._stored.pop(response_id), type=StoredResponse)
        self._lru.remove(response_id)
        for item_id in _items(stored):
            response_ids = self._items[stored.owner, item_id]
            response_ids.remove(response_id)
            if not response_ids:
                del self._items[stored.owner, item_id]
        return stored


def _items(stored: StoredResponse) -> dict[str, JsonObject]:
    """Returns the response's items by their ids. Clients choose the ids of input items, which need not be strings."""
    return {item["id"]: item for item in (*stored.input, *stored.response["output"]) if isinstance(item.get("id"), str)}


def _read(content: bytes, response_id: str) -> StoredResponse:
    """Returns the response in a file's content. Raises ApiError or a decoding error for a file that no server can continue."""
    stored = msgspec.json.decode(content, type=StoredResponse)
    response = stored.response
    optional = (response.get("previous_response_id"), response.get("instructions"))
    if response.get("id") != response_id or not all(isinstance(value, str | None) for value in optional):
        raise ApiError(400, "id must match the file's name, and previous_response_id and instructions must be strings or null")
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise ApiError(400, "output must be a list of objects")
    input_items(output)
    return msgspec.structs.replace(stored, input=input_items(stored.input))
