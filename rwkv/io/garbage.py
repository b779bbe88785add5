"""Python's garbage collector, while a program starts."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off inside, and then freezes all objects: they are never searched for garbage again.

    Importing torch and reading a vocabulary make a million objects that stay until the process ends. Searching them again and
    again takes an eighth of the CPU time from the start of generate.py to its first token. Does nothing if the collector is off
    already.
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
        atexit.register(gc.unfreeze)     # Taichi saves its compiled kernels only if the last collection frees its program
