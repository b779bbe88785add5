"""Writes and reads the benchmark's reports, and makes captions with the machine and versions of a report."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kernels.arguments import path_of
from kernels.machine.hardware import ROOT
from kernels.registry import KernelUnavailable, UnknownKernel

Report = dict[str, Any]
PARTS = {"op", "device", "dtype", "malloc", "machine", "shapes", "sweep"}
FOLDER = ROOT / "benchmarks" / "results"


class UnusableFile(ValueError):
    """A file or folder of the user that cannot be read or written. The message gives the reason."""


def exit_status(main: Callable[[], int | None], *mistakes: type[Exception]) -> int:
    """Runs a program's main, and returns the exit status.

    After an error about a file or a kernel, or an exception in `mistakes`, the message is printed and the status is 2. If
    standard output has been closed, the status is 1 and there is no message.
    """
    caught: tuple[type[Exception], ...] = (OSError, UnusableFile, UnknownKernel, KernelUnavailable, *mistakes)
    try:
        status = main() or 0
        print(end="", flush=True)        # sys.stdout is None in a program started with >&-
    except BrokenPipeError:              # standard output is closed, as in: python -m kernels.bench timex | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except caught as error:
        print(error, file=sys.stderr)
        return 2
    return status


def publish(report: Report, file: Path | None) -> None:
    """Prints the report as one line of JSON, and also writes the line to `file`."""
    print(json.dumps(report), flush=True)
    if file:
        _write(report, file)


def save(report: Report, file: Path) -> None:
    """Writes the report to `file` as one line of JSON; prints the line if the file cannot be written."""
    try:
        _write(report, file)
    except UnusableFile:
        print(json.dumps(report), flush=True)
        raise


def _write(report: Report, file: Path) -> None:
    try:
        file.write_text(json.dumps(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise UnusableFile(f"cannot write {file} ({error.strerror}). The result is in the last line printed above") from None


def output_file(text: str) -> Path:
    """Converts the value of an option to the path of an output file, and creates the file's folder.

    Raises argparse.ArgumentTypeError if the file cannot be written.
    """
    file = path_of(text)
    try:
        check_folder(file.parent)
    except UnusableFile as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
        raise argparse.ArgumentTypeError(f"cannot write the file {file}: give another path")
    return file


def check_folder(folder: Path) -> None:
    """Creates the folder. Raises UnusableFile if no file can be written into the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableFile(f"cannot create the folder {folder} ({error.strerror}): give another path") from None
    if not os.access(folder, os.W_OK):
        raise UnusableFile(f"cannot write into the folder {folder}: give another path")


def read(files: Iterable[str | Path]) -> list[Report]:
    """Returns the benchmark's reports in `files`, without other JSON. Raises UnusableFile if a file is missing or not JSON."""
    contents = [read_json(Path(file)) for file in files]
    return [content for content in contents if isinstance(content, dict) and content.keys() >= PARTS]


def read_json(file: Path) -> Any:
    """Reads a JSON file. Raises UnusableFile if the file is missing or not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableFile(f"cannot read {file} ({error.strerror}): give a file written with --json") from None
    except ValueError:
        raise UnusableFile(f"{file} is not JSON: give a file written with --json") from None


def committed_reports() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def caption(report: Report) -> str:
    """Returns a line with the hardware, the versions, the commit and the date of a report."""
    machine = report["machine"]
    threads = machine.get("threads", 1)
    cpu = f"{machine.get('cpu')}, {threads} thread{'s' if threads > 1 else ''}, malloc {report['malloc']}"
    hardware = machine.get("gpu", cpu)
    names = ("torch", "taichi", *(("triton", "cuda-core", "cuda") if "gpu" in machine else ()))
    versions = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    return f"{hardware}; {versions}; {report['dtype']}; commit {machine['commit']}, {machine['date'][:10]}."
