"""Checks the keywords of JSON schemas, and finds the schemas nested in a schema.

`require_schema` and `require_keywords` reject values that are not JSON schemas, and schemas with keywords that no grammar can
enforce.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping

# The keys under which a schema contains other schemas: a mapping of schemas, a list of schemas, or a single schema.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
         "unevaluatedItems", "unevaluatedProperties")
DEFINITIONS = ("$schema", "$defs", "definitions")        # keys of the root schema to which references in other schemas point
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_VALUES = 100_000                     # maximum JSON values in a schema
CONTROL = re.compile("[\x00-\x1f\x7f]")

Schema = JsonMapping
Place = tuple[str | int, ...]


def require_schema(schema: object, where: str) -> None:
    """Raises UserError, which names the place, for a schema that is too large, and for rules that a text could evade.

    A text could evade some rules by repeating a key, or by spelling a key with other escapes. The check takes linear time.
    """
    if not isinstance(schema, Mapping):
        raise UserError(f"{where} must be a JSON schema, written as a JSON object; got {_excerpt(schema)}")
    try:
        _require_size(schema, where)
        _require_safe_keys(schema, where)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: use fewer levels of nesting") from None


def _require_size(schema: object, where: str) -> None:
    pending = [schema]
    count = 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise UserError(f"{where} must contain at most {MAX_VALUES} JSON values")
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _require_safe_keys(schema: object, where: str) -> None:
    if not isinstance(schema, Mapping):
        return
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len({*map(str, required)})):
        raise UserError(f"{where}: minProperties must be at most 1 or the number of required properties, whichever is larger; "
                        f"got {least}")
    names = schema.get("properties")
    more = schema.get("additionalProperties", True)
    if isinstance(names, Mapping) and more is not False and any(CONTROL.search(name) for name in names):
        raise UserError(f"{where}: a property name with a control character requires additionalProperties=false")
    for place, sub in nested_schemas(schema):
        _require_safe_keys(sub, schema_path(where, place))


def nested_schemas(schema: object) -> Iterator[tuple[Place, object]]:
    """Yields (path, nested schema) for each schema directly inside `schema`. The path is relative to `schema`."""
    if not isinstance(schema, Mapping):
        return
    for key in BY_NAME:
        if isinstance(schema.get(key), Mapping):
            yield from (((key, name), sub) for name, sub in schema[key].items())
    for key in IN_LIST:
        if isinstance(schema.get(key), list):
            yield from (((key, i), sub) for i, sub in enumerate(schema[key]))
    for key in ALONE:
        if isinstance(schema.get(key), (Mapping, bool)):
            yield (key,), schema[key]


def schema_path(where: str, place: Sequence[str | int]) -> str:
    return where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def all_schemas(schema: object) -> Iterator[object]:
    yield schema
    for _, sub in nested_schemas(schema):
        yield from all_schemas(sub)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def is_schema(value: object) -> bool:
    return isinstance(value, (Mapping, bool))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _are_types(value: object) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(kind in TYPES for kind in types if isinstance(kind, str)) and _are_names(types)


KEYWORD_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("type",), _are_types, f"one of {', '.join(TYPES)}, or a list of them"),
    (("required",), _are_names, 'a list of property names, at the same level as "properties"'),
    (BY_NAME, lambda value: isinstance(value, Mapping) and all(map(is_schema, value.values())),
     "an object whose values are schemas"),
    (("allOf", "anyOf", "oneOf"), lambda value: bool(value) and _are_schemas(value), "a list of at least one schema"),
    (("prefixItems",), _are_schemas, "a list of schemas"),
    (("items",), lambda value: is_schema(value) or _are_schemas(value), "a schema"),
    (tuple(key for key in ALONE if key != "items"), is_schema, "a schema"),
    (("enum",), lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    (("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count, "a whole number >= 0"),
    (("minimum", "maximum"), _is_number, "a number"),
    (("exclusiveMinimum", "exclusiveMaximum"), lambda value: _is_number(value) or isinstance(value, bool), "a number"),
    (("multipleOf",), lambda value: _is_number(value) and 0 < value < math.inf, "a number above 0"),
    (("pattern", "format", "$ref"), lambda value: isinstance(value, str), "a string"),
    (("uniqueItems",), lambda value: isinstance(value, bool), "true or false"))


def require_keywords(schema: object, where: str) -> None:
    """Raises UserError, which names the place, for a keyword whose value JSON Schema does not allow."""
    if not isinstance(schema, Mapping):
        return
    for keys, fits, expected in KEYWORD_TYPES:
        for key in keys:
            if key in schema and not fits(schema[key]):
                raise UserError(f"{where}: {key} must be {expected}; got {_excerpt(schema[key])}")
    most = schema.get("maxProperties", math.inf)
    if most < max(schema.get("minProperties", 0), len({*schema.get("required", ())})):
        raise UserError(f"{where}: maxProperties must be at least minProperties and at least the number of required "
                        f"properties; got {most}")
    if schema.get("format") == "regex":
        raise UserError(f'{where}: the format "regex" cannot be enforced. Use the keyword "pattern", or omit "format"')
    for place, sub in nested_schemas(schema):
        require_keywords(sub, schema_path(where, place))


def _excerpt(value: object) -> str:
    return json.dumps(value, default=repr)[:60]
