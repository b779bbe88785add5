"""Messages of the server for people, on standard error."""

import sys

from rwkv.io.lines import labelled


def say(subject: str, text: str) -> None:
    print(labelled(subject, text, sys.stderr), file=sys.stderr, flush=True)


def say_refused(status: int, request: str, request_id: str) -> None:
    """request: the method and the path."""
    say("refused" if status < 500 else "failed", f"{status} {request[:200]} {request_id}")
