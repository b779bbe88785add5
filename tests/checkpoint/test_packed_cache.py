"""Tests cache_packed=true: a second start maps the file that the first start packed, and a changed model gets a new entry."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import small_model, tokens
from torch import Tensor

from rwkv.checkpoint import packed_cache
from rwkv.config import GenerateConfig, KernelConfig
from rwkv.errors import UserError
from rwkv.pretrained import OpenCheckpoint, open_checkpoint

pytestmark = pytest.mark.thorough
WIDE = {"n_embd": 256, "n_ffn": 512, "n_layer": 2}


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a bfloat16 checkpoint, and puts the cache into the test's folder."""
    monkeypatch.setattr(packed_cache, "folder", lambda: tmp_path / "cache")
    return write_model(tmp_path / "model.pth")


def write_model(path: Path, seed: int = 0) -> Path:
    small_model("reference", seed=seed, generation="rwkv7", vocab_size=256, **WIDE).save_pretrained(path, dtype="bfloat16")
    return path


def start_program(path: Path, dtype: str = "int4", cached: bool = True) -> OpenCheckpoint:
    return open_checkpoint(GenerateConfig(checkpoint=str(path), dtype=dtype, device="cpu", tokenizer="byte",
                                          cache_packed=cached, kernel=KernelConfig("reference")))


def logits(start: OpenCheckpoint) -> Tensor:
    model = start.model()
    return model(tokens(model))[0]


def entries() -> list[Path]:
    return sorted(packed_cache.folder().glob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@torch.no_grad()
def test_the_second_start_gives_the_results_of_the_first_without_packing(model_file: Path, dtype: str) -> None:
    expected = logits(start_program(model_file, dtype, cached=False))
    assert not packed_cache.folder().exists()
    first = start_program(model_file, dtype)
    assert first.caches
    assert torch.equal(logits(first), expected)
    entry, = entries()
    assert any(str(entry) in line for _, line in first.lines())
    second = start_program(model_file, dtype)
    assert not second.caches
    assert {matrix.format for matrix in second.checkpoint.packed.values()} == {dtype}
    assert torch.equal(logits(second), expected)
    before, after = first.checkpoint, second.checkpoint
    assert [(each.path, each.run, each.step, each.config, each.tokenizer, each.notes) for each in (before, after)] == [
        (model_file, None, 0, before.config, None, [])] * 2
    assert first.model().fingerprint() == second.model().fingerprint()


CHANGES: dict[str, Callable[[Path], object]] = {
    "other weights": lambda path: write_model(path, seed=1),
    "another time": lambda path: os.utime(path, ns=(0, 0)),
    "a flipped byte": lambda path: flip_at_the_same_time(path)}


def flip_at_the_same_time(path: Path) -> None:
    status = path.stat()
    path.write_bytes(flip_byte(path.read_bytes(), status.st_size // 2))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip_byte(content: bytes, index: int) -> bytes:
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1:]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_has_another_entry(model_file: Path, change: str) -> None:
    before = packed_cache.entry_of(model_file, "int4")
    copy = model_file.with_name("moved.pth")
    shutil.copy2(model_file, copy)
    assert packed_cache.entry_of(copy, "int4") == before != packed_cache.entry_of(model_file, "int8")
    CHANGES[change](model_file)
    assert packed_cache.entry_of(model_file, "int4") != before


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda entry: os.truncate(entry, entry.stat().st_size - 1000),
    "flipped": lambda entry: entry.write_bytes(flip_byte(entry.read_bytes(), 3000)),
    "empty": lambda entry: entry.write_bytes(b""),
    "no description": lambda entry: entry.with_suffix(".json").unlink(),
    "another description": lambda entry: entry.with_suffix(".json").write_text("[]")}


@pytest.mark.parametrize("damage", DAMAGE)
@torch.no_grad()
def test_a_damaged_entry_is_written_again(model_file: Path, damage: str) -> None:
    expected = logits(start_program(model_file))
    entry, = entries()
    right = entry.read_bytes()
    DAMAGE[damage](entry)
    again = start_program(model_file)
    assert again.caches
    assert torch.equal(logits(again), expected)
    assert entry.read_bytes() == right
    assert not start_program(model_file).caches


def test_the_least_recently_used_are_deleted(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_model(model_file.with_name(f"{seed}.pth"), seed) for seed in range(3)]
    first, second, third = (packed_cache.entry_of(file, "int4") for file in files)
    start_program(files[0]).model()
    size = first.stat().st_size
    start_program(files[1]).model()
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert not start_program(files[0]).caches               # this start reads `first`, which is then newer than `second`
    abandoned = packed_cache.folder() / ".old.safetensors.123"
    abandoned.touch()
    os.utime(abandoned, (1, 1))
    monkeypatch.setattr(packed_cache, "MAX_BYTES", int(2.5 * size))
    start_program(files[2]).model()
    assert entries() == sorted([first, third])
    assert not second.with_suffix(".json").exists()
    assert not abandoned.exists()


def test_weights_with_adapters_are_not_cached(model_file: Path) -> None:
    start = start_program(model_file, cached=False)
    assert not packed_cache.can_hold(start.checkpoint.__class__(**{**vars(start.checkpoint), "adapter_kind": "LoRA"}))
    assert not start_program(model_file, "bfloat16").caches


def test_a_start_without_the_cache_says_how_to_pack_once(model_file: Path) -> None:
    line, = (line for _, line in start_program(model_file, cached=False).lines() if "cache_packed=true" in line)
    assert f"timemix convert {model_file} model-int4.safetensors --dtype int4" in line
    assert not any("cache_packed" in line for _, line in start_program(model_file, "bfloat16", cached=False).lines())


def test_a_user_without_a_home_directory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users whom the system does not know."""
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(UserError, match="home directory"):
        packed_cache.folder()


def test_a_folder_that_cannot_be_written_is_reported_in_one_sentence(model_file: Path) -> None:
    packed_cache.folder().write_text("a file")
    with pytest.raises(UserError, match="cache_packed=true cannot write"):
        start_program(model_file).model()

