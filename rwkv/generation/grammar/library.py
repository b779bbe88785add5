"""llguidance, imported when it is needed, and its errors as sentences."""

from typing import Any

from rwkv.errors import UserError

MISSING = 'grammars and schemas need llguidance, which is not installed: pip install "timemix[serve]" or pip install llguidance'


def llguidance_module() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(MISSING) from None
    return llguidance


def grammar_error(definition: str) -> str:
    return sentence(llguidance_module().LLMatcher.validate_grammar(definition))


def sentence(message: str) -> str:
    """llguidance's message without the lines that quote the grammar; "" for a warning."""
    if message.startswith("WARNING"):
        return ""
    if "coerce_one_of" in message:       # an option of llguidance
        return "oneOf cannot be enforced, because its schemas may overlap: use anyOf"
    lines = [line.strip() for line in message.strip().splitlines()]
    return " ".join(line for i, line in enumerate(lines) if i == 0 or line.startswith("error:"))
