"""The exceptions for a user's mistakes. Programs print their message and end with status 2. Any other exception is a bug."""


class UserError(ValueError):
    """A user's mistake. The message says what is wrong, what was expected, and what to do."""


class CheckpointError(UserError):
    """A file that is not a complete checkpoint. The message names the file or tensor, the difference, and the likely cause."""


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read, although its file may be undamaged.

    Either the system cannot read the file, or the checkpoint's frozen weights, in another file, are missing or have changed.
    """
