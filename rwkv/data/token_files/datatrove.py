"""Finds and reads the shards that datatrove's DocumentTokenizer writes (data=datatrove).

    NAME.ds             the ids, as uint16 or uint32
    NAME.ds.index       the end of each document, counted in ids (D uint64)
    NAME.ds.metadata    a text, which may be missing. The first line is the name of the tokenizer. In newer versions, the bytes
                        per id follow as |2 or |4. The second line is the number of ids.

All numbers are little-endian. Source: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py.

data.path is a shard, or a folder or pattern of shards, which are read in the order of their names.
"""

from functools import partial
from pathlib import Path

import numpy as np

from rwkv.data.files import find_files, natural_key
from rwkv.data.token_files import Index, TokenFile
from rwkv.errors import UserError
from rwkv.io.utf8 import read_bytes

DTYPES = {2: "<u2", 4: "<u4"}            # by bytes per id
STAGES = ("_unshuffled.ds", "_shuffled.ds")      # suffixes of shards with the same documents before and after shuffling


def files(path: str | None) -> list[TokenFile]:
    """Finds the shards that data.path names. Raises UserError if a file is missing."""
    if not path:
        raise UserError("data=datatrove requires data.path, which must be a .ds file, a folder of .ds files, or a pattern")
    named = sorted(find_files(path, (".ds",)), key=lambda pair: natural_key(pair[0]))
    shards = [file for _, file in named if file.suffix == ".ds"]
    if not shards:
        raise UserError(f"data.path={path} has no .ds files")
    if all(any(shard.name.endswith(stage) for shard in shards) for stage in STAGES):
        raise UserError(f"data.path={path} contains both unshuffled and shuffled shards. Choose the shuffled shards with "
                        f"data.path='{path.rstrip('/')}/**/*{STAGES[1]}'")
    for shard in shards:
        if not _with_ending(shard, ".index").is_file():
            raise UserError(f"data.path={path} has no file {shard.name}.index, which must contain the ends of the documents")
        if _with_ending(shard, ".loss").exists():
            raise UserError(f"{shard}.loss selects the ids to learn, which is not supported. Remove the file to learn all ids")
    return [TokenFile("datatrove", shard, _with_ending(shard, ".index"), partial(read_index, shard), _read_metadata(shard)[0])
            for shard in shards]


def read_index(shard: Path) -> Index:
    """Reads the index of a shard. Raises UserError if the index is damaged or does not match the shard."""
    path = _with_ending(shard, ".index")
    content = read_bytes(path, str(path))
    if len(content) % 8:
        raise UserError(f"{path} is truncated or damaged: the file must have 8 bytes per document; got {len(content)} bytes")
    ends = np.frombuffer(content, "<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any():
        raise UserError(f"{path} is damaged: the ends of the documents are not in ascending order")
    tokens = int(ends[-1]) if len(ends) else 0
    size = shard.stat().st_size
    itemsize = _read_metadata(shard)[1] or (size // tokens if tokens and size % tokens == 0 else 2)
    if itemsize not in DTYPES:
        raise UserError(f"{shard} and its index do not match: the shard has {size} bytes for {tokens} ids, but each id must "
                        "have 2 or 4 bytes")
    return Index(DTYPES[itemsize], tokens, np.unique(np.append(0, ends[:-1])))


def _read_metadata(shard: Path) -> tuple[str, int | None]:
    """Reads the tokenizer's name and the bytes per id from the metadata. Returns "" and None for values that are missing."""
    path = _with_ending(shard, ".metadata")
    if not path.is_file():
        return "", None
    name, separator, size = read_bytes(path, str(path)).decode(errors="replace").partition("\n")[0].strip().rpartition("|")
    return (name, int(size)) if separator and size.isdigit() else (f"{name}{separator}{size}", None)


def _with_ending(shard: Path, ending: str) -> Path:
    return shard.with_name(shard.name + ending)
