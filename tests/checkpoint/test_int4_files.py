"""Weights in int4 in .safetensors: what is loaded is what to_int4 makes of the original, and damage is one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import each_generation, small_model, tokens
from refusals import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.matvec import Int4
from rwkv.checkpoint.files import read_checkpoint, write_checkpoint
from rwkv.errors import UserError
from rwkv.model.quantized import Int4Linear, to_int4
from rwkv.pretrained import RWKV
from rwkv.tools import convert

WIDTHS = {"n_embd": 64, "n_ffn": 96}
KEY = "blocks.0.ffn.key.weight"


def saved(folder: Path, generation: str) -> tuple[RWKV, Path]:
    model, path = small_model("reference", generation=generation, **WIDTHS), folder / "model.safetensors"
    model.save_pretrained(path, dtype="int4")
    return model, path


@each_generation
@torch.no_grad()
def test_it_is_the_model_that_is_rounded_when_loaded(tmp_path: Path, generation: str) -> None:
    model, path = saved(tmp_path, generation)
    loaded = RWKV.from_pretrained(path, "reference", dtype="int4")
    assert loaded.fingerprint() == model.fingerprint() == RWKV.from_pretrained(path, "reference").fingerprint()
    rounded = to_int4(model.eval())
    for layer, expected in zip(loaded.modules(), rounded.modules(), strict=True):
        if isinstance(layer, Int4Linear) and isinstance(expected, Int4Linear):
            for part, other in zip(layer.packed, expected.packed, strict=True):
                assert torch.equal(part, other)
    assert torch.equal(loaded(tokens(model))[0], rounded(tokens(model))[0])


@each_generation
def test_other_dtypes_have_the_rounded_weights(tmp_path: Path, generation: str) -> None:
    model, path = saved(tmp_path, generation)
    exact = model.state_dict()[KEY]
    rounded = Int4.of(exact).dense()
    assert torch.equal(RWKV.from_pretrained(path, "reference").state_dict()[KEY], rounded)


@each_generation
def test_it_is_small_and_is_written_again_to_the_bit(tmp_path: Path, generation: str) -> None:
    model, path = saved(tmp_path, generation)
    again = tmp_path / "again.safetensors"
    write_checkpoint(read_checkpoint(path), again)
    assert again.read_bytes() == path.read_bytes()
    exact = model.state_dict()[KEY]
    parts = load_file(path)
    assert sum(parts[KEY + end].nbytes for end in ("", ".scale", ".shift")) == exact.numel() * 5 / 8


def test_convert_writes_and_reads_it(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "rwkv4")
    model.save_pretrained(tmp_path / "model.pth")
    convert.main([str(tmp_path / "model.pth"), str(tmp_path / "small.safetensors"), "--dtype", "int4"])
    convert.main([str(tmp_path / "small.safetensors"), str(tmp_path / "large.pth"), "--dtype", "float32"])
    large = read_checkpoint(tmp_path / "large.pth").weights[KEY]
    assert torch.equal(large, Int4.of(model.state_dict()[KEY]).dense())


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        small_model("reference", n_ffn=24).save_pretrained(tmp_path / "model.safetensors", dtype="int4")
    assert not list(tmp_path.iterdir())


def test_a_file_without_our_entry_is_read(tmp_path: Path) -> None:
    _, path = saved(tmp_path, "rwkv4")
    save_file(load_file(path), path)
    model = RWKV.from_pretrained(path, "reference", dtype="int4")
    assert model(tokens(model))[0].isfinite().all()


SCALE = f"{KEY}.scale"
DAMAGE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "no shift": lambda tensors: tensors.pop(f"{KEY}.shift"),
    "narrower": lambda tensors: tensors.update({KEY: tensors[KEY][..., :8].contiguous()}),
    "not finite": lambda tensors: tensors[SCALE].fill_(torch.nan),
    "floats": lambda tensors: tensors.update({SCALE: tensors[SCALE].float()}),
    "fewer rows": lambda tensors: tensors.update({KEY + end: tensors[KEY + end][:-1].contiguous()
                                                  for end in ("", ".scale", ".shift")})}


@pytest.mark.thorough
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("dtype", ["int4", "float32"])
def test_damage_is_one_sentence(tmp_path: Path, damage: str, dtype: str) -> None:
    _, path = saved(tmp_path, "rwkv4")
    tensors = load_file(path)
    DAMAGE[damage](tensors)
    save_file(tensors, path)
    refuses(path, "blocks.0.ffn.", dtype=dtype)
