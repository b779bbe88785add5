"""Finds the files of saved states, which rwkv/generation/state_files.py reads and writes."""

from pathlib import Path

from rwkv.commands import commands_as_typed
from rwkv.errors import UserError
from rwkv.io import hub


def state_path(path: str | Path) -> Path:
    """Returns the path of a state file, downloaded if `path` is a name on the Hub. Raises UserError if it does not exist."""
    file = hub.local(path, "state file")
    if file.is_dir():
        raise UserError(f"{path} is a directory: name a state file, such as {file / 'state.safetensors'}")
    if not file.is_file():
        generate = commands_as_typed("python generate.py")
        raise UserError(f"there is no state file at {path}. To create this file, run {generate} with save_state={path}")
    return file
