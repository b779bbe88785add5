"""How a program ends after a user's error, which is printed as one sentence; after an interruption; or when the reader of its
output has gone.
"""

import atexit
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv.errors import UserError
from rwkv.io import signals
from rwkv.io.broken_pipe import abandon

READER_GONE = 1                          # exit statuses of programs
USER_ERROR = 2
INTERRUPTED = 130


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Prints a user's error as one sentence, with exit status 2. Any other error is a bug and keeps its traceback.

    Arguments that are not UTF-8 are a user's error. The signals of rwkv/io/signals.py end the `with` block like Ctrl-C, with
    exit status 130, and are ignored after the block. Characters outside the encoding of standard output are printed as ?.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with signals.raising():
            _require_utf8(sys.argv[1:])
            yield
    except signals.Signalled as signalled:
        print(f"interrupted by {signalled.name}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:              # the reader of standard output has gone, as in: train.py --help | head
        abandon(sys.stdout)
        sys.exit(READER_GONE)
    except (UserError, UnknownKernel, KernelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:             # such as a full disk, or a folder without permission
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    finally:
        atexit.register(signals.ignore)  # runs before the exit functions registered so far: atexit is last in, first out


def _require_utf8(arguments: list[str]) -> None:
    """Raises UserError for an argument that is not UTF-8: Python decodes it to lone surrogates, which a run cannot write to
    files.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"the argument {shown} must be UTF-8: rename the file, or set PYTHONUTF8=1 if the locale "
                            "is C") from None
