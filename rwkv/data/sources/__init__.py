"""Opens sources of text documents. There is one module per kind of data, with the NAME of data=NAME.

    source = open_source(config.data, cache)
    for document in source.documents():
        document.val, document.where, "".join(document.chunks)

A source can be read repeatedly, always in the same order, and is never entirely in memory. data=binidx and data=datatrove
contain tokens instead of text (see rwkv/data/token_files/).

Each module defines:
    source(config, cache) -> Source
    PATH     a description of data.path for error messages; "" if the kind has no path
    LOCAL    whether data.path must be a file, a folder or a pattern on this machine
"""

import glob
import importlib
from pathlib import Path

from rwkv.config import DataConfig
from rwkv.data.documents.source import Source
from rwkv.errors import UserError


def open_source(config: DataConfig, cache: Path) -> Source:
    """Opens the source that data.name and data.path name. `cache` is the folder for the cached hashes of the files."""
    check_path(config)
    source: Source = importlib.import_module(f"{__name__}.{config.name}").source(config, cache)
    return source


def check_path(config: DataConfig) -> None:
    """Raises UserError if data.path is missing, does not exist, or conflicts with data.name."""
    kind = importlib.import_module(f"{__name__}.{config.name}")
    path = config.path
    if path and not kind.PATH:
        raise UserError(f"data={config.name} conflicts with data.path. To train on {path}, pass data=text as well")
    if kind.PATH and not path:
        raise UserError(f"data={config.name} requires data.path, which must be {kind.PATH}")
    if kind.LOCAL and path and not glob.has_magic(path) and not Path(path).exists():
        raise UserError(f"data.path={path} does not exist. Pass {kind.PATH}")
