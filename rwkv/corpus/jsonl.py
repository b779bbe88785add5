"""JSON lines, each an object with a text that is a document: {"text": "..."}; .gz as well. data.field names another key."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv.config import DataConfig
from rwkv.corpus.files import contents, matching, open_file
from rwkv.corpus.source import Source, sha256, split_documents
from rwkv.json_lines import parse, text_of

ENDINGS = (".jsonl", ".jsonl.gz")


def source(config: DataConfig, cache: Path) -> Source:
    """The first document and one of every 1/val_fraction are for validation. Raises ValueError where there is no file.

    A line that is not such an object is a ValueError with its file and number when it is read; blank ones are passed over.
    """
    found = [(name, path) for name, path in matching(str(config.path), ENDINGS) if path.stat().st_size]
    if not found:
        raise ValueError(f"data.path={config.path} is empty")
    paths = [path for _, path in found]

    def documents() -> Iterator[Any]:
        texts = (text for path in paths for text in _texts(path, config.field))
        return split_documents(texts, config.val_fraction, str(config.path))

    names = (part for (name, _), content in zip(found, contents(paths, cache), strict=True) for part in (name, content.sha256))
    about = f"{paths[0].name if len(paths) == 1 else f'{len(paths)} files of {config.path}'}, field {config.field}"
    return Source(documents, about, sha256([config.field, *names]), sum(path.stat().st_size for path in paths))


def _texts(path: Path, field: str) -> Iterator[tuple[str, str, int]]:
    """(text, where, bytes of the file gone through for it)."""
    with open_file(path) as raw:
        lines, before = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw, 0
        for number, line in enumerate(_lines(lines, path), start=1):
            where = f"{path}, line {number}"
            if line.strip():
                at = raw.tell() if path.suffix == ".gz" else before + len(line)
                yield _text(line, field, where), where, at - before
                before = at


def _lines(file: Any, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read data.path={path}: {error}") from None


def _text(line: bytes, field: str, where: str) -> str:
    entry = parse(line, where)
    if not isinstance(entry.get(field), str):
        raise ValueError(_no_text(entry, field, where))
    return text_of(entry, field, where)


def _no_text(entry: dict[str, Any], field: str, where: str) -> str:
    if field in entry:
        return f"{where} has no string in {field!r}, but {json.dumps(entry[field])[:60]}"
    texts = [name for name, value in entry.items() if isinstance(value, str)]
    return f"{where} has no {field!r}: name the field of the text, data.field={'|'.join(texts[:5]) or 'NAME'}"
