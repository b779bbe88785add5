"""What tests of several files share."""

from functools import partial
from pathlib import Path

import pytest
import torch
from training_runs import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file's own folder, with text.txt."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture
def without_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile but its code generator, which needs a C++ compiler and a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr("shutil.which", lambda name: name)
