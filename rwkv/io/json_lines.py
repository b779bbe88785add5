r"""Parses JSON lines, one object per line, in training data, prompts, evaluation texts and samples.

Callers read the lines from a file in binary mode, so that they end only at "\n". str.splitlines() would also split at form
feeds, U+2028, U+2029 and U+0085, which a JSON string may contain.
"""

import json
from typing import Any

from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import WrongCharacter, decode, require_unicode


def parse(line: bytes, where: str) -> JsonObject:
    """Parses the JSON object on a line, which may begin with a byte order mark. Raises UserError for anything but an object.

    `where` is the file and the line's number, for the error message.
    """
    text = decode(line, where)
    try:
        entry = loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where} is not JSON ({error}): expected an object such as {{"key": "value"}} on each line') from None
    if not isinstance(entry, dict):
        raise UserError(f'{where} must be an object such as {{"key": "value"}}; got {text[:60].strip()}')
    return entry


def loads(text: str) -> Any:
    """Parses JSON. Raises ValueError for text that is not JSON, and for duplicate keys."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {duplicate!r} occurs twice in an object")
    return entry


def text_of(entry: JsonObject, key: str, where: str) -> str:
    """Returns the string under `key`. Raises UserError if it is missing or not valid Unicode."""
    text = entry.get(key)
    if not isinstance(text, str):
        actual = f"{key!r} is {json.dumps(text)[:60]}" if key in entry else f"the line has {', '.join(entry)[:60] or 'no keys'}"
        raise UserError(f'{where} has no string {key!r}: expected an object such as {{"{key}": "..."}}, but {actual}')
    try:
        require_unicode(text)
    except WrongCharacter as error:
        raise UserError(f"{where}: {error}") from None
    return text
