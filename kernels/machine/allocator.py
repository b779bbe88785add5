"""How memory is allocated on a CPU.

keep_large_blocks      the C library caches freed blocks: the temporaries of a step then cause no page faults
return_large_blocks    the C library returns them at once: less memory, more page faults
use_large_pages        torch's large tensors use pages of 2 MB: a pass over all weights then causes fewer TLB misses
"""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3              # malloc.h of the GNU C library
LARGE = 2 ** 30
MAPPED = 2 ** 19


def keep_large_blocks() -> bool:
    """Applies the setting to this process. Returns False where the C library has no mallopt (macOS, Windows, musl)."""
    return _call("mallopt", M_MMAP_THRESHOLD, LARGE) and _call("mallopt", M_TRIM_THRESHOLD, LARGE)


def return_large_blocks() -> bool:
    """Freed blocks of at least MAPPED bytes return to the system at once. Returns False as keep_large_blocks does.

    glibc's own threshold would rise to the largest block that was freed, up to 32 MB.
    """
    return _call("mallopt", M_MMAP_THRESHOLD, MAPPED)


def _call(name: str, *arguments: int) -> bool:
    """The result of a function of the C library; False if the library lacks it."""
    try:
        return bool(getattr(ctypes.CDLL(None), name)(*arguments))
    except (AttributeError, OSError, TypeError):
        return False


def use_large_pages() -> None:
    """Asks torch for them on Linux, unless the user has set it. Call it before torch is imported.

    For long-running programs: 600 MB of them take the system half a second to a second longer. No effect unless the system
    provides large pages on request (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled). Source: PyTorch,
    c10/core/impl/alloc_cpu.cpp.
    """
    if sys.platform == "linux" and "torch" not in sys.modules:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def give_back_free_blocks() -> None:
    """Returns the memory of freed blocks to the system where the C library can (glibc)."""
    _call("malloc_trim", 0)
