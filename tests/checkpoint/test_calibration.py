"""Tests int4 that is calibrated on a text: the file's blocks, the loaded model, early errors and refused damage."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from losing import dropping
from models import each_generation, small_model, tokens
from refusals import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels import native
from kernels.matvec import Blocks, Int4, quantise
from rwkv.checkpoint import calibration
from rwkv.checkpoint.calibration import SEQUENCE, calibrate, read_ids
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import SavedModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.generation.decoder import CDecoder
from rwkv.model.base import is_linear_weight
from rwkv.model.decoding.c_step import step_of
from rwkv.model.quantized import BlockLinear
from rwkv.pretrained import RWKV, open_checkpoint, resolve_dtype
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert

pytestmark = pytest.mark.thorough
NARROW = {"n_embd": 64, "n_ffn": 96, "n_layer": 2}       # rows that are not multiples of 256
WIDE = {"n_embd": 256, "n_ffn": 512, "n_layer": 2}
KEY = "blocks.1.ffn.key.weight"
TEXT = "".join(f"{number} squared is {number * number}.\n" for number in range(60, 150))
in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def write_model(folder: Path, generation: str = "rwkv4", **sizes: int) -> tuple[RWKV, Path]:
    path = folder / "model.safetensors"
    model = small_model("reference", ByteTokenizer().vocab_size, generation=generation, **(sizes or NARROW))
    model.save_pretrained(path, ByteTokenizer())
    return model, path


def write_calibrated(path: Path, text: Path, *options: str) -> Path:
    target = path.with_name("calibrated.safetensors")
    convert.main([str(path), str(target), "--dtype", "int4", "--calibrate", str(text), *options])
    return target


def blocks_in(path: Path) -> dict[str, str]:
    return {name: matrix.format for name, matrix in read_checkpoint(path).packed.items()}


@in_c
@pytest.mark.parametrize("sizes", [NARROW, WIDE])
@each_generation
@torch.no_grad()
def test_the_model_computes_with_the_file_s_blocks(tmp_path: Path, text: Path, generation: str, sizes: dict[str, int]) -> None:
    """Logits match those of the dequantised weights, in one pass and token by token in C, where the step copies no matrix."""
    model, path = write_model(tmp_path, generation, **sizes)
    target = write_calibrated(path, text)
    loaded, dense = (RWKV.from_pretrained(target, "reference", dtype=dtype) for dtype in ("int4", "float32"))
    assert loaded.fingerprint() == dense.fingerprint() == model.fingerprint()
    layers = {f"{name}.weight": layer for name, layer in loaded.named_modules() if isinstance(layer, BlockLinear | nn.Linear)}
    assert {name: layer.format for name, layer in layers.items() if isinstance(layer, BlockLinear)} == blocks_in(target)
    assert loaded.emb.weight.dtype == torch.bfloat16
    ids = tokens(model, B=2, T=9)
    expected = dense(ids)[0]
    decoder = CDecoder(loaded, loaded.empty_state(2))
    stepped = torch.stack([decoder.step(ids[:, t]).clone() for t in range(9)], 1)
    for logits in (loaded(ids)[0], stepped):
        assert (logits - expected).abs().max() < 2e-2 * expected.abs().max()
    assert max(part.numel() for part in step_of(loaded).own_tensors) < sizes["n_embd"] * sizes["n_embd"]
    content = target.read_bytes()
    assert all(layer.packed.weight.numpy().tobytes() in content for layer in layers.values())         # type: ignore[union-attr]


@in_c
@torch.no_grad()
def test_a_model_with_deep_embed(tmp_path: Path, text: Path) -> None:
    path, ids = tmp_path / "model.safetensors", torch.tensor([ByteTokenizer().encode("12 squared")])
    model = small_model("reference", 256, generation="rwkv7", deep_embed_dim=4, **NARROW)
    model.save_pretrained(path, ByteTokenizer())
    target = write_calibrated(path, text)
    loaded, dense = (RWKV.from_pretrained(target, "reference", dtype=dtype) for dtype in ("int4", "float32"))
    assert loaded.fingerprint() == dense.fingerprint()
    expected = dense(ids)[0]
    assert (loaded(ids)[0] - expected).norm() < 2e-2 * expected.norm()


@each_generation
def test_exactly_the_matrices_of_int4_are_quantised(tmp_path: Path, text: Path, generation: str) -> None:
    """Rows of a multiple of 256 become k-quants and other rows blocks of 32. The head has 5 bits."""
    for sizes, kind in ((NARROW, "0"), (WIDE, "k")):
        model, path = write_model(tmp_path, generation, **sizes)
        target, plain = write_calibrated(path, text), tmp_path / "int4.safetensors"
        convert.convert(path, plain, "int4")
        calibrated_parts, parts = load_file(target), load_file(plain)
        matrices = {name for name in model.state_dict() if is_linear_weight(name, model.generation.group(name))}
        assert blocks_in(target) == {name: f"q{5 if name == 'head.weight' else 4}_{kind}" for name in matrices}
        others = {name for name in parts if name.removesuffix(".scale").removesuffix(".shift") not in matrices}
        assert calibrated_parts.keys() == matrices | others
        assert all(torch.equal(calibrated_parts[name], parts[name]) for name in others)
        if kind == "k":
            assert target.stat().st_size < plain.stat().st_size


@each_generation
@torch.no_grad()
def test_logits_of_another_text_change_less_than_in_int4(tmp_path: Path, text: Path, generation: str) -> None:
    model, path = write_model(tmp_path, generation, **WIDE)
    target, plain = write_calibrated(path, text), tmp_path / "int4.safetensors"
    convert.convert(path, plain, "int4")
    ids = torch.tensor([ByteTokenizer().encode("The sum of 12 and 13 is 25, and 30 squared is 900.")])
    expected = model(ids)[0]
    new, old = ((RWKV.from_pretrained(file, "reference")(ids)[0] - expected).norm() for file in (target, plain))
    assert new < 0.8 * old


def test_the_moments_are_those_of_the_text(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding a matrix for the text's moments changes its products on the text less than rounding for independent inputs."""
    _, path = write_model(tmp_path, "rwkv7", **WIDE)
    errors: list[tuple[float, float]] = []

    def quantise_and_compare(weight: Tensor, moments: list[Tensor], format: str) -> Blocks:
        M = torch.block_diag(*moments)
        independent = quantise(weight, [torch.eye(len(window)) for window in moments], format)
        packed = quantise(weight, moments, format)
        errors.append((error(weight, packed, M), error(weight, independent, M)))
        return packed

    def error(weight: Tensor, packed: Blocks, M: Tensor) -> float:
        difference = weight - packed.dense()
        return ((difference @ M) * difference).sum().item()

    monkeypatch.setattr(calibration, "quantise", quantise_and_compare)
    for matrix in calibrate(read_checkpoint(path), read_ids(text, ByteTokenizer())).packed.values():
        matrix.read()
    assert len(errors) == 2 * 6 + 1
    assert all(new < 0.9 * old for new, old in errors)


def test_a_calibrated_file_is_copied_bit_for_bit_and_converted_back(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path, **WIDE)
    target, again, back = write_calibrated(path, text), tmp_path / "again.safetensors", tmp_path / "back.pth"
    for options in ([], ["--dtype", "int4"]):
        convert.main([str(target), str(again), *options])
        assert again.read_bytes() == target.read_bytes()
    convert.main([str(target), str(back), "--dtype", "float32"])
    expected = read_checkpoint(target).packed[KEY].read().dense()
    assert torch.equal(read_checkpoint(back).weights[KEY], expected)
    convert.main([str(target), str(again), "--dtype", "int8"])
    assert blocks_in(again).keys() == blocks_in(target).keys()
    assert {*blocks_in(again).values()} == {"int8"}


def test_matrices_may_be_read_in_any_order(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path, "rwkv7")
    ids = read_ids(text, ByteTokenizer())
    packed = calibrate(read_checkpoint(path), ids).packed
    first = {name: matrix.read().weight.clone() for name, matrix in packed.items()}
    for name in (*reversed(packed), KEY):
        assert torch.equal(packed[name].read().weight, first[name])
    assert torch.equal(calibrate(read_checkpoint(path), ids).packed[KEY].read().weight, first[KEY])


def test_a_line_names_the_text_and_the_formats(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = write_model(tmp_path)
    write_calibrated(path, text)
    line = next(line for line in capsys.readouterr().err.splitlines() if "calibrated" in line)
    n_tokens = len(TEXT) // (SEQUENCE - 1) * SEQUENCE
    for part in (str(text), f"{n_tokens:,} tokens", "Q4_0", "Q5_0", "rows of 64", "bits per weight"):
        assert part in line


@in_c
def test_int4_and_auto_load_the_calibrated_blocks_and_a_line_says_so(tmp_path: Path, text: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = write_model(tmp_path)
    target = write_calibrated(path, text)
    for dtype in ("int4", "auto", "blocks", None):
        checkpoint = open_checkpoint(SavedModelConfig(checkpoint=str(target), device="cpu", dtype=dtype))
        assert checkpoint.dtype == "blocks"
        lines = [line for label, line in checkpoint.lines() if label == "dtype"]
        assert lines == [] if dtype == "blocks" else "Q4_0, Q5_0" in lines[0]
        assert not [line for label, line in checkpoint.lines() if label == "weights"]
    assert resolve_dtype("int4", "cpu", read_checkpoint(path)) == ("int4", None)
    assert resolve_dtype("int4", "cuda", read_checkpoint(target)) == ("int4", None)
    monkeypatch.setattr("rwkv.pretrained.why_not", lambda operator, name: "no C kernels for plan9 on vax")
    assert resolve_dtype("int4", "cpu", read_checkpoint(target)) == ("int4", None)
    checkpoint = open_checkpoint(SavedModelConfig(checkpoint=str(target), device="cpu", dtype="int4"))
    assert any("requantises" in line for label, line in checkpoint.lines() if label == "weights")


def write(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text)


WRONG: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "missing": (lambda path: None, [], "text.txt"),
    "a folder": (Path.mkdir, [], "must be a file"),
    "empty": (write(""), [], "at least 1,024 tokens"),
    "short": (write(TEXT[:900]), [], "has 900"),
    "not UTF-8": (write(TEXT.encode() + b"\xff\xfe"), [], "UTF-8"),
    "int8": (write(TEXT), ["--dtype", "int8"], "requires --dtype int4"),
    "no dtype": (write(TEXT), [], "requires --dtype int4"),
    "GGUF": (write(TEXT), ["--dtype", "int4", "--format", "gguf"], "safetensors"),
    "another tokenizer": (write(TEXT), ["--dtype", "int4", "--tokenizer", "world"], "world")}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_reported_in_one_sentence_before_the_work(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = write_model(tmp_path)
    make, options, part = WRONG[case]
    text, target = tmp_path / "text.txt", tmp_path / "out.safetensors"
    make(text)
    monkeypatch.setattr(calibration._Calibrator, "matrix", lambda self, name: pytest.fail("it began"))
    dtype = [] if options or case == "no dtype" else ["--dtype", "int4"]
    with pytest.raises(SystemExit) as error:
        convert.main([str(path), str(target), "--calibrate", str(text), *dtype, *options])
    assert error.value.code not in (0, None)
    assert part in capsys.readouterr().err
    assert not target.exists()


def test_a_text_of_another_alphabet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Ünïcödé " * 400, encoding="utf-8")
    with pytest.raises(UserError, match="the tokenizer loses"):
        read_ids(path, dropping("0123456789 .\nsquaredincö"))


def test_packed_weights_are_not_calibrated(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path)
    plain = tmp_path / "int4.safetensors"
    convert.convert(path, plain, "int4")
    for source in (plain, write_calibrated(path, text)):
        with pytest.raises(UserError, match="pass the checkpoint that this file was converted from"):
            convert.convert(source, tmp_path / "again.safetensors", "int4", calibrate=text)
    assert not (tmp_path / "again.safetensors").exists()


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path, n_embd=64, n_ffn=72)
    with pytest.raises(UserError, match="multiples of 32"):
        convert.convert(path, tmp_path / "out.safetensors", "int4", calibrate=text)


def test_a_model_that_overflows_on_the_text_is_refused(tmp_path: Path, text: Path) -> None:
    model, path = write_model(tmp_path)
    with torch.no_grad():
        model.blocks[0].ln2.weight.mul_(1e25)
    model.save_pretrained(path, ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"ffn\.\w+\.weight are not finite"):
        convert.convert(path, tmp_path / "out.safetensors", "int4", calibrate=text)
    assert not (tmp_path / "out.safetensors").exists()


def test_weights_beyond_float16_are_refused(tmp_path: Path, text: Path) -> None:
    model, path = write_model(tmp_path)
    with torch.no_grad():
        model.head.weight.mul_(1e9)
    model.save_pretrained(path, ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"head\.weight are too large for"):
        convert.convert(path, tmp_path / "out.safetensors", "int4", calibrate=text)


def test_another_dtype_is_refused(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path)
    with pytest.raises(UserError, match="requires --dtype int4"):
        convert.convert(path, tmp_path / "out.safetensors", "float32", calibrate=text)


DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda blocks: blocks.index_fill(2, torch.tensor([1]), 0x7C),
    "bytes of a block": lambda blocks: blocks[:, :, :-1].contiguous(),
    "blocks of a row": lambda blocks: blocks[:, :-1].contiguous(),
    "rows": lambda blocks: blocks[:-1].contiguous(),
    "flat": lambda blocks: blocks.flatten(1)}


@pytest.mark.parametrize("dtype", [pytest.param("int4", marks=in_c), "float32"])
def test_damage_is_reported_in_one_sentence(tmp_path: Path, text: Path, dtype: str) -> None:
    for sizes in (NARROW, WIDE):
        _, path = write_model(tmp_path, **sizes)
        target = write_calibrated(path, text)
        for damage in DAMAGE.values():
            tensors = load_file(target)
            tensors[KEY] = damage(tensors[KEY])
            save_file(tensors, tmp_path / "damaged.safetensors")
            refuses(tmp_path / "damaged.safetensors", "blocks.1.ffn.", dtype=dtype)


def test_a_damaged_file_is_not_copied(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path)
    tensors = load_file(write_calibrated(path, text))
    save_file(tensors | {KEY: DAMAGE["scale"](tensors[KEY])}, tmp_path / "damaged.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ffn\."):
        convert.convert(tmp_path / "damaged.safetensors", tmp_path / "copy.safetensors", "int4")
    assert not (tmp_path / "copy.safetensors").exists()


def test_a_file_without_our_entry_is_read(tmp_path: Path, text: Path) -> None:
    _, path = write_model(tmp_path, **WIDE)
    target = write_calibrated(path, text)
    expected = RWKV.from_pretrained(target, "reference")
    save_file(load_file(target), tmp_path / "plain.safetensors")
    model = RWKV.from_pretrained(tmp_path / "plain.safetensors", "reference")
    assert torch.equal(model(tokens(model))[0], expected(tokens(model))[0])


def test_uncalibrated_int4_is_unchanged(tmp_path: Path) -> None:
    model, path = write_model(tmp_path, **WIDE)
    plain = tmp_path / "int4.safetensors"
    convert.convert(path, plain, "int4")
    assert {*blocks_in(plain).values()} == {"int4"}
    assert torch.equal(read_checkpoint(plain).weights[KEY], Int4.of(model.state_dict()[KEY]).dense())
