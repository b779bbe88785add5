"""data=datatrove: shards of datatrove's DocumentTokenizer. NAME.ds has the ids, as uint16 or uint32.

NAME.ds.index contains the end of each document, counted in ids (D uint64). NAME.ds.metadata, which may be missing, is a text:
the first line is the tokenizer's name, followed in newer versions by |2 or |4, the bytes per id; the second line is the number
of ids. All numbers are little-endian. Source: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py.

data.path is a shard, or a folder or pattern of shards, which are read in the order of their names.
"""

from functools import partial
from pathlib import Path

import numpy as np

from rwkv.data.files import matching, natural
from rwkv.data.token_files import Index, TokenFile
from rwkv.errors import UserError
from rwkv.io.utf8 import read_bytes

DTYPES = {2: "<u2", 4: "<u4"}            # by bytes per id
STAGES = ("_unshuffled.ds", "_shuffled.ds")      # suffixes of shards with the same documents before and after shuffling


def files(path: str | None) -> list[TokenFile]:
    """The shards that data.path names. Raises UserError if a file is missing."""
    if not path:
        raise UserError("data=datatrove requires data.path: a .ds file, a folder of them, or a pattern")
    shards = [file for _, file in sorted(matching(path, (".ds",)), key=lambda pair: natural(pair[0])) if file.suffix == ".ds"]
    if not shards:
        raise UserError(f"data.path={path} has no .ds files")
    if all(any(shard.name.endswith(stage) for shard in shards) for stage in STAGES):
        raise UserError(f"data.path={path} has the same shards before and after shuffling: choose the "
                        f"shuffled ones, data.path='{path.rstrip('/')}/**/*{STAGES[1]}'")
    for shard in shards:
        if not _beside(shard, ".index").is_file():
            raise UserError(f"data.path={path}: there is no {shard.name}.index, which contains the ends of documents")
        if _beside(shard, ".loss").exists():
            raise UserError(f"{shard}.loss selects which ids to learn, which is not supported: remove it to learn all ids")
    return [TokenFile("datatrove", shard, _beside(shard, ".index"), partial(read_index, shard), _metadata(shard)[0])
            for shard in shards]


def read_index(shard: Path) -> Index:
    """Reads a shard's index. Raises UserError if it is damaged or does not match the shard."""
    path = _beside(shard, ".index")
    content = read_bytes(path, str(path))
    if len(content) % 8:
        raise UserError(f"{path} must have 8 bytes per document; got {len(content)} bytes: it is truncated or damaged")
    ends = np.frombuffer(content, "<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any():
        raise UserError(f"{path}: the ends of its documents must ascend; it is damaged")
    tokens = int(ends[-1]) if len(ends) else 0
    size = shard.stat().st_size
    itemsize = _metadata(shard)[1] or (size // tokens if tokens and size % tokens == 0 else 2)
    if itemsize not in DTYPES:
        raise UserError(f"{shard} has {size} bytes for {tokens} ids: an id must have 2 or 4 bytes; the files do not match")
    return Index(DTYPES[itemsize], tokens, np.unique(np.append(0, ends[:-1])))


def _metadata(shard: Path) -> tuple[str, int | None]:
    """The tokenizer's name ("" if not stated) and the bytes per id (None if not stated), from the metadata."""
    path = _beside(shard, ".metadata")
    if not path.is_file():
        return "", None
    name, separator, size = read_bytes(path, str(path)).decode(errors="replace").partition("\n")[0].strip().rpartition("|")
    return (name, int(size)) if separator and size.isdigit() else (f"{name}{separator}{size}", None)


def _beside(shard: Path, ending: str) -> Path:
    return shard.with_name(shard.name + ending)
