"""JSON lines, also in .gz: the text of each {"text": "..."} is a document. data.field names another key."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv.config import DataConfig
from rwkv.data.sources.files import contents, matching, open_file
from rwkv.data.sources.source import Source, sha256, split_documents
from rwkv.errors import UserError
from rwkv.io.json_lines import parse, text_of

ENDINGS = (".jsonl", ".jsonl.gz")


def source(config: DataConfig, cache: Path) -> Source:
    """Raises UserError if there is no file; reading raises it for a line that is no such object. Blank lines are skipped.

    The first document and one of every 1/val_fraction are for validation.
    """
    found = files(str(config.path))
    paths = [path for _, path in found]

    def documents() -> Iterator[Any]:
        texts = (text for path in paths for text in _texts(path, config.field))
        return split_documents(texts, config.val_fraction, str(config.path))

    names = (part for (name, _), content in zip(found, contents(paths, cache), strict=True) for part in (name, content.sha256))
    about = f"{paths[0].name if len(paths) == 1 else f'{len(paths)} files of {config.path}'}, field {config.field}"
    return Source(documents, about, sha256([config.field, *names]), sum(path.stat().st_size for path in paths))


def files(path: str) -> list[tuple[str, Path]]:
    """(name, file) of the files of `path` that are not empty. Raises UserError if there is none."""
    found = [(name, file) for name, file in matching(path, ENDINGS) if file.stat().st_size]
    if not found:
        raise UserError(f"data.path={path} is empty")
    return found


def lines(path: Path) -> Iterator[tuple[bytes, str, int]]:
    """(line, where, bytes of the file read for it) of each line that is not blank."""
    with open_file(path) as raw:
        file, before = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw, 0
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                at = raw.tell() if path.suffix == ".gz" else before + len(line)
                yield line, f"{path}, line {number}", at - before
                before = at


def _texts(path: Path, field: str) -> Iterator[tuple[str, str, int]]:
    return ((_text(line, field, where), where, weight) for line, where, weight in lines(path))


def _lines(file: Any, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read data.path={path}: {error}") from None


def _text(line: bytes, field: str, where: str) -> str:
    entry = parse(line, where)
    if not isinstance(entry.get(field), str):
        raise UserError(_no_text(entry, field, where))
    return text_of(entry, field, where)


def _no_text(entry: dict[str, Any], field: str, where: str) -> str:
    if field in entry:
        return f"{where} has no string in {field!r}, but {json.dumps(entry[field])[:60]}"
    texts = [name for name, value in entry.items() if isinstance(value, str)]
    return f"{where} has no {field!r}: name the field of the text, data.field={'|'.join(texts[:5]) or 'NAME'}"
