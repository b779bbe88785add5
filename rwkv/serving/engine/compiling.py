"""Compiles each grammar in a separate process before the engine does, so that one client's schema cannot block other clients.

A grammar of a few bytes can take minutes and gigabytes to compile, and only killing the process stops the library. So one of
PROCESSES processes compiles each grammar first. If the compilation takes more CPU time than SECONDS or more memory than MEMORY,
the process ends, and the server rejects the grammar. If the machine is too busy to compile it, the client may send it again.
Each API key has a queue of grammars. The key with the fewest running compilations is next.
"""

import asyncio
import mmap
import multiprocessing
import signal
import sys
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rwkv.config import MIB
from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.generation.grammar.matcher import compile_grammar, require_ends, vocabulary
from rwkv.io.json_types import JsonObject
from rwkv.io.signals import STOPPING
from rwkv.serving.http.errors import RETRY_AFTER, ApiError
from rwkv.serving.log import say
from rwkv.tokenizer.tokenizers import Tokenizer

PROCESSES = 2
SECONDS = 5.0                            # CPU time limit for compiling one grammar; on Windows, a limit of elapsed time
BUSY = 1 if sys.platform == "win32" else 12              # elapsed time, in units of the CPU time limit, that ends a compilation
START_S = 120.0                          # time limit for starting a process
EXIT_S = 5.0                             # time limit for the exit of a process that has closed its connection
MEMORY = 512 * MIB                       # maximum memory for compiling, in addition to the process's memory at the start
MAX_COMPILED = 64 * MIB                  # maximum memory of a compiled grammar in the engine's process
MOST_WAITING = 256                       # maximum grammars in all queues
MAX_CACHED = 256                         # grammars whose result is cached
N_WALKS = 12                             # random texts per grammar, to find prefixes that cannot be completed
# Exit codes of a process that reached its time limit, and of one killed for another reason. Windows has only the first.
if sys.platform == "win32":
    OUT_OF_TIME = KILLED = None
else:
    OUT_OF_TIME, KILLED = -signal.SIGPROF, -signal.SIGKILL


class Compilers:
    """The processes that compile grammars, and their queues. All methods except `close` must be called from the event loop.

    `tokenizer` is the dictionary that Tokenizer.to_dict returns.
    """

    def __init__(self, tokenizer: JsonObject, seconds: float = SECONDS) -> None:
        self._processes = [_Process(tokenizer, seconds) for _ in range(PROCESSES)]
        self._idle = [*self._processes]
        self._threads = ThreadPoolExecutor(PROCESSES)
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()     # by owner; the owner served last comes last
        self._running: dict[str, int] = {}               # the number of jobs by owner
        self._reasons: OrderedDict[str, str] = OrderedDict()             # why each grammar is refused; "" if it is accepted

    async def check(self, grammar: Grammar, owner: str) -> None:
        """Raises UserError if the grammar cannot be used, and ApiError 429 if too many grammars are queued."""
        key = sha256(repr((grammar.start, grammar.rules, [part.name for part in grammar.parts])).encode()).hexdigest()
        reason = self._reasons.get(key)
        if reason is None:
            if sum(map(len, self._waiting.values())) >= MOST_WAITING:
                raise ApiError(429, "the server is busy: too many grammars are queued. Try again later", code="queue_full",
                               retry_after=RETRY_AFTER)
            job = _Job(grammar)
            self._waiting.setdefault(owner, deque()).append(job)
            self._start()
            reason = await job.result
            self._reasons[key] = reason
            if len(self._reasons) > MAX_CACHED:
                self._reasons.popitem(last=False)
        if reason:
            raise UserError(reason)

    def _start(self) -> None:
        while self._idle and self._waiting:
            owner = min(self._waiting, key=lambda owner: self._running.get(owner, 0))
            jobs = self._waiting[owner]
            job = jobs.popleft()
            self._waiting.move_to_end(owner)
            if not jobs:
                del self._waiting[owner]
            self._running[owner] = self._running.get(owner, 0) + 1
            process = self._idle.pop()
            future = asyncio.get_running_loop().run_in_executor(self._threads, process.reason, job.grammar)
            future.add_done_callback(lambda done, owner=owner, job=job, process=process:         # type: ignore[misc]
                                     self._end(owner, job, process, done))

    def _end(self, owner: str, job: "_Job", process: "_Process", done: asyncio.Future[str]) -> None:
        self._idle.append(process)
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if not job.result.done():        # the request has not been cancelled
            if done.exception():
                job.result.set_exception(done.exception() or RuntimeError())
            else:
                job.result.set_result(done.result())
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.kill()


class _Job:
    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class _Process:
    """A process that compiles grammars. The first grammar starts it; after a kill, the next grammar starts it again."""

    def __init__(self, tokenizer: JsonObject, seconds: float) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: SpawnProcess | None = None
        self._connection: Any = None     # of a different type on Windows
        self._stopped = False

    def reason(self, grammar: Grammar) -> str:
        """Returns the reason why the grammar is refused, or "" for an accepted grammar. Blocks during the compilation.

        Raises ApiError if the process does not start, and if the machine is too busy to compile the grammar.
        """
        where = grammar.parts[0].where
        if self._process is not None and not self._process.is_alive():
            self.kill()                  # killed while idle: not this grammar's fault
        if self._process is None and not self._stopped:
            self._start_process()
        try:
            if self._stopped:
                raise EOFError
            self._connection.send(grammar)
            if self._connection.poll(self._seconds * BUSY):
                reason: str = self._connection.recv()
                return reason
        except (EOFError, OSError):
            if self._process is not None:
                self._process.join(EXIT_S)
        exit_code = self._process and self._process.exitcode             # None while the process compiles
        self.kill()
        if exit_code == OUT_OF_TIME:
            return f"{where} must compile within {self._seconds:g} seconds: make the grammar smaller or simpler"
        if exit_code in (None, KILLED):  # the system kills processes if it lacks memory
            raise ApiError(503, f"{where} was not compiled, because the server is busy. Try again later", code="compiler_busy",
                           retry_after=RETRY_AFTER)
        return f"{where} must compile within {MEMORY // MIB} MiB of memory: make the grammar smaller or simpler"

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote_end = context.Pipe()
        process = context.Process(target=_main, args=(remote_end, self._tokenizer, self._seconds), daemon=True)
        try:
            process.start()
            self._process = process
            remote_end.close()
            if not self._connection.poll(START_S):
                raise TimeoutError(f"it did not start within {START_S:g} seconds")
            self._connection.recv()
        except (EOFError, OSError) as error:
            self.kill()
            if not self._stopped:
                say("grammars", f"the process that compiles grammars did not start: {error or 'it exited'}")
                raise ApiError(503, "the process that compiles grammars did not start: see the server's log",
                               code="compiler_ended", retry_after=RETRY_AFTER) from None

    def stop(self) -> None:
        """Interrupts a call of reason() in another thread."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            self._connection.close()


def _main(connection: Connection, tokenizer: JsonObject, seconds: float) -> None:
    for number in STOPPING:              # the HTTP process decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    loaded = Tokenizer.from_dict(dict(tokenizer))
    with suppress(UserError):            # the tokenizer does not support grammars, or llguidance is missing
        vocabulary(loaded)
    _limit_memory()
    with suppress(EOFError, OSError):    # the HTTP process has ended
        connection.send("ready")
        while True:
            grammar = connection.recv()
            _limit_time(seconds)
            reason = _refusal_reason(grammar, loaded)
            _limit_time(0)
            connection.send(reason)


def _refusal_reason(grammar: Grammar, tokenizer: Tokenizer) -> str:
    before = _resident_bytes()
    try:
        libraries = compile_grammar(grammar, tokenizer)
        require_ends(grammar, libraries, tokenizer, N_WALKS)
    except UserError as error:
        return str(error)
    if _resident_bytes() - before > MAX_COMPILED:
        return f"{grammar.parts[0].where} must take at most {MAX_COMPILED // MIB} MiB when compiled: make the grammar simpler"
    return ""


def _resident_bytes() -> int:
    """Returns this process's resident memory in bytes, or 0 if the system does not report it."""
    try:
        return _pages()[1] * mmap.PAGESIZE
    except OSError:
        return 0


def _pages() -> list[int]:
    """Returns the pages of this process's addresses and of its resident memory. ARM has pages of 4, 16 or 64 KiB."""
    return [int(number) for number in Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]]


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):              # macOS has neither this file nor this limit
            addresses = _pages()[0] * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (addresses + MEMORY, addresses + MEMORY))


def _limit_time(seconds: float) -> None:
    """Makes SIGPROF end this process after this many more seconds of CPU time; 0 means no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
