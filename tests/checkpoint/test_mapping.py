"""Tests that files larger than memory and swap are mapped, as in converting a 13.3b model on a laptop. The files are sparse."""

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from rwkv.checkpoint import formats
from rwkv.checkpoint.formats import _torch_file
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.checkpoint.mapping import map_file
from rwkv.errors import CheckpointError

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
WEIGHT = torch.arange(6.0).view(2, 3)
pytestmark = pytest.mark.skipif(not OVERCOMMIT.is_file() or OVERCOMMIT.read_text().strip() == "2",
                                reason="needs Linux, without a strict limit on committed memory")


def larger_than_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(("MemTotal:", "SwapTotal:")))
    return 2 * 1024 * kib // 4 * 4


def write_pth(path: Path) -> None:
    """Writes a hole between the zip's entries and its directory."""
    weight = Stored.of("a.weight", "", WEIGHT, False)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _torch_file._add_bytes(archive, "data.pkl", _torch_file.pickle_structure({"a.weight": weight})[0])
        with _torch_file._open_entry(archive, "data/0", weight.nbytes) as entry:
            entry.write(WEIGHT.numpy().tobytes())
        _torch_file._add_bytes(archive, "version", b"3\n")
        archive.start_dir += larger_than_memory()


def write_safetensors(path: Path) -> None:
    """Writes a second tensor that is a hole."""
    n, hole = WEIGHT.nbytes, larger_than_memory()
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, n]},
                         "b.weight": {"dtype": "F32", "shape": [hole // 4], "data_offsets": [n, n + hole]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + WEIGHT.numpy().tobytes())
    os.truncate(path, path.stat().st_size + hole)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_larger_than_memory_is_mapped(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    {".pth": write_pth, ".safetensors": write_safetensors}[suffix](path)
    content = formats.recognise(path).read(path)
    assert path.stat().st_size > larger_than_memory()
    assert torch.equal(content.tensors["a.weight"].get(), WEIGHT)


def test_changes_of_a_mapped_tensor_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"before")
    os.truncate(path, larger_than_memory())
    mapped = map_file(path)
    mapped[:6] = torch.tensor(list(b"after!"), dtype=torch.uint8)
    with path.open("rb") as file:
        assert file.read(6) == b"before"
    assert bytes(mapped[:6].tolist()) == b"after!"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        map_file(tmp_path / "empty")
