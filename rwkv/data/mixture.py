"""The sources of data=mix: what data.sources says of each, and what the plan says of them.

    data.sources=[{path: web/*.jsonl.gz, weight: 0.7}, {name: code, data: hf, path: ORG/NAME, field: content, weight: 0.3}]

weight: the source's share of the tokens that training reads, over the sum of all weights. name: of its validation loss,
val/loss/NAME; by default the last part of its path. data: its kind, as of data=; by default inferred from its path. The other
entries are the options of a run on that source alone (OF_SOURCE).

Each source has a validation split of its own, as in a run on that source alone, and all have the same tokenizer. Needs no
PyTorch.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from kernels.arguments import from_home
from rwkv.config import SOURCES, TOKENS, DataConfig
from rwkv.errors import UserError

OF_SOURCE = ("path", "field", "separator", "split", "val_fraction")
ENTRIES = ("name", "data", "weight", *OF_SOURCE)
KINDS = tuple(kind for kind in (*SOURCES, *TOKENS) if kind != "chat")
EXAMPLE = "data.sources=[{path: A.jsonl, weight: 0.7}, {path: B.txt, weight: 0.3}]"
ENDINGS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "hf",
           ".arrow": "hf", ".csv": "hf", ".tsv": "hf", ".bin": "binidx", ".idx": "binidx",
           ".ds": "datatrove"}


class MixedSource(NamedTuple):
    """A source's name, its share of the training tokens (all shares add up to 1), and the options of a run on it alone."""

    name: str
    share: float
    config: DataConfig


def mixed_sources(config: DataConfig) -> list[MixedSource]:
    """The sources of data=mix. Raises UserError for an entry that is wrong."""
    if not config.sources:
        raise UserError(f"data=mix needs data.sources: {EXAMPLE}")
    for number, entry in enumerate(config.sources):
        _check_entry(entry, f"data.sources[{number}]")
    total = sum(entry["weight"] for entry in config.sources)
    found = [MixedSource(str(entry.get("name") or _default_name(entry)), entry["weight"] / total,
                         _config_of(entry, config, f"data.sources[{number}]")) for number, entry in enumerate(config.sources)]
    names = [source.name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two of data.sources have the name {twice}: give each a name of its own, name: NAME")
    return found


def names_of(config: DataConfig) -> list[str]:
    """The names of the sources; none for data of another kind."""
    return [source.name for source in mixed_sources(config)] if config.name == "mix" else []


def source_metric(name: str) -> str:
    """The name of a source's validation loss among the metrics."""
    return f"val/loss/{name}"


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Names the source in a UserError from inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.sources, {source}: {error}") from None


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be {{path: PATH, weight: NUMBER}}; got {entry}")
    for key in entry:
        if key not in ENTRIES:
            close = get_close_matches(str(key), ENTRIES, n=1)
            raise UserError(f"{where} has the unknown entry {key}; "
                            + (f"did you mean {close[0]}?" if close else f"there are: {', '.join(ENTRIES)}"))
    weight = entry.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight must be a number above 0; got {weight}")
    fraction = entry.get("val_fraction", 0.1)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise UserError(f"{where}.val_fraction must be a number between 0 and 1; got {fraction}")
    name = str(entry.get("name") or "")
    if not re.fullmatch(r"[^\s/,\"]*", name):
        raise UserError(f"{where}.name must be a name without spaces, commas and slashes, as metrics have it; got {name}")


def _config_of(entry: dict[str, Any], config: DataConfig, where: str) -> DataConfig:
    path = None if entry.get("path") is None else from_home(str(entry["path"]))
    kind = entry.get("data") or _kind_of(path, where)
    if kind not in KINDS:
        alone = "; conversations are trained on alone" if kind == "chat" else ""
        raise UserError(f"{where}.data must be one of {', '.join(KINDS)}; got {kind}{alone}")
    given = {name: entry[name] for name in OF_SOURCE if entry.get(name) is not None} | {"path": path}
    try:
        return replace(config, sources=[], **given, name=kind)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _kind_of(path: str | None, where: str) -> str:
    """The kind of data at a path, by its ending or those of the files in a folder. Raises UserError where none says it."""
    if path is None:
        raise UserError(f"{where} has no path: {EXAMPLE}")
    folder = Path(path)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        return "hf"
    if folder.is_dir():
        kinds = {_by_ending(file.name) for file in folder.rglob("[!.]*") if file.is_file()} - {None}
        if len(kinds) == 1:
            return str(*kinds)
    elif kind := _by_ending(folder.name):
        return kind
    elif Path(f"{path}.bin").is_file():
        return "binidx"
    elif not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):         # a data set's name
        return "hf"
    raise UserError(f"{where}: the path {path} does not say what kind of data it is: add data: {'|'.join(KINDS)}")


def _by_ending(name: str) -> str | None:
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), None)


def _default_name(entry: dict[str, Any]) -> str:
    """The last part of the path without wildcards and endings, or else the kind."""
    parts = [part for part in re.split(r"[/\\]", str(entry.get("path") or "")) if part and "*" not in part]
    name = re.sub(r"[\s,\"]+", "_", parts[-1]) if parts else str(entry.get("data"))
    for ending in sorted(ENDINGS, key=len, reverse=True):
        name = name.removesuffix(ending)
    return name
