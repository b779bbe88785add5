"""Several servers on one states_dir=: before it answers a request, a server notices what the others have written or deleted.

States and responses are immutable files with random names, and their writes are atomic, so that servers need no order among
them.
"""

import asyncio
import os
import time
from pathlib import Path

from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.responses.store import Responses
from rwkv.serving.states.folder import STATE

SETTLED_NS = 50_000_000                  # a folder that changed within this time may change again under the same time stamp


class SharedFolder:
    """The folder, as this server last saw it."""

    def __init__(self, folder: Path, engine: RemoteEngine, responses: Responses) -> None:
        self._folder = folder
        self._engine = engine
        self._responses = responses
        self._changed = dict[bool, int]()                # the folder's time stamp at the last look, with and without lost files
        self._syncing = asyncio.Lock()

    async def sync(self, lost_too: bool) -> None:
        """Adds new files. Does nothing while the folder is unchanged.

        lost_too: also drop states whose files are lost. A request that continues such a state notices it in any case, and may
        still find the state in memory.
        """
        async with self._syncing:
            try:
                changed = os.stat(self._folder).st_mtime_ns                      # noqa: PTH116 (called for each request)
                if changed == self._changed.get(lost_too) or self._engine.failed is not None:
                    return
                names = {*await asyncio.to_thread(os.listdir, self._folder)}
            except OSError:              # a state that is used says what is wrong
                return
            states = self._engine.states
            new = tuple(name for name in names if (match := STATE.fullmatch(name)) and match[1] not in states)
            lost = tuple(state_id for state_id in states if lost_too and f"{state_id}.safetensors" not in names)
            if new or lost:
                await self._engine.sync(new, lost)
            self._responses.sync(names)
            if time.time_ns() - changed > SETTLED_NS:
                self._changed[lost_too] = changed
