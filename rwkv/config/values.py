"""Parses and checks single values. Each error is a UserError that begins with the option's name."""

import math
import operator
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rwkv.errors import UserError


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """Returns `value` as an int. Raises UserError unless `value` is a whole number from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number; got {value!r}") from None
    if not least <= number <= most:
        raise UserError(f"{name} must be {f'{least} or more' if most == math.inf else f'from {least} to {most}'}; got {number}")
    return number


def whole_numbers(name: str, values: Iterable[Any], most: float = math.inf) -> tuple[int, ...]:
    """Returns `values` as ints. Raises UserError unless all values are whole numbers from 0 to `most`."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of whole numbers; got {values!r}")
    return tuple(whole_number(name, value, most=most) for value in values)


def strings(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Returns `values` as a tuple. Raises UserError unless `values` is a list of strings."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of strings; got a {type(values).__name__}")
    values = tuple(values)
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{name} must be a list of strings; got the item {value!r}")
    return values


def biases(texts: Iterable[str]) -> dict[int, float]:
    """Parses strings ID:X into {ID: X}. Raises UserError for any other string."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(f"logit_bias must be TOKEN_ID:NUMBER, as in logit_bias=198:-5; got {text!r}") from None
    return biases


def texts_and_ids(texts: Iterable[str]) -> list[str | int]:
    """Returns `texts` as a list in which each string [ID,...] is replaced by its token ids."""
    entries: list[str | int] = []
    for text in texts:
        ids = re.fullmatch(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]", text, re.ASCII)
        entries += map(int, ids[1].split(",")) if ids else [text]
    return entries


def texts_or_whole_numbers(name: str, values: Any) -> tuple[int | str, ...]:
    """Returns `values` as a tuple. Raises UserError unless all values are token ids or non-empty strings."""
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, Iterable) or "" in (values := tuple(values)):
        raise UserError(f"{name} must be a list of token ids and non-empty strings; got {values!r}")
    return tuple(value if isinstance(value, str) else whole_number(name, value) for value in values)


def require_type(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Raises UserError unless `value` has one of the types. `expected` describes a valid value for the message."""
    if not isinstance(value, types):
        is_simple = value is None or isinstance(value, (str, bytes, int, float, Path, type))
        shown = repr(value)[:60] if is_simple else f"a value of the type {type(value).__name__}"
        raise UserError(f"{name} must be {expected}; got {shown}")


def require_path(name: str, value: object) -> None:
    require_type(name, value, (str, Path), "a string or a Path")
    if value == "":                      # Path("") is the current directory
        raise UserError(f"{name} must not be empty")


def require_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def require_at_least(name: str, value: float, least: float, most: float) -> None:
    if not value >= least:
        raise UserError(f"{name} must be at least {least}; got {value}")
    if value > most:
        raise UserError(f"{name} must be at most {most}; got {value}")
    if value == math.inf:
        raise UserError(f"{name} must be a finite number; got {value}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        allowed = f"a finite number above {low:g}" if high == math.inf else f"above {low:g} and below {high:g}"
        raise UserError(f"{name} must be {allowed}; got {value:g}")
