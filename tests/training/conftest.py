"""What tests of several files share."""

from pathlib import Path

import pytest
from training_runs import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file's own folder, with text.txt."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder
