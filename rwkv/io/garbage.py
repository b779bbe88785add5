"""Python's garbage collector, while a program starts."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection inside, and then freezes the objects that there are: they are never searched for garbage.

    Importing torch and reading a vocabulary make a million objects that stay until the process ends. The collector walks them
    again and again, which is an eighth of the CPU time from the start of generate.py to its first token. Does nothing where the
    collector is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)     # Taichi keeps its compiled kernels when the last collection ends its program
