"""Lets several servers share one folder states_dir=. Before a request, a server checks what the others have changed.

The servers need no coordination, because states and responses are immutable files with random names, written atomically.
"""

import asyncio
import os
import time
from pathlib import Path

from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.responses.store import Responses
from rwkv.serving.states.folder_lock import STATE

SETTLED_NS = 50_000_000                  # within this time after a change, a folder may change again with the same time stamp


class SharedFolder:
    """The folder states_dir=, as this server last read it."""

    def __init__(self, folder: Path, engine: RemoteEngine, responses: Responses) -> None:
        self._folder = folder
        self._engine = engine
        self._responses = responses
        self._changed = dict[bool, int]()                # the folder's time stamp at the last sync, by `lost_too`
        self._syncing = asyncio.Lock()

    async def sync(self, lost_too: bool) -> None:
        """Adds new files to the server's states and responses. Does nothing if the folder has not changed.

        With `lost_too`, also drops states whose files are gone. A request that continues a state does not need this: the engine
        notices a missing file, or still has the state in memory.
        """
        async with self._syncing:
            try:
                changed = os.stat(self._folder).st_mtime_ns                      # noqa: PTH116 (called for each request)
                if changed == self._changed.get(lost_too) or self._engine.failed is not None:
                    return
                names = {*await asyncio.to_thread(os.listdir, self._folder)}
            except OSError:              # the request that uses a state reports the error
                return
            states = self._engine.states
            new = tuple(name for name in names if (match := STATE.fullmatch(name)) and match[1] not in states)
            lost = tuple(state_id for state_id in states if lost_too and f"{state_id}.safetensors" not in names)
            if new or lost:
                await self._engine.sync(new, lost)
            self._responses.sync(names)
            if time.time_ns() - changed > SETTLED_NS:
                self._changed[lost_too] = changed
