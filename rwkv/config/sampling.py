"""Declares the sampling options, which programs and requests share, with their ranges."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar

from rwkv.config.schema import GRAMMAR, TEXT, option
from rwkv.config.values import biases, require_one_of, texts_and_ids, texts_or_whole_numbers, whole_number, whole_numbers
from rwkv.errors import UserError

SMALL = 1e-30                            # bounds of options that scale logits, so that logits stay in float32's range
LARGE = 1e30
ORDERS = ("hf", "rwkv")


def sampling_option(default: Any, help: str, *, least: float | None = None, most: float = math.inf, or_zero: bool = False,
                    served: tuple[float, float] | None = None, one_of: tuple[str, ...] | None = None, typed: Any = None,
                    read: Callable[[Any], Any] | None = None, verbatim: str | None = None) -> Any:
    """Returns a field of Sampling, which is an `option` with more metadata.

    Args:
        or_zero: True if 0 is allowed in addition to the range.
        served: the range in HTTP requests, if OpenAI's API has a different range.
        typed: the type on the command line, if different from the field's type.
        read: a function that converts a value of the type `typed` to the field's type.
    """
    return option(default, help, least=least, most=most, one_of=one_of, verbatim=verbatim,
                  more={"or_zero": or_zero, "served": served, "typed": typed, "read": read})


def _as_float(number: Real) -> float:
    """Returns the number as a float, or infinity for an integer that is too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Sampling:
    """The sampling options of the command line, HTTP requests, the engine and kernels/draw.

    The options of generate.py, chat.py and serve.py and the fields of requests are derived from the fields below. Raises
    UserError for a value out of range or of the wrong type. Integers may be NumPy's or torch's, other numbers NumPy's or
    fractions. Each answer of a conversation, and each sequence that continues a saved state, starts without presence and
    frequency penalties.

    Attributes:
        repetition_penalty: penalty of tokens in the prompt or the output (CTRL, arXiv 1909.05858). The formulas of all
            penalties are in rwkv/generation/sampling.py.
        presence_penalty, frequency_penalty: penalties of tokens in the output (OpenAI's API).
        penalty_decay: factor on the counts of frequency_penalty for each new token, as in the demos of RWKV's author.
        no_penalty: tokens without penalties, given as ids or as texts of one or more tokens.
        banned: tokens that are never drawn.
    """

    temperature: float = sampling_option(0.8, "temperature; 0: greedy", least=SMALL, most=LARGE, or_zero=True, served=(0, 2))
    top_k: int = sampling_option(0, "sample from the top k tokens; 0: all", least=0, served=(-1, 2**31 - 1))
    top_p: float = sampling_option(0.95, "nucleus sampling: the likeliest tokens with this total probability; 1: all",
                                   least=SMALL, most=1, served=(0, 1))
    min_p: float = sampling_option(0.0, "minimum probability, relative to the likeliest token; 0: off", least=0, most=1)
    repetition_penalty: float = sampling_option(1.0, "penalty of tokens in the prompt or the output: divides their logits if "
                                                "positive, else multiplies them; 1: off", least=SMALL, most=LARGE,
                                                served=(0.01, 100))
    presence_penalty: float = sampling_option(0.0, "subtracted from the logit of each token in the output so far; 0: off",
                                              least=-LARGE, most=LARGE, served=(-2, 2))
    frequency_penalty: float = sampling_option(0.0, "subtracted once per occurrence of the token in the output so far; 0: off",
                                               least=-LARGE, most=LARGE, served=(-2, 2))
    penalty_decay: float = sampling_option(1.0, "factor per step on the counts of frequency_penalty, so that they fade; 1: off",
                                           least=0, most=1)
    no_penalty: tuple[int | str, ...] = sampling_option(tuple, "text whose tokens have no penalty, or token ids as [ID,...]; "
                                                        "repeatable", typed=list[str], read=texts_and_ids, verbatim=TEXT)
    logit_bias: Mapping[int, float] = sampling_option(dict, "ID:X adds X to a token's logit; repeatable", typed=list[str],
                                                      read=biases, least=-LARGE, most=LARGE, served=(-100, 100))
    banned: tuple[int, ...] = sampling_option(tuple, "[ID,...]: tokens never sampled, such as [0], the end-of-text token of "
                                              "many models", typed=list[int])
    order: str = sampling_option("hf", "order of the filters: hf: temperature before top_p, top_k and min_p, as in Hugging "
                                 "Face; rwkv: after top_p, top_k and min_p, as in ChatRWKV", one_of=ORDERS)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int:
                value = whole_number(item.name, value, item.metadata["least"], item.metadata["most"])
                object.__setattr__(self, item.name, value)
            else:
                self._check(item, value)
            if item.type is float:
                object.__setattr__(self, item.name, float(value))        # a Fraction cannot be multiplied by a tensor
        tokens = whole_numbers("logit_bias: each token id", self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(zip(tokens, map(float, self.logit_bias.values()), strict=True)))
        object.__setattr__(self, "banned", whole_numbers("banned", self.banned))
        object.__setattr__(self, "no_penalty", texts_or_whole_numbers("no_penalty", self.no_penalty))

    @staticmethod
    def _check(item: Field, value: Any) -> None:
        """Raises UserError for a wrong type or a value out of range, except for integers, which whole_number checks."""
        limits = item.metadata
        if limits["one_of"]:
            require_one_of(item.name, value, limits["one_of"])
        if item.type == Mapping[int, float]:
            if not isinstance(value, Mapping):
                raise UserError(f"{item.name} must be a dict that maps token ids to numbers; got {value!r}")
        elif limits["least"] is None:
            return
        for number in value.values() if isinstance(value, Mapping) else [value]:
            fits = isinstance(number, Real) and (limits["least"] <= _as_float(number) <= limits["most"] or
                                                 (limits["or_zero"] and number == 0))
            if not fits:
                up_to = "" if limits["most"] == math.inf else f" to {limits['most']:g}"
                raise UserError(f"{item.name} must be {'0, or ' * limits['or_zero']}a number from {limits['least']:g}{up_to}; "
                                f"got {number!r}")

    @classmethod
    def from_config(cls, config: Any) -> "Sampling":
        """Returns the sampling options of a program's configuration. Raises UserError for a value out of range."""
        values = {}
        for item in fields(cls):
            read = item.metadata["read"]
            value = getattr(config, item.name)
            values[item.name] = read(value) if read else value
        return cls(**values)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Returns the options as a hashable tuple."""
        values = [getattr(self, item.name) for item in fields(self)]
        return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without the cached hash, because strings have other hashes in another process."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError if a token id is outside the vocabulary, or all tokens are banned."""
        for name in ("logit_bias", "banned", "no_penalty"):
            for token in getattr(self, name):
                if isinstance(token, int) and not 0 <= token < vocab_size:
                    raise UserError(f"{name} must contain only token ids from 0 to {vocab_size - 1}; got {token}")
        if len({*self.banned}) >= vocab_size:
            raise UserError(f"banned contains all {vocab_size} tokens of the vocabulary: at least one token must be allowed")

    def ids_without_penalty(self, tokenizer: Any) -> tuple[int, ...]:
        """Returns the sorted token ids of `no_penalty`. Raises UserError for a string that the tokenizer cannot encode."""
        texts = [entry for entry in self.no_penalty if isinstance(entry, str)]
        try:
            encoded = tokenizer.encode_within(texts)
        except UserError as error:
            raise UserError(f"no_penalty: {error}") from None
        return tuple(sorted({entry for entry in self.no_penalty if isinstance(entry, int)}.union(*encoded)))

    def __str__(self) -> str:
        """Formats temperature, top_p and all options without their default value: "temperature 0.8, top_p 0.95, order rwkv"."""
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if value != default or item.name in ("temperature", "top_p"):
                parts.append(f"{item.name} {_format(value)}")
        return ", ".join(parts)


def _format(value: object) -> str:
    if isinstance(value, Mapping):
        return "[" + ",".join(f"{token}:{bias:g}" for token, bias in value.items()) + "]"
    if isinstance(value, tuple):
        return "[" + ",".join(map(repr, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def preset_option(name: str, heading: str = "Sampling") -> Any:
    """Declares the option `sampling`, which names a preset: a file in configs/sampling with the other sampling options."""
    return option(name, "preset for the options below; default: that of the checkpoint or model family (docs/chat.md)",
                  verbatim=GRAMMAR, heading=heading)


Config = TypeVar("Config")


def with_sampling(config: type[Config]) -> type[Config]:
    """Adds the options of Sampling as fields after the field `sampling`. This class decorator is placed below @dataclass."""
    annotations: dict[str, Any] = {}
    for name, kind in config.__annotations__.items():
        annotations[name] = kind
        for item in fields(Sampling) if name == "sampling" else ():
            typed = item.metadata["typed"]
            metadata = {**item.metadata, "least": None}          # Sampling.from_config checks the range
            annotations[item.name] = typed or item.type
            setattr(config, item.name, field(default_factory=list, metadata=metadata) if typed else
                    field(default=item.default, metadata=metadata))
    config.__annotations__ = annotations
    return config
