"""Splits a text at data.separator, such as <|endoftext|>, into documents, and finds marks that may be such separators."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

from rwkv.errors import UserError
from rwkv.io.lines import count_of

LINE_ENDS = "\r\n"
MARK = re.compile(r"<(?:\|(?:end|eo|EO)[\w ]{0,24}\|>|\|\w{1,20}_(?:end|sep)\|>|/s>|end_of_\w{1,12}>|eo[std]>|EO[STD]>"
                  r"|endoftext>|｜end▁of▁\w{1,12}｜>)|\[EO[STD]\]")
Text = tuple[str, str, int | None]       # a text, its location for error messages, and the number of its bytes in the source


def marks(texts: Iterable[str]) -> Counter[str]:
    """Counts the marks in `texts` that end a document or a turn in the vocabularies of other models."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(MARK.findall(text))
    return counts


def describe(counts: Mapping[str, int], takes_separator: bool) -> str:
    """Returns a warning that the most frequent mark will be learnt as ordinary text, with a remedy.

    `takes_separator` says whether this kind of data supports data.separator.
    """
    mark, times = max(counts.items(), key=lambda item: item[1])
    others = len(counts) - 1
    more = f", as do {count_of(others, 'similar mark')}" if others else ""
    remedy = (f"If {mark} ends documents, pass data.separator={quote(mark)}" if takes_separator else
              f"If {mark} ends documents, remove it from the texts, because each text already is one document")
    return f"{mark} occurs {count_of(times, 'time')} in the texts{more}, and is learnt as ordinary text. {remedy}"


def separate(texts: Iterable[tuple[Iterable[str], str, int | None]], separator: str, path: str) -> Iterator[Text]:
    """Yields the documents between separators in each (chunks, where, weight), without the newlines around the separators.

    Raises UserError after the last text if no text contains the separator.
    """
    occurs = False
    for chunks, where, weight in texts:
        for number, document in enumerate(_split_chunks(chunks, separator)):
            occurs = occurs or number > 0
            yield document.strip(LINE_ENDS), where, 0 if number and weight is not None else weight
    if not occurs:
        raise UserError(f"data.separator={separator!r} does not occur in data.path={path}. Omit data.separator, or set "
                        "data.separator to the text between documents")


def _split_chunks(chunks: Iterable[str], separator: str) -> Iterator[str]:
    unfinished: list[str] = []           # parts of the current document, without any part of a separator
    rest = ""                            # the end of the previous chunk, because a separator may begin there
    most = len(separator) - 1
    for chunk in chunks:
        *ends, rest = (rest + chunk).split(separator)
        for end in ends:
            yield "".join([*unfinished, end])
            unfinished = []
        cut = max(len(rest) - most, 0)
        unfinished.append(rest[:cut])
        rest = rest[cut:]
    yield "".join([*unfinished, rest])
