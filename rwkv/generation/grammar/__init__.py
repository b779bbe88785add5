r"""Grammars constrain generated text with token masks, which the library llguidance computes.

A Grammar defines which texts are allowed: JSON that fits a schema, or the texts of a Lark grammar or regular expression,
optionally after thoughts or as a tool call. A Matcher follows one sequence and computes the allowed next tokens. An end-of-text
token is allowed only where the text is complete. No other special token is allowed. Between two JSON tokens at most one newline
and 32 spaces are allowed. So no sequence continues with white space forever, or contains a blank line, which ends a turn in
some chat templates.

Grammar.check rejects schemas with rules that llguidance cannot enforce, and names the place in the schema. Importing this
module requires neither torch nor llguidance.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from time import thread_time
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.generation.grammar.library import grammar_error, llguidance_module
from rwkv.generation.grammar.schema_checks import DEFINITIONS, Schema, nested_schemas, require_schema, schema_path
from rwkv.generation.grammar.schema_rewrites import allows_unbounded_numbers, rewrite_schema
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import require_unicode

# Without the escape "\/", a string without control characters has only one spelling, so differently spelt keys differ.
JSON_FORM = {"whitespace_pattern": r"\n?[ ]{0,32}", "json_allowed_escapes": 'bfnrtu"\\'}
SPACE = 'SPACE: /[ \\n]/'                # may stand between a template's "Assistant:", or thoughts, and the answer
REST = "REST: /(?s:.+)/"
THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/'
TRIES = 500                              # maximum schemas checked to locate an error
PLACE_S = 1.0                            # CPU time limit for locating an error, in seconds
# Allows JSON whose numbers are finite in float64. A number without an exponent has at most 308 digits before the point.
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
    """A sub-grammar, which Lark rules refer to by name. Only equal parts have the same name."""

    kind: str                            # "json_schema" or "lark_grammar"
    content: str                         # a schema as JSON, or a Lark grammar
    where: str                           # the part's name in error messages
    name: str                            # the part's name in Lark rules

    @classmethod
    def of(cls, kind: str, content: str, where: str) -> "Part":
        digest = sha256("\0".join((kind, content, where)).encode("utf-8", "surrogatepass")).hexdigest()
        return cls(kind, content, where, f"part_{digest[:20]}")


@dataclass(frozen=True)
class Grammar:
    """Defines which texts are allowed. check() raises UserError if llguidance rejects the grammar.

    Grammars can be hashed and pickled. `start` is the right side of Lark's rule `start`, in which @NAME refers to a part.
    """

    start: str
    parts: tuple[Part, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def json_schema(cls, schema: Schema, where: str = "json_schema") -> "Grammar":
        """Returns a grammar of the JSON texts that are valid under the schema. Raises UserError as require_schema does."""
        return cls.only(_schema_part(schema, where))

    @classmethod
    def only(cls, part: Part) -> "Grammar":
        return cls(f"@{part.name}", (part,))

    @classmethod
    def lark(cls, text: str, where: str = "grammar") -> "Grammar":
        """Returns a grammar from source text in llguidance's dialect of Lark."""
        require_unicode(text)
        return cls.only(Part.of("lark_grammar", text, where))

    @classmethod
    def regex(cls, pattern: str, where: str = "regex") -> "Grammar":
        """Returns a grammar of the texts that match a regular expression as a whole.

        The syntax of `pattern` is that of Rust's crate regex.
        """
        require_unicode(pattern)
        content = json.loads(llguidance_module().LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return cls.only(Part.of("lark_grammar", content, where))

    @classmethod
    def choice(cls, texts: Sequence[str], where: str = "choice") -> "Grammar":
        """Returns a grammar of exactly these texts, at least one."""
        require_unicode("".join(texts))
        texts_in_lark = " | ".join(map(_literal, texts))         # one terminal, because llguidance limits their number
        return cls.only(Part.of("lark_grammar", f"start: CHOICE\nCHOICE: {texts_in_lark}", where))

    @classmethod
    def calls(cls, start: tuple[str, str], functions: Sequence[tuple[str, Schema, str]], closing: str,
              written: str = "") -> "Grammar":
        """Returns a grammar of exactly one tool call.

        Args:
            start: as ChatTemplate.call_start.
            functions: one tuple (name, schema of the arguments, the schema's name in error messages) per allowed function.
            closing: a text that may follow the call.
            written: the part of the call with which the prompt already ends. If `written` is not empty, `closing` must be a
                stop string. The last token may then extend beyond `closing`, because the text is cut at a stop string.
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
        """Returns a grammar of all texts in which the arguments of each call fit the function's schema.

        `functions` are as for `calls`. A call is {"name": ..., "arguments": ...}. A call whose first key is not "name" is not
        constrained.
        """
        parts = tuple(_schema_part({**parameters, "type": "object"}, where) for _, parameters, where in functions)
        names = [re.escape(name).replace("/", r"\/") for name, _, _ in functions]         # Lark ends a pattern at "/"
        heads = tuple(rf'head_{part.name}[lazy]: /(?s:.*)\{{\s*"name"\s*:\s*"{name}"\s*,\s*"arguments"\s*:/'
                      for part, name in zip(parts, names, strict=True))
        calls = " | ".join(f'head_{part.name} SPACE? @{part.name} SPACE? "}}"' for part in parts)
        return cls(f"({calls})* REST?", parts, (*heads, SPACE, REST))

    def or_else(self, other: "Grammar") -> "Grammar":
        return Grammar(f"({self.start}) | ({other.start})", tuple(dict.fromkeys(self.parts + other.parts)),
                       tuple(dict.fromkeys(self.rules + other.rules)))

    def after_space(self) -> "Grammar":
        """Returns this grammar, in which a space or a newline may precede the text."""
        return replace(self, start=f"SPACE? ({self.start})", rules=(*self.rules, SPACE))

    def after(self, text: str) -> "Grammar":
        return replace(self, start=f"{_literal(text)} ({self.start})")

    def after_thoughts(self, opening: str = "") -> "Grammar":
        """Returns this grammar, preceded by thoughts, which are any text that ends with </think>.

        `opening` is the text that begins the thoughts. If `opening` is not empty, the thoughts are optional.
        """
        head = f"({_literal(opening)} thoughts SPACE?)?" if opening else "thoughts SPACE?"
        return replace(self, start=f"{head} SPACE? ({self.start})", rules=(*self.rules, THOUGHTS, SPACE))

    @property
    def definition(self) -> str:
        """Returns this grammar in llguidance's JSON format. Raises UserError if a schema cannot be enforced."""
        rules = "\n".join([f"start: {self.start}", *dict.fromkeys(self.rules)])
        parts = [{"name": part.name, part.kind: _enforceable(part) if part.kind == "json_schema" else part.content}
                 for part in dict.fromkeys(self.parts)]
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    def with_finite_numbers(self) -> "Grammar | None":
        """Returns a second grammar to apply together with this grammar, so that all numbers are finite in float64.

        The second grammar is a copy of this grammar in which each schema is replaced by all JSON with finite numbers. Returns
        None if the schemas already exclude infinite numbers.
        """
        parts = tuple(part._replace(kind="lark_grammar", content=FINITE_JSON) if part.kind == "json_schema" else part
                      for part in self.parts)
        schemas = [json.loads(part.content) for part in self.parts if part.kind == "json_schema"]
        return replace(self, parts=parts) if any(map(allows_unbounded_numbers, schemas)) else None

    def check(self) -> None:
        """Raises UserError, which names the place, if the grammar cannot be compiled, or if llguidance is not installed."""
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
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")           # JSON does not escape it, but Lark must


def _schema_part(schema: Schema, where: str) -> Part:
    require_schema(schema, where)
    return Part.of("json_schema", json.dumps(schema), where)


def _enforceable(part: Part) -> JsonObject:
    try:
        return {**rewrite_schema(json.loads(part.content), part.where, _is_empty), "x-guidance": JSON_FORM}
    except RecursionError:
        raise UserError(f"{part.where} is nested too deeply: use fewer levels of nesting") from None


def _is_empty(patterns: Sequence[str]) -> bool:
    reason = _schema_error({"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]})
    return "Unsatisfiable" in reason


def _error_place(schema: Schema, reason: str, where: str) -> str:
    """Returns the path of the innermost schema that has this error on its own.

    If TRIES or PLACE_S runs out, the path is that of an outer schema.
    """
    root = schema
    tries = TRIES
    deadline = thread_time() + PLACE_S
    narrower = True
    while narrower:
        narrower = False
        for place, sub in nested_schemas(schema):
            tries -= 1
            if tries < 0 or thread_time() > deadline:
                return where
            definitions = {key: root[key] for key in DEFINITIONS if key in root and place[0] not in DEFINITIONS}
            if isinstance(sub, Mapping) and _schema_error({**definitions, **sub}) == reason:
                schema = sub
                where = schema_path(where, place)
                narrower = True
                break
    return where


def _schema_error(schema: Schema) -> str:
    part = {"name": "schema", "json_schema": {**schema, "x-guidance": JSON_FORM}}
    return grammar_error(json.dumps({"grammars": [{"lark_grammar": "start: @schema"}, part]}))
