"""Text files, each a document. The end of a single file is for validation; of several files, some whole ones."""

from collections.abc import Iterator
from pathlib import Path

from rwkv.config import DataConfig
from rwkv.data.source import Document, Source, count_reaching, rank, validation_begins
from rwkv.data.text_files import contents, matching, names_and_hashes
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.utf8 import chunks

PATH = "a text file in UTF-8, a folder of .txt files, or a pattern such as books/**/*.md"
LOCAL = True


def source(config: DataConfig, cache: Path) -> Source:
    found = [(name, path) for name, path in matching(str(config.path), (".txt",)) if path.stat().st_size]
    if not found:
        raise UserError(f"data.path={config.path} is empty: give a text in UTF-8")
    if len(found) == 1:
        return _one(found[0][1], config.val_fraction, cache)
    return _several(sorted(found, key=lambda pair: rank(pair[0])), config, cache)


def _one(path: Path, val_fraction: float, cache: Path) -> Source:
    ((digest, characters),) = contents([path], cache, text=True)
    cut = validation_begins(characters, val_fraction, f"data.path={path}")

    def documents() -> Iterator[Document]:
        yield Document(_between(path, 0, cut), False, str(path))
        yield Document(_between(path, cut, characters), True, str(path), before=cut)

    size = path.stat().st_size
    bounds = (size - (characters - cut) + 1, size - cut + 1)
    return Source(documents, f"{path.name}, the last {100 * val_fraction:g} % for validation", digest, size, bounds)


def _several(found: list[tuple[str, Path]], config: DataConfig, cache: Path) -> Source:
    paths = [path for _, path in found]
    sizes = [path.stat().st_size for path in paths]
    count = count_reaching(config.val_fraction, sizes)

    def documents() -> Iterator[Document]:
        for group, val in ((paths[count:], False), (paths[:count], True)):
            yield from (Document(chunks(path), val, str(path)) for path in group)

    about = f"{len(found)} files of {config.path}, {count} of them for validation"
    bounds = (sum(sizes[count:]) + len(found) - count, sum(sizes[:count]) + count)
    return Source(documents, about, sha256(names_and_hashes(found, cache, text=True)), sum(sizes), bounds)


def _between(path: Path, start: int, stop: int) -> Iterator[str]:
    """Characters `start` to `stop` of a file, in chunks."""
    at = 0
    for chunk in chunks(path):
        part = chunk[max(start - at, 0):max(stop - at, 0)]
        if part:
            yield part
        at += len(chunk)
        if at >= stop:
            return
