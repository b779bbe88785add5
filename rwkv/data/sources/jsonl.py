"""JSON lines, also in .gz: the text of each {"text": "..."} is a document. data.field names another key.

A file may also be one JSON list of such objects.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rwkv.config import DataConfig
from rwkv.data.copies import split_documents
from rwkv.data.separators import Text, separate
from rwkv.data.source import Source, chunks_of
from rwkv.data.text_files import matching, names_and_hashes
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.json_lines import loads, parse, text_of
from rwkv.io.utf8 import decode, open_file

PATH = "a .jsonl or .jsonl.gz file, a folder of them, or a pattern"
LOCAL = True
ENDINGS = (".jsonl", ".jsonl.gz")
BLOCK = 1 << 16                          # bytes at a file's beginning in which a list is looked for
OTHER_FILES = {b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"PK\3\4": "a zip archive",
               b"BZh": "compressed with bzip2", b"\x28\xb5\x2f\xfd": "compressed with zstandard",
               b"\xfd7zXZ": "compressed with xz"}


def source(config: DataConfig, cache: Path) -> Source:
    found = files(str(config.path))
    paths = [path for _, path in found]

    def documents() -> Iterator[Any]:
        texts = ((_text(entry, config.field, where), where, weight) for path in paths for entry, where, weight in entries(path))
        return split_documents(between_separators(texts, config), config.val_fraction, str(config.path))

    about = f"{paths[0].name if len(paths) == 1 else f'{len(paths)} files of {config.path}'}, field {config.field}"
    identity = sha256([config.field, *filter(None, [config.separator]), *names_and_hashes(found, cache)])
    return Source(documents, about, identity, sum(path.stat().st_size for path in paths))


def between_separators(texts: Iterator[Text], config: DataConfig) -> Iterator[Text]:
    """The documents of (text, where, weight): each text, or the parts between data.separator."""
    if config.separator is None:
        return texts
    chunked = ((chunks_of(text), where, weight) for text, where, weight in texts)
    return separate(chunked, config.separator, str(config.path))


def files(path: str, endings: Sequence[str] = ENDINGS) -> list[tuple[str, Path]]:
    """(name, file) of the files of `path` that are not empty. endings: those read in a folder. Raises UserError for no file."""
    found = [(name, file) for name, file in matching(path, endings) if file.stat().st_size]
    if not found:
        raise UserError(f"data.path={path} is empty")
    return found


def entries(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """(object, where, bytes of the file read for it) of each line that is not blank, or of each entry of a JSON list."""
    beginning = _beginning(path)
    kind = next((kind for magic, kind in OTHER_FILES.items() if beginning.startswith(magic)), None)
    if kind:
        raise UserError(f"data.path={path} is {kind}: expected JSON lines or one JSON list, as a text or in .gz; `datasets` "
                        "and pandas write JSON lines with to_json")
    if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _of_list(path)
    else:
        for line, where, size in lines(path):
            yield parse(line, where), where, size


def lines(path: Path) -> Iterator[tuple[bytes, str, int]]:
    """(line, where, bytes of the file read for it) of each line that is not blank."""
    with open_file(path) as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        before = 0
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                at = raw.tell() if path.suffix == ".gz" else before + len(line)
                yield line, f"{path}, line {number}", at - before
                before = at


def _of_list(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """The entries of a list, which is in memory as a whole."""
    with open_file(path) as raw:
        content = b"".join(_lines(gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw, path))
    text = decode(content, str(path))
    try:
        found = loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} begins with [ and is not one JSON list ({error}): expected that, or an object on each "
                        "line") from None
    for number, entry in enumerate(found, start=1):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} is not an object such as {{\"key\": \"value\"}}: {json.dumps(entry)[:60]}")
        yield entry, where, path.stat().st_size // len(found)


def _beginning(path: Path) -> bytes:
    with open_file(path) as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            block: bytes = file.read(BLOCK)
            return block
        except (OSError, EOFError, zlib.error):          # _lines reports it
            return b""


def _lines(file: Any, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read data.path={path}: {error}") from None


def _text(entry: dict[str, Any], field: str, where: str) -> str:
    if field not in entry:
        texts = [name for name, value in entry.items() if isinstance(value, str)]
        raise UserError(f"{where} has no {field!r}: name the field of the text, data.field={'|'.join(texts[:5]) or 'NAME'}")
    if not isinstance(entry[field], str):
        raise UserError(f"{where} has no string in {field!r}, but {json.dumps(entry[field])[:60]}")
    return text_of(entry, field, where)
