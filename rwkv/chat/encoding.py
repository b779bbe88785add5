"""Encodes rendered conversations as token ids.

The name of a special token becomes that token if the template has written the name, but remains text if a message contains it.

    template = for_tokenizer(template, tokenizer)
    ids, = encode(tokenizer, [template.render(messages)])

In rendered text, names from the template look the same as names from messages. So the template from for_tokenizer marks the
names in messages before rendering: each name is replaced by random characters that nobody can have typed. `encode` and
`remove_marks` restore the names. Besides whole names, the template marks parts of names at the beginning or end of a message,
because rendering could join two parts into a whole name.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from rwkv.chat.interface import END, ChatTemplate, Part
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import ROLES, Message, Tools, check_messages
from rwkv.chat.thoughts import Think
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import Tokenizer

SECRET = secrets.token_hex(16)           # random, different in each process
MARK = re.compile(rf"{SECRET}((?:[0-9a-f]{{6}})+)z")     # holds the marked characters in hexadecimal
ENDS_MARKED = re.compile(rf"{MARK.pattern}\s*\Z")


def for_tokenizer(template: ChatTemplate, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns a MarkingTemplate if the tokenizer has special tokens, and otherwise the template itself.

    With the World tokenizer, bos_token of a jinja2 template is set to end_of_text, because World uses one token for both.
    """
    if tokenizer.kind == "world" and isinstance(template, JinjaTemplate):
        template.begin_with_end_of_text()
    return MarkingTemplate(template, tokenizer) if tokenizer.special else template


def encode(tokenizer: Tokenizer, parts: Sequence[str], before: str = "") -> list[list[int]]:
    """Returns the token ids of each part of a text that a template from for_tokenizer has rendered.

    END becomes the end-of-text token. Each part is encoded separately, like a prompt, but no space is added at the beginning of
    a part that continues a text. `before` is the text that precedes the parts. Raises UserError as the tokenizer does.
    """
    return encode_each(tokenizer, [parts], before)[0]


def encode_each(tokenizer: Tokenizer, texts: Sequence[Sequence[str]], before: str = "") -> list[list[list[int]]]:
    cut_texts = [[*_pieces(tokenizer, parts, before)] for parts in texts]
    pieces = [piece for parts in cut_texts for part in parts for piece in part]
    starting = iter(tokenizer.encode_batch([piece.text for piece in pieces if not piece.within]))
    within = iter(tokenizer.encode_within([piece.text for piece in pieces if piece.within]))
    return [[[token for piece in part
              for token in (*piece.ends, *next(within if piece.within else starting)[piece.skip:])]
             for part in parts] for parts in cut_texts]


class _Piece(NamedTuple):
    text: str
    within: bool = False                 # True if the piece continues a text
    skip: int = 0                        # the number of first ids to drop
    ends: tuple[int, ...] = ()           # ids to put before the ids of the piece


def _pieces(tokenizer: Tokenizer, parts: Sequence[str], before: str) -> Iterator[list[_Piece]]:
    last = _use_private_names(tokenizer, before.rpartition(END)[2])
    for part in parts:
        first, *rest = [_use_private_names(tokenizer, text) for text in part.split(END)]
        pieces = _pieces_after(tokenizer, last, first)
        last = first or last
        for text in rest:
            pieces.append(_Piece(text, ends=(tokenizer.end_of_text,)))
            last = text
        yield pieces


def _pieces_after(tokenizer: Tokenizer, before: str, text: str) -> list[_Piece]:
    """Cuts `text` into pieces whose ids continue the ids of `before`.

    Cutting is necessary because a tokenizer may add a space after a special token.
    """
    if not (tokenizer.adds_space and before and text):
        return [_Piece(text)]
    names = [*tokenizer.private.values()]
    special = next((name for name in names if before.endswith(name)), None)
    if special is not None:
        return [_Piece(special + text, skip=1)]
    place = min((text.find(name) for name in names if name in text), default=len(text))
    return [_Piece(text[:place], within=True), _Piece(text[place:])]


def _use_private_names(tokenizer: Tokenizer, rendered: str) -> str:
    """Removes the marks, and replaces special tokens' names from the template with the tokenizer's private names."""
    private = tokenizer.private
    if not private:
        return rendered
    pattern = _patterns(tuple(private)).mark_or_name
    return pattern.sub(lambda match: _unmark(match) if match[1] else private[match[0]], rendered)


def visible_text(rendered: str) -> str:
    """Returns a rendered text as a user sees it, without marks and without END, which stands for the end-of-text token."""
    return remove_marks(rendered).replace(END, "")


def remove_marks(rendered: str) -> str:
    return MARK.sub(_unmark, rendered)


def mark_special_names(tokenizer: Tokenizer, value: Any) -> Any:
    """Returns the JSON value with the names of special tokens in all strings marked as text."""
    if not tokenizer.special:
        return value
    if isinstance(value, str):
        return _mark_names(value, _patterns(tuple(tokenizer.special)))
    if isinstance(value, Mapping):
        return {mark_special_names(tokenizer, key):
                item if key == "role" and item in (*ROLES,) else mark_special_names(tokenizer, item)
                for key, item in value.items()}
    return [mark_special_names(tokenizer, item) for item in value] if isinstance(value, (list, tuple)) else value


def decode_with_special_names(tokenizer: Tokenizer, ids: Sequence[int], after: Sequence[int] = ()) -> str:
    """Decodes `ids` for a user, with the names of special tokens. `after` holds the ids that precede `ids`."""
    names = {index: name for name, index in tokenizer.special.items()}
    decoder = tokenizer.decoder(after)
    return "".join(decoder.flush() + names[token] if token in names else decoder.push(token) for token in ids) + decoder.flush()


class MarkingTemplate(ChatTemplate):
    """Renders with another template, and marks the names of special tokens in messages (see the top of this file)."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.name = template.name
        self.definition = template.definition
        self.stop = template.stop
        self.supports_tools = template.supports_tools
        self.call_start = template.call_start
        self.thinks = template.thinks
        self._template = template
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        messages = check_messages(messages)              # before marking, so that errors show the original text
        with _errors_without_marks():
            return self._template.render(mark_special_names(self._tokenizer, messages), add_generation_prompt,
                                         mark_special_names(self._tokenizer, tools), think, effort)

    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        messages = check_messages(messages)
        with _errors_without_marks():
            return self._template.parts(mark_special_names(self._tokenizer, messages),
                                        mark_special_names(self._tokenizer, tools))

    def answer_start(self, think: Think = False) -> str:
        return self._template.answer_start(think)


@contextmanager
def _errors_without_marks() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise type(error)(remove_marks(str(error))) from None


class _Patterns(NamedTuple):
    name: re.Pattern[str]                # matches a whole name
    mark_or_name: re.Pattern[str]        # matches a mark or a whole name
    start: re.Pattern[str]               # matches the last part of a name at the beginning of a text
    end: re.Pattern[str]                 # matches the first part of a name at the end of a text


@lru_cache
def _patterns(names: tuple[str, ...]) -> _Patterns:
    cuts = [(name[:cut], name[cut:]) for name in names for cut in range(1, len(name))]
    first_parts = _alternatives(first for first, _ in cuts if not first.isalnum())       # letters alone would match most words
    last_parts = _alternatives(last for _, last in cuts if not last.isalnum())
    return _Patterns(re.compile(_alternatives(names)), re.compile(f"{MARK.pattern}|{_alternatives(names)}"),
                     re.compile(rf"\s*(?!{SECRET})({last_parts})"), re.compile(rf"({first_parts})\s*\Z"))


def _alternatives(texts: Iterable[str]) -> str:
    """Returns a pattern that matches the longest possible of the texts. Without texts, the pattern matches nothing."""
    return "|".join(map(re.escape, sorted({*texts}, key=lambda text: (-len(text), text)))) or r"(?!)"


def _mark_names(text: str, patterns: _Patterns) -> str:
    text = patterns.name.sub(lambda name: _mark(name[0]), text)
    if name := patterns.start.match(text):
        text = f"{text[:name.start(1)]}{_mark(name[1])}{text[name.end(1):]}"
    if (name := patterns.end.search(text)) and not ENDS_MARKED.search(text):
        text = f"{text[:name.start(1)]}{_mark(name[1])}{text[name.end(1):]}"
    return text


def _mark(text: str) -> str:
    # A mark has only letters and digits, because templates and JSON do not change these
    return f"{SECRET}{''.join(f'{ord(character):06x}' for character in text)}z"


def _unmark(mark: re.Match[str]) -> str:
    return "".join(chr(int(mark[1][place:place + 6], 16)) for place in range(0, len(mark[1]), 6))
