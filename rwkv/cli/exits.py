"""Ends a program with a message and an exit status after a user's error or an interruption."""

import atexit
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv.errors import UserError, compile_message, memory_message
from rwkv.io import signals
from rwkv.io.broken_pipe import abandon, discard_when_unread

READER_GONE = 1                          # exit status when the reader has closed standard output
USER_ERROR = 2
INTERRUPTED = 130


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Prints the message of a user's error in the `with` block, and exits with status 2. Other errors keep their traceback.

    Running out of memory and arguments that are not UTF-8 count as user errors. The signals of rwkv/io/signals.py end the
    `with` block like Ctrl-C, with exit status 130, and are ignored after the block. Characters outside the encoding of standard
    output are printed as ?.
    """
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with signals.raise_on_signal():
            _require_utf8(sys.argv[1:])
            yield
    except signals.Signalled as signalled:
        print(f"interrupted by {signalled.name}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:              # the reader has closed standard output, as in: train.py --help | head
        abandon(sys.stdout)
        sys.exit(READER_GONE)
    except (UserError, UnknownKernel, KernelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except (MemoryError, RuntimeError) as error:
        if message := compile_message(error):
            print(f"error: {message}", file=sys.stderr)
        elif message := memory_message(error):
            print(f"error: {message}. Use a smaller model, a smaller batch or another dtype", file=sys.stderr)
        else:
            raise
        sys.exit(USER_ERROR)
    except OSError as error:             # such as a full disk, or a folder without write permission
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if not error.filename and not _has_current_directory():
            message = "the current directory has been deleted: change to another one"
        print(f"error: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    finally:
        atexit.register(signals.ignore)  # atexit runs this first, before all functions registered so far


def _open_missing_streams() -> None:
    """Opens the null device for standard input and output if the program was started without them, as with >&-."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")              # noqa: SIM115  it stays open, like a standard stream
    if sys.stdout is None:
        sys.stdout = discard_when_unread(None)


def _require_utf8(arguments: list[str]) -> None:
    """Raises UserError for an argument that is not UTF-8.

    Python decodes such an argument to lone surrogates, which cannot be written to files.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            escaped = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"the argument {escaped} must be valid UTF-8: rename the file, or set PYTHONUTF8=1 if the locale "
                            'is "C"') from None


def _has_current_directory() -> bool:
    try:
        return bool(os.getcwd())         # noqa: PTH109  as Path.cwd()
    except OSError:
        return False
