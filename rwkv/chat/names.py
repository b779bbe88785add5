"""Infers a released model's series, and thus its chat template and training sequence length, from the model's name.

    rwkv7-g1k-1.5b-20260930-ctx25600.pth     RWKV-x070-World-0.4B-v2.9-20250107-ctx4096.pth     BlinkDL's files
    rwkv-g1k-3b-temp-5441.pth                                                                   BlinkDL's weekly checkpoints
    RWKV7-G1k-1.5B-20260930, RWKV7-13.3B-20260805                                               RWKV's models on Hugging Face

A file's metadata takes precedence over its name.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rwkv.chat.metadata import names_in, template_file
from rwkv.io import hub
from rwkv.io.json_types import JsonObject

GENERIC = re.compile(r"(model|pytorch_model|consolidated|tf_model|ggml-model)([-._].*)?\Z")      # describe no model
_SERIES = re.compile(r"(?<![a-z0-9])g([01])([a-z]?)\d*(?![a-z0-9])")
_DATED = re.compile(r"(?<![a-z0-9])rwkv-?(?:7|x070|v7)[a-z]?(?![0-9]).*?(?<!\d)(20\d\d)-?([01]\d)-?([0-3]\d)(?!\d)")
_CONTEXT = re.compile(r"(?<![a-z0-9])ctx(\d{3,7})(?!\d)")
FIRST_G1 = "20250307"                    # release day of rwkv7-g1-0.1b; older models belong to the World or Pile series


class ReleaseGroup(NamedTuple):
    """The G1 models from a letter and release day up to the next group, trained on sequences of at most `context` tokens."""

    letter: str
    day: str
    context: int


SERIES = (ReleaseGroup("", FIRST_G1, 4096), ReleaseGroup("b", "20251202", 8192), ReleaseGroup("h", "20260701", 10240),
          ReleaseGroup("i", "20260801", 16384), ReleaseGroup("k", "20260901", 25600))
WORLD_CONTEXT = 4096


class Choice(NamedTuple):
    """A choice of a chat template. `template` is a name for chat_template(), and `why` is the reason, which is printed."""

    template: str
    why: str


class Length(NamedTuple):
    """A training sequence length. `tokens` is None if the length is unknown. `why` is the source, which is printed."""

    tokens: int | None
    why: str


def choose_template(requested: str | None, path: str, run: JsonObject | None = None) -> Choice:
    """Chooses the requested template, the template that the model was trained with, or the checkpoint's default.

    The first of these that is known is chosen.

    Args:
        path: the checkpoint's path.
        run: the configuration of the training run that wrote the checkpoint.
    """
    if requested:
        return Choice(requested, "set by template=")
    run = run or {}
    if trained := run.get("data", {}).get("template"):
        return Choice(trained, "the template of the training conversations")
    return default_template(path, run.get("init_from"))


def default_template(*names: str | None) -> Choice:
    """Chooses the template in the checkpoint's file or directory (rwkv/chat/metadata.py), or else that of the model's series.

    `names` are the checkpoint's path and other names.
    """
    for name in filter(None, names):
        if file := template_file(Path(name)):
            return Choice(str(file), "from the checkpoint")
    return template_of_series(*names)


def template_of_series(*names: str | None) -> Choice:
    """Chooses the template that BlinkDL uses for the model's series.

    The template is g1 for the series G0 and G1, and for any RWKV-7 model released since the first G1 model. For other models,
    the template is world. The series is inferred from the model's name, or else from a name inside the file.
    """
    return next(filter(None, map(_choice_by_name, _descriptive_names(names))), Choice("world", "default"))


def series_name(*names: str | None) -> str | None:
    """Returns the name, without suffix, from which template_of_series infers the series of the same `names`, or None."""
    name = next(filter(_choice_by_name, _descriptive_names(names)), None)
    return name and (name.removesuffix(Path(name).suffix) if name.endswith((*hub.WEIGHTS, ".pt")) else name)


def _choice_by_name(name: str) -> Choice | None:
    if match := _SERIES.search(name.lower()):
        return Choice("g1", f"{name} belongs to the series G{match[1]}{match[2]}")
    if "world" in name.lower():
        return Choice("world", f"{name} belongs to the World series")
    if "pile" not in name.lower() and _release_day(name) >= FIRST_G1:
        return Choice("g1", f"{name} is dated after the first G1 model")
    return None


def trained_length(*names: str | None) -> Length:
    """Infers the length of the sequences on which a model was trained. `names` are as in default_template."""
    for name in _descriptive_names(names):
        if match := _CONTEXT.search(name.lower()):
            return Length(int(match[1]), f"according to the name {name}")
        if match := _SERIES.search(name.lower()):
            released = [series for series in SERIES if series.letter <= match[2]][-1]
            return Length(released.context, f"as other models of the series G{match[1]}{match[2]}")
        if "world" in name.lower():
            return Length(WORLD_CONTEXT, "as other models of the World series")
        day = _release_day(name)
        if "pile" not in name.lower() and day >= FIRST_G1:
            return Length([series for series in SERIES if series.day <= day][-1].context, "as other models of that time")
    return Length(None, "the length is not in any name")


def _descriptive_names(names: tuple[str | None, ...]) -> Iterator[str]:
    """Yields the parts of the names that may describe the model, with the most specific first, and then names in the files."""
    for name in filter(None, names):
        path = Path(name)
        yield path.name
        if GENERIC.match(path.name.lower()):             # the directory's name describes the model instead
            yield path.parent.name
        yield from (part.rpartition("--")[2] for part in path.parts if part.startswith("models--"))      # Hugging Face's cache
        if path.is_symlink():
            yield path.resolve().name
    for name in filter(None, names):
        yield from (inner.rstrip("/").rpartition("/")[2] for inner in names_in(Path(name)))


def _release_day(name: str) -> str:
    date = _DATED.search(name.lower())
    return "".join(date.groups()) if date else ""        # for example "20260805"
