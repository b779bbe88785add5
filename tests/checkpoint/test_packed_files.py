"""Tests int8 and int4 weights in .safetensors: the model equals one that is rounded when it is loaded, its matrices are the
mapped file, and damage is reported in one sentence."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens
from refusals import refuses
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.matvec import FORMATS
from rwkv.checkpoint.files import read_checkpoint, write_checkpoint
from rwkv.checkpoint.formats import _packed
from rwkv.config import SavedModelConfig
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder
from rwkv.model.decoding import c_step
from rwkv.model.decoding.c_step import step_of, why_not
from rwkv.model.quantized import Int4Linear, Int8Linear, to_int4, to_int8
from rwkv.model.weights_watch import WeightsWatch
from rwkv.pretrained import RWKV, open_checkpoint, requantisation_lines, resolve_dtype
from rwkv.tools import convert

pytestmark = pytest.mark.thorough
WIDTHS = {"n_embd": 64, "n_ffn": 96}
WIDE = {"n_embd": 256, "n_ffn": 512, "n_layer": 2}       # whole blocks of int4
KEY = "blocks.0.ffn.key.weight"
ROUND: dict[str, Callable[[RWKV], RWKV]] = {"int8": to_int8, "int4": to_int4}
each_dtype = pytest.mark.parametrize("dtype", ROUND)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write_packed(folder: Path, generation: str, dtype: str = "int4", **widths: int) -> tuple[RWKV, Path]:
    model, path = small_model("reference", generation=generation, **(widths or WIDTHS)), folder / "model.safetensors"
    model.save_pretrained(path, dtype=dtype)
    return model, path


def layers(model: RWKV) -> list[Int8Linear | Int4Linear]:
    return [layer for layer in model.modules() if isinstance(layer, Int8Linear | Int4Linear)]


def round_weight(weight: Tensor, dtype: str) -> Tensor:
    return FORMATS[dtype].of(weight).dense()


@each_dtype
@each_generation
@torch.no_grad()
def test_a_packed_file_equals_rounding_when_the_model_is_loaded(tmp_path: Path, generation: str, dtype: str) -> None:
    for widths in (WIDTHS, WIDE):
        model, path = write_packed(tmp_path, generation, dtype, **widths)
        loaded = RWKV.from_pretrained(path, "reference", dtype=dtype)
        unpacked = RWKV.from_pretrained(path, "reference")
        assert loaded.fingerprint() == model.fingerprint() == unpacked.fingerprint()
        unpacked.head.weight += 1
        assert unpacked.fingerprint() != model.fingerprint()
        expected = ROUND[dtype](model.eval())
        for layer, other in zip(layers(loaded), layers(expected), strict=True):
            assert layer.packed.numbers == other.packed.numbers
            for part, right in zip(layer.packed, other.packed, strict=True):
                assert torch.equal(part, right)
        for B, T in ((2, 1), (8, 9)):    # products of few rows and of many rows
            ids = tokens(model, B=B, T=T)
            assert torch.equal(loaded(ids)[0], expected(ids)[0])


@each_dtype
def test_auto_is_the_dtype_of_the_file_and_a_line_says_so(tmp_path: Path, dtype: str) -> None:
    _, path = write_packed(tmp_path, "rwkv7", dtype, **WIDE, vocab_size=256)
    for chosen in ("auto", None):
        config = SavedModelConfig(checkpoint=str(path), tokenizer="byte", device="cpu", dtype=chosen)
        checkpoint = open_checkpoint(config)
        assert checkpoint.dtype == dtype
        assert f"packed in {dtype}" in str(checkpoint.dtype_line)
    assert resolve_dtype("float32", "cpu", read_checkpoint(path)) == ("float32", None)
    assert resolve_dtype("auto", "cuda", read_checkpoint(path))[0] != dtype
    adapted = replace(read_checkpoint(path), packed={})              # as after a merge, which unpacks the weights
    assert resolve_dtype("auto", "cpu", adapted) == ("float32", None)


@each_dtype
@each_generation
@torch.no_grad()
def test_low_rank_matrices_stay_in_bfloat16_with_the_same_results(tmp_path: Path, generation: str, dtype: str) -> None:
    """A bfloat16 file and a file packed from it give the same results, with gradients and without."""
    source, path = tmp_path / "model.pth", tmp_path / "packed.safetensors"
    small_model("reference", generation=generation, **WIDE).save_pretrained(source, dtype="bfloat16")
    write_checkpoint(read_checkpoint(source), path, dtype)
    expected = ROUND[dtype](RWKV.from_pretrained(source, "reference"))
    for file in (source, path):
        loaded = RWKV.from_pretrained(file, "reference", dtype=dtype)
        several = tokens(loaded, B=3, T=5)
        assert torch.equal(loaded(several)[0], expected(several)[0])
        with torch.enable_grad():
            assert torch.equal(loaded(several)[0], expected(several)[0])
        state, right = loaded.empty_state(3), expected.empty_state(3)
        for ids in several.T:
            logits, state = loaded.prefill(ids[:, None], state)
            correct, right = expected.prefill(ids[:, None], right)
            assert torch.equal(logits, correct)


@each_dtype
@each_generation
def test_other_dtypes_have_the_rounded_weights(tmp_path: Path, generation: str, dtype: str) -> None:
    model, path = write_packed(tmp_path, generation, dtype)
    assert torch.equal(RWKV.from_pretrained(path, "reference").state_dict()[KEY], round_weight(model.state_dict()[KEY], dtype))


@each_dtype
@each_generation
def test_a_packed_file_is_small_and_is_rewritten_bit_for_bit(tmp_path: Path, generation: str, dtype: str) -> None:
    model, path = write_packed(tmp_path, generation, dtype)
    again = tmp_path / "again.safetensors"
    write_checkpoint(read_checkpoint(path), again)
    assert again.read_bytes() == path.read_bytes()
    exact = model.state_dict()[KEY]
    parts = load_file(path)
    size = sum(parts[KEY + end].nbytes for end in ("", ".scale", ".shift") if KEY + end in parts)
    assert size == (exact.numel() * 5 / 8 if dtype == "int4" else exact.numel() + 4 * len(exact))


@each_dtype
def test_convert_writes_and_reads_it(tmp_path: Path, dtype: str) -> None:
    model, _ = write_packed(tmp_path, "rwkv4")
    model.save_pretrained(tmp_path / "model.pth")
    convert.main([str(tmp_path / "model.pth"), str(tmp_path / "small.safetensors"), "--dtype", dtype])
    convert.main([str(tmp_path / "small.safetensors"), str(tmp_path / "large.pth"), "--dtype", "float32"])
    large = read_checkpoint(tmp_path / "large.pth").weights[KEY]
    assert torch.equal(large, round_weight(model.state_dict()[KEY], dtype))


@pytest.mark.parametrize(("source", "target"), [("int8", "int4"), ("int4", "int8")])
def test_a_second_rounding_is_reported_but_not_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str,
                                                         target: str) -> None:
    model, path = write_packed(tmp_path, "rwkv7", source)
    model.save_pretrained(tmp_path / "exact.safetensors")
    out = str(tmp_path / "out.safetensors")
    for file, dtype in ((path, source), (path, "bfloat16"), (tmp_path / "exact.safetensors", target)):
        convert.main([str(file), out, "--dtype", dtype])
        assert requantisation_lines(read_checkpoint(file), dtype) == []
        assert "WARNING" not in capsys.readouterr().err
    convert.main([str(path), out, "--dtype", target])
    for line in (capsys.readouterr().err.splitlines()[0], *requantisation_lines(read_checkpoint(path), target)):
        assert source in line
        assert target in line


def test_rows_that_are_not_whole_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        small_model("reference", n_ffn=24).save_pretrained(tmp_path / "model.safetensors", dtype="int4")
    assert not list(tmp_path.iterdir())


@each_dtype
def test_a_file_without_our_entry_is_read(tmp_path: Path, dtype: str) -> None:
    for widths in (WIDTHS, WIDE):
        _, path = write_packed(tmp_path, "rwkv4", dtype, **widths)
        save_file(load_file(path), path)
        model = RWKV.from_pretrained(path, "reference", dtype=dtype)
        assert model(tokens(model))[0].isfinite().all()


def mapped_ranges(path: Path) -> list[range]:
    """Returns the address ranges at which this process maps the file."""
    lines = [line.split() for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[-1] == str(path)]


@linux
@each_dtype
@each_generation
def test_matrices_are_mapped_from_the_file_at_whole_cache_lines(tmp_path: Path, generation: str, dtype: str) -> None:
    source, path = tmp_path / "model.pth", tmp_path / "packed.safetensors"
    small_model("reference", generation=generation, **WIDE, vocab_size=256).save_pretrained(source, dtype="bfloat16")
    write_checkpoint(read_checkpoint(source), path, dtype)
    model = RWKV.from_pretrained(path, "reference", dtype=dtype)
    ranges = mapped_ranges(path)
    large = [model.emb.weight, *(part for layer in layers(model) for part in layer.packed)]
    large += [part for name, part in model.named_parameters() if model.generation.group(name) == "low rank"]
    for part in large:
        assert any(part.data_ptr() in each for each in ranges)
        assert part.data_ptr() % 64 == 0
    if why_not(model) is None:
        assert sum(part.nbytes for part in step_of(model).own_tensors) < 2**16


@linux
@each_generation
@torch.no_grad()
def test_bfloat16_by_input_is_the_same_model_without_a_copy(tmp_path: Path, generation: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    source, path, again = (tmp_path / name for name in ("model.pth", "by_input.safetensors", "again.pth"))
    small_model("reference", generation=generation, vocab_size=256, **WIDE).save_pretrained(source, dtype="bfloat16")
    convert.main([str(source), str(path), "--dtype", "bfloat16", "--by-input"])
    model, expected = (RWKV.from_pretrained(file, "reference", dtype="bfloat16") for file in (path, source))
    value = model.blocks[1].ffn.value.weight
    assert any(value.data_ptr() in each for each in mapped_ranges(path))
    assert model.fingerprint() == expected.fingerprint()
    ids = tokens(model)
    assert torch.equal(model(ids)[0], expected(ids)[0])
    if why_not(model) is None:
        monkeypatch.setattr(c_step, "COPIED", 0)
        state = model.empty_state(2)
        assert torch.equal(CDecoder(model, state).step(ids[:, 0]), CDecoder(expected, state).step(ids[:, 0]))
        assert sum(part.nbytes for part in step_of(model).own_tensors) < 2**16
        for file in (source, path):
            start = open_checkpoint(SavedModelConfig(checkpoint=str(file), dtype="bfloat16", device="cpu", tokenizer="byte"))
            assert any(f"convert {file} " in line for _, line in start.lines()) == (file == source)
    watch = WeightsWatch(model)
    value.view(torch.int16).numpy()[:] = 0
    assert not watch.is_unchanged()
    convert.main([str(path), str(again)])
    assert again.read_bytes() == source.read_bytes()


def test_by_input_requires_bfloat16(tmp_path: Path) -> None:
    _, path = write_packed(tmp_path, "rwkv7")
    for target, dtype in (("a.safetensors", "int8"), ("a.pth", "bfloat16"), ("a.safetensors", None)):
        with pytest.raises(UserError, match="requires the dtype bfloat16"):
            convert.convert(path, tmp_path / target, dtype, by_input=True)


def test_files_of_earlier_versions_are_repacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = write_packed(tmp_path, "rwkv7", **WIDE)
    new = RWKV.from_pretrained(path, "reference", dtype="int4")
    assert not any(matrix.repacked for matrix in read_checkpoint(path).packed.values())
    old = tmp_path / "old.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(_packed, "_is_interleaved", lambda K: False)
        write_checkpoint(read_checkpoint(path), old)
    assert all(matrix.repacked for matrix in read_checkpoint(old).packed.values())
    with pytest.warns(UserWarning, match="timemix convert"):
        loaded = RWKV.from_pretrained(old, "reference", dtype="int4")
    assert torch.equal(loaded(tokens(new))[0], new(tokens(new))[0])
    write_checkpoint(read_checkpoint(old), old)
    assert old.read_bytes() == path.read_bytes()


@each_generation
@torch.no_grad()
def test_int8_with_sparse_inputs_is_stored_by_input(tmp_path: Path, generation: str) -> None:
    """A file that stores the same matrices by output, as earlier versions did, contains the same model."""
    _, path = write_packed(tmp_path, generation, "int8", **WIDE)
    tensors = load_file(path)
    by_input = [name for name in tensors if name.endswith(".by_input")]
    assert by_input == [f"blocks.{i}.ffn.value.weight.by_input" for i in range(2)]
    old, again = tmp_path / "old.safetensors", tmp_path / "again.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name.removesuffix(".by_input"): tensor.T.contiguous() if name in by_input else tensor
               for name, tensor in tensors.items()}, old, metadata)
    model, expected = (RWKV.from_pretrained(file, "reference", dtype="int8") for file in (path, old))
    ids = tokens(model)
    assert torch.equal(model(ids)[0], expected(ids)[0])
    if why_not(model) is None:
        state = model.empty_state(2)
        assert torch.equal(CDecoder(model, state).step(ids[:, 0]), CDecoder(expected, state).step(ids[:, 0]))
    write_checkpoint(read_checkpoint(old), again)
    assert again.read_bytes() == path.read_bytes()


@each_dtype
@torch.no_grad()
def test_a_write_into_the_model_is_noticed_and_leaves_the_file(tmp_path: Path, dtype: str) -> None:
    _, path = write_packed(tmp_path, "rwkv7", dtype, **WIDE)
    before = path.read_bytes()
    model, other = (RWKV.from_pretrained(path, "reference", dtype=dtype) for _ in range(2))
    expected = other(tokens(model))[0]
    changes: list[Callable[[], object]] = [lambda: layers(model)[0].packed.scale.mul_(2), lambda: model.emb.weight.add_(1),
                                           lambda: model.blocks[0].att.g1.zero_()]
    for change in changes:
        watch = WeightsWatch(model)
        change()
        assert not watch.is_unchanged()
    assert not torch.equal(model(tokens(model))[0], expected)
    assert torch.equal(other(tokens(model))[0], expected)
    assert path.read_bytes() == before


@each_dtype
@torch.no_grad()
def test_a_model_outlives_its_file_and_can_be_copied(tmp_path: Path, dtype: str) -> None:
    _, path = write_packed(tmp_path, "rwkv7", dtype, **WIDE)
    model = RWKV.from_pretrained(path, "reference", dtype=dtype)
    ids = tokens(model)
    expected = RWKV.from_pretrained(path, "reference", dtype=dtype, mmap=False)(ids)[0]
    # The next line replaces the file with a rename
    small_model("reference", seed=1, generation="rwkv7", **WIDE).save_pretrained(path, dtype=dtype)
    copies: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("cpu")]
    path.unlink()
    for each in (model, *copies):
        assert torch.equal(each(ids)[0], expected)


@linux
@pytest.mark.programs
def test_conversion_needs_the_memory_of_the_largest_tensor(tmp_path: Path) -> None:
    """The peak is far below the size of the file, which is over 30 times its largest tensor."""
    source = tmp_path / "model.pth"
    model = small_model("reference", generation="rwkv7", n_embd=512, n_layer=12, vocab_size=2000)
    model.save_pretrained(source, dtype="bfloat16")
    largest = 4 * 512 * 512 * 2
    assert source.stat().st_size > 30 * largest
    program = PEAK.format(files=[str(source), str(tmp_path / "packed.safetensors")], dtypes=[*ROUND])
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert max(map(int, process.stdout.split())) < 8 * largest


PEAK = """
import re
from pathlib import Path
import torch
import rwkv.pretrained, rwkv.checkpoint.formats.pth, rwkv.checkpoint.formats.safetensors
from kernels.matvec import Int4, Int8
from rwkv.tools import convert
Int4.of(torch.randn(64, 256)), Int8.of(torch.randn(64, 256))
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
for dtype in {dtypes}:
    Path("/proc/self/clear_refs").write_text("5")        # sets the peak to the current size
    before = peak()
    convert.main([*{files}, "--dtype", dtype])
    print(peak() - before)
"""

SCALE = f"{KEY}.scale"
DAMAGE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "no scale": lambda tensors: tensors.pop(SCALE),
    "no shift": lambda tensors: tensors.pop(f"{KEY}.shift"),
    "narrower": lambda tensors: tensors.update({KEY: tensors[KEY][..., ::2].contiguous()}),
    "not finite": lambda tensors: tensors[SCALE].fill_(torch.nan),
    "other floats": lambda tensors: tensors.update({SCALE: tensors[SCALE].double()}),
    "fewer rows": lambda tensors: tensors.update({KEY + end: tensors[KEY + end][:-1].contiguous()
                                                  for end in ("", ".scale", ".shift") if KEY + end in tensors})}


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "damage"), [*product(ROUND, sorted(DAMAGE.keys() - {"no shift"})), ("int4", "no shift")])
@pytest.mark.parametrize("loaded_in", ["packed", "float32"])
def test_damage_is_reported_in_one_sentence(tmp_path: Path, damage: str, loaded_in: str, dtype: str) -> None:
    for widths in (WIDTHS, WIDE):
        _, path = write_packed(tmp_path, "rwkv4", dtype, **widths)
        tensors = load_file(path)
        DAMAGE[damage](tensors)
        save_file(tensors, path)
        refuses(path, "blocks.0.ffn.", dtype=dtype if loaded_in == "packed" else "float32")


def test_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "VERSION", _packed.WITH_BLOCKS + 1)
    _, path = write_packed(tmp_path, "rwkv4")
    monkeypatch.undo()
    refuses(path, "newer version")
