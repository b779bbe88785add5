"""Ctrl-C as a question that is asked between two tokens, so that nothing is cut in the middle; a second one is not patient."""

import signal
from types import FrameType, TracebackType


class Interrupt:
    """`with Interrupt() as interrupt:` Ctrl-C sets `interrupt.asked`; the next one raises KeyboardInterrupt as ever."""

    asked = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
