"""Functions that write the server's log to standard error."""

import sys

from rwkv.io.lines import labelled_line


def say(subject: str, text: str) -> None:
    print(labelled_line(subject, text, sys.stderr), file=sys.stderr, flush=True)


def say_refused(status: int, request: str, request_id: str, reason: str = "") -> None:
    """Logs a refused or failed request.

    Args:
        request: the method and the path.
        reason: the error message that the client gets.
    """
    message = f": {reason[:200]}" if reason else ""
    line = f"{status} {request[:200]} {request_id}{message}"
    say("refused" if status < 500 else "failed", "".join(char if char.isprintable() else "?" for char in line))
