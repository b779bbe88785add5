"""Saved states: a file gives back what was saved, for its own model and tokenizer only."""

from pathlib import Path

import pytest
import torch
from models import each_generation, small_model

from rwkv.errors import UserError
from rwkv.generation.prefill import prefill
from rwkv.generation.states import load_context, save_context
from rwkv.model.quantized import to_int8
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = small_model(vocab_size=256)
    save_context(tmp_path / "state.safetensors", prefill(model, torch.tensor([[1, 2, 3]])), model, BYTES)
    return tmp_path / "state.safetensors"


@each_generation
def test_a_context_comes_back_to_the_bit(tmp_path: Path, generation: str) -> None:
    model, saved = small_model(vocab_size=256, generation=generation), tmp_path / "state.safetensors"
    expected = prefill(model, torch.tensor([[1, 2, 3]]))
    save_context(saved, expected, model, BYTES)
    found = load_context(saved, model, BYTES)
    assert torch.equal(found.logits, expected.logits)
    assert all(map(torch.equal, found.state, expected.state))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@each_generation
def test_the_hash_is_of_the_weights_whatever_their_dtype(generation: str) -> None:
    def model_of(seed: int = 0) -> RWKV:
        return small_model(vocab_size=256, seed=seed, generation=generation)

    model = model_of()
    whole = model.fingerprint()
    assert model_of(seed=1).fingerprint() != whole
    assert model_of().bfloat16().fingerprint() == whole
    assert to_int8(model_of().requires_grad_(False)).fingerprint() == whole
    with torch.no_grad():
        model.blocks[1].att.key.weight.add_(0.01)
    assert model.fingerprint() != whole


def test_a_file_of_another_model_or_tokenizer_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors .*\bmodel\b"):
        load_context(saved, small_model(vocab_size=256, seed=1), BYTES)
    with pytest.raises(ValueError, match=r"safetensors .*\btokenizer\b"):
        load_context(saved, small_model(vocab_size=256), CharTokenizer("abc"))


def test_a_missing_or_damaged_file_is_one_sentence(saved: Path) -> None:
    model = small_model(vocab_size=256)
    whole = saved.read_bytes()
    with pytest.raises(UserError):
        load_context(saved.with_name("none"), model, BYTES)
    for damaged in (b"", whole[:100], whole[:-10], b"\0" * 100):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.safetensors"):
            load_context(saved, model, BYTES)
