"""Finds and reads the token files of Megatron and RWKV-LM (data=binidx).

NAME.bin contains the ids, and NAME.idx the offsets of documents. The .idx is little-endian:
    9 bytes    "MMIDIDX" and two zeros
    8 bytes    version 1
    1 byte     the type of the ids
    8 bytes    S, the number of sequences
    8 bytes    D, the number of document entries
    S int32    the lengths of the sequences in ids
    S int64    the offsets of the sequences in the .bin, in bytes
    D int64    the first sequence of each document, and S at the end

Sources: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py; BlinkDL/RWKV-LM, RWKV-v5/src/binidx.py.

data.path=NAME stands for NAME.bin, for Megatron's NAME_text_document.bin, or for parts such as NAME_00000.bin, NAME_00001.bin,
... A folder or a pattern stands for all pairs of files in it. Parts are read in the order of their names, with numbers in
numerical order.
"""

import glob
import re
from functools import partial
from pathlib import Path

import numpy as np

from rwkv.data.files import find_files, natural_key
from rwkv.data.token_files import Index, TokenFile
from rwkv.errors import UserError
from rwkv.io.utf8 import open_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34                              # bytes
DTYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}         # Megatron's codes 6 and 7 are floats
PARTS = re.compile(r"[_.-]?(?:part|shard)?[_.-]?(?P<number>\d+)(?:[_.-]of[_.-](?P<of>\d+))?(?P<kind>_\w+)?")   # follows NAME


def files(path: str | None) -> list[TokenFile]:
    """Finds the token files that data.path names. Raises UserError if a file is missing."""
    if not path:
        raise UserError("data=binidx requires data.path=NAME for the files NAME.bin and NAME.idx, or for the parts "
                        "NAME_00000.bin, NAME_00000.idx, ...")
    base = path.removesuffix(".bin").removesuffix(".idx")
    if Path(path).is_dir() or (glob.has_magic(path) and not Path(f"{base}.bin").exists()):
        bases = {str(file.with_suffix("")) for _, file in find_files(path, (".bin", ".idx")) if file.suffix in (".bin", ".idx")}
    elif Path(f"{base}.bin").is_file() or Path(f"{base}.idx").is_file():
        bases = {base}
    else:
        bases = {*_part_names(Path(base))} or {base}
    pairs = [Path(f"{base}{suffix}") for base in sorted(bases, key=natural_key) for suffix in (".bin", ".idx")]
    missing = [file.name for file in pairs if not file.is_file()]
    if missing or not bases:
        raise UserError(f"data.path={path} has no {' and no '.join(missing[:4]) or '.bin file'}, but data=binidx requires "
                        "NAME.bin and NAME.idx")
    return [TokenFile("binidx", Path(f"{base}.bin"), Path(f"{base}.idx"), partial(read_index, Path(f"{base}.idx")))
            for base in sorted(bases, key=natural_key)]


def _part_names(base: Path) -> list[str]:
    """Returns the paths, without suffixes, of Megatron's NAME_KEY_document or of the parts of NAME."""
    names = {file.stem: file.stem.removeprefix(base.name) for file in base.parent.glob(f"{glob.escape(base.name)}*")
             if file.suffix in (".bin", ".idx") and file.is_file()} if base.parent.is_dir() else {}
    megatron_names = [name for name, rest in names.items() if re.fullmatch(r"_\w+_(?:document|sentence)", rest)
                      and not PARTS.fullmatch(rest)]
    matched = {name: match for name, rest in names.items() if (match := PARTS.fullmatch(rest))}
    kinds = {match["kind"] for match in matched.values()} | {*megatron_names}
    if len(kinds) > 1:
        raise UserError(f"data.path={base} is ambiguous, because several files match: "
                        f"{', '.join(sorted([*megatron_names, *matched])[:6])}. Pass a longer part of the name, or a pattern")
    numbers = {int(match["number"]) for match in matched.values()}
    most = max((int(match["of"]) for match in matched.values() if match["of"]), default=0)
    first, last = min(numbers, default=0), max(numbers, default=-1)
    absent = {*range(first, max(last + 1, first + most))} - numbers
    if absent:
        raise UserError(f"data.path={base}: part {min(absent)} is missing, but {min(matched)} exists. To train without the "
                        "missing part, pass a pattern that matches the existing parts")
    return [str(base.with_name(name)) for name in (*megatron_names, *matched)]


def read_index(path: Path) -> Index:
    """Reads an .idx file. Raises UserError if the file has a different format or is truncated."""
    with open_file(path) as file:
        data = file.read(HEADER)
    if data.startswith(b"TNTIDX"):
        raise UserError(f"{path} has fairseq's older format TNTIDX, which is not supported. Create the file again with "
                        "Megatron-LM")
    if data[:9] != MAGIC or len(data) < HEADER:
        raise UserError(f'{path} is not the index of a .bin file: an index must begin with "MMIDIDX" and a complete header')
    version, code, sequences, documents = (int.from_bytes(data[start:stop], "little")
                                           for start, stop in ((9, 17), (17, 18), (18, 26), (26, 34)))
    if version != 1 or code not in DTYPES:
        raise UserError(f"{path} has version {version} and id type {code}, but must have version 1 and one of the id types "
                        f"{', '.join(map(str, DTYPES))} (uint8, int8, int16, int32, int64, uint16)")
    expected = HEADER + 12 * sequences + 8 * documents
    size = path.stat().st_size
    if size not in (expected, expected + sequences):         # Megatron may add a mode of one byte per sequence
        raise UserError(f"{path} is truncated or damaged: the file must have {expected} bytes for {sequences} sequences and "
                        f"{documents} document entries; got {size}")
    return _read_tables(path, DTYPES[code], sequences, documents)


def _read_tables(path: Path, dtype: str, sequences: int, documents: int) -> Index:
    with open_file(path) as file:
        file.seek(HEADER)
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        places = np.fromfile(file, "<i8", sequences)
        firsts = np.fromfile(file, "<i8", documents)
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if not np.array_equal(places, begins[:-1] * np.dtype(dtype).itemsize) or (lengths < 0).any():
        raise UserError(f"{path} is damaged or not a Megatron index file: the sequences are not contiguous in the .bin file")
    if not documents or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(f"{path} is damaged: the documents do not span the sequences 0 to {sequences}")
    return Index(dtype, int(begins[-1]), np.unique(begins[firsts[:-1]]))
