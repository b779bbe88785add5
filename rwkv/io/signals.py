"""Stopping on Ctrl-C or SIGTERM at a safe point: the signal sets a flag, and the program looks at it where it can stop."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

DEFAULT_HANDLERS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequest:
    """`with StopRequest() as stop:` sets stop.requested at one of `signals`, and then calls on_signal(number) if given.

    The next signal has its default effect (the second Ctrl-C raises KeyboardInterrupt) unless every_signal=True: then each
    one is handled like the first. install() and restore() do what the `with` block does. Main thread only.
    """

    def __init__(self, signals: tuple[int, ...] = tuple(DEFAULT_HANDLERS), on_signal: Callable[[int], object] | None = None,
                 every_signal: bool = False) -> None:
        self.requested = False
        self._signals = signals
        self._on_signal = on_signal
        self._every_signal = every_signal
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals}

    def restore(self) -> None:
        """Gives the signals back the handlers that they had before install()."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._every_signal:
            for each in self._signals:
                signal.signal(each, DEFAULT_HANDLERS[each])
        if self._on_signal is not None:
            self._on_signal(number)
