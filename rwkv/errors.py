"""TODO."""



class CheckpointError(ValueError):
    """A file that is not, or not wholly, an RWKV-4 checkpoint: which, what was found, what was expected, the likely cause."""


class UsageError(Exception):
    """A command line that says something that does not exist or does not fit."""
