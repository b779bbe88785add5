r"""JSON lines: one object on each line of training data, prompts, evaluation texts and samples.

Read the lines from a file that is open in binary mode: they end only at "\n". str.splitlines() also splits at U+2028, U+2029
and U+0085, which a JSON string may contain, and at form feed.
"""

import json
from typing import Any

from rwkv.errors import UserError
from rwkv.io.utf8 import WrongCharacter, decode, require_unicode


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The object on a line; a byte order mark before it is skipped. Raises UserError for anything but an object.

    where: the file and the line's number, for the message.
    """
    text = decode(line, where)
    try:
        entry = loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where} is not JSON ({error}): expected an object such as {{"key": "value"}} on each line') from None
    if not isinstance(entry, dict):
        raise UserError(f'{where} is not an object such as {{"key": "value"}}: {text[:60].strip()}')
    return entry


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, and for an object with the same key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in an object")
    return entry


def text_of(entry: dict[str, Any], key: str, where: str) -> str:
    """The string under `key`. Raises UserError if there is none, or if it is not valid Unicode."""
    text = entry.get(key)
    if not isinstance(text, str):
        found = f"{key!r} is {json.dumps(text)[:60]}" if key in entry else f"there is {', '.join(entry)[:60] or 'nothing'}"
        raise UserError(f'{where} has no string {key!r}: expected an object such as {{"{key}": "..."}}; {found}')
    try:
        require_unicode(text)
    except WrongCharacter as error:
        raise UserError(f"{where}: {error}") from None
    return text
