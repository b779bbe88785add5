"""Defines the errors that end training early."""

from rwkv.errors import UserError


class Diverged(UserError):
    """Raised if the loss or a weight is not finite, before a checkpoint of this step is written."""


class Interrupted(Exception):
    """Raised if a signal stopped training between two steps. A checkpoint has been saved."""
