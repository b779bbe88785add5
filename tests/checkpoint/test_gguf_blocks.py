"""Tests models that use a GGUF file's blocks in place: logits, memory, the choice of dtype, and damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import KINDS, official_weights, rewritten
from models import small_model, tokens
from numpy_rwkv7 import NumpyRWKV7
from torch import nn

from kernels import native
from kernels.matvec import BLOCKS, Blocks
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import SavedModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.generation.decoder import CDecoder, Decoder, decoding_line
from rwkv.model.decoding.c_step import step_of
from rwkv.model.quantized import BlockEmbedding, BlockLinear
from rwkv.model.rwkv7 import UNUSED
from rwkv.pretrained import RWKV, blocks_of, open_checkpoint, resolve_dtype

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
WIDTH = 256                              # the elements of a k-quant's block
MIXED = ("Q4_K", "Q6_K", "Q5_K")         # as in Q4_K_M


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    small_model("reference", generation="rwkv7", n_embd=WIDTH, n_layer=2, n_ffn=2 * WIDTH, head_size=64).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mixed(plain: Path) -> Path:
    return rewritten(plain, plain.with_name("mixed.gguf"), MIXED)


def expected_logits(path: Path, ids: torch.Tensor) -> np.ndarray:
    """Returns logits in float64, computed from weights that an independent reader dequantises."""
    return NumpyRWKV7(official_weights(path))(ids.numpy())[0]


@pytest.mark.parametrize("kind", [MIXED, "Q8_0", *(pytest.param(name.upper(), marks=pytest.mark.thorough)
                                                   for name in BLOCKS if name != "q8_0")])
@torch.no_grad()
def test_logits_are_those_of_the_dequantised_weights(plain: Path, tmp_path: Path, kind: str | tuple[str, ...]) -> None:
    """A prompt read in one pass, in chunks or token by token has the logits of float64, except for the rounding of inputs."""
    path = rewritten(plain, tmp_path / "model.gguf", kind)
    model = RWKV.from_pretrained(path, "reference", dtype="blocks")
    ids = tokens(model, B=2, T=20)
    expected = torch.from_numpy(expected_logits(path, ids))
    at_once, _ = model(ids)
    first, state = model(ids[:, :7])
    chunked = torch.cat((first, model(ids[:, 7:], state)[0]), dim=1)
    decoders = CDecoder(model, model.empty_state(2)), Decoder(model, model.empty_state(2))
    stepped = [torch.stack([decoder.step(ids[:, t]).clone() for t in range(20)], dim=1) for decoder in decoders]
    for logits in (at_once, chunked, *stepped):
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.mean() < 2e-2
        assert error.max() < 0.1
        if "K" in str(kind):
            assert (logits - expected).abs().max() < 2e-2 * expected.abs().max()


@torch.no_grad()
def test_every_matrix_is_read_in_the_file_s_own_bytes(mixed: Path) -> None:
    """Decoding in C copies neither a matrix nor the embedding."""
    model = RWKV.from_pretrained(mixed, "reference", dtype="blocks")
    linears = (BlockLinear, BlockEmbedding, nn.Linear, nn.Embedding)
    layers = [module for module in model.modules() if isinstance(module, linears)]
    content = mixed.read_bytes()
    starts = set()                       # of the mapped file
    for layer in layers:
        assert isinstance(layer, (BlockLinear, BlockEmbedding))
        weight = layer.packed.weight
        starts.add(weight.data_ptr() - content.index(weight.numpy().tobytes()))
    assert len(starts) == 1
    step = step_of(model)
    assert max(tensor.numel() for tensor in step.own_tensors) < WIDTH * WIDTH
    addresses = set(step._structs.tolist())
    assert all(layer.packed.weight.data_ptr() in addresses for layer in layers)       # type: ignore[union-attr]
    assert decoding_line(model).startswith("decoding: C, one call per token")


@torch.no_grad()
def test_a_row_has_the_same_bits_in_prefill_and_alone(mixed: Path) -> None:
    layer = RWKV.from_pretrained(mixed, "reference", dtype="blocks").blocks[1].ffn.value
    assert isinstance(layer, BlockLinear)
    rows = torch.randn(150, layer.in_features)
    together = layer(rows)
    for row in (0, 63, 64, 149):
        assert torch.equal(layer(rows[row:row + 1])[0], together[row])
    assert layer(rows[:0]).shape == (0, layer.out_features)


def test_the_gradient_of_an_input_is_that_of_the_dequantised_weight(mixed: Path) -> None:
    layer = RWKV.from_pretrained(mixed, "reference", dtype="blocks").blocks[0].att.key
    assert isinstance(layer, BlockLinear)
    x, grad = torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    layer(x).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ layer.packed.dense())


def test_a_model_in_blocks_is_the_model_of_its_file(mixed: Path) -> None:
    """Fingerprints are equal, because states and caches are looked up by fingerprint."""
    models = [RWKV.from_pretrained(mixed, "reference", dtype=dtype) for dtype in ("blocks", "float32")]
    assert models[0].fingerprint() == models[1].fingerprint()
    unmapped = RWKV.from_pretrained(mixed, "reference", dtype="blocks", mmap=False)
    ids = tokens(unmapped)
    with torch.no_grad():
        assert torch.equal(unmapped(ids)[0], models[0](ids)[0])
    with pytest.raises(UserError, match="cannot be saved"):
        models[0].save_pretrained(mixed.with_name("again.gguf"))


def test_auto_uses_the_blocks_of_a_file(plain: Path, mixed: Path, tmp_path: Path) -> None:
    def dtype_and_lines(path: Path, dtype: str | None = None) -> tuple[str, list[str]]:
        checkpoint = open_checkpoint(SavedModelConfig(checkpoint=str(path), tokenizer="byte", device="cpu", dtype=dtype))
        return checkpoint.dtype, [text for label, text in checkpoint.lines() if label == "dtype"]

    path = tmp_path / "byte.gguf"
    small_model("reference", 257, generation="rwkv7", n_embd=WIDTH, n_layer=1, head_size=64).save_pretrained(path)
    assert dtype_and_lines(path) == ("float32", [])
    quantised = rewritten(path, tmp_path / "quantised.gguf", MIXED)
    for dtype in (None, "auto"):
        name, (line,) = dtype_and_lines(quantised, dtype)
        assert name == "blocks"
        assert all(kind in line for kind in MIXED)
    assert dtype_and_lines(quantised, "float32") == ("float32", [])
    others = rewritten(path, tmp_path / "others.gguf", "IQ4_XS")
    assert dtype_and_lines(others)[0] == "float32"
    with pytest.raises(UserError, match="Q8_0"):
        dtype_and_lines(others, "blocks")


def test_blocks_without_a_kernel_are_dequantised(plain: Path, tmp_path: Path) -> None:
    """Q4_K matrices stay blocks beside IQ4_XS matrices, which become nn.Linear."""
    path = rewritten(plain, tmp_path / "model.gguf", ("Q4_K", "IQ4_XS"))
    model = RWKV.from_pretrained(path, "reference", dtype="auto")
    kinds = {type(module) for module in model.modules() if isinstance(module, (nn.Linear, BlockLinear))}
    assert kinds == {nn.Linear, BlockLinear}
    ids = tokens(model, B=1, T=8)
    expected = torch.from_numpy(expected_logits(path, ids))
    decoder = CDecoder(model, model.empty_state(1))
    for t in range(8):
        logits = decoder.step(ids[:, t])
    with torch.no_grad():
        for last in (logits, model(ids)[0][:, -1]):
            assert (last - expected[:, -1]).abs().max() < 2e-2 * expected.abs().max()


@torch.no_grad()
def test_without_the_library_blocks_are_dequantised_and_a_line_says_so(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkv.pretrained.why_not", lambda operator, name: "no C kernels for plan9 on vax")
    for dtype in ("auto", "blocks"):
        name, line = resolve_dtype(dtype, "cpu", read_checkpoint(mixed))
        assert name == "float32"
        assert "plan9" in str(line)
    with pytest.warns(UserWarning, match="dequantised"):
        model = RWKV.from_pretrained(mixed, "reference", dtype="blocks")
    assert isinstance(model.head, nn.Linear)


def test_blocks_need_a_cpu(mixed: Path) -> None:
    with pytest.raises(UserError, match="requires a CPU"):
        resolve_dtype("blocks", "cuda", read_checkpoint(mixed))


def test_a_scale_that_is_not_finite_is_refused(mixed: Path, tmp_path: Path) -> None:
    """Loading fails before the first token, whichever matrix and whichever scale of a block is infinite."""
    infos = {tensor.name: tensor for tensor in gguf.GGUFReader(mixed).tensors}
    for name in ("token_embd.weight", "blk.1.channel_mix_key.weight", "output.weight"):
        info = infos[name]
        kind = BLOCKS[info.tensor_type.name.lower()]
        for half in kind.halves:
            content = bytearray(mixed.read_bytes())
            offset = int(info.data_offset) + int(info.n_bytes) - kind.bytes_per_block + half
            content[offset:offset + 2] = np.float16("inf").tobytes()
            path = tmp_path / "damaged.gguf"
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="not finite"):
                RWKV.from_pretrained(path, "reference", dtype="blocks")


def test_adapters_are_merged_in_float32(mixed: Path) -> None:
    """A changed matrix no longer uses the file's blocks, but all others do."""
    checkpoint = read_checkpoint(mixed)
    stored = checkpoint.weights.stored
    name = "blocks.0.att.key.weight"
    stored[name] = stored[name].scale(1.0)
    blocks = blocks_of(checkpoint)
    assert name not in blocks
    assert len(blocks) == 1 + 1 + 2 * 6 - 1                              # embedding, head, six matrices of each layer
    assert stored["emb.weight"].rename("other").in_blocks() is not None
    assert stored["emb.weight"].transpose().in_blocks() is None


def test_an_embedding_of_blocks_refuses_tokens_that_it_lacks(mixed: Path) -> None:
    embedding = RWKV.from_pretrained(mixed, "reference", dtype="blocks").emb
    assert isinstance(embedding, BlockEmbedding)
    some = torch.tensor([[3, 0], [49, 3]])
    assert torch.equal(embedding(some), embedding.packed.dense()[some])
    for bad in (-1, 50):
        with pytest.raises(IndexError):
            embedding(torch.tensor([bad]))


def test_elements_of_blocks_are_those_of_the_matrix(mixed: Path) -> None:
    for packed in blocks_of(read_checkpoint(mixed)).values():
        assert isinstance(packed, Blocks)
        indices = torch.arange(0, packed.K * len(packed.weight), 37)
        assert torch.equal(packed.elements_at(indices), packed.dense().flatten()[indices])


def test_quantised_files_are_read_without_the_package(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    theirs = official_weights(mixed)
    monkeypatch.setitem(sys.modules, "gguf", None)
    ours = read_checkpoint(mixed).weights
    for name, weight in theirs.items():
        if name in UNUSED:
            continue
        assert np.array_equal(ours[name].numpy().reshape(weight.shape), weight), name
    assert {tensor.blocks for tensor in ours.stored.values()} - {None} == {name for name in KINDS.__members__ if name in MIXED}
