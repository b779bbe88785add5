"""JSON schemas like those of real tools and of test suites, for the tests of grammars."""

import random
from typing import Any

OBJECT: dict[str, Any] = {"type": "object"}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with only these properties, by default all required."""
    return {"type": "object", "properties": properties, "additionalProperties": False,
            "required": [*properties] if required is None else required}


SHORT = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": -20, "maximum": 200}
NODE = {"type": "object", "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"], "additionalProperties": False}

# Schemas as in function-calling data sets and OpenAI's structured outputs
TOOLS: list[dict[str, Any]] = [
    closed(city=SHORT, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    closed(["query"], query=SHORT, limit={"type": "integer", "minimum": 1, "maximum": 50}),
    closed(path={"type": "string", "pattern": "^/[a-z]{1,8}(/[a-z]{1,8}){0,2}$"}, recursive={"type": "boolean"}),
    closed(to={"type": "array", "items": {"type": "string", "format": "email", "maxLength": 20}, "minItems": 1, "maxItems": 2}),
    closed(date={"type": "string", "format": "date"}, time={"type": "string", "format": "time"}),
    closed(amount={"type": "number", "minimum": 0, "maximum": 1000}, currency={"enum": ["EUR", "NOK", "USD"]}),
    closed(action={"const": "move"}, x=INTEGER, y=INTEGER),
    closed(id={"type": "string", "format": "uuid"}),
    closed(address=closed(street=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"})),
    closed(tags={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}),
    closed(name={"type": ["string", "null"], "maxLength": 5}, age={"anyOf": [INTEGER, {"type": "null"}]}),
    closed(shape={"oneOf": [closed(kind={"const": "circle"}, radius=INTEGER), closed(kind={"const": "square"}, side=INTEGER)]}),
    closed(steps={"type": "array", "maxItems": 2, "items": closed(explanation=SHORT, output=SHORT)}, final_answer=SHORT),
    {"$ref": "#/$defs/node", "$defs": {"node": {**NODE}}},
    {"$defs": {"size": {"enum": ["S", "M", "L"]}}, **closed(size={"$ref": "#/$defs/size"}, count=INTEGER)},
    closed(host={"type": "string", "format": "ipv4"}, port={"type": "integer", "minimum": 1, "maximum": 65535}),
    closed(**{"a/b": INTEGER, "c\"d": INTEGER, "é": INTEGER, "": INTEGER}),
    closed(matrix={"type": "array", "minItems": 2, "maxItems": 2,
                   "items": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}}),
    closed(when={"type": "string", "format": "date-time"}),
    closed(flag={"type": "boolean"}, value={"type": "null"}),
]
# Schemas as in JSON-Schema-Test-Suite, each with one or two keywords
KEYWORDS: list[dict[str, Any]] = [
    {**OBJECT, "properties": {"a": INTEGER, "b": SHORT}, "required": ["a", "b"], "maxProperties": 3,
     "additionalProperties": INTEGER},
    {"type": "array", "prefixItems": [INTEGER, SHORT], "items": False},
    {"type": "array", "prefixItems": [INTEGER], "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 5, "uniqueItems": False},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "pattern": "^[a-c]+x?$", "maxLength": 8},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 40}, {"type": "integer", "multipleOf": 7, "minimum": 0,
                                                                       "maximum": 700},
    {"type": "number", "minimum": -1.5, "maximum": 2.25}, {"enum": [1, "1", None, True, {"a": [1]}, []]},
    {"const": {"k": "\u0001\n\"", "l": [1.5, None]}}, {"type": ["integer", "boolean", "null"], "maximum": 90},
    {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{**OBJECT, "properties": {"a": INTEGER}, "required": ["a"]},
               {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}], "maxProperties": 2},
    {**OBJECT, "patternProperties": {"^n[0-9]$": INTEGER}, "additionalProperties": False, "maxProperties": 2},
    {**OBJECT, "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"definitions": {"p": {"type": "integer", "minimum": 0, "maximum": 9}}, "type": "array",
     "items": {"$ref": "#/definitions/p"}, "maxItems": 4},
    {"oneOf": [{"type": "integer", "maximum": 50, "minimum": 0}, {"type": "boolean"}]},
    {"type": "object", "title": "T", "description": "An empty one.", "default": {}, "examples": [1], "properties": {},
     "additionalProperties": False},
    {"type": "string", "format": "ipv4"},
]
SCHEMAS = TOOLS + KEYWORDS


def random_schema(random: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a random schema of up to three levels."""
    nested = ["object", "array", "anyOf"] * 2 if depth < 2 else []
    kind = random.choice(["string", "integer", "number", "enum", "pattern", "format", "boolean", *nested])
    if kind == "object" or depth == 0:
        names = random.sample(["id", "name", "a b", "ключ", "x-y", "n/m", "q\"", "kind"], random.randint(0, 4))
        properties = {name: random_schema(random, depth + 1) for name in names}
        more = random.choice([False, False, {"type": "integer", "maximum": 99, "minimum": 0}])
        schema = {"type": "object", "properties": properties, "additionalProperties": more,
                  "required": random.sample(names, random.randint(0, len(names)))}
        return schema if more is False else {**schema, "required": names, "maxProperties": len(names) + 2}
    if kind == "array":
        least = random.randint(0, 2)
        return {"type": "array", "items": random_schema(random, depth + 1), "minItems": least,
                "maxItems": least + random.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, depth + 1) for _ in range(random.randint(1, 3))]}
    low = random.randint(-1000, 1000)
    return {"string": {"type": "string", "minLength": random.randint(0, 2), "maxLength": random.randint(2, 8)},
            "integer": {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 2000)},
            "number": {"type": "number", "minimum": low / 8, "maximum": low / 8 + random.randint(1, 99)},
            "enum": {"enum": random.sample(["a", "\n", "é", 1, 1.5, None, True, [], {"k": 1}], random.randint(1, 5))},
            "pattern": {"type": "string", "pattern": random.choice(["^[a-f]{1,6}$", r"^\d{2,4}-[A-Z]$", "^(ab|cd)*$"]),
                        "maxLength": 12},
            "format": {"type": "string", "format": random.choice(["date", "time", "date-time", "uuid", "ipv4"])},
            "boolean": {"type": "boolean"}}[kind]
