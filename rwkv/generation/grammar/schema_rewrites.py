"""Rewrites a JSON schema so that llguidance enforces the schema correctly.

`rewrite_schema` returns a schema whose valid texts are all valid under the original. The new schema may allow fewer texts.
Rewriting adds rules that llguidance does not enforce, and removes rules without effect that llguidance rejects. Schemas without
a finite instance, such as circular references, become `false`: otherwise llguidance would let a text begin that can never end.

The dialect is draft 2020-12, with the older keywords that llguidance supports. A `format` that is not enforced here is ignored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

from rwkv.errors import UserError
from rwkv.generation.grammar.patterns import escape_text, exclusion_pattern, rust_pattern, rust_patterns
from rwkv.generation.grammar.schema_checks import (
    ALONE,
    BY_NAME,
    IN_LIST,
    TYPES,
    Schema,
    all_schemas,
    is_schema,
    require_keywords,
)
from rwkv.io.json_types import JsonObject

MERGING = ("allOf", "anyOf", "oneOf", "$ref")            # keys whose schemas llguidance may merge with their siblings
URI = "%!#$&'()*+,/:;=?@~"               # characters besides letters, digits and "-._" that may stand in a URI as they are
ANNOTATIONS = ("$comment", "title", "description", "default", "examples", "$schema")    # keys that restrict nothing
SCALARS = ("null", "boolean", "integer", "number", "string")
MAX_MULTIPLE = 5_000                     # limit of multipleOf in units of its last digit; llguidance gives up at 10,000
LARGEST_INT, LOWEST_INT = 2**63 - 1, -(2**63 - 1024)     # llguidance's integer bounds: int64's, the lower rounded up
LARGEST_FLOAT = float(2**63 - 1024)      # llguidance's largest bound of a `number`

NO_LEAP_SECOND = "^[^:]+:[0-9]+:[0-5]"   # allows no second 60, which very few minutes have
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DAY_OF_YEAR = f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{LEAP_YEAR}-02-29)"       # allows 29 February only in leap years
# A label of a domain has at most 63 characters. Hyphens in the third and fourth place are reserved (RFC 5891, 4.2.3.1)
LABEL = "([^.@]{1,3}|[^.@]{2}([^.@-][^.@]|-[^.@-])[^.@]{0,59})"
LABELS = rf"{LABEL}(\.{LABEL})*$"
POINTER = "(/([^/~]|~[01])*)*$"
# Patterns for rules that llguidance does not enforce: an email address has at most 64 characters before the @ and 254 in total
# (RFC 5321), and a domain has at most 253 (RFC 1035).
FORMAT_PATTERNS = {"time": [NO_LEAP_SECOND], "date": [DAY_OF_YEAR], "date-time": [NO_LEAP_SECOND, DAY_OF_YEAR],
                   "email": [f"^[^@]{{1,64}}@{LABELS}", "^.{1,254}$"], "hostname": [f"^{LABELS}", "^.{1,253}$"],
                   "json-pointer": [f"^{POINTER}"], "relative-json-pointer": [f"^(0|[1-9][0-9]*)(#$|{POINTER})"],
                   "uri-template": ["^[^']*$"]}
# Each of these formats is missing in llguidance, and is replaced by a stricter format
NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "uri-reference": "uri", "iri-reference": "uri",
            "uri-template": "uri"}
ENFORCED = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

IsEmpty = Callable[[Sequence[str]], bool]        # returns True if no text matches all patterns (in llguidance's syntax)


def rewrite_schema(schema: Schema, where: str, is_empty: IsEmpty) -> JsonObject:
    """Returns the rewritten schema, without the key x-guidance.

    Raises UserError, which names the place, if the schema cannot be enforced.
    """
    require_keywords(schema, where)
    schema = _name_properties(schema, schema)
    finite = _Finite(schema)
    if not finite.has_instance(schema):
        raise UserError(f"{where}: no JSON value can satisfy the schema, because the schema excludes what it requires, or "
                        "because its references form an endless loop")
    _require_multiples(schema, where)
    return _Rewriter(schema, finite, is_empty).rewrite(schema, where)


def allows_unbounded_numbers(schema: object) -> bool:
    """Returns True if the schema allows unbounded numbers, such as 1e999, which is infinite in float64."""
    return any(map(_may_be_any_number, all_schemas(schema)))


def _name_properties(schema: Any, root: Schema) -> Any:
    """Returns the schema in which `properties` has the names that propertyNames lists, there and in all nested schemas.

    Pydantic uses propertyNames for a dict whose keys are an Enum or a Literal, and zod uses it for a record.
    """
    if not isinstance(schema, Mapping):
        return schema
    rules = {**schema}
    names = _listed_names(rules.get("propertyNames"), root)
    if names is not None and not rules.get("patternProperties"):
        del rules["propertyNames"]
        properties = rules.get("properties", {})
        required = [name for name in rules.get("required", ()) if name not in names]
        rules["properties"] = {**{name: properties.get(name, rules.get("additionalProperties", True)) for name in names},
                               **dict.fromkeys(required, False)}
        rules["additionalProperties"] = False
    for key in {*BY_NAME, *IN_LIST, *ALONE}:
        if key in BY_NAME and key in rules:
            rules[key] = {name: _name_properties(sub, root) for name, sub in rules[key].items()}
        elif isinstance(rules.get(key), list):
            rules[key] = [_name_properties(sub, root) for sub in rules[key]]
        elif isinstance(rules.get(key), Mapping):
            rules[key] = _name_properties(rules[key], root)
    return rules


def _listed_names(schema: object, root: Schema) -> list[str] | None:
    """Returns the names that a schema of propertyNames lists with enum or const, or None if it describes them differently."""
    if not isinstance(schema, Mapping):
        return None
    rules = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if [*rules] == ["$ref"]:
        target = _target(root, rules["$ref"])
        return _listed_names(target, root) if isinstance(target, Mapping) and "$ref" not in target else None
    names = rules.pop("enum", None) or [rules.pop("const", None)]
    if rules not in ({}, {"type": "string"}) or not all(isinstance(name, str) for name in names):
        return None
    return [*dict.fromkeys(names)]


def _target(root: object, reference: str) -> object:
    """Returns the schema that a JSON pointer refers to, or None for any other reference or if there is no such schema."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for step in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        else:
            return None
    return target if is_schema(target) else None


def _may_be_any_number(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return bool(schema)
    if "const" in schema or "enum" in schema or ("type" not in schema and any(key in schema for key in MERGING)):
        return False
    types = _types(schema)
    bounded = any(key in schema for key in ("minimum", "exclusiveMinimum")) and any(
        key in schema for key in ("maximum", "exclusiveMaximum"))
    return (("number" in types or "integer" in types) and not bounded) or (
        "object" in types and "additionalProperties" not in schema) or ("array" in types and "items" not in schema)


def _types(schema: Schema) -> list[str]:
    types = schema.get("type", TYPES)
    return [types] if isinstance(types, str) else [*types]


class _Finite:
    """Determines which schemas have a finite valid text. A schema that refers to itself or requires itself has none."""

    def __init__(self, root: object) -> None:
        targets = {sub["$ref"]: _target(root, sub["$ref"]) for sub in all_schemas(root)
                   if isinstance(sub, Mapping) and isinstance(sub.get("$ref"), str)}
        self._finite = {reference: target is None for reference, target in targets.items()}      # None: llguidance checks it
        changed = True
        order = [*targets.items()]
        while changed:
            changed = False
            order.reverse()              # chains of references resolve quickly in both directions
            for reference, target in order:
                if not self._finite[reference] and self.has_instance(target):
                    self._finite[reference] = changed = True

    def has_instance(self, schema: object) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if not self._finite.get(schema.get("$ref", ""), True):
            return False
        if not all(map(self.has_instance, schema.get("allOf", ()))):
            return False
        if any(key in schema and not any(map(self.has_instance, schema[key])) for key in ("anyOf", "oneOf")):
            return False
        types = _types(schema)
        return (any(kind in SCALARS for kind in types) or "const" in schema or "enum" in schema
                or ("object" in types and self._has_object(schema)) or ("array" in types and self._has_array(schema)))

    def _has_object(self, schema: Schema) -> bool:
        names = schema.get("properties", {})
        other = schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
        return all(self.has_instance(names.get(name, other)) for name in schema.get("required", ()))

    def _has_array(self, schema: Schema) -> bool:
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        least = schema.get("minItems", 0)
        return all(map(self.has_instance, first[:int(least)])) and (least <= len(first) or self.has_instance(rest))


def _require_multiples(schema: Schema, where: str) -> None:
    """Raises UserError if a multipleOf is too large.

    llguidance needs one state for each remainder, and multiplies the values of merged schemas in 32 bits.
    """
    schemas = [sub for sub in all_schemas(schema) if isinstance(sub, Mapping)]
    multiples = {Decimal(str(sub["multipleOf"])) for sub in schemas if "multipleOf" in sub}
    places = max((-multiple.normalize().as_tuple().exponent for multiple in multiples), default=0)       # type: ignore[operator]
    units = [int(multiple.scaleb(max(places, 0))) for multiple in multiples]
    for multiple in multiples:
        digits = multiple.scaleb(max(-multiple.normalize().as_tuple().exponent, 0))      # type: ignore[operator]
        if digits > MAX_MULTIPLE:
            raise UserError(f"{where}: multipleOf, written without its decimal point, must be at most {MAX_MULTIPLE}; got "
                            f"{multiple}")
    if len(units) > 1 and math.prod(units) >= 2**32 and _is_merged(schemas):
        raise UserError(f"{where}: the multipleOf values of schemas that apply together, scaled to whole numbers by the same "
                        f"power of ten, must have a product below 2^32; got {', '.join(map(str, sorted(multiples)))}")


def _is_merged(schemas: Sequence[Schema]) -> bool:
    return any(key in sub and (len(sub) > 1 or key == "allOf") for sub in schemas for key in MERGING)


class _Rewriter:
    def __init__(self, root: Schema, finite: _Finite, is_empty: IsEmpty) -> None:
        schemas = [sub for sub in all_schemas(root) if isinstance(sub, Mapping)]
        self._finite = finite
        self._is_empty = is_empty
        self._declared = {name for sub in schemas for name in (*sub.get("properties", ()), *sub.get("required", ()))}
        may_merge = _is_merged(schemas)
        patterns = any(sub.get("patternProperties") for sub in schemas)
        # llguidance requires that the patterns of merged objects are equal or disjoint
        self._late_names = {name for sub in schemas for name in _late_names(sub)} if may_merge and not patterns else None
        self._keeps_open = may_merge and patterns

    def rewrite(self, schema: Schema, where: str) -> JsonObject:
        rules = _without_empty_rules(schema)
        for key in BY_NAME:
            if key in rules:
                rules[key] = {name: self._rewrite_inside(sub, f"{where}.{key}.{name}", key) for name, sub in rules[key].items()}
        for key in IN_LIST:
            if isinstance(rules.get(key), list):
                rules[key] = [self._rewrite_inside(sub, f"{where}.{key}[{i}]", key) for i, sub in enumerate(rules[key])]
        for key in ALONE:
            if isinstance(rules.get(key), (Mapping, bool)):
                rules[key] = self._rewrite_inside(rules[key], f"{where}.{key}", key)
        for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            if key in rules:
                rules[key] = int(rules[key])
        if rules.get("$ref", "").startswith("#"):        # llguidance requires a URI; Pydantic writes "#/$defs/Größe"
            rules["$ref"] = quote(rules["$ref"], safe=URI)
        _enforce_format(rules)
        if "pattern" in rules:
            rules["pattern"], *more = rust_patterns(rules["pattern"])
            if more:
                rules["allOf"] = [*rules.get("allOf", ()), *({"pattern": pattern} for pattern in more)]
        _enforce_bounds(rules, where)
        _require_exact(rules, where)
        self._order_names(rules)
        return rules

    def _rewrite_inside(self, schema: object, where: str, key: str) -> object:
        if key not in ("$defs", "definitions") and not self._finite.has_instance(schema):
            return False
        return self.rewrite(schema, where) if isinstance(schema, Mapping) else schema

    def _order_names(self, rules: JsonObject) -> None:
        """Adapts the rules for property names to llguidance, which requires declared names in the schema's order, then others.

        A pattern that matches only declared names is moved to these names. If the pattern stayed, a comma could be written
        after which no key is allowed. Other keys must not begin with a declared name that is no longer allowed: after
        "forecast" is skipped, "forecasts" is excluded too.
        """
        patterns = {rust_pattern(pattern): sub for pattern, sub in rules.get("patternProperties", {}).items()}
        names = {*rules.get("properties", ()), *rules.get("required", ())}
        if patterns and rules.get("additionalProperties") is False:
            other = f"^{exclusion_pattern(set(), names)}$"
            for pattern in [pattern for pattern in patterns if self._is_empty([pattern, other])]:
                self._move_to_names(rules, pattern, patterns.pop(pattern), names)
        if patterns or "patternProperties" in rules:
            rules["patternProperties"] = patterns
            return
        late_names = _late_names(rules)
        other = rules.get("additionalProperties", True)
        may_merge = self._late_names is not None
        if not late_names or other is False or self._keeps_open or (may_merge and not _is_any(other)):
            return
        properties = rules.get("properties", {})
        rules["properties"] = {**properties, **{name: other for name in rules.get("required", ()) if name not in properties}}
        if self._late_names is not None:                 # each merged schema must allow the names declared in the others
            possible = "|".join([exclusion_pattern(self._late_names, set()), *map(escape_text, sorted(self._declared))])
        else:
            possible = exclusion_pattern(late_names, names)
        rules["patternProperties"] = {f"^({possible})$": other}
        rules["additionalProperties"] = False

    def _move_to_names(self, rules: JsonObject, pattern: str, schema: object, names: set[str]) -> None:
        properties = {name: rules.get("properties", {}).get(name, True)
                      for name in (*rules.get("properties", ()), *rules.get("required", ()))}
        for name in names:
            if not self._is_empty([pattern, f"^{escape_text(name)}$"]):
                properties[name] = schema if properties[name] is True else {"allOf": [properties[name], schema]}
        rules["properties"] = {name: sub for name, sub in properties.items()
                               if name in rules.get("properties", ()) or sub is not True}


def _late_names(schema: Schema) -> set[str]:
    """Returns the optional declared names that are no longer allowed once a later name has been written."""
    required = {*schema.get("required", ())}
    names = [*schema.get("properties", ())]
    if not required.difference(names):
        names = names[:-1]
    return {name for name in names if name and name not in required}


def _without_empty_rules(schema: Schema) -> JsonObject:
    # llguidance rejects some keywords even where they exclude nothing
    has_no_effect = {"uniqueItems": schema.get("uniqueItems") is False or schema.get("maxItems", 2) <= 1,
                     "not": schema.get("not") is False, "propertyNames": _is_any_name(schema.get("propertyNames")),
                     "dependentRequired": not schema.get("dependentRequired"),
                     "dependentSchemas": not schema.get("dependentSchemas"),
                     "dependencies": not schema.get("dependencies"),
                     "unevaluatedProperties": _is_any(schema.get("unevaluatedProperties")),
                     "unevaluatedItems": _is_any(schema.get("unevaluatedItems")),
                     "minContains": "contains" not in schema, "maxContains": "contains" not in schema,
                     "contains": schema.get("minContains") == 0 and "maxContains" not in schema,
                     "then": "if" not in schema, "else": "if" not in schema,
                     "contentSchema": True, "deprecated": True,
                     "minimum": schema.get("minimum") == -math.inf, "maximum": schema.get("maximum") == math.inf}
    if has_no_effect["contains"]:
        has_no_effect["minContains"] = True
    return {key: value for key, value in schema.items() if not has_no_effect.get(key, False)}


def _is_any(schema: object) -> bool:
    return schema is True or schema == {}


def _is_any_name(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    rules = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    kind = rules.pop("type", "string")
    return ("string" in kind if isinstance(kind, list) else kind == "string") and (not rules or rules == {"minLength": 0})


def _enforce_format(rules: JsonObject) -> None:
    kind: str | None = rules.pop("format", None)
    if kind is None:
        return
    enforced = NARROWER.get(kind, kind)
    if enforced in ENFORCED:
        rules["format"] = enforced
    patterns = FORMAT_PATTERNS.get(kind, FORMAT_PATTERNS.get(enforced, []))
    if patterns:
        rules["allOf"] = [*rules.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]


def _enforce_bounds(rules: JsonObject, where: str) -> None:
    """Replaces the bounds of numbers by bounds that llguidance represents exactly, in float64 or int64.

    The range of allowed numbers never becomes wider.
    """
    types = _types(rules)
    whole = "integer" in types and "number" not in types
    low, low_open = _bound(rules, "minimum", "exclusiveMinimum", max)
    high, high_open = _bound(rules, "maximum", "exclusiveMaximum", min)
    if "multipleOf" in rules:            # else with_finite_numbers() could end a number before it is a multiple
        low = -LARGEST_FLOAT if low is None else low
        high = LARGEST_FLOAT if high is None else high
    if low is None and high is None:
        return
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        rules.pop(key, None)
    if low is not None:
        if whole:
            low = (math.floor(low) + 1) if low_open else math.ceil(low)
        least = LOWEST_INT if whole else -LARGEST_FLOAT
        if low > (LARGEST_INT if whole else LARGEST_FLOAT):
            raise UserError(f"{where}: minimum must be less than 2^63; got {low}")
        low = _whole(max(_float_above(low), least) if not (whole and abs(low) < 2**53) else low)
        rules["exclusiveMinimum" if low_open and not whole else "minimum"] = low
    if high is not None:
        if whole:
            high = (math.ceil(high) - 1) if high_open else math.floor(high)
        if high < (LOWEST_INT if whole else -LARGEST_FLOAT):
            raise UserError(f"{where}: maximum must be greater than -2^63; got {high}")
        if whole and high >= LARGEST_INT:
            high = LARGEST_INT
        elif not (whole and abs(high) < 2**53):
            high = _whole(min(_float_below(high), LARGEST_FLOAT))
        rules["exclusiveMaximum" if high_open and not whole else "maximum"] = high
    # llguidance has no half-open range that begins at a number of 19 digits
    if high is None and low is not None and low >= 10**18:
        rules["maximum"] = LARGEST_INT if whole else int(LARGEST_FLOAT)
    if low is None and high is not None and high <= -(10**18):
        rules["minimum"] = LOWEST_INT


def _bound(rules: Schema, key: str, exclusive: str, tighter: Callable[[float, float], float]) -> tuple[float | None, bool]:
    """Returns the tighter bound of the two keys, and True if that bound is exclusive.

    In draft 4, the value of the key `exclusive` is true or false.
    """
    bound = rules.get(key)
    other = rules.get(exclusive)
    if isinstance(other, bool) or other is None:
        return bound, other is True
    if bound is None or tighter(bound, other) == other:
        return other, True
    return bound, False


def _float_below(value: float) -> float:
    try:
        result = float(value)
    except OverflowError:
        return math.copysign(LARGEST_FLOAT * 2, value)
    return math.nextafter(result, -math.inf) if result > value else result


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value          # llguidance reads long floats inexactly, but not ints


def _float_above(value: float) -> float:
    return -_float_below(-value)


def _require_exact(rules: Schema, where: str) -> None:
    for key, values in (("const", [rules.get("const")]), ("enum", rules.get("enum", ()))):
        pending = [*values]
        while pending:
            value = pending.pop()
            if isinstance(value, Mapping):
                pending += value.values()
            elif isinstance(value, list):
                pending += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{where}: {key} must contain only finite numbers")
            elif isinstance(value, int) and abs(value) > 2**53 and (abs(value) > 2**1000 or int(float(value)) != value):
                raise UserError(f"{where}: {key} must contain only whole numbers from -2^53 to 2^53; got {value}"[:200])


