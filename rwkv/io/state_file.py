"""Files of saved states (rwkv/generation/states.py reads and writes them)."""

from pathlib import Path

from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.commands import as_typed


def state_file(path: str | Path) -> Path:
    """The file at a path, or of a name on the Hub. Raises UserError where there is none."""
    found = hub.local(path, "state file")
    if found.is_dir():
        raise UserError(f"{path} is a directory: name the state file in it, as {found / 'state.safetensors'}")
    if not found.is_file():
        generate = as_typed("python generate.py")
        raise UserError(f"no state file at {path}: {generate} writes one with save_state={path}")
    return found
