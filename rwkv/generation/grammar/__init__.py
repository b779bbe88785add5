r"""Grammars: constrained decoding with token masks, computed by the library llguidance.

A Grammar defines which texts are allowed: JSON that fits a schema, or the texts of a Lark grammar or regular expression,
optionally after thoughts or as a tool call. A Matcher follows one sequence and computes the allowed next tokens. An end-of-text
token is allowed only where the text is complete; no other special token is allowed. Between two JSON tokens at most one line
end and 32 spaces are allowed, so that no sequence continues with white space forever or contains a blank line, which ends a
turn in some chat templates.

Schemas with rules that llguidance cannot enforce are rejected; the error message says where in the schema (`check`). Importing
this module needs neither torch nor llguidance.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from time import monotonic
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.generation.grammar.json_schema import enforceable, unbounded_numbers
from rwkv.generation.grammar.keywords import DEFINITIONS, Schema, inside, named, require_schema
from rwkv.generation.grammar.library import grammar_error, llguidance_module
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import require_unicode

# Without the escape "\/", a string without control characters has only one spelling, so no key can repeat another in disguise.
JSON_FORM = {"whitespace_pattern": r"\n?[ ]{0,32}", "json_allowed_escapes": 'bfnrtu"\\'}
SPACE = 'SPACE: /[ \\n]/'                # optional between a template's "Assistant:", or thoughts, and the answer
REST = "REST: /(?s:.+)/"
THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/'
TRIES = 500                              # most schemas checked to locate an error
PLACE_S = 1.0                            # time limit for locating an error, in seconds
# JSON whose numbers are finite in float64. A number without an exponent has at most 308 digits before the point.
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


class Part(NamedTuple):
    """A sub-grammar. content: a schema as JSON, or a Lark grammar. where: its name in error messages. name: its name in the
    rules; two parts have the same name only if they are equal."""

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

    Grammars can be hashed and pickled. check() raises UserError if llguidance rejects the grammar.
    """

    start: str
    parts: tuple[Part, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: Schema, where: str = "json_schema") -> "Grammar":
        """A grammar of the JSON texts that are valid under the schema. Raises UserError as require_schema does."""
        return cls.only(_schema_part(schema, where))

    @classmethod
    def only(cls, part: Part) -> "Grammar":
        return cls(f"@{part.name}", (part,))

    @classmethod
    def lark(cls, text: str, where: str = "grammar") -> "Grammar":
        """A grammar in llguidance's dialect of Lark."""
        return cls.only(Part.of("lark_grammar", text, where))

    @classmethod
    def regex(cls, pattern: str, where: str = "regex") -> "Grammar":
        """A grammar of the texts that a regular expression matches as a whole, in the syntax of Rust's crate regex."""
        require_unicode(pattern)
        content = json.loads(llguidance_module().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls.only(Part.of("lark_grammar", content, where))

    @classmethod
    def calls(cls, start: tuple[str, str], functions: Sequence[tuple[str, Schema, str]], closing: str,
              written: str = "") -> "Grammar":
        """A grammar of one call of one function. functions: for each, (name, schema of the arguments, the schema's name in
        errors).

        start: as ChatTemplate.call_start. closing: a text that may follow the call. written: the part of the call that the
        prompt already ends with; if it is not empty, closing must be a stop string. Since the text is cut at a stop string,
        the last token may extend beyond it.
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
        """A grammar of all texts in which each call, {"name": ..., "arguments": ...}, has arguments that fit the schema.

        functions: as for `calls`. A call whose first key is not "name" is not constrained.
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
        """This grammar, preceded by any text that ends with </think>. opening: the text that begins the thoughts; if it is not
        empty, the thoughts are optional."""
        head = f"({_literal(opening)} thoughts SPACE?)?" if opening else "thoughts SPACE?"
        return replace(self, start=f"{head} SPACE? ({self.start})", rules=(*self.rules, THOUGHTS, SPACE))

    @property
    def definition(self) -> str:
        """This grammar in llguidance's JSON format. Raises UserError for a schema that cannot be enforced, and says where."""
        rules = "\n".join([f"start: {self.start}", *dict.fromkeys(self.rules)])
        parts = [{"name": part.name, part.kind: _enforceable(part) if part.kind == "json_schema" else part.content}
                 for part in dict.fromkeys(self.parts)]
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    def with_finite_numbers(self) -> "Grammar | None":
        """A grammar to apply in addition to self, so that all numbers of a text are finite in float64. It is a copy of self in
        which each schema allows any JSON with finite numbers. None if the schemas already exclude infinite numbers."""
        parts = tuple(part._replace(kind="lark_grammar", content=FINITE_JSON) if part.kind == "json_schema" else part
                      for part in self.parts)
        schemas = [json.loads(part.content) for part in self.parts if part.kind == "json_schema"]
        return replace(self, parts=parts) if any(map(unbounded_numbers, schemas)) else None

    def check(self) -> None:
        """Raises UserError if the grammar cannot be compiled, and says where, or if llguidance is not installed."""
        reason = grammar_error(self.definition)
        if not reason:
            return
        for part in self.parts:
            if part.kind == "json_schema":
                schema = _enforceable(part)
                if error := _schema_error(schema):
                    raise UserError(f"{_error_place(schema, error, part.where)}: {error}")
            elif error := grammar_error(Grammar.only(part).definition):
                raise UserError(f"{part.where}: {error}")
        raise UserError(f"{self.parts[0].where}: {reason}")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema_part(schema: Schema, where: str) -> Part:
    require_schema(schema, where)
    return Part.of("json_schema", json.dumps(schema), where)


def _enforceable(part: Part) -> JsonObject:
    try:
        return {**enforceable(json.loads(part.content), part.where, _is_empty), "x-guidance": JSON_FORM}
    except RecursionError:
        raise UserError(f"{part.where} is nested too deeply") from None


def _is_empty(patterns: Sequence[str]) -> bool:
    reason = _schema_error({"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]})
    return "Unsatisfiable" in reason


def _error_place(schema: Schema, reason: str, where: str) -> str:
    """The path of the innermost schema that has this error on its own, or of an outer schema if TRIES or PLACE_S runs out."""
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
    return grammar_error(json.dumps({"grammars": [{"lark_grammar": "start: @schema"}, part]}))
