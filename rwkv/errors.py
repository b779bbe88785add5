"""Errors that are a user's mistake: programs print one sentence and end with status 2. Any other error is a bug."""


class UserError(ValueError):
    """A user's mistake. The message is one sentence: what is wrong, what was expected, what to do."""


class CheckpointError(UserError):
    """A file is not a complete checkpoint. The message names the file or tensor, what was found and expected, and the likely
    cause.
    """


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read, although it may be sound: the system cannot read the file, or the frozen weights that belong
    to the checkpoint are missing or have changed.
    """
