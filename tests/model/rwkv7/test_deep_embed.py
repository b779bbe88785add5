"""Tests RWKV-7a's DeepEmbed in the model, in files, in training and in generation; tests/numpy_rwkv7.py has the formula."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models import assert_same_state, small_model, tokens
from numpy_rwkv7 import NumpyRWKV7
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from rwkv.checkpoint.files import read_checkpoint, write_checkpoint
from rwkv.errors import CheckpointError, UserError
from rwkv.generation.decoder import Decoder, decoder_of
from rwkv.generation.engine import generate_batch
from rwkv.model.base import n_parameters
from rwkv.model.lora import linear_layer_names
from rwkv.model.rwkv7 import DEEP_EMBED
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

TENSORS = [f"blocks.{layer}.ffn.{name}" for layer in range(3) for name in DEEP_EMBED]


def deep_embed_model(vocab_size: int = 256, **sizes: int) -> RWKV:
    return small_model("reference", vocab_size, generation="rwkv7",
                       **{"n_embd": 64, "head_size": 32, "deep_embed_dim": 4, **sizes})


def in_float64(model: RWKV, ids: torch.Tensor) -> np.ndarray:
    return NumpyRWKV7({name: weight.detach().numpy() for name, weight in model.state_dict().items()})(ids.numpy())[0]


@pytest.fixture(scope="module")
def model() -> RWKV:
    return deep_embed_model().requires_grad_(False)


@pytest.fixture
def model_file(model: RWKV, tmp_path: Path) -> Path:
    torch.save(model.state_dict(), tmp_path / "rwkv7a.pth")
    return tmp_path / "rwkv7a.pth"


@torch.no_grad()
def test_logits_are_those_of_the_formula_merged_or_not(model: RWKV, model_file: Path) -> None:
    ids = tokens(model, T=40)
    expected = in_float64(model, ids)
    without = {name: weight for name, weight in model.state_dict().items() if name not in TENSORS}
    assert np.abs(NumpyRWKV7({name: weight.numpy() for name, weight in without.items()})(ids.numpy())[0] - expected).max() > 0.1
    for loaded in (model, RWKV.from_pretrained(model_file, "reference")):
        first, state = loaded(ids[:, :23])
        rest, after = loaded(ids[:, 23:], state)
        np.testing.assert_allclose(torch.cat([first, rest], 1).numpy(), expected, rtol=0, atol=4e-5)
        assert_same_state(after, loaded(ids)[1])
        *_, (hidden, _) = loaded.hidden_in_parts(ids, None, 3)        # prompts are read in parts
        np.testing.assert_allclose(loaded.head(hidden).numpy(), expected, rtol=0, atol=4e-5)


def test_merging_drops_only_the_merged_tensor_and_keeps_the_fingerprint(model: RWKV, model_file: Path) -> None:
    """Merging drops only s_emb_x and keeps the fingerprint; n_parameters() counts the tensors of the unmerged model."""
    merged = RWKV.from_pretrained(model_file, "reference")
    assert set(model.state_dict()) - set(merged.state_dict()) == {name for name in TENSORS if "s_emb_x" in name}
    assert merged.fingerprint() == model.fingerprint()
    assert merged.merge().fingerprint() == model.fingerprint()
    assert n_parameters(model.config, model.vocab_size) == sum(weight.numel() for weight in model.state_dict().values())


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.05), ("int8", 0.05), ("int4", 0.3)])
@torch.no_grad()
def test_other_dtypes_are_close(model: RWKV, model_file: Path, dtype: str, allowed: float) -> None:
    """With DeepEmbed the second product of the feed-forward half has inputs of either sign, and without it none is negative."""
    ids = tokens(model, T=16)
    expected = in_float64(model, ids)
    logits = RWKV.from_pretrained(model_file, "reference", dtype=dtype)(ids)[0].float().numpy()
    assert np.sqrt(((logits - expected) ** 2).mean()) < allowed * expected.std()


# Files


@pytest.mark.parametrize("name", ["again.pth", "again.safetensors", "again.ckpt"])
def test_files_are_written_as_they_were_read(model: RWKV, model_file: Path, tmp_path: Path, name: str) -> None:
    write_checkpoint(read_checkpoint(model_file), tmp_path / name)
    loaded = read_checkpoint(tmp_path / name)
    assert loaded.config == read_checkpoint(model_file).config
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in model.state_dict().items())


@torch.no_grad()
def test_a_merged_model_is_written_without_a_tensor_to_merge(model: RWKV, model_file: Path, tmp_path: Path) -> None:
    """The author's code requires s_emb_x, but programs that write merged files leave it out."""
    RWKV.from_pretrained(model_file, "reference").save_pretrained(tmp_path / "merged.pth")
    loaded = torch.load(tmp_path / "merged.pth")
    assert all(not loaded[name].any() for name in TENSORS if "s_emb_x" in name)
    torch.save({name: weight for name, weight in loaded.items() if "s_emb_x" not in name}, tmp_path / "without.pth")
    ids = tokens(model)
    for name in ("merged.pth", "without.pth"):
        logits = RWKV.from_pretrained(tmp_path / name, "reference")(ids)[0]
        np.testing.assert_allclose(logits.numpy(), in_float64(model, ids), rtol=0, atol=4e-5)


@torch.no_grad()
def test_int4_files_keep_the_tables_in_bfloat16(model: RWKV, model_file: Path, tmp_path: Path) -> None:
    write_checkpoint(read_checkpoint(model_file), tmp_path / "model.safetensors", dtype="int4")
    assert read_checkpoint(tmp_path / "model.safetensors").weights.stored[TENSORS[0]].dtype == torch.bfloat16
    ids = tokens(model)
    packed, rounded = (RWKV.from_pretrained(path, "reference", dtype="int4")(ids)[0] for path in (
        tmp_path / "model.safetensors", model_file))
    torch.testing.assert_close(packed, rounded, rtol=0, atol=0.1)


@pytest.mark.parametrize(("name", "form"), [("model.gguf", None), ("model.bin", None), ("model", "fla"), ("model", "official")])
def test_formats_that_cannot_store_deep_embed_are_refused(model_file: Path, tmp_path: Path, name: str,
                                                          form: str | None) -> None:
    with pytest.raises(UserError):
        write_checkpoint(read_checkpoint(model_file), tmp_path / name, layout=form)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("changes", [
    {"blocks.1.ffn.s_emb.weight": torch.zeros(256, 9)}, {"blocks.0.ffn.s1": torch.zeros(64, 3)},
    {"blocks.2.ffn.s_emb_x.weight": torch.zeros(64, 16)}, {"blocks.1.ffn.s0": torch.zeros(64)},
    {"blocks.1.ffn.s2": None}, {"blocks.0.ffn.s1": None}, {"blocks.1.ffn.s_emb.weight": None},
], ids=lambda changes: "-".join(changes))
def test_a_damaged_file_names_the_tensor(model: RWKV, tmp_path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    weights = {name: weight for name, weight in {**model.state_dict(), **changes}.items() if weight is not None}
    save_file(weights, tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "odd.safetensors")
    assert "ffn.s" in str(error.value)


# Training and generation


def test_a_new_model_equals_one_without_deep_embed_and_learns() -> None:
    """A new model has the logits of the model without DeepEmbed, and all tensors of DeepEmbed get gradients in training."""
    model = deep_embed_model(vocab_size=20).init_weights()
    without = {name: weight for name, weight in model.state_dict().items() if name not in TENSORS}
    plain = small_model("reference", 20, generation="rwkv7", n_embd=64, head_size=32)
    plain.load_state_dict(without)
    ids = tokens(model, B=4, T=32)
    torch.testing.assert_close(model(ids)[0], plain(ids)[0])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    unlearnt = [name for name, weight in model.named_parameters() if name in TENSORS and not weight.grad.any()]
    assert not unlearnt


@torch.no_grad()
def test_packed_texts_are_read_like_single_texts(model: RWKV) -> None:
    ids = tokens(model, B=1, T=20)
    starts = torch.zeros(1, 20, dtype=torch.bool)
    starts[0, [0, 7]] = True
    packed = model.forward_features(ids, starts)
    alone = torch.cat([model.forward_features(part) for part in (ids[:, :7], ids[:, 7:])], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=4e-5)


def test_the_tables_get_no_adapter(model: RWKV) -> None:
    """LoRA adapts the linear layers, but not the tables of DeepEmbed."""
    layers = "att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"
    assert linear_layer_names(model.config) == list(layers)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_texts_equal_those_of_whole_passes(model_file: Path, dtype: str) -> None:
    loaded, tokenizer = RWKV.from_pretrained(model_file, "reference", dtype=dtype), ByteTokenizer()
    assert isinstance(decoder_of(loaded, loaded.empty_state(1)), Decoder)
    samples = generate_batch(loaded, tokenizer, ["One", "Another one"], 12, temperature=0)
    for prompt, sample in zip(("One", "Another one"), samples, strict=True):
        ids = tokenizer.encode(prompt)
        for token in sample.tokens:
            with torch.no_grad():
                assert loaded.prefill(torch.tensor([ids]))[0][0].argmax() == token
            ids.append(token)
