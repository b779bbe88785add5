"""Handles signals that ask a program to stop: Ctrl-C, SIGTERM, SIGHUP when a terminal closes, and SIGUSR1, SIGUSR2 and SIGXCPU.

Batch systems send the last three before a job's time limit.

    with raise_on_signal(): ...            a signal ends the block with an exception, as Ctrl-C does
    with StopRequest() as stop: ...        a signal sets stop.requested, which the program polls whenever it can stop

A signal that was ignored when the program started (nohup ignores SIGHUP) stays ignored, except Ctrl-C. Shells start background
commands with Ctrl-C ignored, and a user who sends it anyway wants the program to end.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.2                       # the time between checks for a signal
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
STOPPING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))       # Windows has only the first two


class Signalled(KeyboardInterrupt):
    """Reports that one of the signals STOPPING has arrived. `name` is the signal's name."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(self.name)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raises Signalled for the first of the signals STOPPING inside the block, and KeyboardInterrupt for Ctrl-C.

    Has no effect outside the main thread.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, _raise) for number in caught_signals() if number != signal.SIGINT}
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):
            previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    ignore()                             # a closing terminal sends further signals, which would interrupt the clean-up
    raise Signalled(number)


def ignore() -> None:
    """Ignores the signals STOPPING except Ctrl-C, because they could change the exit status of a program that is ending."""
    for number in STOPPING:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)


def caught_signals() -> list[int]:
    """Returns the signals in STOPPING that are not ignored."""
    return [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]


def consume_interruptibly(items: Iterable[T], work: Callable[[Iterator[T]], object]) -> None:
    """Runs work(items) in a thread, so that a signal can interrupt a library that handles none. Re-raises errors of `work`.

    On interruption the thread gets no further items. If the thread still runs a second later, it is abandoned, and ends with
    the process.
    """
    interrupted = threading.Event()
    outcome: Future[None] = Future()

    def items_until_interrupted() -> Iterator[T]:
        for item in items:
            if interrupted.is_set():
                raise InterruptedError
            yield item

    def run() -> None:
        try:
            work(items_until_interrupted())
            outcome.set_result(None)
        except BaseException as error:   # a panic in a Rust library, for example, is no subclass of Exception
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()                   # a signal may interrupt start() after the thread has started
        while thread.is_alive():         # without a timeout, join() would miss a signal just before the wait
            thread.join(POLL_SECONDS)
        outcome.result()
    except KeyboardInterrupt:
        interrupted.set()
        if thread.is_alive():            # join() fails if start() has been interrupted
            thread.join(1.0)
        raise


def describe_exit(status: int) -> str:
    """Returns why a process ended, from the exit status that Python reports: `SIGSEGV`, or `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"{name}: out of memory?" if name == "SIGKILL" else name


class StopRequest:
    """Records that a signal has asked the program to stop. The first signal sets `requested` and calls on_signal(number).

    After that, further signals have no effect, except that Ctrl-C raises KeyboardInterrupt. With every_signal=True every signal
    is handled like the first. Use a StopRequest in a `with` block, or call install() and restore(). Works only in the main
    thread.
    """

    def __init__(self, signals: tuple[int, ...] = STOPPING, on_signal: Callable[[int], object] | None = None,
                 every_signal: bool = False) -> None:
        self.requested = False
        self._signals = signals
        self._on_signal = on_signal
        self._every_signal = every_signal
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        allowed = {*caught_signals(), signal.SIGINT}
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals if number in allowed}

    def restore(self) -> None:
        """Restores the signal handlers that install() replaced."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_repeated = self.requested and not self._every_signal
        self.requested = True
        if signal.SIGINT in self._previous and not self._every_signal:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._on_signal is not None and not is_repeated:
            self._on_signal(number)
