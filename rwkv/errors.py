"""Errors that are a user's mistake: programs show them as one sentence and end with status 2. Anything else is a bug."""


class UserError(ValueError):
    """A user's mistake. The message is one sentence: what is wrong, what was expected, what to do."""


class CheckpointError(UserError):
    """A file that is not a whole checkpoint: which file or tensor, what was found, what was expected, the likely cause."""


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read, although nothing says that it is damaged: by the system, or because the frozen weights
    that it belongs to are missing or changed."""
