"""Declares options as dataclass fields with help and allowed values in their metadata, and checks their values."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rwkv.config.values import require_at_least, require_between, require_one_of
from rwkv.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PATH = "path"                            # PATH, NAME and TEXT are free text, taken verbatim from the command line
NAME = "name"
TEXT = "text"
GRAMMAR = "grammar"                      # Hydra parses the value
LARGEST = 10**15                         # limits whole numbers: len() and islice() accept only numbers of 64 bits


def option(default: Any, help: str, *, one_of: Collection[str] | None = None, least: float | None = None,
           most: float = math.inf, above: float | None = None, below: float = math.inf, verbatim: str | None = None,
           filled: bool = False, needs: tuple[str | bool, ...] = (), heading: str | None = None,
           more: Mapping[str, object] | None = None) -> Any:
    """Returns a dataclass field for one option.

    Args:
        default: the value, or a factory such as list.
        help: the description in --help.
        one_of, least, most, above, below: the allowed values; None is always allowed. With `least`, a number must be finite.
        verbatim: how a value on the command line is read: `PATH` (~/ is expanded), `NAME`, `TEXT` (null is a string) or
            `GRAMMAR`; None: as `free_text_kind` says.
        filled: True if the value must not be empty; implied for paths.
        needs: (option, value, ...): the option that this option requires, and the values that the required option may have;
            without values, any value except null.
        heading: the title in --help above this option and the next ones.
        more: further metadata.
    """
    assert least is not None or most == math.inf, "most requires least"
    assert above is not None or below == math.inf, "below requires above"
    metadata = {"help": help, "heading": heading, "one_of": one_of, "least": least, "most": most, "above": above,
                "below": below, "verbatim": verbatim, "filled": filled or verbatim == PATH, "needs": needs, **(more or {})}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options(schema: type, prefix: str = "") -> dict[str, Field]:
    """Returns the options of a dataclass and of its nested dataclasses, by dotted key."""
    result: dict[str, Field] = {}
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            result |= options(item.type, f"{prefix}{item.name}.")
        else:
            result[prefix + item.name] = item
    return result


def free_text_kind(item: Field) -> str | None:
    """Returns `PATH`, `NAME` or `TEXT` if the option's value is taken verbatim, or None if Hydra parses the value.

    By default, a string option without a list of allowed values is a `NAME`.
    """
    kind: str | None = item.metadata["verbatim"]
    if kind is None and item.type in (str, str | None, list[str]) and not item.metadata["one_of"]:
        return NAME
    return None if kind == GRAMMAR else kind


def check_options(config: "DataclassInstance", group: str = "") -> None:
    """Raises UserError for the first value that its option does not allow.

    Hydra parses true and false as booleans. If an option allows these words among other strings, its value is converted to a
    string. `group` is the prefix of the option names, such as "model.".
    """
    for item in fields(config):
        value = getattr(config, item.name)
        limits = item.metadata
        if value is None or not limits:
            continue
        if limits["filled"] and "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"{group}{item.name} is empty, perhaps because a shell variable is not set: give a value, or omit "
                            f"{group}{item.name}=")
        if limits["one_of"]:
            if "true" in limits["one_of"]:
                value = str(value).lower()
                setattr(config, item.name, value)
            require_one_of(group + item.name, value, limits["one_of"])
        if limits["least"] is not None:
            most = LARGEST if isinstance(value, int) and limits["most"] == math.inf else limits["most"]
            require_at_least(group + item.name, value, limits["least"], most)
        if limits["above"] is not None:
            require_between(group + item.name, value, limits["above"], limits["below"])


def require_effect(config: "DataclassInstance", user_keys: Iterable[str]) -> None:
    """Raises UserError for the first option that the user set and that has no effect in this configuration.

    `user_keys` are the dotted keys that the user set.
    """
    for message in filter(None, (missing_requirement(config, key) for key in user_keys)):
        raise UserError(message)


def missing_requirement(config: "DataclassInstance", key: str) -> str | None:
    """Returns a message if the option `key` has no effect, because the option that it requires has another value; else None."""
    schema = options(type(config))
    needs = schema[key].metadata["needs"] if key in schema else ()
    if not needs:
        return None
    required, *allowed = needs
    value = operator.attrgetter(required)(config)
    if is_met(allowed, value):
        return None
    if not allowed:
        return f"{key} requires {required}=: omit {key}, or set {required}="
    group, _, name = required.rpartition(".")
    switch = group if name in ("name", "method") else required        # data.name is set by data=, tune.method by tune=
    value, *allowed = (str(each).lower() if isinstance(each, bool) else each for each in (value, *allowed))
    return f"{key} requires {switch}={' or '.join(allowed)}; got {switch}={value}: omit {key}, or set {switch}={allowed[0]}"


def is_met(allowed: Sequence[object], value: object) -> bool:
    """Returns True if a required option's value is one of `allowed` or, if none are listed, is not None."""
    return value in allowed if allowed else value is not None
