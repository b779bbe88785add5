"""The errors that end training early."""

from rwkv.errors import UserError


class Diverged(UserError):
    """The loss or a weight is not finite. The checkpoints saved before are intact."""


class Interrupted(Exception):
    """Training was stopped by a signal, between two steps, and has saved a checkpoint."""
