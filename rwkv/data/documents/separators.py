"""Splits texts that contain several documents, separated by a mark such as <|endoftext|> (data.separator)."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

from rwkv.errors import UserError
from rwkv.io.lines import counted

LINE_ENDS = "\r\n"
MARK = re.compile(r"<(?:\|(?:end|eo|EO)[\w ]{0,24}\|>|\|\w{1,20}_(?:end|sep)\|>|/s>|end_of_\w{1,12}>|eo[std]>|EO[STD]>"
                  r"|endoftext>|｜end▁of▁\w{1,12}｜>)|\[EO[STD]\]")
Text = tuple[str, str, int | None]       # a text, its location for error messages, and its bytes in the source


def marks(texts: Iterable[str]) -> Counter[str]:
    """Counts the marks in `texts` that end a document or a turn in other models' vocabularies."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(MARK.findall(text))
    return counts


def describe(counts: Mapping[str, int], takes_separator: bool) -> str:
    """A message about marks that will be learnt as ordinary text. takes_separator: whether the data support data.separator."""
    mark, times = max(counts.items(), key=lambda item: item[1])
    others = len(counts) - 1
    more = f", as do {counted(others, 'other mark')} of this kind" if others else ""
    remedy = (f"if it ends documents, pass data.separator={quote(mark)}" if takes_separator else
              "if it ends documents, remove it from the texts, since each text already is one document")
    return f"{mark} occurs {counted(times, 'time')} in the texts{more}, and is learnt as ordinary text: {remedy}"


def separate(texts: Iterable[tuple[Iterable[str], str, int | None]], separator: str, path: str) -> Iterator[Text]:
    """Yields the documents between separators in each (chunks, where, weight), without the line ends around separators.

    Raises UserError after the last text if the separator did not occur.
    """
    occurs = False
    for chunks, where, weight in texts:
        for number, document in enumerate(_between(chunks, separator)):
            occurs = occurs or number > 0
            yield document.strip(LINE_ENDS), where, 0 if number and weight is not None else weight
    if not occurs:
        raise UserError(f"data.separator={separator!r} does not occur in data.path={path}: omit data.separator, or "
                        "set it to the text between documents")


def _between(chunks: Iterable[str], separator: str) -> Iterator[str]:
    unfinished: list[str] = []           # parts of the current document, without any part of a separator
    rest = ""                            # the end of the previous chunk, in which a separator may begin
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
