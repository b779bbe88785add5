"""Imports llguidance when it is first needed, and shortens its error messages."""

import re
from types import ModuleType
from typing import Protocol

from rwkv.errors import UserError

MISSING = ('grammars and schemas require llguidance, which is not installed: run pip install "timemix[serve]" or pip install '
           'llguidance')
UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


class LibraryMatcher(Protocol):
    """Declares the methods of llguidance's LLMatcher that this program uses."""

    def deep_copy(self) -> "LibraryMatcher": ...
    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, token: int) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def stop_reason(self) -> str: ...


def llguidance_module() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UserError(MISSING) from None
    return llguidance


def grammar_error(definition: str) -> str:
    return short_message(llguidance_module().LLMatcher.validate_grammar(definition))


def short_message(message: str) -> str:
    """Returns llguidance's error message without the lines that quote the grammar, or "" for a warning."""
    if message.startswith("WARNING"):
        return ""
    if "coerce_one_of" in message:       # the message suggests this option of llguidance
        return "oneOf cannot be enforced, because the schemas may overlap. Use anyOf"
    if unknown := UNIMPLEMENTED.search(message):
        keys = ", ".join(re.findall(r'"([^"]+)"', unknown[1]))
        return f"{keys} cannot be enforced during generation. Omit the rule, and check it in the finished JSON"
    lines = [line.strip() for line in message.strip().splitlines()]
    return " ".join(line for i, line in enumerate(lines) if i == 0 or line.startswith("error:"))
