"""Sources of text, document by document: one module per kind, named like the value of data=.

    source = open_source(config.data, cache)
    for document in source.documents():
        document.val, document.where, "".join(document.chunks)

A source can be read repeatedly, always in the same order, and is never entirely in memory. data=binidx and data=datatrove
contain tokens, not text (rwkv/data/token_files/).

A kind has source(config, cache) -> Source; PATH, what data.path is, for errors ("" if there is none); and LOCAL, whether
data.path is always a file, a folder or a pattern on this machine.
"""

import glob
import importlib
from pathlib import Path

from rwkv.config import DataConfig
from rwkv.data.documents.source import Source
from rwkv.errors import UserError


def open_source(config: DataConfig, cache: Path) -> Source:
    """The source of data.name and data.path. cache: the folder for hashes of its files."""
    check_path(config)
    source: Source = importlib.import_module(f"{__name__}.{config.name}").source(config, cache)
    return source


def check_path(config: DataConfig) -> None:
    """Raises UserError if data.path is missing, does not exist, or conflicts with data.name."""
    kind = importlib.import_module(f"{__name__}.{config.name}")
    path = config.path
    if path and not kind.PATH:
        raise UserError(f"data={config.name} conflicts with data.path: to train on {path}, pass data=text as well")
    if kind.PATH and not path:
        raise UserError(f"data={config.name} requires data.path: {kind.PATH}")
    if kind.LOCAL and path and not glob.has_magic(path) and not Path(path).exists():
        raise UserError(f"data.path={path} does not exist: pass {kind.PATH}")
