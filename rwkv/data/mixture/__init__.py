"""Reads the definitions of the sources of data=mix from data.sources.

    data.sources=[{path: web/*.jsonl.gz, weight: 0.7}, {name: code, data: hf, path: ORG/NAME, field: content, weight: 0.3}]

    weight   the source's fraction of the training tokens, relative to the sum of all weights
    name     the NAME in val/loss/NAME, the metric of the source's validation loss; by default the last part of the path
    data     the kind of data, as in data=; by default inferred from the path

The other keys are options as in a run on that source alone. Each source has its own validation split, as in a run on that
source alone. All sources use the same tokenizer. This module does not import PyTorch.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from kernels.arguments import from_home
from rwkv.config import SOURCES, TOKENS, DataConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject

TEXTS = ("name", "path", "field", "separator", "split", "config")
ENTRIES = (*TEXTS, "data", "weight", "val_fraction")
KINDS = tuple(kind for kind in (*SOURCES, *TOKENS) if kind != "chat")
EXAMPLE = "data.sources=[{path: A.jsonl, weight: 0.7}, {path: B.txt, weight: 0.3}]"
SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "hf",
           ".arrow": "hf", ".csv": "hf", ".tsv": "hf", ".bin": "binidx", ".idx": "binidx",
           ".ds": "datatrove"}


class MixedSource(NamedTuple):
    """A source of data=mix.

    `share` is its fraction of the training tokens, and all shares add up to 1. `config` is the configuration of a run on this
    source alone.
    """

    name: str
    share: float
    config: DataConfig


def mixed_sources(config: DataConfig) -> list[MixedSource]:
    """Returns the sources of data=mix. Raises UserError if an entry is invalid or two sources have the same name."""
    if not config.sources:
        raise UserError(f"data=mix requires data.sources, for example {EXAMPLE}")
    for number, entry in enumerate(config.sources):
        _check_entry(entry, f"data.sources[{number}]")
    total = sum(entry["weight"] for entry in config.sources)
    sources = [MixedSource(str(entry.get("name") or _default_name(entry)), entry["weight"] / total,
                           _config_of(entry, config, f"data.sources[{number}]")) for number, entry in enumerate(config.sources)]
    names = [source.name for source in sources]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"the names in data.sources must be unique; got {duplicate} twice. Add name: NAME to one of these "
                        "entries")
    return sources


def names_of(config: DataConfig) -> list[str]:
    """Returns the names of the sources of data=mix, or [] for any other kind of data."""
    return [source.name for source in mixed_sources(config)] if config.name == "mix" else []


def source_metric(name: str) -> str:
    """Returns the name of the metric for a source's validation loss."""
    return f"val/loss/{name}"


@contextmanager
def prefix_errors(source: str) -> Iterator[None]:
    """Adds the source's name to the message of a UserError that is raised inside the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.sources, {source}: {error}") from None


def _check_entry(entry: object, where: str) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be {{path: PATH, weight: NUMBER}}; got {entry}")
    for key in entry:
        if key not in ENTRIES:
            close = get_close_matches(str(key), ENTRIES, n=1)
            raise UserError(f"{where} has the unknown key {key}. "
                            + (f"Did you mean {close[0]}?" if close else f"The known keys are {', '.join(ENTRIES)}"))
    for key in ("data", *TEXTS):
        if isinstance(entry.get(key), (bool, list, dict)):
            raise UserError(f"{where}.{key} must be a string (quote it if YAML reads another type); got {entry[key]!r:.60}")
    weight = entry.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight must be a positive finite number; got {weight!r}")
    fraction = entry.get("val_fraction", 0.1)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise UserError(f"{where}.val_fraction must be a number between 0 and 1; got {fraction}")
    name = str(entry.get("name") or "")
    if not re.fullmatch(r"[^\s/,\"]*", name):
        raise UserError(f"{where}.name must not contain spaces, commas, slashes or quotes, because the name becomes part of "
                        f"the names of metrics; got {name}")


def _config_of(entry: JsonObject, config: DataConfig, where: str) -> DataConfig:
    path = None if entry.get("path") is None else from_home(str(entry["path"]))
    kind = entry.get("data") or _infer_kind(path, where)
    if kind not in KINDS:
        reason = ", but conversations cannot be mixed" if kind == "chat" else ""
        raise UserError(f"{where}.data must be one of {', '.join(KINDS)}; got {kind}{reason}")
    overrides: JsonObject = {name: str(entry[name]) for name in TEXTS if entry.get(name) is not None}
    if entry.get("val_fraction") is not None:
        overrides["val_fraction"] = entry["val_fraction"]
    try:
        return replace(config, sources=[], **overrides | {"path": path, "name": kind})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _infer_kind(path: str | None, where: str) -> str:
    if path is None:
        raise UserError(f"{where} has no path. An example is {EXAMPLE}")
    folder = Path(path)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        return "hf"
    if folder.is_dir():
        kinds = {_kind_by_suffix(file.name) for file in folder.rglob("[!.]*") if file.is_file()} - {None}
        if len(kinds) == 1:
            return str(*kinds)
    elif kind := _kind_by_suffix(folder.name):
        return kind
    elif Path(f"{path}.bin").is_file():
        return "binidx"
    elif not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):         # looks like a dataset's name on the Hub
        return "hf"
    raise UserError(f"{where}: the kind of data cannot be inferred from the path {path}. Add data: {'|'.join(KINDS)} to the "
                    "entry")


def _kind_by_suffix(name: str) -> str | None:
    return next((kind for ending, kind in SUFFIXES.items() if name.endswith(ending)), None)


def _default_name(entry: JsonObject) -> str:
    parts = [part for part in re.split(r"[/\\]", str(entry.get("path") or "")) if part and "*" not in part]
    name = re.sub(r"[\s,\"]+", "_", parts[-1]) if parts else str(entry.get("data"))
    for ending in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(ending)
    return name
