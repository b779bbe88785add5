"""Compares quantised GGUF files with an independent reader and writer: weights and logits."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import HALVES, KINDS, official_weights, rewritten
from models import small_model, tokens
from numpy_rwkv7 import NumpyRWKV7
from refusals import refuses

from rwkv.checkpoint.files import read_checkpoint
from rwkv.errors import CheckpointError
from rwkv.model.rwkv7 import UNUSED
from rwkv.pretrained import RWKV, requantisation_lines

pytestmark = pytest.mark.thorough
WRITTEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
WIDTH = 256                              # the elements of a k-quant's block


def model_of(head_size: int = 64, **sizes: int) -> RWKV:
    widths = {"n_embd": WIDTH, "n_layer": 2, "n_ffn": WIDTH, "head_size": head_size, **sizes}
    return small_model("reference", generation="rwkv7", **widths)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with heads of 128, whose group norm has the epsilon 64e-5, as in llama.cpp and the official code."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model_of(128).save_pretrained(path)
    return path


def actual_and_expected_logits(path: Path, ours: RWKV) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits of `ours`, and float64 logits from the weights that an independent reader dequantises."""
    ids = tokens(ours, B=1, T=12)
    with torch.no_grad():
        actual = ours(ids)[0].float().numpy()
    return actual, NumpyRWKV7(official_weights(path))(ids.numpy())[0]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in ("Q4_K", "Q6_K", "IQ4_XS") else pytest.mark.thorough) for kind in HALVES])
def test_every_quantisation_is_read_as_by_an_independent_reader(plain: Path, tmp_path: Path, kind: str) -> None:
    path = rewritten(plain, tmp_path / "model.gguf", kind)
    ours, theirs = read_checkpoint(path).weights, official_weights(path)
    assert set(ours) == set(theirs)
    for name, weight in ours.items():
        if name not in UNUSED:
            assert np.array_equal(weight.numpy().reshape(theirs[name].shape), theirs[name]), name
    actual, expected = actual_and_expected_logits(path, RWKV.from_pretrained(path, "reference"))
    assert np.abs(actual - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.05), ("int8", 0.06), ("int4", 0.4)])
def test_a_quantised_file_runs_in_every_dtype(plain: Path, tmp_path: Path, dtype: str, error: float) -> None:
    """`error` bounds the logits' relative RMS error. int4 has the largest, because it rounds Q6_K's numbers a second time."""
    path = rewritten(plain, tmp_path / "model.gguf", "Q6_K")
    actual, expected = actual_and_expected_logits(path, RWKV.from_pretrained(path, "reference", dtype=dtype))
    assert 1e-4 < np.sqrt(((actual - expected) ** 2).mean() / (expected ** 2).mean()) < error


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_matrices_read_one_at_a_time_are_those_read_at_once(plain: Path, tmp_path: Path, dtype: str) -> None:
    path = rewritten(plain, tmp_path / "model.gguf", "Q4_K")
    RWKV.from_pretrained(path, "reference").save_pretrained(tmp_path / "model.safetensors")        # loading maps this file
    one, other = (RWKV.from_pretrained(file, "reference", dtype=dtype) for file in (path, tmp_path / "model.safetensors"))
    assert one.fingerprint() == other.fingerprint()
    with torch.no_grad():
        assert torch.equal(one(tokens(one))[0], other(tokens(other))[0])


def test_a_type_that_the_package_cannot_dequantise_is_named(plain: Path, tmp_path: Path) -> None:
    for number, part in ((15, "Q8_K"), (77, "type 77")):
        path = tmp_path / f"{number}.gguf"
        content = plain.read_bytes()
        name = b"blk.1.channel_mix_key.weight"
        at = content.index(name) + len(name) + 4 + 16
        path.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4:])
        refuses(path, name.decode(), part)


def test_without_the_package_quantised_files_alone_cannot_be_read(plain: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    path = rewritten(plain, tmp_path / "model.gguf", "IQ4_XS")
    model_of().save_pretrained(tmp_path / "q8_0.gguf", dtype="q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    from rwkv.checkpoint.formats import _gguf_types

    _gguf_types._package_block.cache_clear()
    refuses(path, "pip install")
    for name in (plain, tmp_path / "q8_0.gguf"):
        assert RWKV.from_pretrained(name, "reference").vocab_size == 50


# Written


@pytest.mark.parametrize("dtype", ["q4_1", "q8_0", *(pytest.param(dtype, marks=pytest.mark.thorough)
                                                     for dtype in WRITTEN if dtype not in ("q4_1", "q8_0"))])
def test_written_blocks_equal_those_of_the_package_gguf(tmp_path: Path, dtype: str) -> None:
    model = model_of(n_ffn=80)
    path = tmp_path / "model.gguf"
    model.save_pretrained(path, dtype=dtype)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kind = KINDS[dtype.upper()]
    own = model.state_dict()
    for theirs, name in {"token_embd.weight": "emb.weight", "blk.1.time_mix_key.weight": "blocks.1.att.key.weight"}.items():
        assert tensors[theirs].tensor_type == kind
        assert np.array_equal(tensors[theirs].data, gguf.quantize(own[name].numpy(), kind))
    assert tensors["output.weight"].tensor_type.name == "Q8_0"
    assert tensors["blk.1.channel_mix_value.weight"].tensor_type.name == "F16"        # rows of 80 are not whole blocks
    file_type = gguf.GGUFReader(path).fields["general.file_type"].contents()
    assert file_type == gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"].value
    actual, expected = actual_and_expected_logits(path, RWKV.from_pretrained(path, "reference"))
    assert np.abs(actual - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["q4_0", "q5_1", "q8_0"])
def test_values_beyond_the_range_of_a_block_are_refused(tmp_path: Path, dtype: str) -> None:
    model = model_of()
    with torch.no_grad():
        model.blocks[1].ffn.key.weight[3, 3] = 1e7
    with pytest.raises(CheckpointError):
        model.save_pretrained(tmp_path / "model.gguf", dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "dtype", "least", "most"), [("Q4_K", "int4", 0.003, 0.1), ("Q6_K", "int4", 0.03, 0.1),
                                                             ("Q4_K", "int8", 0.003, 0.01)])
def test_the_error_of_a_second_rounding_is_measured_and_reported(plain: Path, tmp_path: Path, kind: str, dtype: str,
                                                                 least: float, most: float) -> None:
    file = rewritten(plain, tmp_path / "model.gguf", kind)
    (line,) = requantisation_lines(read_checkpoint(file), dtype)
    assert kind in line
    assert dtype in line
    assert least < float(line.split()[-1].rstrip("%")) / 100 < most


def test_the_state_dict_of_a_model_in_its_blocks_can_be_saved(plain: Path, tmp_path: Path) -> None:
    model = RWKV.from_pretrained(rewritten(plain, tmp_path / "model.gguf", "Q4_K"), "reference", dtype="blocks")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_files_of_floats_are_rounded_once(plain: Path, tmp_path: Path) -> None:
    assert requantisation_lines(read_checkpoint(plain), "int4") == []
    assert requantisation_lines(read_checkpoint(rewritten(plain, tmp_path / "model.gguf", "Q4_K")), "bfloat16") == []
