"""Reads JSON lines, also compressed (.gz, .zst). The text of each {"text": "..."} is a document.

data.field sets a different key. A file may also be one JSON list of such objects.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rwkv.config import DataConfig
from rwkv.data.documents.copies import split_documents
from rwkv.data.documents.separators import Text, separate
from rwkv.data.documents.source import Source, chunks_of
from rwkv.data.files import find_files, names_and_hashes
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.compressed import BROKEN, COMPRESSED, decompressed_stream
from rwkv.io.json_lines import loads, parse, text_of
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import decode, open_file, require_no_pointer

PATH = "a .jsonl, .jsonl.gz or .jsonl.zst file, a folder of them, or a pattern"
LOCAL = True
ENDINGS = (".jsonl", *(f".jsonl{ending}" for ending in COMPRESSED))
BLOCK = 1 << 16                          # this many bytes of a file are enough to tell whether it is a JSON list
OBJECTS = re.compile(rb'\s*(?:\[\s*)?\{\s*"')          # begins a JSON object, or a list of objects
OTHER_FILES = {b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"PK\3\4": "a zip archive",
               b"BZh": "compressed with bzip2", b"\xfd7zXZ": "compressed with xz",
               b"\x28\xb5\x2f\xfd": "compressed with zstandard, and its name does not end in .zst",
               b"\x1f\x8b": "compressed with gzip, and its name does not end in .gz"}


def source(config: DataConfig, cache: Path) -> Source:
    named = files(str(config.path))
    paths = [path for _, path in named]

    def documents() -> Iterator[Any]:
        texts = ((text_in(entry, config.field, where), where, weight)
                 for path in paths for entry, where, weight in entries(path))
        return split_documents(between_separators(texts, config), config.val_fraction, str(config.path))

    about = f"{paths[0].name if len(paths) == 1 else f'{len(paths)} files of {config.path}'}, field {config.field}"
    identity = sha256([config.field, *filter(None, [config.separator]), *names_and_hashes(named, cache)])
    return Source(documents, about, identity, sum(path.stat().st_size for path in paths))


def between_separators(texts: Iterator[Text], config: DataConfig) -> Iterator[Text]:
    """Yields the documents in each (text, where, weight): the whole text, or the parts between the separators."""
    if config.separator is None:
        return texts
    chunked = ((chunks_of(text), where, weight) for text, where, weight in texts)
    return separate(chunked, config.separator, str(config.path))


def files(path: str, endings: Sequence[str] = ENDINGS) -> list[tuple[str, Path]]:
    """Returns the (name, file) of each non-empty file that `path` names. Raises UserError if there is none.

    `endings` are the suffixes of the files to read if `path` is a folder.
    """
    named = [(name, file) for name, file in find_files(path, endings) if file.stat().st_size]
    if not named:
        raise UserError(f"data.path={path} is empty. Pass a file that contains text")
    return named


def entries(path: Path) -> Iterator[tuple[JsonObject, str, int]]:
    """Yields (object, where, bytes read) for each non-blank line of a file, or for each entry of its JSON list."""
    if is_list(path):
        yield from _list_entries(path)
    else:
        for line, where, size in lines(path):
            yield parse(line, where), where, size


def is_list(path: Path) -> bool:
    """Returns True if the file is one JSON list. Raises UserError if the file has another format, such as Parquet."""
    require_no_pointer(path)
    beginning = _read_beginning(path)
    kind = next((kind for magic, kind in OTHER_FILES.items() if beginning.startswith(magic)), None)
    if kind:
        raise UserError(f"data.path={path} is {kind}, but must contain JSON lines or one JSON list, either uncompressed or in "
                        "a .gz or .zst file. The method to_json of `datasets` and pandas writes JSON lines")
    return beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def begins_with_object(path: Path) -> bool:
    """Returns True if a file begins with a JSON object or a list of objects, as files of texts or of conversations do."""
    return OBJECTS.match(_read_beginning(path).removeprefix(codecs.BOM_UTF8)) is not None


def lines(path: Path) -> Iterator[tuple[bytes, str, int]]:
    """Yields (line, where, bytes read) for each non-blank line of a file."""
    with open_file(path) as raw:
        file = decompressed_stream(raw, path)
        before = 0
        for number, line in enumerate(read_lines(file, path), start=1):
            if line.strip():
                at = before + len(line) if file is raw else raw.tell()
                yield line, f"{path}, line {number}", at - before
                before = at


def _list_entries(path: Path) -> Iterator[tuple[JsonObject, str, int]]:
    with open_file(path) as raw:
        text = decode(b"".join(read_lines(decompressed_stream(raw, path), path)), str(path))
    try:
        content = loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} begins with "[", but is not a JSON list ({error}). The file must contain one JSON list, or '
                        "one JSON object per line") from None
    for number, entry in enumerate(content, start=1):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} must be an object such as {{\"key\": \"value\"}}; got {json.dumps(entry)[:60]}")
        yield entry, where, path.stat().st_size // len(content)


def _read_beginning(path: Path) -> bytes:
    with open_file(path) as raw:
        try:
            block: bytes = decompressed_stream(raw, path).read(BLOCK)
            return block
        except BROKEN:                   # `read_lines` will report the damage when it reads the lines
            return b""


def read_lines(file: Any, path: Path) -> Iterator[bytes]:
    """Yields the lines of a file. Raises UserError if compressed content is damaged or truncated."""
    try:
        yield from file
    except BROKEN as error:
        raise UserError(f"data.path={path} cannot be read: {error}") from None


def text_in(entry: JsonObject, field: str, where: str) -> str:
    """Returns the text in a field; "" for null, as in data=hf, whose library writes null for a row without a text.

    Raises UserError if the field is missing or not a string.
    """
    if field not in entry:
        texts = [name for name, value in entry.items() if isinstance(value, str)]
        chat = "" if texts else ", or pass data=chat if the entries are conversations"
        raise UserError(f"{where} has no field {field!r}. Name the field that contains the text with "
                        f"data.field={'|'.join(texts[:5]) or 'NAME'}{chat}")
    if entry[field] is None:
        return ""
    if not isinstance(entry[field], str):
        raise UserError(f"{where}: the field {field!r} must be a string; got {json.dumps(entry[field])[:60]}")
    return text_of(entry, field, where)
