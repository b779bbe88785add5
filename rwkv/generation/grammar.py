r"""Grammars: which texts may be written, as masks over tokens, by llguidance (PyPI).

A Grammar says what is allowed: JSON by a schema, a Lark grammar or a regular expression, perhaps after thoughts or in the form
of a call. A Matcher follows one text and says which tokens may come next. An end-of-text token may come exactly where the text
so far is complete; no other special token is allowed. JSON has at most one line end and 32 spaces between its parts, so that no
text continues with white space for ever, and no blank line, which ends a turn in some chat templates.

A schema with rules that llguidance cannot enforce is refused; the error names the place in the schema (`check`). Importing this
file needs neither torch nor llguidance.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from rwkv.errors import UserError
from rwkv.generation.json_schema import DEFINITIONS, enforceable, inside, named, require_schema, unbounded_numbers
from rwkv.io.utf8 import require_unicode
from rwkv.tokenizer.tokenizers import ByteTokenizer, Tokenizer

MISSING = 'grammars and schemas need llguidance, which is not installed: pip install "timemix[serve]" or pip install llguidance'
# A string without control characters can be written in only one way, so that no key is another key with escapes: no "\/".
JSON_FORM = {"whitespace_pattern": r"\n?[ ]{0,32}", "json_allowed_escapes": 'bfnrtu"\\'}
SPACE = 'SPACE: /[ \\n]/'                # may stand before an answer, after a template's "Assistant:" or after thoughts
REST = "REST: /(?s:.+)/"
THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/'
TRIES = 500                              # schemas that are tried to find the place of an error
PLACE_S = 1.0                            # seconds that may take
COMPILED = 32                            # number of compiled grammars that are kept
WALKS, STEPS = 48, 160                   # texts that are begun to find out whether each beginning has an end; tokens of each
LAST_WALKS, LAST_STEPS = 4, 8_000        # where none of these has ended
# Bounds of llguidance's work for one token: a lexer's states take 1 to 2 kB each
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
# JSON whose numbers are finite as float64. Without an exponent they have at most 308 digits before the point.
FINITE_JSON = r"""start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" (pair ("," pair)*)? "}"
pair: STRING ":" value
array: "[" (value ("," value)*)? "]"
STRING: /"([^"\\\x00-\x1f]|\\[^\x00-\x1f])*"/
NUMBER: PLAIN | SCIENTIFIC
PLAIN: /-?(0|[1-9][0-9]{0,307}|1[0-6][0-9]{307})(\.[0-9]+)?/
SCIENTIFIC: /-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?[eE](-[0-9]{1,3}|[+]?0*([1-9]?[0-9]|1[0-9]{2}|2[0-8][0-9]))/
%ignore /[ \n]+/
"""

CHARACTERS = (*range(0x20, 0x7f), *range(0x80, 0xc0), *range(0xc2, 0xf5))       # bytes with which all text can be written
BYTES = ByteTokenizer()

Schema = Mapping[str, Any]


class Part(NamedTuple):
    """A grammar within a grammar. content: a schema as JSON, or a Lark grammar. where: the name of this part in errors. name:
    its name in the rules; equal for equal parts alone."""

    kind: str                            # "json_schema" or "lark_grammar"
    content: str
    where: str
    name: str

    @classmethod
    def of(cls, kind: str, content: str, where: str) -> "Part":
        digest = sha256("\0".join((kind, content, where)).encode("utf-8", "surrogatepass")).hexdigest()
        return cls(kind, content, where, f"part_{digest[:20]}")


@dataclass(frozen=True)
class Grammar:
    """What a text may be. start: the right side of Lark's rule `start`, in which @NAME stands for the part of this name.

    Equal grammars have equal hashes, and a grammar can be sent to another process. check() and matcher() raise UserError for a
    grammar that llguidance refuses.
    """

    start: str
    parts: tuple[Part, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: Schema, where: str = "json_schema") -> "Grammar":
        """JSON that is valid by a schema. Raises UserError as require_schema does."""
        return cls.only(_schema_part(schema, where))

    @classmethod
    def only(cls, part: Part) -> "Grammar":
        return cls(f"@{part.name}", (part,))

    @classmethod
    def lark(cls, text: str, where: str = "grammar") -> "Grammar":
        """llguidance's dialect of Lark."""
        return cls.only(Part.of("lark_grammar", text, where))

    @classmethod
    def regex(cls, pattern: str, where: str = "regex") -> "Grammar":
        """A text that as a whole matches a regular expression in the syntax of Rust's crate regex."""
        require_unicode(pattern)
        content = json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls.only(Part.of("lark_grammar", content, where))

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
        alternatives = [f"{_literal(rest) if rest else ''} @{part.name} {end}"
                        for part, (rest, _, _) in zip(parts, possible, strict=True)]
        return cls(" | ".join(alternatives), parts, (REST,) if written else ())

    @classmethod
    def text_with_calls(cls, functions: Sequence[tuple[str, Schema, str]]) -> "Grammar":
        """Any text in which calls of these functions, {"name": ..., "arguments": ...}, have arguments by their schemas.

        Not held to the schemas are calls in which the arguments or another key stand before the name.
        """
        parts = tuple(_schema_part({**parameters, "type": "object"}, where) for _, parameters, where in functions)
        heads = tuple(rf'head_{part.name}[lazy]: /(?s:.*)\{{\s*"name"\s*:\s*"{name}"\s*,\s*"arguments"\s*:/'
                      for part, (name, _, _) in zip(parts, functions, strict=True))
        calls = " | ".join(f'head_{part.name} SPACE? @{part.name} SPACE? "}}"' for part in parts)
        return cls(f"({calls})* REST?", parts, (*heads, SPACE, REST))

    def or_else(self, other: "Grammar") -> "Grammar":
        return Grammar(f"({self.start}) | ({other.start})", tuple(dict.fromkeys(self.parts + other.parts)),
                       tuple(dict.fromkeys(self.rules + other.rules)))

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
        """llguidance's JSON. Raises UserError, with the place, for a schema that cannot be enforced."""
        rules = "\n".join([f"start: {self.start}", *dict.fromkeys(self.rules)])
        parts = [{"name": part.name, part.kind: _enforceable(part) if part.kind == "json_schema" else part.content}
                 for part in dict.fromkeys(self.parts)]
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    def with_finite_numbers(self) -> "Grammar | None":
        """The same with any JSON that has finite numbers for each schema: a text must follow both. None where no schema allows
        other numbers."""
        parts = tuple(part._replace(kind="lark_grammar", content=FINITE_JSON) if part.kind == "json_schema" else part
                      for part in self.parts)
        schemas = [json.loads(part.content) for part in self.parts if part.kind == "json_schema"]
        return replace(self, parts=parts) if any(map(unbounded_numbers, schemas)) else None

    def check(self) -> None:
        """Raises UserError, with the place, if the grammar cannot be compiled, and if llguidance is not installed."""
        reason = _error(self.definition)
        if not reason:
            return
        for part in self.parts:
            if part.kind == "json_schema":
                schema = _enforceable(part)
                if of_schema := _schema_error(schema):
                    raise UserError(f"{_place(schema, of_schema, part.where)}: {of_schema}")
            elif of_part := _error(Grammar.only(part).definition):
                raise UserError(f"{part.where}: {of_part}")
        raise UserError(f"{self.parts[0].where}: {reason}")

    def matcher(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = ()) -> "Matcher":
        """A matcher for a new text. stop_tokens: further tokens that end it. Raises UserError as compiled() does."""
        libraries = [library.deep_copy() for library in compiled(self, tokenizer)]
        return Matcher(libraries, vocabulary(tokenizer), stop_tokens)


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
        self.closing = [self._ids[mark] for mark in (b'"', b"}", b"]", b":", b",") if mark in self._ids]
        self.has_all_characters = all(bytes([byte]) in self._ids for byte in CHARACTERS)
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
    """Follows one text in its grammars, all of which must allow it."""

    def __init__(self, libraries: Sequence[Any], vocabulary: Vocabulary, stop_tokens: Sequence[int] = ()) -> None:
        self._libraries = libraries
        self._end = vocabulary.ends[0]
        self._ends = {*vocabulary.ends, *{*stop_tokens}.intersection(vocabulary.special_token_ids)}

    def allowed(self) -> bytearray | None:
        """One bit for each token, the lowest bit of a byte first: 1 where the token may come next. None where no token may."""
        both = -1
        for library in self._libraries:
            if library.is_error():
                return None
            mask = library.compute_bitmask()
            if library.is_error():       # the grammar has become too complex, and the mask allows only the end of text
                return None
            both &= int.from_bytes(mask, "little")
        allowed = bytearray(both.to_bytes(len(mask), "little"))
        complete = bool(allowed[self._end // 8] >> self._end % 8 & 1)
        for token in self._ends:
            allowed[token // 8] = allowed[token // 8] & ~(1 << token % 8) | complete << token % 8
        return allowed if any(allowed) else None

    @property
    def too_complex(self) -> bool:
        """Whether a limit of the work for one token has been reached."""
        return any(library.stop_reason() in ("ParserTooComplex", "LexerTooComplex") for library in self._libraries)

    @property
    def error(self) -> str:
        return next((library.get_error() for library in self._libraries if library.is_error()), "")

    def push(self, token: int) -> None:
        """Follows an allowed token that was drawn. Not for a token that ends the text."""
        for library in self._libraries:
            library.consume_token(token)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's Vocabulary. For World's it takes half a second to make."""
    return Vocabulary(tokenizer)


@lru_cache(maxsize=COMPILED)
def compiled(grammar: Grammar, tokenizer: Tokenizer) -> list[Any]:
    """llguidance's matchers, which are copied for each text. Raises UserError as Grammar.check and require_ends do."""
    return compile_grammar(grammar, tokenizer)


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer) -> list[Any]:
    both = (grammar, grammar.with_finite_numbers())
    libraries = [_library(each, tokenizer) for each in both if each is not None]
    if not vocabulary(tokenizer).has_all_characters:
        require_ends(grammar, libraries, tokenizer)
    return libraries


def _library(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    llguidance = _llguidance()
    limits = llguidance.LLParserLimits(**LIMITS)
    library = llguidance.LLMatcher(vocabulary(tokenizer).library, grammar.definition, log_level=0, limits=limits)
    if library.is_error():
        grammar.check()
        raise UserError(f"{grammar.parts[0].where}: {_sentence(library.get_error())}")
    return library


def require_ends(grammar: Grammar, libraries: Sequence[Any], tokenizer: Tokenizer, walks: int = WALKS) -> None:
    """Raises UserError if a text of random tokens comes to a place where no token may come: the grammar has a beginning without
    an end, or the tokenizer lacks a character. If it lacks some, one of a few texts must also end."""
    words = vocabulary(tokenizer)
    walk = partial(_walk, libraries, words, grammar)
    ended = sum(walk(seed, STEPS) for seed in range(walks))
    if not (ended or words.has_all_characters or any(walk(seed, LAST_STEPS, STEPS) for seed in range(LAST_WALKS))):
        raise UserError(f"{grammar.parts[0].where}: no text could be finished with the tokenizer's {len(words.tokens)} tokens")


def _walk(libraries: Sequence[Any], words: Vocabulary, grammar: Grammar, seed: int, steps: int,
          closing: int | None = None) -> bool:
    """Whether a text of at most `steps` random tokens has ended. closing: from this token on it closes what is open."""
    draw = Random(seed)
    matcher = Matcher([library.deep_copy() for library in libraries], words)
    written = b""
    for step in range(steps):
        mask = matcher.allowed()
        if mask is None:
            if matcher.too_complex:
                return False
            raise UserError(f"{grammar.parts[0].where}: {_without_end(grammar, written, words, matcher.error)}")
        close = closing is not None and step >= closing
        preferred = [token for token in (*words.ends, *words.closing) if mask[token // 8] >> token % 8 & 1] if close else []
        token = draw.choice(preferred) if preferred else _drawn(mask, draw)
        if token in words.ends:
            return True
        matcher.push(token)
        written += words.tokens[token]
    return False


def _drawn(mask: bytearray, draw: Random) -> int:
    """One of the tokens of a mask."""
    start = draw.randrange(len(mask))
    place = next(place % len(mask) for place in range(start, start + len(mask)) if mask[place % len(mask)])
    return place * 8 + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def _without_end(grammar: Grammar, written: bytes, words: Vocabulary, error: str) -> str:
    """Why a text cannot go on after `written`: which character the tokenizer lacks, or that nothing may come. error: of
    llguidance, or ""."""
    if words.has_all_characters:
        reason = f" ({_sentence(error).partition(';')[0]})" if error else ""
        return f"nothing may follow {written.decode(errors='replace')[-40:]!r}, so an answer could not be finished{reason}"
    libraries = [_library(each, BYTES) for each in (grammar, grammar.with_finite_numbers()) if each]
    matcher = Matcher([library.deep_copy() for library in libraries], vocabulary(BYTES))
    place = 0
    while (mask := matcher.allowed()) and place < len(written) and mask[written[place] // 8] >> written[place] % 8 & 1:
        matcher.push(written[place])
        place += 1
    begun = written[:place].decode(errors="replace")[-40:]
    needed = [chr(byte) for byte in range(33, 127) if mask and mask[byte // 8] >> byte % 8 & 1]
    return f"the text {begun!r} must go on with {' or '.join(needed[:10]) or 'nothing'}, for which the tokenizer has no token"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(MISSING) from None
    return llguidance


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _error(definition: str) -> str:
    return _sentence(_llguidance().LLMatcher.validate_grammar(definition))


def _sentence(message: str) -> str:
    """llguidance's message without the lines that quote the grammar; "" for a warning."""
    if message.startswith("WARNING"):
        return ""
    if "coerce_one_of" in message:       # an option of llguidance
        return "oneOf: one text may be valid by two of its schemas, and that cannot be enforced: use anyOf"
    lines = [line.strip() for line in message.strip().splitlines()]
    return " ".join(line for i, line in enumerate(lines) if i == 0 or line.startswith("error:"))


def _schema_part(schema: Schema, where: str) -> Part:
    require_schema(schema, where)
    return Part.of("json_schema", json.dumps(schema), where)


def _enforceable(part: Part) -> dict[str, Any]:
    try:
        return {**enforceable(json.loads(part.content), part.where, _is_empty), "x-guidance": JSON_FORM}
    except RecursionError:
        raise UserError(f"{part.where} is nested too deeply") from None


def _is_empty(patterns: Sequence[str]) -> bool:
    reason = _schema_error({"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]})
    return "Unsatisfiable" in reason


def _place(schema: Schema, reason: str, where: str) -> str:
    """The place of the innermost schema that has this error by itself, or of an outer one after TRIES tries."""
    root = schema
    left = TRIES
    end = monotonic() + PLACE_S
    found = True
    while found:
        found = False
        for place, sub in inside(schema):
            left -= 1
            if left < 0 or monotonic() > end:
                return where
            definitions = {key: root[key] for key in DEFINITIONS if key in root and place[0] not in DEFINITIONS}
            if isinstance(sub, Mapping) and _schema_error({**definitions, **sub}) == reason:
                schema = sub
                where = named(where, place)
                found = True
                break
    return where


def _schema_error(schema: Schema) -> str:
    part = {"name": "schema", "json_schema": {**schema, "x-guidance": JSON_FORM}}
    return _error(json.dumps({"grammars": [{"lark_grammar": "start: @schema"}, part]}))
