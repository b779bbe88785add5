r"""Grammars: constrained decoding with token masks, by llguidance (PyPI).

A Grammar defines the allowed texts: JSON by a schema, a Lark grammar or a regular expression, optionally after thoughts or as a
tool call. A Matcher follows one sequence and computes the allowed next tokens. An end-of-text token is allowed only where the
text is complete; no other special token is allowed. JSON has at most one line end and 32 spaces between its parts, so that no
sequence continues with white space forever, and no blank line, which ends a turn in some chat templates.

Schemas with rules that llguidance cannot enforce are rejected; the error names the place in the schema (`check`). Importing
this file needs neither torch nor llguidance.
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
# No "\/": a string without control characters has only one spelling, so that no key repeats another with escapes.
JSON_FORM = {"whitespace_pattern": r"\n?[ ]{0,32}", "json_allowed_escapes": 'bfnrtu"\\'}
SPACE = 'SPACE: /[ \\n]/'                # optional before an answer, after a template's "Assistant:" or after thoughts
REST = "REST: /(?s:.+)/"
THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/'
TRIES = 500                              # schemas tried to find the place of an error
PLACE_S = 1.0                            # its time limit in seconds
COMPILED = 32                            # compiled grammars in the cache
WALKS, STEPS = 48, 160                   # random walks that look for dead ends; tokens of each
LAST_WALKS, LAST_STEPS = 4, 8_000        # if none of these has ended
# Limits of llguidance's work per token: a lexer state takes 1 to 2 kB
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

CHARACTERS = (*range(0x20, 0x7f), *range(0x80, 0xc0), *range(0xc2, 0xf5))       # bytes that suffice for any text
BYTES = ByteTokenizer()

Schema = Mapping[str, Any]


class Part(NamedTuple):
    """A sub-grammar. content: a schema as JSON, or a Lark grammar. where: its name in errors. name: its name in the rules;
    equal only for equal parts."""

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
    """A constraint on a text. start: the right side of Lark's rule `start`, in which @NAME refers to a part.

    Equal grammars have equal hashes, and grammars can be pickled. check() and matcher() raise UserError for a grammar that
    llguidance rejects.
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
        """A full match of a regular expression, in the syntax of Rust's crate regex."""
        require_unicode(pattern)
        content = json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls.only(Part.of("lark_grammar", content, where))

    @classmethod
    def calls(cls, start: tuple[str, str], functions: Sequence[tuple[str, Schema, str]], closing: str,
              written: str = "") -> "Grammar":
        """One call of one of the functions: (name, the schema of its arguments, the schema's name in errors).

        start: as ChatTemplate.call_start. closing: the text that may end the call. written: the beginning of the call, if the
        prompt ends with it; then closing must be a stop string, and the last token may extend beyond it, since the text is cut
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
        """Any text in which the arguments of calls of these functions, {"name": ..., "arguments": ...}, follow their schemas.

        Calls with another key before the name are not constrained.
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
        """This grammar, optionally after a space or a line end."""
        return replace(self, start=f"SPACE? ({self.start})", rules=(*self.rules, SPACE))

    def after(self, text: str) -> "Grammar":
        return replace(self, start=f"{_literal(text)} ({self.start})")

    def after_thoughts(self, opening: str = "") -> "Grammar":
        """This grammar after any text up to </think>. opening: how the thoughts begin; they are then optional."""
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
        """This grammar with any JSON of finite numbers for each schema: a text must follow both. None if no schema allows
        other numbers."""
        parts = tuple(part._replace(kind="lark_grammar", content=FINITE_JSON) if part.kind == "json_schema" else part
                      for part in self.parts)
        schemas = [json.loads(part.content) for part in self.parts if part.kind == "json_schema"]
        return replace(self, parts=parts) if any(map(unbounded_numbers, schemas)) else None

    def check(self) -> None:
        """Raises UserError, with the place, if the grammar cannot be compiled or llguidance is not installed."""
        reason = _error(self.definition)
        if not reason:
            return
        for part in self.parts:
            if part.kind == "json_schema":
                schema = _enforceable(part)
                if error := _schema_error(schema):
                    raise UserError(f"{_error_place(schema, error, part.where)}: {error}")
            elif error := _error(Grammar.only(part).definition):
                raise UserError(f"{part.where}: {error}")
        raise UserError(f"{self.parts[0].where}: {reason}")

    def matcher(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = ()) -> "Matcher":
        """A matcher for a new sequence. stop_tokens: further tokens that end it. Raises UserError as compiled() does."""
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
        """The ids of a text that the grammar prescribes: the tokenizer's, otherwise the longest matching tokens.

        The mask then allows only these tokens, or a longer token at the text's end.
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
    """Follows one sequence in its grammars, all of which must allow it."""

    def __init__(self, libraries: Sequence[Any], vocabulary: Vocabulary, stop_tokens: Sequence[int] = ()) -> None:
        self._libraries = libraries
        self._end = vocabulary.ends[0]
        self._ends = {*vocabulary.ends, *{*stop_tokens}.intersection(vocabulary.special_token_ids)}

    def allowed(self) -> bytearray | None:
        """One bit for each token, the lowest bit of a byte first: 1 if the token is allowed. None if no token is."""
        bits = -1
        for library in self._libraries:
            if library.is_error():
                return None
            mask = library.compute_bitmask()
            if library.is_error():       # too complex; the mask allows only the end of text
                return None
            bits &= int.from_bytes(mask, "little")
        allowed = bytearray(bits.to_bytes(len(mask), "little"))
        complete = bool(allowed[self._end // 8] >> self._end % 8 & 1)
        for token in self._ends:
            allowed[token // 8] = allowed[token // 8] & ~(1 << token % 8) | complete << token % 8
        return allowed if any(allowed) else None

    @property
    def too_complex(self) -> bool:
        """Whether a limit of the work per token has been reached."""
        return any(library.stop_reason() in ("ParserTooComplex", "LexerTooComplex") for library in self._libraries)

    @property
    def error(self) -> str:
        return next((library.get_error() for library in self._libraries if library.is_error()), "")

    def push(self, token: int) -> None:
        """Advances by an allowed token that does not end the sequence."""
        for library in self._libraries:
            library.consume_token(token)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's Vocabulary, cached: World's takes half a second to make."""
    return Vocabulary(tokenizer)


@lru_cache(maxsize=COMPILED)
def compiled(grammar: Grammar, tokenizer: Tokenizer) -> list[Any]:
    """llguidance's matchers, to be copied for each sequence. Raises UserError as Grammar.check and require_ends do."""
    return compile_grammar(grammar, tokenizer)


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer) -> list[Any]:
    grammars = (grammar, grammar.with_finite_numbers())
    libraries = [_library(each, tokenizer) for each in grammars if each is not None]
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
    """Raises UserError if a random walk reaches a dead end, where no token is allowed: the grammar has a prefix without an end,
    or the tokenizer lacks a character. If it lacks some, one of a few walks must also end."""
    vocab = vocabulary(tokenizer)
    walk = partial(_walk, libraries, vocab, grammar)
    ended = sum(walk(seed, STEPS) for seed in range(walks))
    if not (ended or vocab.has_all_characters or any(walk(seed, LAST_STEPS, STEPS) for seed in range(LAST_WALKS))):
        raise UserError(f"{grammar.parts[0].where}: no text can be completed with the tokenizer's {len(vocab.tokens)} tokens")


def _walk(libraries: Sequence[Any], vocab: Vocabulary, grammar: Grammar, seed: int, steps: int,
          closing: int | None = None) -> bool:
    """Whether a text of at most `steps` random tokens has ended. closing: from this step on it prefers tokens that close."""
    draw = Random(seed)
    matcher = Matcher([library.deep_copy() for library in libraries], vocab)
    text = b""
    for step in range(steps):
        mask = matcher.allowed()
        if mask is None:
            if matcher.too_complex:
                return False
            raise UserError(f"{grammar.parts[0].where}: {_dead_end_reason(grammar, text, vocab, matcher.error)}")
        close = closing is not None and step >= closing
        preferred = [token for token in (*vocab.ends, *vocab.closing) if mask[token // 8] >> token % 8 & 1] if close else []
        token = draw.choice(preferred) if preferred else _random_token(mask, draw)
        if token in vocab.ends:
            return True
        matcher.push(token)
        text += vocab.tokens[token]
    return False


def _random_token(mask: bytearray, draw: Random) -> int:
    """A random token of a mask."""
    start = draw.randrange(len(mask))
    byte = next(byte % len(mask) for byte in range(start, start + len(mask)) if mask[byte % len(mask)])
    return byte * 8 + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


def _dead_end_reason(grammar: Grammar, text: bytes, vocab: Vocabulary, error: str) -> str:
    """Why no token is allowed after `text`: the character that the tokenizer lacks, or the grammar's dead end. error:
    llguidance's, or ""."""
    if vocab.has_all_characters:
        reason = f" ({_sentence(error).partition(';')[0]})" if error else ""
        return f"nothing may follow {text.decode(errors='replace')[-40:]!r}, so an answer could not be completed{reason}"
    libraries = [_library(each, BYTES) for each in (grammar, grammar.with_finite_numbers()) if each]
    matcher = Matcher([library.deep_copy() for library in libraries], vocabulary(BYTES))
    n = 0
    while (mask := matcher.allowed()) and n < len(text) and mask[text[n] // 8] >> text[n] % 8 & 1:
        matcher.push(text[n])
        n += 1
    prefix = text[:n].decode(errors="replace")[-40:]
    needed = [chr(byte) for byte in range(33, 127) if mask and mask[byte // 8] >> byte % 8 & 1]
    return f"the text {prefix!r} must go on with {' or '.join(needed[:10]) or 'nothing'}, which the tokenizer lacks"


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
        return "oneOf cannot be enforced, because its schemas may overlap: use anyOf"
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


def _error_place(schema: Schema, reason: str, where: str) -> str:
    """The place of the innermost schema that has this error by itself; an outer one if TRIES or PLACE_S runs out."""
    root = schema
    tries = TRIES
    deadline = monotonic() + PLACE_S
    narrower = True
    while narrower:
        narrower = False
        for place, sub in inside(schema):
            tries -= 1
            if tries < 0 or monotonic() > deadline:
                return where
            definitions = {key: root[key] for key in DEFINITIONS if key in root and place[0] not in DEFINITIONS}
            if isinstance(sub, Mapping) and _schema_error({**definitions, **sub}) == reason:
                schema = sub
                where = named(where, place)
                narrower = True
                break
    return where


def _schema_error(schema: Schema) -> str:
    part = {"name": "schema", "json_schema": {**schema, "x-guidance": JSON_FORM}}
    return _error(json.dumps({"grammars": [{"lark_grammar": "start: @schema"}, part]}))
