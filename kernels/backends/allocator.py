"""The C library's allocator, told to keep large freed blocks: a training step's temporaries then cost no page faults."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3              # malloc.h of the GNU C library
LARGE = 2 ** 30


def keep_large_blocks() -> bool:
    """Applies the setting to this process. Returns False where the C library has no mallopt (macOS, Windows, musl)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE)) and bool(mallopt(M_TRIM_THRESHOLD, LARGE))


def give_back_free_blocks() -> None:
    """Returns the memory of freed blocks to the system where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
