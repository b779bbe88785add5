"""Changes how memory is allocated on a CPU.

keep_large_blocks      makes the C library keep freed blocks, so that the temporaries of a step cause no page faults
return_large_blocks    makes the C library return freed blocks to the system immediately: less memory, more page faults
use_large_pages        makes torch use pages of 2 MB for large tensors, so that a pass over all weights causes fewer TLB misses
"""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3              # from malloc.h of the GNU C library
LARGE = 2 ** 30
MAPPED = 2 ** 19


def keep_large_blocks() -> bool:
    """Makes the C library keep freed blocks. Returns False if the C library has no mallopt (macOS, Windows, musl)."""
    return _call("mallopt", M_MMAP_THRESHOLD, LARGE) and _call("mallopt", M_TRIM_THRESHOLD, LARGE)


def return_large_blocks() -> bool:
    """Makes the C library return freed blocks of at least MAPPED bytes immediately. Returns False without mallopt.

    glibc's default threshold grows to the size of the largest block freed so far, up to 32 MB.
    """
    return _call("mallopt", M_MMAP_THRESHOLD, MAPPED)


def _call(name: str, *arguments: int) -> bool:
    """Calls a function of the C library. Returns True if the function exists and its result is nonzero."""
    try:
        return bool(getattr(ctypes.CDLL(None), name)(*arguments))
    except (AttributeError, OSError, TypeError):
        return False


def use_large_pages() -> None:
    """Sets torch's environment variable for 2 MB pages on Linux, unless the user has set it. Call this before importing torch.

    The setting suits long-running programs, because allocating 600 MB in large pages takes half a second to a second longer.
    The variable has no effect unless /sys/kernel/mm/transparent_hugepage/enabled is `madvise`. Source: PyTorch,
    c10/core/impl/alloc_cpu.cpp.
    """
    if sys.platform == "linux" and "torch" not in sys.modules:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def give_back_free_blocks() -> None:
    """Gives the memory of freed blocks back to the system, if the C library has malloc_trim (glibc)."""
    _call("malloc_trim", 0)
