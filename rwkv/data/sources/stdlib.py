"""Reads the source files of the running Python's standard library into memory: 11 MB of text that need no download."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rwkv.config import DataConfig
from rwkv.data.documents.copies import fingerprint, place_in_order
from rwkv.data.documents.source import Document, Source, chunks_of, rank
from rwkv.errors import UserError
from rwkv.io.cache import sha256

PATH = ""
LOCAL = False
SKIPPED = {"site-packages", "dist-packages", "encodings", "test", "tests", "idle_test", "__pycache__"}


class Text(NamedTuple):
    """The documents of both splits, none of which is empty."""

    train: list[str]
    val: list[str]


def source(config: DataConfig, cache: Path) -> Source:
    text = read_stdlib(Path(sysconfig.get_path("stdlib")), config.val_fraction)
    about = (f"{len(text.train) + len(text.val)} .py files of this Python's standard library, "
             f"{len(text.val)} of them for validation")

    def documents() -> Iterator[Document]:
        seen: set[int] = set()
        for split, val in ((text.train, False), (text.val, True)):
            for document in split:
                computed = fingerprint([document])
                yield Document(chunks_of(document), val, "the standard library", copy=computed in seen)
                seen.add(computed)

    n_train, n_val = (sum(len(document.encode()) + 1 for document in split) for split in (text.train, text.val))
    return Source(documents, about, sha256(text.val + text.train), n_train + n_val, (n_train, n_val))


def read_stdlib(root: Path, val_fraction: float) -> Text:
    """Reads the .py files under `root`, each as a document. Raises UserError if there are fewer than two.

    Validation gets the first files in a fixed random order, and their copies. The position of a file in this order depends only
    on its name, so the split is nearly the same for all Python versions.
    """
    documents = {path.relative_to(root).as_posix(): _read_text(path) for path in _python_files(root)}
    shuffled = [documents[name] for name in sorted(documents, key=rank) if documents[name]]
    if len(shuffled) < 2:
        raise UserError(f"the standard library in {root} has no .py files. Pass a text file with data=text data.path=FILE")
    fingerprints = [fingerprint([document]) for document in shuffled]
    placed = place_in_order(fingerprints, [len(document.encode()) for document in shuffled], val_fraction)
    train, val = ([document for document, place in zip(shuffled, placed, strict=True) if place.val == is_val]
                  for is_val in (False, True))
    return Text(train, val)


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in SKIPPED:
            yield from _python_files(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
