"""Text for training and for validation: a file, or the sources of the running Python's standard library."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rwkv.config import DataConfig

STDLIB_SKIPPED = {"site-packages", "dist-packages", "encodings", "test", "tests", "idle_test", "__pycache__"}
STDLIB_SEED = 0


@dataclass(frozen=True)
class Text:
    """The documents of both splits, none empty; `source` says to people what they are, `sha256` identifies them."""

    train: list[str]
    val: list[str]
    source: str
    sha256: str


def read(config: DataConfig) -> Text:
    """The text that data.name and data.path name. Raises ValueError where there is none."""
    if config.name == "stdlib" and config.path:
        raise ValueError(f"data=stdlib takes no data.path: to train on {config.path}, give data=text as well")
    if config.name == "stdlib":
        return read_stdlib(Path(sysconfig.get_path("stdlib")), config.val_fraction)
    if not config.path:
        raise ValueError("data=text needs data.path=FILE, a text file in UTF-8")
    return read_file(Path(config.path), config.val_fraction)


def read_file(path: Path, val_fraction: float) -> Text:
    """One document: the last val_fraction of its characters is for validation. `sha256` is that of the file."""
    text = _decode(path, _read_bytes(path))
    cut = int(len(text) * (1 - val_fraction))
    if not 0 < cut < len(text):
        raise ValueError(f"data.path={path} has {len(text)} characters: too few to split into training and validation")
    return Text([text[:cut]], [text[cut:]], f"{path.name}, the last {100 * val_fraction:g} % for validation", sha256([text]))


def read_stdlib(root: Path, val_fraction: float) -> Text:
    """The .py sources under `root`, each a document; the first ones in a fixed random order are for validation.

    A file's place in that order hangs on its own name alone: another Python version has nearly the same split.
    """
    documents = {path.relative_to(root).as_posix(): _source(path) for path in _python_files(root)}
    shuffled = [documents[name] for name in sorted(documents, key=_random_rank) if documents[name]]
    if len(shuffled) < 2:
        raise ValueError(f"the standard library in {root} has no .py sources: use data=text data.path=FILE")
    count = _count_reaching(val_fraction, shuffled)
    source = f"{len(shuffled)} .py files of this Python's standard library, {count} of them for validation"
    return Text(shuffled[count:], shuffled[:count], source, sha256(shuffled))


def sha256(documents: Sequence[str]) -> str:
    """Identifies a list of documents; of a single one, it is the SHA-256 of its UTF-8."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def utf8_bytes(documents: Sequence[str]) -> int:
    return sum(len(document.encode()) for document in documents)


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read data.path={path}: {error.strerror}") from None
    if not content:
        raise ValueError(f"data.path={path} is empty")
    return content


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path={path} is not UTF-8: its byte {error.start} is {content[error.start]:#04x}; convert it, "
                         f"for instance with: iconv -f latin1 -t utf-8 {path.name} > {path.stem}.utf8.txt") from None


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in STDLIB_SKIPPED:
            yield from _python_files(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def _source(path: Path) -> str:
    """The file's text, every line end a newline; nothing where it is in another encoding."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _random_rank(name: str) -> bytes:
    return hashlib.sha256(f"{STDLIB_SEED} {name}".encode()).digest()


def _count_reaching(fraction: float, documents: Sequence[str]) -> int:
    """How many of the first documents hold `fraction` of all bytes: at least one, and fewer than all."""
    reached = np.cumsum([len(document.encode()) for document in documents])
    return int(np.clip(1 + np.searchsorted(reached, fraction * reached[-1]), 1, len(documents) - 1))
