"""Files of saved states (rwkv/generation/states.py reads and writes them)."""

from pathlib import Path

from rwkv.errors import UserError
from rwkv.io.commands import as_typed


def require_state_file(path: str | Path) -> None:
    """Raises UserError where there is no file."""
    if not Path(path).is_file():
        generate = as_typed("python generate.py")
        raise UserError(f"no state file at {path}: {generate} writes one with save_state={path}")
