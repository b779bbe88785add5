"""Datasets through Hugging Face's `datasets` library: a column of texts, each a document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv.config import DataConfig
from rwkv.data.copies import split_documents
from rwkv.data.source import Source
from rwkv.data.sources.jsonl import between_separators
from rwkv.data.text_files import contents
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.lines import counted

PATH = "a folder that save_to_disk made, a .parquet, .arrow, .json or .csv file, or a dataset's name"
LOCAL = False
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
ROWS = 256                               # rows read at a time


def source(config: DataConfig, cache: Path) -> Source:
    dataset = _load(str(config.path), config.split)
    texts = [name for name, kind in dataset.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if not len(dataset):
        raise UserError(f"data.path={config.path} is empty")
    if config.field not in texts:
        raise UserError(f"data.path={config.path} has no column {config.field!r} of strings; it has "
                        f"{', '.join(texts) or 'none'}: choose with data.field=NAME")

    def documents() -> Iterator[Any]:
        return split_documents(between_separators(_texts(dataset, config), config), config.val_fraction, str(config.path))

    about = f"{config.path}, split {config.split}, {counted(len(dataset), 'row')}, column {config.field}"
    identity = sha256([config.field, *filter(None, [config.separator]), config.split, str(len(dataset)),
                       *_content(dataset, config, cache)])
    return Source(documents, about, identity, int(dataset.data.nbytes))


def _load(path: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("data=hf needs the library `datasets`: pip install datasets") from None
    suffix = Path(path).suffix
    try:
        if (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(path)
        elif suffix in FORMATS:
            found = datasets.load_dataset(FORMATS[suffix], data_files={split: path}, split=split)
        else:
            found = datasets.load_dataset(path, split=split)
    except Exception as error:           # errors of all its sources: files, the network, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load data.path={path} with the library `datasets`: {reason}") from None
    if isinstance(found, dict) and split not in found:
        raise UserError(f"data.path={path} has no split {split!r}; it has {', '.join(found)}: choose with data.split=NAME")
    return found[split] if isinstance(found, dict) else found


def _texts(dataset: Any, config: DataConfig) -> Iterator[tuple[str, str, int | None]]:
    only = dataset.select_columns([config.field])
    for start in range(0, len(only), ROWS):
        for number, text in enumerate(only[start:start + ROWS][config.field], start=start):
            yield text or "", f"{config.path}, row {number}", None


def _content(dataset: Any, config: DataConfig, cache: Path) -> list[str]:
    """Hashes of the dataset's files, or the hash of its texts if it is in memory or has only some rows of its files."""
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if files and getattr(dataset, "_indices", None) is None:
        return [content.sha256 for content in contents(files, cache)]
    return [sha256(text for text, _, _ in _texts(dataset, config))]
