"""The server's log, on standard error."""

import sys

from rwkv.io.lines import labelled


def say(subject: str, text: str) -> None:
    print(labelled(subject, text, sys.stderr), file=sys.stderr, flush=True)


def say_refused(status: int, request: str, request_id: str, reason: str = "") -> None:
    """request: the method and the path. reason: the message to the client."""
    message = f": {reason[:200]}" if reason else ""
    line = f"{status} {request[:200]} {request_id}{message}"
    say("refused" if status < 500 else "failed", "".join(char if char.isprintable() else "?" for char in line))
