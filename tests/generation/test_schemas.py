"""Tests of JSON schemas: allowed prefixes can be completed, finished texts are valid, unenforceable rules are refused."""

import json
import math
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from models import small_model

from rwkv.errors import UserError
from rwkv.generation.engine import generate_batch
from rwkv.generation.grammar import Grammar
from rwkv.generation.grammar.matcher import cached_matchers, matcher_of, require_ends
from rwkv.generation.grammar.patterns import rust_pattern, rust_patterns
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

BYTES = ByteTokenizer()
OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}
CLOSED = {**OBJECT, "additionalProperties": False}
CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ENDLESS = {"n": {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}
LIST = {"l": {"anyOf": [{**CLOSED, "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/l"}},
                         "required": ["v", "next"]}, {"type": "null"}]}}

# A case has a schema, texts that it allows, and texts that it does not allow
ENFORCED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "patterns over declared keys": (
        {**CLOSED, "properties": {"a": {}}, "required": ["a"], "patternProperties": {"^a$": INTEGER}},
        ['{"a": 1}'], ['{"a": 1,', '{"a": "']),
    "patterns over some declared keys": (
        {**CLOSED, "properties": {"a": {}, "b": {}}, "patternProperties": {"^[abc]$": INTEGER}},
        ['{"a": 1, "b": 2, "c": 3}'], ['{"a": "']),
    "a pattern that declares a required key": (
        {**CLOSED, "properties": {"a": {}}, "required": ["b"], "patternProperties": {"^(a|b)$": INTEGER}},
        ['{"a": 1, "b": 2}', '{"b": 2}'], ['{"b": 2,', '{"b": "']),
    "a pattern of no text": (
        {**CLOSED, "properties": {"a": {}}, "patternProperties": {r"^[^\s\S]$": {}}}, ['{"a": 1}'], ['{"a": 1,']),
    "an optional key whose value is a circle": (
        {**OBJECT, "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": CIRCLE}, ['{"y": 1}', "{}"], ['{"x"']),
    "a circle or null": ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": CIRCLE}, ["null"], []),
    "items without end": ({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": ENDLESS}, ["[]"], ["[{"]),
    "a list by references": ({"$ref": "#/$defs/l", "$defs": LIST}, ['{"v": true, "next": {"v": false, "next": null}}'], ["1"]),
    "a key that can no longer come": (
        {**OBJECT, "properties": {"forecast": INTEGER, "temperature": INTEGER}, "required": ["temperature"]},
        ['{"temperature": 1, "wind": 2}', '{"forecast": 2, "temperature": 1}'],
        ['{"temperature": 1, "forecast', '{"temperature": 1, "temperature"']),
    "such a key among others": (
        {**OBJECT, "properties": {"a": {}, "ab": {}, "abc": {}}, "required": ["abc"], "additionalProperties": INTEGER},
        ['{"ab": 1, "abc": 1, "b": 2}', '{"a": 1, "abc": 2}'], ['{"abc": 1, "a', '{"abc": 1, "b": "']),
    "such a key, inside": (
        {"type": "array", "items": {**OBJECT, "properties": {"a": {}, "b": {}}, "required": ["c"]}},
        ['[{"c": 1, "d": 1}]'], ['[{"c": 1, "a', '[{"c": 1, "b']),
    "such keys of joined schemas": (
        {"allOf": [{**OBJECT, "properties": {"ab": {}, "z": {}}, "required": ["z"]}, {"properties": {"a": {}, "y": {}}}]},
        ['{"z": 1, "x": 1}', '{"ab": 1, "z": 1, "a": 2}'], ['{"z": 1, "abc', '{"z": 1, "ad"', '{"z": 1, "a": 2, "ab']),
    "a name that another begins with": (
        {"anyOf": [{**OBJECT, "properties": {"a": {}, "b": {}}, "required": ["b", "ac"]}, {"type": "null"}], "title": "T"},
        ['{"b": 1, "ac": 2}', '{"b": 1, "ac": 1, "d": 1}'], ['{"b": 1, "ac": 2, "ad']),
    "other values for other keys": (
        {**OBJECT, "properties": {'a"b': {"type": "null"}, "z": {"type": "null"}}, "required": ["z", "y"],
         "additionalProperties": {"type": "boolean"}},
        ['{"z": null, "y": true, "x": false}', '{"a\\"b": null, "z": null, "y": true}'],
        ['{"z": null, "y": true, "a\\"b', '{"z": t']),
    "joined schemas with other values": (
        {"allOf": [{**OBJECT, "properties": {"a": {"type": "null"}, "z": INTEGER}, "required": ["z"],
                    "additionalProperties": {"type": ["integer", "null"]}}, {"properties": {"b": {"type": "integer"}}}]},
        ['{"a": null, "z": 1, "b": 1, "c": null}'], ['{"z": 1, "b": n']),
    "listed names": (
        {**OBJECT, "propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": INTEGER, "properties": {"b": {"const": "x"}},
         "$defs": {"C": {"enum": ["a", "b", "c"], "type": "string", "title": "C"}}},
        ['{"a": 1, "b": "x", "c": 3}', '{"c": 1}', "{}"], ['{"d', '{"a": "', '{"b": 1', '{"ab']),
    "listed names, inside": (
        {"type": "array", "items": {**OBJECT, "propertyNames": {"const": "a"}, "additionalProperties": {
            **OBJECT, "propertyNames": {"enum": ["n", "m"]}, "required": ["m"]}}},
        ['[{"a": {"n": 1, "m": 2}}, {}]', '[{"a": {"m": []}}]'], ['[{"b', '[{"a": {"k', '[{"a": {}', '[{"a": {"n": 1}']),
    "a required name that is not listed": (
        {"anyOf": [{**OBJECT, "propertyNames": {"enum": ["a"]}, "required": ["b"]}, {"type": "null"}]}, ["null"], ["{"]),
    "labels of a domain": (
        {"type": "string", "format": "hostname"}, ['"a--b.c-d.com"', '"abc"', '"ab-c"'], ['"ab--', '"x.xn--']),
    "large multiples": ({**INTEGER, "multipleOf": 5000}, ["30000", "-10000", "0", "1234567890123455000"], []),
    "19 digits": ({"type": "number", "exclusiveMinimum": 10**18}, ["1000000000000000001"], ["1e19"]),
    "19 digits below zero": ({**INTEGER, "maximum": -(10**18)}, ["-1000000000000000001"], ["1"]),
    "an empty name": ({**OBJECT, "properties": {"": {}, "b": {}}, "required": ["b"]}, ['{"b": 1, "c": 2}'], []),
    "numbers": ({"type": "number"}, ["1e28", "-1.5E-300", "0.1e+007", "1" * 300], ["1e999", "882E829", "-1e400", "9" * 310]),
    "any numbers": ({}, ['[1e9, "1e999"]', '{"1e999": 1}'], ["[1e999", '{"a": {"b": [-1E999']),
    "int64": ({**INTEGER, "minimum": -2**63, "maximum": 2**63 - 1}, ["9223372036854775807", "-9223372036854774784", "0"],
              ["9223372036854775808", "-9223372036854775809"]),
    "uint64": ({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, ["0", "9223372036854775807"], ["-1", "18446744073709551616"]),
    "odd bounds": ({**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 3}, [str(2**53 + 2)], [str(2**53), str(2**53 + 4)]),
    "open bounds": ({**INTEGER, "exclusiveMinimum": -2, "exclusiveMaximum": 1.5}, ["-1", "1"], ["-2", "2"]),
    "large bounds": ({"type": "number", "maximum": 1e300}, ["12.5"], []),
    "names that are texts": (
        {**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": INTEGER}, ['{"a": 1}'], []),
    "any names": ({**OBJECT, "propertyNames": {}, "unevaluatedProperties": {}, "dependentRequired": {}}, ['{"a": 1}'], []),
    "format path": ({"type": "string", "format": "path"}, ['"any text"'], ["1"]),
    "format json-pointer": ({"type": "string", "format": "json-pointer"}, ['"/a~1b/0"', '""'], ['"a"', '"/~2"']),
    "white space": ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\xa0"', '"\ufeff"'], ['"\x85"', '"a"']),
    "no white space": ({"type": "string", "pattern": r"^[^\s]\S$"}, ['"\x85a"'], ['"a\ufeff"', '" a"']),
    "the dot": ({"type": "string", "pattern": "^.$"}, ['"a"'], ['"\\r"', '"\u2028"']),
    "no quotes": ({"type": "string", "pattern": r'^[^"\\]*$'}, ['"a\\nb"', '""'], ['"\\"', '"a\\\\']),
    "brackets": ({"type": "string", "pattern": "^[[&&~.]$"}, ['"["', '"&"', '"~"', '"."'], ['"a"']),
    "unique items, at most one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 2"]),
}


def allows(grammar: Grammar, text: str) -> bool:
    """Returns True if the grammar allows the text as a prefix, and a further token or the end after the text."""
    matcher = matcher_of(grammar, BYTES)
    for byte in text.encode():
        mask = matcher.allowed_mask()
        if mask is None or not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.push(byte)
    mask = matcher.allowed_mask()
    return mask is not None


def is_finished(grammar: Grammar, text: str) -> bool:
    matcher = matcher_of(grammar, BYTES)
    for byte in text.encode():
        matcher.push(byte)
    mask = matcher.allowed_mask()
    return mask is not None and bool(mask[0] & 1)


@pytest.mark.parametrize("name", ENFORCED)
def test_a_schema_allows_exactly_its_texts(name: str) -> None:
    schema, allowed, forbidden = ENFORCED[name]
    grammar = Grammar.json_schema(schema)
    grammar.check()
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for text in allowed:
        assert allows(grammar, text), text
        assert is_finished(grammar, text), text
        assert validator.is_valid(json.loads(text)), text
    for text in forbidden:
        assert not allows(grammar, text) or (text[-1].isdigit() and not is_finished(grammar, text)), text


def walk(grammar: Grammar, seed: int, most: int = 500) -> bytes | None:
    """Returns a text of random bytes, or None if the text has not ended after `most` bytes.

    After 80 bytes, closing brackets, quotes and separators are preferred, so that most texts end.
    """
    matcher = matcher_of(grammar, BYTES)
    draw = random.Random(seed)
    written = b""
    while len(written) < most:
        mask = matcher.allowed_mask()
        assert mask is not None, written
        bytes_ = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if 0 in bytes_ and (len(bytes_) == 1 or draw.random() < 0.3):
            return written
        bytes_ = [byte for byte in bytes_ if byte]
        likely = [byte for byte in bytes_ if byte in (b'"}],:' if len(written) > 80 else b'"}],:0123456789e.+-abcfortmpu')]
        byte = draw.choice(likely if likely and (len(written) > 80 or draw.random() < 0.6) else bytes_)
        matcher.push(byte)
        written += bytes([byte])
    return None


def is_finite(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("name", ENFORCED)
@pytest.mark.parametrize("walks", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_random_texts_are_valid(name: str, walks: int) -> None:
    schema = ENFORCED[name][0]
    grammar = Grammar.json_schema(schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    ended = [written for seed in range(walks) if (written := walk(grammar, seed)) is not None]
    for written in ended:
        value = json.loads(written)
        assert validator.is_valid(value), (schema, written)
        assert is_finite(value), written
    assert len(ended) > walks // 4


REFUSED: dict[str, dict[str, Any]] = {
    "a circle": {**OBJECT, "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], "$defs": CIRCLE},
    "a reference to itself": {"$ref": "#"}, "a circle of items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "an object in itself": {"$ref": "#/$defs/n", "$defs": ENDLESS},
    "a circle in all": {"allOf": [OBJECT, {"$ref": "#/$defs/a"}], "$defs": CIRCLE},
    "only circles": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/n"}], "$defs": {**CIRCLE, **ENDLESS}},
    "required inside a property": {**CLOSED, "properties": {"a": {**INTEGER, "required": True}}},
    "required of another type": {**INTEGER, "required": "a"}, "required of no names": {**OBJECT, "required": [1]},
    "a length as a text": {**INTEGER, "minLength": "3"}, "items as a number": {**INTEGER, "items": 3},
    "an enum as a text": {"enum": "a"}, "no enum": {"enum": []}, "no alternatives": {"anyOf": []},
    "a type of no name": {"type": ["string", 3]}, "multiples of 0": {**INTEGER, "multipleOf": 0},
    "properties as a list": {**INTEGER, "properties": []}, "a bound as a text": {"type": "string", "minimum": "0"},
    "too few properties": {**OBJECT, "required": ["a", "b"], "maxProperties": 1},
    "integers beyond 64 bits": {**INTEGER, "minimum": 2**70}, "a constant that float64 lacks": {"const": 2**53 + 1},
    "a constant inside": {"enum": [{"a": [2**60 + 1]}]}, "overlapping schemas": {"oneOf": [{"type": "number"}, INTEGER]},
    "a large multiple": {**INTEGER, "multipleOf": 10_007}, "a long multiple": {"type": "number", "multipleOf": 0.2000003},
    "multiples whose product overflows": {"allOf": [{**INTEGER, "multipleOf": 65537}, {"multipleOf": 65539}]},
    "a format that cannot be enforced": {"type": "string", "format": "regex"},
    "different items": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "a condition": {**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "a negation": {"not": INTEGER}}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused(name: str) -> None:
    grammar = Grammar.json_schema(REFUSED[name])
    for refuse in (grammar.check, lambda: matcher_of(grammar, BYTES)):
        with pytest.raises(UserError, match=r"^json_schema.*: ") as error:
            refuse()
        assert not re.search("coerce|Unimplemented", str(error.value)), "these are the library's words"


def test_the_error_for_a_required_but_excluded_name_says_so() -> None:
    with pytest.raises(UserError, match="the schema excludes what it requires"):
        Grammar.json_schema({**CLOSED, "properties": {"a": INTEGER}, "required": ["b"]}).check()


def test_a_schema_of_too_many_values_is_refused_at_once() -> None:
    with pytest.raises(UserError):
        Grammar.json_schema({"enum": [*range(200_000)]})


LETTERS = "abcdefghijklmnopqrstuvwxyz :.,\n"


@pytest.mark.parametrize(("characters", "schema"), [
    (LETTERS, OBJECT), (LETTERS, {"type": "string"}), (LETTERS, INTEGER), (LETTERS + '{"', OBJECT),
    (LETTERS + '{}"', {**CLOSED, "properties": {"A": {"type": "null"}}, "required": ["A"]}),
    (LETTERS + '"', {"enum": ["xA", "y"]}), ('{}"', {"type": "boolean"})])
def test_a_tokenizer_without_the_characters_of_a_schema_is_refused(characters: str, schema: dict[str, Any]) -> None:
    tokenizer = CharTokenizer(characters)
    model = small_model("conv1d", vocab_size=tokenizer.vocab_size)
    with pytest.raises(UserError, match=r"(?s)json_schema: .*tokenizer"):
        generate_batch(model, tokenizer, [characters[0]], max_new_tokens=30, grammar=Grammar.json_schema(schema))


def test_a_tokenizer_with_the_characters_of_this_schema_is_enough() -> None:
    tokenizer = CharTokenizer(LETTERS + '{}"')
    model = small_model("conv1d", vocab_size=tokenizer.vocab_size)
    schema = {**CLOSED, "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    sample, = generate_batch(model, tokenizer, ["a"], max_new_tokens=300, grammar=Grammar.json_schema(schema))
    assert json.loads(sample.text)["a"] in "bc"


def test_a_grammar_without_ends_is_refused() -> None:
    for grammar in (Grammar.lark('start: "a" B\nB: /x/ & /y/'), Grammar.lark('start: "a" b | "c"\nb: "b" b')):
        with pytest.raises(UserError):
            require_ends(grammar, cached_matchers(grammar, BYTES), BYTES)


def test_more_than_ten_parts_have_different_names() -> None:
    functions = [(f"f{i}", {**CLOSED, "properties": {"a": {"const": i}}, "required": ["a"]}, f"tools[{i}]") for i in range(25)]
    calls = Grammar.calls(('{"name":"', '","arguments":'), functions, "\n```")
    grammar = Grammar.json_schema({"const": "@part1"}).or_else(calls).or_else(Grammar.text_with_calls(functions[:3]))
    grammar.check()
    for i in (0, 1, 10, 20, 24):
        written = f'{{"name":"f{i}","arguments":{{"a":{i}}}}}'
        assert is_finished(Grammar.json_schema(OBJECT).or_else(calls), written)
        assert not allows(calls, written.replace(f":{i}", f":{i + 1}"))
    assert is_finished(grammar, '"@part1"')


def test_patterns_are_read_as_ecma_reads_them() -> None:
    assert rust_pattern(r"^\w\d[a-z]\.$") == r"^\w\d[a-z]\.$"
    assert rust_pattern(r"[^[\]]") == r"[^\x00\[\]]"
    for pattern, text, matches in ((r"^[^-+.]+$", "-", False), (r"^[^-+.]+$", "!", True), (r"^[^-]$", "-", False),
                                   (r"^[-a]$", "-", True), (r"^[^a-]$", "-", False), (r"^[+--]$", ",", True),
                                   (r"^[+--]$", ".", False), (r"^[--/]$", ".", True), (r"^[\--/]$", ".", True),
                                   (r"^[^+--]$", ",", False), (r"^\<a\>$", "<a>", True), (r"^\<a\>$", "a", False)):
        assert is_finished(Grammar.json_schema({"type": "string", "pattern": pattern}), json.dumps(text)) == matches, pattern


# The emails of zod 4, the decimals of Pydantic 2.12, and rules such as those for passwords and names
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
LOOKAHEADS = [EMAIL, DECIMAL, r"^(?=.*[a-b])(?=.*\d).{2,}$", r"^(?!ab|a\.$|b$).+", r"^(?!.*ab)[ab.]*$", r"^(?!.*a)[ab.]*$",
              r"^(?!.*[a.])\S*$", r"^(?![ab]+$).*$", r"^(?=a|b).*[.]$", r"^(?!-)[-a]+$"]


@pytest.mark.parametrize("pattern", LOOKAHEADS)
def test_lookaheads_at_the_beginning_become_further_patterns(pattern: str) -> None:
    python = [re.sub(r"\\u\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), each)
              for each in rust_patterns(pattern)]
    assert not any("(?=" in each or "(?!" in each for each in python)
    texts = ["".join(random.Random(seed).choices("ab.1-+ab@", k=seed % 7)) for seed in range(3000)]
    matched = [text for text in texts if re.search(pattern, text)]
    assert [text for text in texts if all(re.search(each, text) for each in python)] == matched
    assert matched or pattern == EMAIL
    grammar = Grammar.json_schema({"type": "string", "pattern": pattern})
    for text in [*random.Random(1).sample(texts, 50), *matched[:10], "a.b@ab.ab", "a..b@ab.ab", ".a@ab.ab"]:
        assert is_finished(grammar, json.dumps(text)) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", ["(?=a)b", "^(?!a)b|c", "^a(?!b)", "^(?!(a|b)c)d", "^(?<=a)b", "^(?=a"])
def test_other_lookarounds_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"json_schema\.properties\.a:"):
        Grammar.json_schema({**CLOSED, "properties": {"a": {"type": "string", "pattern": pattern}}}).check()


@pytest.mark.parametrize("name", ["Größe", "Box[int]", "Map<string, x>", "a b", "模型"])
def test_a_reference_need_not_be_a_uri(name: str) -> None:
    """Pydantic and other libraries write the names of classes into references without escaping them."""
    grammar = Grammar.json_schema({"$ref": f"#/$defs/{name}", "$defs": {name: {"type": "array", "items": INTEGER}}})
    grammar.check()
    assert is_finished(grammar, "[3]")
    assert not is_finished(grammar, "[null]")
