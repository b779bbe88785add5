"""Tests tuned states of every program that publishes them: each is read in its layout or refused, and written for others."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from files import SIZES
from models import small_model, tokens
from programs import caller, one_sentence
from safetensors.torch import load_file, save_file
from torch import Tensor

from rwkv.checkpoint import time_states
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import GenerateConfig, KernelConfig
from rwkv.errors import UserError
from rwkv.pretrained import RWKV, OpenCheckpoint, open_checkpoint
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert

L, H, N = 3, 2, 64
PROMPT = "prompt=once", "max_new_tokens=6", "kernel=reference"


def tuned_state(L: int = L, H: int = H, N: int = N, seed: int = 0, **names: str) -> dict[str, Tensor]:
    """Returns a tuned state as trainers write it: a matrix (value, key) per head."""
    random = torch.Generator().manual_seed(seed)
    return {f"blocks.{layer}.att.time_state": 0.3 * torch.randn(H, N, N, generator=random) for layer in range(L)}


def transposed(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a tuned state as web-rwkv's converter writes it: a matrix (key, value) per head."""
    return {name: state.mT.half().contiguous() for name, state in states.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model with a vocabulary of bytes, and one tuned state in every file format."""
    root = tmp_path_factory.mktemp("states")
    model = small_model(generation="rwkv7", vocab_size=256, n_layer=L, **SIZES["rwkv7"])
    model.save_pretrained(root / "base.safetensors", ByteTokenizer())
    small_model(vocab_size=256).save_pretrained(root / "base4.safetensors", ByteTokenizer())
    rounded = {name: state.half().float() for name, state in tuned_state().items()}           # float16 is the narrowest format
    torch.save(rounded, root / "state.pth")
    torch.save(rounded, root / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({f"_orig_mod.module.model.{name}": state.bfloat16() for name, state in rounded.items()}, root / "wrapped.pth")
    torch.save({"state_dict": {name: state[None].double() for name, state in rounded.items()}}, root / "rows.pth")
    save_file(transposed(rounded), root / "state.st")
    save_file(transposed(rounded), root / "ai00.state")
    save_file(rounded, root / "plain.safetensors")
    save_file(transposed(rounded), root / "turned.safetensors")
    torch.save({**model.state_dict(), **rounded}, root / "both.pth")
    convert.convert(root / "both.pth", root / "both.st")
    return root


FORMS = {"state.pth": None, "old.pth": None, "wrapped.pth": None, "rows.pth": None, "state.st": None, "ai00.state": None,
         "plain.safetensors": "official", "turned.safetensors": "transposed"}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_state(folder: Path, form: str) -> None:
    config = read_checkpoint(folder / "base.safetensors").config
    states = time_states.read(folder / form, config, FORMS[form])
    expected = tuned_state()
    atol = 2e-2 if form == "wrapped.pth" else 1e-3       # bfloat16, float16
    for layer, state in enumerate(states.layers):
        torch.testing.assert_close(state.get(), expected[f"blocks.{layer}.att.time_state"], rtol=0, atol=atol)
    assert states.layout in states.line
    content = time_states.read_content((folder / form).read_bytes(), config, states.layout)
    assert all(torch.equal(one.get(), other.get()) for one, other in zip(content.layers, states.layers, strict=True))


def open_base(folder: Path) -> OpenCheckpoint:
    return open_checkpoint(GenerateConfig(checkpoint=str(folder / "base.safetensors"), kernel=KernelConfig("reference")))


def test_a_separate_state_gives_the_results_of_a_model_that_contains_it(folder: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """The state is read from state= or beside the weights, in either layout."""
    model = RWKV.from_pretrained(folder / "base.safetensors", "reference")
    ids = tokens(model, B=1)
    states = {name: state.half().float() for name, state in tuned_state().items()}
    plain = model(ids)[0]
    model.set_time_states(list(states.values()))
    expected = model(ids)[0]
    assert (expected - plain).abs().max() > 0.1
    for name in ("state.pth", "state.st"):
        base, context = open_base(folder).model_and_context(str(folder / name), None)
        torch.testing.assert_close(base(ids, context.state)[0], expected, rtol=0, atol=1e-5)
        assert "tuned state in" in capsys.readouterr().err
    torch.testing.assert_close(RWKV.from_pretrained(folder / "both.pth", "reference")(ids)[0], expected, rtol=0, atol=1e-5)
    rounded = RWKV.from_pretrained(folder / "both.st", "reference")
    assert all(torch.equal(*pair) for pair in zip(rounded.time_states(), states.values(), strict=True))
    trained = RWKV.from_pretrained(folder / "both.pth", "reference", trainable=True)
    assert len(trained.time_states()) == L


def test_a_layout_that_no_file_states_is_required(folder: Path) -> None:
    config = read_checkpoint(folder / "base.safetensors").config
    with pytest.raises(UserError, match=r"state_layout=official .*state_layout=transposed"):
        time_states.read(folder / "plain.safetensors", config)
    states = time_states.read(folder / "state.pth", config, "transposed")        # the option wins over the file's format
    assert states.layout == "transposed"
    assert torch.equal(states.layers[0].get(), time_states.read(folder / "state.pth", config).layers[0].get().mT)


def test_a_model_in_place_of_a_state_is_not_called_a_training_run(folder: Path) -> None:
    with pytest.raises(UserError, match="contains weights: pass them as checkpoint=") as error:
        open_base(folder).model_and_context(str(folder / "base.safetensors"), None)
    assert "training run" not in str(error.value)


@pytest.mark.parametrize(("states", "message"), [
    (tuned_state(L=2), "2 layers of 2 heads of size 64, but the model has 3 layers of 2 heads of size 64"),
    (tuned_state(H=4, N=32), "3 layers of 4 heads of size 32, but the model has 3 layers of 2 heads of size 64"),
    ({**tuned_state(), "blocks.1.att.time_state": torch.zeros(2, 64, 32)}, "several shapes"),
    ({name: state[0] for name, state in tuned_state().items()}, "an unexpected shape"),
    ({name: state for name, state in tuned_state(L=4).items() if "1" not in name}, "lacks layer 1"),
    ({**tuned_state(), "blocks.0.att.time_offset": torch.zeros(2)}, "time_offset"),
    ({**tuned_state(), "emb.weight": torch.zeros(2, 2)}, "checkpoint="), ({"a.b": torch.zeros(2)}, "a.b"), ({}, "no tensors"),
    ({**tuned_state(), **{f"ema.{name}": state for name, state in tuned_state().items()}}, "several states"),
    ({"blocks.0.att.key.lora_A": torch.zeros(2, 2)}, "adapter"),
    ({name: state / 0 for name, state in tuned_state().items()}, "finite")])
def test_a_state_of_another_model_says_what_both_have(folder: Path, tmp_path: Path, states: dict[str, Tensor],
                                                      message: str) -> None:
    torch.save(states, tmp_path / "wrong.pth")
    with pytest.raises(UserError) as error:
        open_base(folder).model_and_context(str(tmp_path / "wrong.pth"), None)
    assert "\n" not in str(error.value)
    for part in ("wrong.pth", message):
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["state.pth", "old.pth", "state.st"])
def test_a_damaged_state_is_reported_in_one_sentence(folder: Path, tmp_path: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    config = read_checkpoint(folder / "base.safetensors").config
    damaged = [whole[:-300], whole[:200], b""] + ([whole[:9000] + b"\xff" * 64 + whole[9064:]] if name == "state.pth" else [])
    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            time_states.read(tmp_path / name, config, "official")
        with pytest.raises(UserError, match="the file"):
            time_states.read_content(content, config, "official")


def test_convert_transposes_a_state_for_web_rwkv_and_back(folder: Path, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    convert.main([str(folder / "state.pth"), str(tmp_path / "out.st")])
    actual, expected = load_file(tmp_path / "out.st"), load_file(folder / "state.st")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert "key by value" in capsys.readouterr().err
    convert.main([str(folder / "turned.safetensors"), str(tmp_path / "back.pth"), "--state-layout", "transposed"])
    back, before = (torch.load(path, weights_only=True) for path in (tmp_path / "back.pth", folder / "state.pth"))
    assert all(torch.equal(back[name], before[name]) for name in before)
    for (name, *arguments), message in ((("state.pth", "out.gguf"), ".st"),
                                        (("state.pth", "o.pth", "--dtype", "float16"), "--dtype"),
                                        (("state.pth", "o.pth", "--by-input"), "--by-input"),
                                        (("base.safetensors", "o.pth", "--state-layout", "official"), "--state-layout"),
                                        (("both.pth", "out.gguf"), "tuned state")):
        with pytest.raises(SystemExit) as exit_info:
            convert.main([str(folder / name), *arguments])
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.programs
def test_programs_take_a_state_of_any_form(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    run = caller(monkeypatch, capsys)
    base = "checkpoint=base.safetensors"
    texts = set()
    for options in ((base, "state=state.pth"), (base, "state=state.st"),
                    (base, "state=plain.safetensors", "state_layout=official"), ("checkpoint=both.pth", "tokenizer=byte")):
        status, text, error = run("generate", *options, *PROMPT)
        assert status == 0, error
        assert "state: " in error
        texts.add(text)
    assert len(texts) == 1
    assert run("generate", base, *PROMPT)[1] not in texts
    for wrong, message in ((("checkpoint=base4.safetensors", "state=state.pth"), "RWKV-4"),
                           ((base, "state=plain.safetensors"), "state_layout="), ((base, "state_layout=official"), "state="),
                           (("checkpoint=state.pth",), "state="), ((base, "state=base.safetensors"), "checkpoint=")):
        one_sentence(run("generate", *wrong, *PROMPT), message)
