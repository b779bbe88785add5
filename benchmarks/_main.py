"""Functions that the programs of this folder share: exit status, reading a text, measuring in parts, requests to a process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from kernels.bench.results import Report, exit_status, publish, read_json, save
from kernels.machine import hardware
from rwkv.errors import UserError
from rwkv.io import utf8


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program's main, and exits with its status. After a user's mistake, prints the message and exits with status 2."""
    sys.exit(exit_status(main, UserError))


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises UserError if the file cannot be read, is not UTF-8, or is empty."""
    text = utf8.read_text(path, str(path))
    if not text:
        raise UserError(f"{path} must not be empty: pass a file with text")
    return text


def measure_parts(parts: Mapping[str, Callable[[], Report]], file: Path | None) -> None:
    """Measures each part, and updates these parts in `file`. The commit of each part is written too."""
    before = read_json(file) if file and file.exists() else {}
    machine = hardware.describe("cpu")
    report: Report = before | {"machine": machine, "commits": before.get("commits", {})}
    for name, measure in parts.items():
        report[name] = measure()
        report["commits"][name] = machine["commit"]
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        if file:                         # saves after each part, so that an interrupted run keeps its measurements
            save(report, file)
    publish(report, file)


class ProcessEnded(SystemExit):
    """A process has ended before it answered."""


@contextmanager
def line_process(command: Sequence[str | Path], environment: Mapping[str, str] | None = None
                 ) -> Iterator[subprocess.Popen[str]]:
    """Starts `command` with pipes for send_line and receive_line. Its input is closed at the end of the `with` block."""
    with subprocess.Popen(command, cwd=hardware.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            with suppress(BrokenPipeError):  # the process ended before it read its last request
                process.stdin.close()


def send_line(process: subprocess.Popen[str], line: str) -> None:
    """Sends a line. If the process has ended, nothing happens here: receive_line raises."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        print(line, file=process.stdin, flush=True)


def receive_line(process: subprocess.Popen[str], start: str = "") -> str:
    """Returns the next line that begins with `start`, skipping the output of libraries. Raises ProcessEnded."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    command = " ".join(map(str, process.args))           # type: ignore[arg-type]
    raise ProcessEnded(f"{command} ended with status {process.wait()}")


@contextmanager
def answering_process(command: Sequence[str | Path]) -> Iterator[Callable[[Any], Any]]:
    """Starts `command`, and yields a function that sends a request as a JSON line and returns the answer.

    The process ends with the `with` block. The function raises ProcessEnded if the process has ended before.
    """
    with line_process(command) as process:
        def ask(request: Any) -> Any:
            send_line(process, json.dumps(request))
            return json.loads(receive_line(process))

        yield ask
