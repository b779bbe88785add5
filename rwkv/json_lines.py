r"""Lines of JSON, each an object: of the data, of prompts and of samples.

A line ends at "\n" alone, as in iterating over a file that is open in binary mode. str.splitlines() also splits at U+2028,
U+2029, U+0085 and form feed, and a JSON string may hold the first three as they are.
"""

import json
from typing import Any

from rwkv.utf8 import WrongCharacter, decode, require_unicode


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The object on a line, which may begin with a byte order mark. Raises ValueError for anything else."""
    text = decode(line, where)
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f'{where} is not an object such as {{"key": "value"}}: {text[:60].strip()}')
    return entry


def text_of(entry: dict[str, Any], key: str, where: str) -> str:
    """The string `key` of an object. Raises ValueError where there is none, or where UTF-8 cannot hold it."""
    text = entry.get(key)
    if not isinstance(text, str):
        found = f"{key!r} is {json.dumps(text)[:60]}" if key in entry else f"there is {', '.join(entry)[:60] or 'nothing'}"
        raise ValueError(f'{where} has no string {key!r}: expected an object such as {{"{key}": "..."}}; {found}')
    try:
        require_unicode(text)
    except WrongCharacter as error:
        raise ValueError(f"{where}: {error}") from None
    return text
