"""The exceptions for a user's mistakes. Programs print their message and end with status 2. Any other exception is a bug."""


class UserError(ValueError):
    """A user's mistake. The message says what is wrong, what was expected, and what to do."""


class CheckpointError(UserError):
    """A file that is not a complete checkpoint. The message names the file or tensor, the difference, and the likely cause."""


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read, although its file may be undamaged.

    Either the system cannot read the file, or the checkpoint's frozen weights, in another file, are missing or have changed.
    """


def full_gpu(error: BaseException) -> str | None:
    """Returns a sentence about a GPU without enough memory if that is torch's error, or None. Does not import torch."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    return "the GPU has too little free memory: " + "; ".join(str(error).split(". ")[1:3])
