"""The check that a wrong file is refused with one sentence."""

from pathlib import Path

import pytest

from rwkv.errors import CheckpointError
from rwkv.pretrained import RWKV


def refuses(path: Path, *said: str, **options: str) -> None:
    """Checks that loading raises one sentence that contains the file's name and everything in `said`."""
    with pytest.raises(CheckpointError) as error:
        RWKV.from_pretrained(path, "reference", **options)
    assert "\n" not in str(error.value)
    for part in (path.name, *said):
        assert part in str(error.value)
