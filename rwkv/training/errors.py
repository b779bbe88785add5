"""The errors that end training early."""

from rwkv.errors import UserError


class Diverged(UserError):
    """The loss or a weight is not finite. Earlier checkpoints are intact."""


class Interrupted(Exception):
    """A signal stopped training between two steps, and a checkpoint was saved."""
