"""A rendered conversation as ids: special tokens that the chat template writes are tokens; their names in a message are text.

    rendered = Rendered(tokenizer)
    ids = rendered.encode(rendered.render(template, messages))

A template cannot tell its own text from a message's, so the names in messages are marked before it renders them: with other
characters, which nobody can have typed, and which `encode` and `text` turn back. Only messages that hold the name of a special
token are changed by that, or that begin or end with a part of one, which could become whole beside another part.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rwkv.errors import UserError
from rwkv.tokenizer.chat import ChatTemplate, Part
from rwkv.tokenizer.tokenizers import Tokenizer

SECRET = secrets.token_hex(16)           # of this process
MARK = re.compile(rf"{SECRET}((?:[0-9a-f]{{6}})+)z")
ENDS_MARKED = re.compile(rf"{MARK.pattern}\s*\Z")


class Rendered:
    """For one tokenizer. With one that has no special tokens that a template may write, nothing is marked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = [*tokenizer.special]
        self._name = re.compile(_either(names))
        self._start = re.compile(rf"\s*(?!{SECRET})({_either(name[cut:] for name in names for cut in range(1, len(name)))})")
        self._end = re.compile(rf"({_either(name[:cut] for name in names for cut in range(1, len(name)))})\s*\Z")
        self._mark_or_name = re.compile(f"{MARK.pattern}|{_either(names)}")

    def render(self, template: ChatTemplate, messages: Any, **options: Any) -> str:
        """template.render(messages, **options) with marks. Raises UserError as it does."""
        with self._errors_without_marks():
            return template.render(self.marked(messages), **self.marked(options))

    def parts(self, template: ChatTemplate, messages: Any, tools: Any = None) -> list[Part]:
        """template.parts(messages, tools) with marks. Raises UserError as it does."""
        with self._errors_without_marks():
            return template.parts(self.marked(messages), self.marked(tools))

    def marked(self, value: Any) -> Any:
        """`value`, as of JSON, with the names of special tokens in its strings marked as text."""
        if not self._tokenizer.special:
            return value
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, (list, tuple)) else value

    def text(self, rendered: str) -> str:
        """The rendered text without marks."""
        return MARK.sub(_unmarked, rendered)

    def encode(self, rendered: str) -> list[int]:
        """The ids of a rendered text, with its marks. Raises UserError as Tokenizer.encode does."""
        return self._tokenizer.encode(self._spelt(rendered))

    def encode_batch(self, rendered: Sequence[str]) -> list[list[int]]:
        """encode() of each text."""
        return self._tokenizer.encode_batch([self._spelt(text) for text in rendered])

    def _spelt(self, rendered: str) -> str:
        """The text for the tokenizer, with the private names of the special tokens that the template has written."""
        private = self._tokenizer.private
        if not private:
            return rendered
        return self._mark_or_name.sub(lambda found: _unmarked(found) if found[1] else private[found[0]], rendered)

    @contextmanager
    def _errors_without_marks(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise type(error)(self.text(str(error))) from None

    def _marked(self, text: str) -> str:
        text = self._name.sub(lambda found: _mark_of(found[0]), text)
        if found := self._start.match(text):
            text = f"{text[:found.start(1)]}{_mark_of(found[1])}{text[found.end(1):]}"
        if (found := self._end.search(text)) and not ENDS_MARKED.search(text):
            text = f"{text[:found.start(1)]}{_mark_of(found[1])}{text[found.end(1):]}"
        return text


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids` with the names of special tokens, for people."""
    names = {index: name for name, index in tokenizer.special.items()}
    decoder = tokenizer.decoder()
    return "".join(decoder.flush() + names[token] if token in names else decoder.push(token) for token in ids) + decoder.flush()


def _either(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted({*texts}, key=lambda text: (-len(text), text)))) or r"(?!)"


def _mark_of(text: str) -> str:
    """Letters and digits alone, which templates and JSON leave as they are."""
    return f"{SECRET}{''.join(f'{ord(character):06x}' for character in text)}z"


def _unmarked(mark: re.Match[str]) -> str:
    return "".join(chr(int(mark[1][place:place + 6], 16)) for place in range(0, len(mark[1]), 6))
