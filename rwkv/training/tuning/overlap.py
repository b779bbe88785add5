"""Warns if the validation text includes text on which another timemix run has trained the weights of init_from=."""

from pathlib import Path

from rwkv.checkpoint.files import Checkpoint
from rwkv.config import DataConfig
from rwkv.io.json_types import JsonObject

LAST_PART = ("binidx", "datatrove", "stdlib", "text")     # a smaller data.val_fraction selects part of a larger split


def warn_of_split(data: DataConfig, sha256: str, base: Checkpoint | None) -> str | None:
    """Returns a warning if the run that trained the base weights split the same data differently, or else None.

    Two runs have the same data if the SHA-256 or the path is equal. `sha256` is the SHA-256 of this run's data.
    """
    base_data = (base.run or {}).get("data") if base is not None else None
    if base is None or not isinstance(base_data, dict):
        return None
    if base.data_sha256 != sha256 and _source_key(base_data) != _source_key(vars(data)):
        return None
    fraction = base_data.get("val_fraction", data.val_fraction)
    inside = data.name in LAST_PART and data.separator is None and data.val_fraction < fraction
    if data.val_fraction == fraction or inside:
        return None
    return (f"the weights of {base.path} were trained on a part of the validation text: that run had "
            f"data.val_fraction={fraction:g}, but this run has {data.val_fraction:g}. Use data.val_fraction={fraction:g} to "
            "validate on unseen text")


def _source_key(data: JsonObject) -> tuple[object, ...]:
    path = data.get("path")
    names = ("name", "field", "config", "split", "separator") if data.get("name") != "chat" else ("name",)
    sources = [sorted(source.items()) for source in data.get("sources") or ()]
    return (None if path is None else str(Path(path).resolve()), str(sources), *(data.get(name) for name in names))
