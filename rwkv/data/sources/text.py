"""Reads text files, each as a document. Validation gets the end of a single file, or some of several files.

With data.separator, a file contains several documents, and validation gets some of the documents.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rwkv.config import DataConfig
from rwkv.data.documents.copies import place_in_order, split_documents
from rwkv.data.documents.separators import separate
from rwkv.data.documents.source import Document, Source, rank, validation_begins
from rwkv.data.files import Content, contents, find_files, names_and_hashes
from rwkv.data.sources.jsonl import begins_with_object
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.lines import count_of
from rwkv.io.utf8 import chunks

PATH = "a text file in UTF-8, a folder of .txt files, or a pattern such as books/**/*.md"
LOCAL = True
AS_JSON = "JSON, learnt with its keys and escapes; data=jsonl and data=chat learn only the texts in it"


def source(config: DataConfig, cache: Path) -> Source:
    files = [(name, path) for name, path in find_files(str(config.path), (".txt",)) if path.stat().st_size]
    if not files:
        raise UserError(f"data.path={config.path} contains no text. Pass a file with text in UTF-8")
    files.sort(key=lambda pair: rank(pair[0]))
    opened = _open(files, config, cache)
    return replace(opened, about=f"{opened.about}; {AS_JSON}") if begins_with_object(files[0][1]) else opened


def _open(files: list[tuple[str, Path]], config: DataConfig, cache: Path) -> Source:
    if config.separator is not None:
        return _separated_source(files, config, config.separator, cache)
    file_contents = contents([path for _, path in files], cache, text=True)
    if len({content.fingerprint for content in file_contents}) == 1:
        return _single_file_source(files, file_contents[0], config.val_fraction)
    return _several_files_source(files, file_contents, config)


def _single_file_source(files: list[tuple[str, Path]], content: Content, val_fraction: float) -> Source:
    """Returns the source for a single file, or for several identical files, of which only the first is read."""
    path = files[0][1]
    copies = len(files) - 1
    cut = validation_begins(content.characters, val_fraction, f"data.path={path}")

    def documents() -> Iterator[Document]:
        yield Document(_characters_between(path, 0, cut), False, str(path))
        yield Document(_characters_between(path, cut, content.characters), True, str(path), before=cut)

    size = path.stat().st_size
    bounds = (size - (content.characters - cut) + 1, size - cut + 1)
    equal = f" (without {count_of(copies, 'file')} with identical text)" if copies else ""
    about = f"{path.name}{equal}, the last {100 * val_fraction:g} % for validation"
    return Source(documents, about, content.sha256, size, bounds)


def _several_files_source(files: list[tuple[str, Path]], file_contents: list[Content], config: DataConfig) -> Source:
    sizes = [path.stat().st_size for _, path in files]
    placed = place_in_order([content.fingerprint for content in file_contents], sizes, config.val_fraction)

    def documents() -> Iterator[Document]:
        for val in (False, True):
            yield from (Document(chunks(path), val, str(path), copy=place.copy)
                        for (_, path), place in zip(files, placed, strict=True) if place.val == val)

    count = sum(place.val for place in placed)
    val_size = sum(size for size, place in zip(sizes, placed, strict=True) if place.val)
    about = f"{len(files)} files of {config.path}, {count} of them for validation"
    bounds = (sum(sizes) - val_size + len(files) - count, val_size + count)
    identity = [part for (name, _), content in zip(files, file_contents, strict=True) for part in (name, content.sha256)]
    return Source(documents, about, sha256(identity), sum(sizes), bounds)


def _separated_source(files: list[tuple[str, Path]], config: DataConfig, separator: str, cache: Path) -> Source:
    """Returns the source of the texts between separators, which are split like the documents of data=jsonl."""
    def documents() -> Iterator[Document]:
        texts = separate(((chunks(path), str(path), None) for _, path in files), separator, str(config.path))
        return split_documents(texts, config.val_fraction, str(config.path))

    name = files[0][1].name if len(files) == 1 else f"{len(files)} files of {config.path}"
    identity = sha256([separator, *names_and_hashes(files, cache, text=True)])
    size = sum(path.stat().st_size for _, path in files)
    return Source(documents, f"{name}, documents between {separator!r}", identity, size)


def _characters_between(path: Path, start: int, stop: int) -> Iterator[str]:
    at = 0
    for chunk in chunks(path):
        part = chunk[max(start - at, 0):max(stop - at, 0)]
        if part:
            yield part
        at += len(chunk)
        if at >= stop:
            return
