"""Defines fixtures that the tests of several files use."""

from functools import partial
from pathlib import Path

import pytest
import torch
from training_runs import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for the tests of one file, with text.txt."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture
def without_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch.compile skip its code generator, which needs a C++ compiler and a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr("shutil.which", lambda name: name)
