"""Declaration and checks of options: fields of dataclasses whose metadata holds the help and the allowed values."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rwkv.config.values import require_at_least, require_between, require_one_of
from rwkv.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PATH = "path"                            # kinds of free text, taken verbatim from the command line
NAME = "name"
TEXT = "text"
GRAMMAR = "grammar"                      # no free text: Hydra parses the value


def option(default: Any, help: str, *, one_of: Collection[str] | None = None, least: float | None = None,
           most: float = math.inf, above: float | None = None, below: float = math.inf, verbatim: str | None = None,
           filled: bool = False, needs: tuple[str | bool, ...] = (), heading: str | None = None,
           more: Mapping[str, object] | None = None) -> Any:
    """A dataclass field for one option.

    default: the value, or a factory such as list. help: its text in --help. heading: the title in --help above this option and
    the next ones. one_of, least, most, above and below: the allowed values; None is always allowed. With least, a number must
    be finite. verbatim: how a typed value is read: PATH (~/ is expanded), NAME, TEXT (null is a string) or GRAMMAR; None:
    free_text decides. filled: the value must not be empty. needs: (option, value, ...), another option and the values one of
    which it must have. more: further metadata.
    """
    assert least is not None or most == math.inf, "most requires least"
    assert above is not None or below == math.inf, "below requires above"
    metadata = {"help": help, "heading": heading, "one_of": one_of, "least": least, "most": most, "above": above,
                "below": below, "verbatim": verbatim, "filled": filled, "needs": needs, **(more or {})}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options(schema: type, prefix: str = "") -> dict[str, Field]:
    """The options of a dataclass and of the dataclasses nested in it, by dotted key."""
    result: dict[str, Field] = {}
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            result |= options(item.type, f"{prefix}{item.name}.")
        else:
            result[prefix + item.name] = item
    return result


def free_text(item: Field) -> str | None:
    """PATH, NAME or TEXT if the option's value is taken verbatim; None if Hydra's grammar parses it.

    By default, a string option without a list of choices is a NAME, taken verbatim.
    """
    kind: str | None = item.metadata["verbatim"]
    if kind is None and item.type in (str, str | None, list[str]) and not item.metadata["one_of"]:
        return NAME
    return None if kind == GRAMMAR else kind


def check_options(config: "DataclassInstance", group: str = "") -> None:
    """Raises UserError for the first value that its option does not allow. group: the prefix of option names, "model.".

    Converts True and False to "true" and "false" if the option allows these among other strings: Hydra parses them as booleans.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        limits = item.metadata
        if value is None or not limits:
            continue
        if limits["filled"] and "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"{group}{item.name} is empty (an unset shell variable?): give a value, or leave "
                            f"{group}{item.name}= out")
        if limits["one_of"]:
            if "true" in limits["one_of"]:
                value = str(value).lower()
                setattr(config, item.name, value)
            require_one_of(group + item.name, value, limits["one_of"])
        if limits["least"] is not None:
            require_at_least(group + item.name, value, limits["least"], limits["most"])
        if limits["above"] is not None:
            require_between(group + item.name, value, limits["above"], limits["below"])


def require_effect(config: "DataclassInstance", user_keys: Iterable[str]) -> None:
    """Raises UserError for the first option that the user set although it has no effect in this configuration."""
    schema = options(type(config))
    for key in user_keys:
        needs = schema[key].metadata["needs"] if key in schema else ()
        if not needs:
            continue
        required, *allowed = needs
        value = operator.attrgetter(required)(config)
        if value not in allowed:
            group, _, name = required.rpartition(".")
            shown = group if name in ("name", "method") else required        # data.name is set by data=, tune.method by tune=
            value, *allowed = (str(each).lower() if isinstance(each, bool) else each for each in (value, *allowed))
            raise UserError(f"{key} requires {shown}={' or '.join(allowed)}; got {shown}={value}: leave {key} out, or give "
                            f"{shown}={allowed[0]}")
