"""Checks that a wrong file is refused with one sentence."""

from pathlib import Path

import pytest

from rwkv.errors import CheckpointError
from rwkv.pretrained import RWKV


def refuses(path: Path, *parts: str, **options: str) -> None:
    """Checks that loading raises a CheckpointError of one line, which contains the file's name and each of `parts`."""
    with pytest.raises(CheckpointError) as error:
        RWKV.from_pretrained(path, "reference", **options)
    assert "\n" not in str(error.value)
    for part in (path.name, *parts):
        assert part in str(error.value)
