"""With init_from= the weights of a run of our own, validation may have text that those weights were trained on."""

from pathlib import Path
from typing import Any

from rwkv.checkpoint.files import Checkpoint
from rwkv.config import DataConfig

LAST_PART = ("binidx", "datatrove", "stdlib", "text")     # a smaller data.val_fraction chooses a part of what a larger one does


def warn_of_split(data: DataConfig, sha256: str, before: Checkpoint | None) -> str | None:
    """A sentence if the run that made the weights `before` divided the same data otherwise; None if not.

    sha256: of this run's data. Data are the same if their SHA-256 or their path is.
    """
    own = (before.run or {}).get("data") if before is not None else None
    if before is None or not isinstance(own, dict):
        return None
    if before.data_sha256 != sha256 and _read(own) != _read(vars(data)):
        return None
    fraction = own.get("val_fraction", data.val_fraction)
    inside = data.name in LAST_PART and data.separator is None and data.val_fraction < fraction
    if data.val_fraction == fraction or inside:
        return None
    return (f"the weights of {before.path} were trained on a part of the validation text: their run divided these data with "
            f"data.val_fraction={fraction:g}, and this one has {data.val_fraction:g}; take data.val_fraction={fraction:g} to "
            "validate on text that they have not read")


def _read(data: dict[str, Any]) -> tuple[Any, ...]:
    path = data.get("path")
    names = ("name", "field", "split", "separator") if data.get("name") != "chat" else ("name",)
    sources = [sorted(source.items()) for source in data.get("sources") or ()]
    return (None if path is None else str(Path(path).resolve()), str(sources), *(data.get(name) for name in names))
