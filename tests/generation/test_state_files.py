"""Tests of saved states: a file restores the saved state, but only for the same model and tokenizer."""

import copy
from pathlib import Path

import pytest
import torch
from models import each_generation, small_model
from safetensors.torch import load, save

from rwkv.checkpoint.files import read_checkpoint
from rwkv.errors import UserError
from rwkv.generation.prefill import prefill
from rwkv.generation.state_files import CHECKSUM, load_context, metadata_of, save_context
from rwkv.model.quantized import to_int8
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    model = small_model(vocab_size=256)
    save_context(tmp_path / "state.safetensors", prefill(model, torch.tensor([[1, 2, 3]])), model, BYTES)
    return tmp_path / "state.safetensors"


@each_generation
def test_a_context_is_restored_bit_for_bit(tmp_path: Path, generation: str) -> None:
    model, state_file = small_model(vocab_size=256, generation=generation), tmp_path / "state.safetensors"
    expected = prefill(model, torch.tensor([[1, 2, 3]]))
    save_context(state_file, expected, model, BYTES)
    actual = load_context(state_file, model, BYTES)
    assert torch.equal(actual.logits, expected.logits)
    assert all(map(torch.equal, actual.state, expected.state))
    assert [path.name for path in state_file.parent.iterdir()] == [state_file.name]


def test_a_context_that_could_not_be_loaded_is_not_written(tmp_path: Path) -> None:
    model = small_model(vocab_size=256)
    rows = prefill(model, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    for context, part in ((rows, "one row"), (rows.state, "PrefillResult")):
        with pytest.raises(UserError, match=part):
            save_context(tmp_path / "state.safetensors", context, model, BYTES)          # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


@each_generation
def test_the_hash_depends_on_the_weights_but_not_on_their_dtype(tmp_path: Path, generation: str) -> None:
    def model_of(seed: int = 0) -> RWKV:
        return small_model(vocab_size=256, seed=seed, generation=generation)

    model = model_of()
    whole = model.fingerprint()
    assert model_of(seed=1).fingerprint() != whole
    assert model_of().bfloat16().fingerprint() == whole
    half = model_of().half()
    assert half.fingerprint() == copy.deepcopy(half).float().fingerprint() == whole
    with torch.no_grad():
        half.blocks[1].att.key.weight.add_(0.01)
    assert half.fingerprint() != whole
    path = tmp_path / "model.safetensors"
    model.save_pretrained(path)
    checkpoint = read_checkpoint(path)
    assert RWKV.from_checkpoint(checkpoint, model.operator, "cpu", "float16").fingerprint() == whole
    assert to_int8(model_of().requires_grad_(False)).fingerprint() == whole
    with torch.no_grad():
        model.blocks[1].att.key.weight.add_(0.01)
    assert model.fingerprint() != whole


def test_a_file_of_another_model_or_tokenizer_is_refused(state_file: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors .*\bmodel\b"):
        load_context(state_file, small_model(vocab_size=256, seed=1), BYTES)
    with pytest.raises(ValueError, match=r"safetensors .*\btokenizer\b"):
        load_context(state_file, small_model(vocab_size=256), CharTokenizer("abc"))


def test_a_missing_or_damaged_file_is_reported_in_one_sentence(state_file: Path) -> None:
    model = small_model(vocab_size=256)
    whole = state_file.read_bytes()
    with pytest.raises(UserError):
        load_context(state_file.with_name("none"), model, BYTES)
    for damaged in (b"", whole[:100], whole[:-10], b"\0" * 100):
        state_file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.safetensors"):
            load_context(state_file, model, BYTES)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_weights_are_not_a_state_and_the_error_names_their_option(name: str, tmp_path: Path) -> None:
    model = small_model(vocab_size=256)
    model.save_pretrained(tmp_path / name)
    with pytest.raises(UserError, match="checkpoint="):
        load_context(tmp_path / name, model, BYTES)


@each_generation
def test_a_file_that_has_changed_is_refused(tmp_path: Path, generation: str) -> None:
    """The file is complete and each of its numbers is possible in a state, so only the checksum reveals the change."""
    model = small_model(vocab_size=256, generation=generation)
    state_file = tmp_path / "state.safetensors"
    save_context(state_file, prefill(model, torch.tensor([[1, 2, 3]]))._replace(last_ids=(1, 2, 3)), model, BYTES)
    whole = state_file.read_bytes()
    tensors = load(whole)
    metadata = metadata_of(whole)
    half = len(whole) // 2
    name = next(name for name in tensors if name != "logits")
    changed = {
        "zeros from the middle on": whole[:half] + bytes(len(whole) - half),
        "one bit": whole[:-1] + bytes([whole[-1] ^ 1]),
        "a page of zeros": save({**tensors, name: torch.zeros_like(tensors[name])}, metadata),
        "a sign": save({**tensors, "logits": -tensors["logits"]}, metadata),
        "another dtype": save({**tensors, "logits": tensors["logits"].bfloat16()}, metadata),
        "layers in another order": save({**tensors, name: tensors[name].flip(0).contiguous()}, metadata),
        "other last ids": save(tensors, {**metadata, "last_ids": "[1, 2, 4]"}),
        "further metadata": save(tensors, {**metadata, "timemix-serve": "{}"}),
        "another checksum": save(tensors, {**metadata, CHECKSUM: "0" * 64})}
    for what, content in changed.items():
        state_file.write_bytes(content)
        with pytest.raises(UserError, match=r"state\.safetensors has changed"):
            load_context(state_file, model, BYTES)
        assert content != whole, what


def test_a_file_without_a_checksum_is_refused(state_file: Path) -> None:
    metadata = metadata_of(state_file.read_bytes())
    del metadata[CHECKSUM]
    state_file.write_bytes(save(load(state_file.read_bytes()), metadata))
    with pytest.raises(UserError, match="checksum"):
        load_context(state_file, small_model(vocab_size=256), BYTES)
