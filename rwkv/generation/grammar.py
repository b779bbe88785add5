r"""Grammars: which texts may be written, as masks over tokens, by llguidance (PyPI).

A Grammar says what is allowed: JSON by a schema, a Lark grammar or a regular expression, perhaps after thoughts or in the form
of a call. A Matcher follows one text and says which tokens may come next. An end-of-text token may come exactly where the text
so far is complete; no other special token is allowed. JSON has at most one line end and 32 spaces between its parts, so that no
text continues with white space for ever, and no blank line, which ends a turn in some chat templates.

A schema with rules that llguidance cannot enforce is refused; the error names the place in the schema (`check`). Importing this
file needs neither torch nor llguidance.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from rwkv.errors import UserError
from rwkv.io.utf8 import require_unicode
from rwkv.tokenizer.tokenizers import Tokenizer

MISSING = 'grammars and schemas need llguidance, which is not installed: pip install "timemix[serve]" or pip install llguidance'
# A string without control characters can be written in only one way, so that no key is another key with escapes: no "\/".
JSON_FORM = {"whitespace_pattern": r"\n?[ ]{0,32}", "json_allowed_escapes": 'bfnrtu"\\'}
SPACE = 'SPACE: /[ \\n]/'                # may stand before an answer, after a template's "Assistant:" or after thoughts
REST = "REST: /(?s:.+)/"
THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/'
# The keys under which a schema holds other schemas: in a mapping, in a list, or a single schema.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
         "unevaluatedItems", "unevaluatedProperties")
DEFINITIONS = ("$schema", "$defs", "definitions")        # keys of the root schema that references need
CONTROL = re.compile("[\x00-\x1f\x7f]")
NO_LEAP_SECOND = "^[^:]+:[0-9]+:[0-5]"    # there are very few times with a second 60
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DAY_OF_YEAR = f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{LEAP_YEAR}-02-29)"         # 29 February only in leap years
LENGTHS = r"[^.@]{1,63}(\.[^.@]{1,63})*$"                # a domain whose parts have at most 63 characters
# By format, patterns for rules that llguidance does not enforce: an address has at most 64 characters before the @ and 254 in
# all (RFC 5321), a domain at most 253 (RFC 1035).
OF_FORMAT = {"time": [NO_LEAP_SECOND], "date": [DAY_OF_YEAR], "date-time": [NO_LEAP_SECOND, DAY_OF_YEAR],
             "email": [f"^[^@]{{1,64}}@{LENGTHS}", "^.{1,254}$"], "hostname": [f"^{LENGTHS}", "^.{1,253}$"]}
TRIES = 500                              # schemas that are tried to find the place of an error
COMPILED = 32                            # number of compiled grammars that are kept

Schema = Mapping[str, Any]


class Part(NamedTuple):
    """A grammar within a grammar. content: a schema as JSON, or a Lark grammar. where: the name of this part in errors."""

    kind: str                            # "json_schema" or "lark_grammar"
    content: str
    where: str


@dataclass(frozen=True)
class Grammar:
    """What a text may be. start: the right side of Lark's rule `start`, in which @part0 stands for the first of `parts`.

    Equal grammars have equal hashes, and a grammar can be sent to another process. check() and matcher() raise UserError for a
    grammar that llguidance refuses.
    """

    start: str
    parts: tuple[Part, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: Schema, where: str = "json_schema") -> "Grammar":
        """JSON that is valid by a schema. Raises UserError where the schema is no object, and as _check_keys does."""
        if not isinstance(schema, Mapping):
            raise UserError(f"{where} is a JSON schema, an object; got {json.dumps(schema, default=repr)[:60]}")
        return cls("@part0", (_schema_part(schema, where),))

    @classmethod
    def lark(cls, text: str, where: str = "grammar") -> "Grammar":
        """llguidance's dialect of Lark."""
        return cls("@part0", (Part("lark_grammar", text, where),))

    @classmethod
    def regex(cls, pattern: str, where: str = "regex") -> "Grammar":
        """A text that as a whole matches a regular expression in the syntax of Rust's crate regex."""
        require_unicode(pattern)
        content = json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls("@part0", (Part("lark_grammar", content, where),))

    @classmethod
    def calls(cls, start: tuple[str, str], functions: Sequence[tuple[str, Schema, str]], closing: str,
              written: str = "") -> "Grammar":
        """One call of one of the functions: (name, the schema of its arguments, the schema's name in errors).

        start: as ChatTemplate.call_start. closing: the text that may end the call. written: the beginning of the call with
        which the prompt ends; then closing must be a stop string, and the last token may go on beyond it, as the text is cut
        there.
        """
        heads = [f"{start[0]}{name}{start[1]}" for name, _, _ in functions]
        possible = [(head[len(written):], *function[1:]) for head, function in zip(heads, functions, strict=True)
                    if head.startswith(written)]
        parts = tuple(_schema_part({**parameters, "type": "object"}, where) for _, parameters, where in possible)
        end = f'"}}" ({_literal(closing)} {"REST?" if written else ""})?'
        alternatives = [f"{_literal(rest) if rest else ''} @part{i} {end}" for i, (rest, _, _) in enumerate(possible)]
        return cls(" | ".join(alternatives), parts, (REST,) if written else ())

    @classmethod
    def text_with_calls(cls, functions: Sequence[tuple[str, Schema, str]]) -> "Grammar":
        """Any text in which calls of these functions, {"name": ..., "arguments": ...}, have arguments by their schemas.

        Not held to the schemas are calls in which the arguments or another key stand before the name.
        """
        parts = tuple(_schema_part({**parameters, "type": "object"}, where) for _, parameters, where in functions)
        heads = tuple(rf'head{i}[lazy]: /(?s:.*)\{{\s*"name"\s*:\s*"{name}"\s*,\s*"arguments"\s*:/'
                      for i, (name, _, _) in enumerate(functions))
        calls = " | ".join(f'head{i} SPACE? @part{i} SPACE? "}}"' for i in range(len(functions)))
        return cls(f"({calls})* REST?", parts, (*heads, SPACE, REST))

    def or_else(self, other: "Grammar") -> "Grammar":
        moved = other.start
        for i in reversed(range(len(other.parts))):
            moved = moved.replace(f"@part{i}", f"@part{i + len(self.parts)}")
        return Grammar(f"({self.start}) | ({moved})", self.parts + other.parts, tuple({*self.rules, *other.rules}))

    def after_space(self) -> "Grammar":
        """This grammar, perhaps after a space or a line end."""
        return replace(self, start=f"SPACE? ({self.start})", rules=(*self.rules, SPACE))

    def after(self, text: str) -> "Grammar":
        return replace(self, start=f"{_literal(text)} ({self.start})")

    def after_thoughts(self, opening: str = "") -> "Grammar":
        """This grammar after any text up to </think>. opening: that text begins with it, or there are no thoughts."""
        head = f"({_literal(opening)} thoughts SPACE?)?" if opening else "thoughts SPACE?"
        return replace(self, start=f"{head} SPACE? ({self.start})", rules=(*self.rules, THOUGHTS, SPACE))

    @property
    def definition(self) -> str:
        """llguidance's JSON."""
        rules = "\n".join([f"start: {self.start}", *dict.fromkeys(self.rules)])
        parts = [{"name": f"part{i}", part.kind: json.loads(part.content) if part.kind == "json_schema" else part.content}
                 for i, part in enumerate(self.parts)]
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    def check(self) -> None:
        """Raises UserError, with the place, if the grammar cannot be compiled, and if llguidance is not installed."""
        reason = _error(self)
        if not reason:
            return
        for part in self.parts:
            if part.kind == "json_schema":
                schema = json.loads(part.content)
                if of_schema := _schema_error(schema):
                    raise UserError(f"{_place(schema, of_schema, part.where)}: {of_schema}")
            elif of_part := _error(Grammar("@part0", (part,))):
                raise UserError(f"{part.where}: {of_part}")
        raise UserError(f"{self.parts[0].where}: {reason}")

    def matcher(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = ()) -> "Matcher":
        """A matcher for a new text. stop_tokens: further tokens that end it. Raises UserError as check() does."""
        return Matcher(compiled(self, tokenizer).deep_copy(), vocabulary(tokenizer), stop_tokens)


class Vocabulary:
    """A tokenizer's tokens for llguidance. llguidance.TokenizerWrapper reads `tokens` and the attributes that end in _id or
    _ids, and calls the object for the ids of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        llguidance = _llguidance()
        self.tokens = tokenizer.tokens_as_bytes()
        self.ends = tokenizer.ends
        self.eos_token_id = tokenizer.end_of_text
        self.bos_token_id = None
        self.special_token_ids = [index for index, token in enumerate(self.tokens) if not token]
        self._tokenizer = tokenizer
        self._ids = {token: index for index, token in reversed([*enumerate(self.tokens)]) if token}
        self._longest = max(map(len, self._ids))
        self.library = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text that the grammar prescribes: the tokenizer's, or else those of the longest matching tokens.

        The mask then allows only these tokens, except that a longer token may come at the text's end.
        """
        with suppress(ValueError):
            ids = self._tokenizer.encode_within([text.decode()])[0]
            if b"".join(self.tokens[index] for index in ids) == text:
                return ids
        return self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((text[:n] for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._ids), None)
            if token is None:
                break
            ids.append(self._ids[token])
            text = text[len(token):]
        return ids


class Matcher:
    """Follows one text in its grammar."""

    def __init__(self, library: Any, vocabulary: Vocabulary, stop_tokens: Sequence[int]) -> None:
        self._library = library
        self._end = vocabulary.ends[0]
        self._ends = {*vocabulary.ends, *{*stop_tokens}.intersection(vocabulary.special_token_ids)}

    def allowed(self) -> bytearray | None:
        """One bit for each token, the lowest bit of a byte first: 1 where the token may come next. None where no token may."""
        if self._library.is_error():
            return None
        mask = bytearray(self._library.compute_bitmask())
        if self._library.is_error():     # the grammar has become too complex, and the mask allows only the end of text
            return None
        complete = bool(mask[self._end // 8] >> self._end % 8 & 1)
        for token in self._ends:
            mask[token // 8] = mask[token // 8] & ~(1 << token % 8) | complete << token % 8
        return mask if any(mask) else None

    def push(self, token: int) -> None:
        """Follows an allowed token that was drawn. Not for a token that ends the text."""
        self._library.consume_token(token)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's Vocabulary. For World's it takes half a second to make."""
    return Vocabulary(tokenizer)


@lru_cache(maxsize=COMPILED)
def compiled(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    """llguidance's matcher, which is copied for each text. Raises UserError as Grammar.check does."""
    found = _llguidance().LLMatcher(vocabulary(tokenizer).library, grammar.definition, log_level=0)
    if found.is_error():
        grammar.check()
        raise UserError(f"{grammar.parts[0].where}: {_sentence(found.get_error())}")
    return found


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(MISSING) from None
    return llguidance


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _error(grammar: Grammar) -> str:
    return _sentence(_llguidance().LLMatcher.validate_grammar(grammar.definition))


def _sentence(message: str) -> str:
    """llguidance's message without the lines that quote the grammar; "" for a warning."""
    if message.startswith("WARNING"):
        return ""
    lines = [line.strip() for line in message.strip().splitlines()]
    return " ".join(line for i, line in enumerate(lines) if i == 0 or line.startswith("error:"))


def _schema_part(schema: Schema, where: str) -> Part:
    try:
        _check_keys(schema, where)
        return Part("json_schema", json.dumps({**_as_held(schema), "x-guidance": JSON_FORM}), where)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None


def _as_held(schema: Any) -> Any:
    """The schema with OF_FORMAT's patterns, and without "uniqueItems": false, a rule that means nothing and that llguidance
    refuses."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value for key, value in schema.items() if not (key == "uniqueItems" and value is False)}
    for place, sub in _inside(schema):
        holder: Any = found
        *way, last = place
        for step in way:
            holder[step] = holder[step].copy()
            holder = holder[step]
        holder[last] = _as_held(sub)
    if patterns := OF_FORMAT.get(str(schema.get("format"))):
        found["allOf"] = [*found.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    return found


def _inside(schema: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, schema) for each schema directly inside `schema`."""
    if not isinstance(schema, Mapping):
        return
    for key in BY_NAME:
        if isinstance(schema.get(key), Mapping):
            yield from (((key, name), sub) for name, sub in schema[key].items())
    for key in IN_LIST:
        if isinstance(schema.get(key), list):
            yield from (((key, i), sub) for i, sub in enumerate(schema[key]))
    for key in ALONE:
        if isinstance(schema.get(key), Mapping):
            yield (key,), schema[key]


def _check_keys(schema: Any, where: str) -> None:
    """Raises UserError for rules that a text could seem to fulfil by writing a key twice, or with other escapes."""
    if not isinstance(schema, Mapping):
        return
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len({*map(str, required)})):
        raise UserError(f"{where}: minProperties is at most the number of required properties, or 1; got {least}")
    names = schema.get("properties")
    more = schema.get("additionalProperties", True)
    if isinstance(names, Mapping) and more is not False and any(CONTROL.search(name) for name in names):
        raise UserError(f"{where}: a property's name has a control character, which goes only with additionalProperties=false")
    for place, sub in _inside(schema):
        _check_keys(sub, _named(where, place))


def _place(schema: Schema, reason: str, where: str) -> str:
    """The place of the innermost schema that has this error by itself, or of an outer one after TRIES tries."""
    root = schema
    left = TRIES
    found = True
    while found:
        found = False
        for place, sub in _inside(schema):
            left -= 1
            if left < 0:
                return where
            definitions = {key: root[key] for key in DEFINITIONS if key in root and place[0] not in DEFINITIONS}
            if isinstance(sub, Mapping) and _schema_error({**definitions, **sub}) == reason:
                schema = sub
                where = _named(where, place)
                found = True
                break
    return where


def _named(where: str, place: Sequence[Any]) -> str:
    return where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def _schema_error(schema: Schema) -> str:
    part = Part("json_schema", json.dumps({**schema, "x-guidance": JSON_FORM}), "")
    return _error(Grammar("@part0", (part,)))
