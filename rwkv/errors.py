"""The exceptions for a user's mistakes. Programs print their message and end with status 2. Any other exception is a bug."""

import errno
import re

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)       # a file cannot be written


class UserError(ValueError):
    """A user's mistake. The message says what is wrong, what was expected, and what to do."""


class CheckpointError(UserError):
    """A file that is not a complete checkpoint. The message names the file or tensor, the difference, and the likely cause."""


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read, although its file may be undamaged.

    Either the system cannot read the file, or the checkpoint's frozen weights, in another file, are missing or have changed.
    """


def memory_message(error: BaseException) -> str | None:
    """Returns a one-line message if the machine or its GPU has run out of memory, otherwise None. Does not import torch."""
    text = str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        size = re.search(r"allocate (\d+ bytes|[\d.]+ \w+)", text)          # torch's message, and NumPy's
        return f"out of memory: cannot allocate {size[1]}" if size else "out of memory"
    if type(error).__name__ != "OutOfMemoryError" and "CUDA error: out of memory" not in text:
        return None
    details = "; ".join(text.split(". ")[1:3]) if "Tried to allocate" in text else ""
    return f"out of GPU memory: {details}" if details else "out of GPU memory"


def compile_message(error: BaseException) -> str | None:
    """Returns a one-line message if torch.compile could not write to its cache, otherwise None. Does not import torch."""
    cause = getattr(error, "inner_exception", None)
    if not isinstance(cause, OSError) or cause.errno not in UNWRITABLE or not cause.filename:
        return None
    return f"torch.compile failed: {cause.filename}: {cause.strerror}. Set TORCHINDUCTOR_CACHE_DIR to a writable folder"
