"""Tests which arguments the public names of rwkv/__init__.py accept, and that others are refused before any work."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model, world_vocabulary
from tokenizer_files import chatml
from torch import nn

import rwkv
from rwkv import RWKV, Tokenizer, embed, generate, generate_batch
from rwkv.chat.turn_templates import chat_template
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation.conversation import Chat
from rwkv.generation.engine import Engine
from rwkv.generation.grammar import Grammar
from rwkv.generation.request import Request
from rwkv.generation.state_files import load_context, save_context
from rwkv.generation.stopping import StoppingCriteria
from rwkv.tokenizer.tokenizers import WorldTokenizer
from rwkv.tools import convert

BYTES = Tokenizer.named("byte")
MODEL: Any = small_model(vocab_size=256)
G1 = chat_template("g1")


def world() -> WorldTokenizer:
    return WorldTokenizer(world_vocabulary([]).to_text())


class OtherTokenizer:
    """Looks like a tokenizer of transformers."""

    vocab_size = 256
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_the_public_names_are_listed() -> None:
    """Completion in a notebook and help(rwkv) show the names in dir(rwkv)."""
    assert {*rwkv.__all__} <= {*dir(rwkv)}


@pytest.mark.parametrize("tokenizer", ["world", Path("tokenizer.json"), None, OtherTokenizer(), BYTES.to_dict(), type(BYTES)],
                         ids=lambda value: type(value).__name__)
def test_a_tokenizer_must_be_a_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"^tokenizer must be a Tokenizer"):
        generate(MODEL, tokenizer, "a")
    with pytest.raises(UserError, match=r"^tokenizer must be a Tokenizer"):
        generate_batch(MODEL, tokenizer, ["a"])
    with pytest.raises(UserError, match=r"^tokenizer must be a Tokenizer"):
        embed(MODEL, tokenizer, ["a"])
    with pytest.raises(UserError, match=r"^tokenizer must be a Tokenizer"):
        Chat(MODEL, tokenizer, "g1", Sampling(), 5)      # type: ignore[arg-type]
    if tokenizer is not None:
        with pytest.raises(UserError, match=r"^tokenizer must be a Tokenizer"):
            MODEL.save_pretrained(tmp_path / "model.safetensors", tokenizer)
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("model", ["model.pth", Path("model.pth"), None, RWKV, BYTES, MODEL.state_dict(),
                                   nn.DataParallel(MODEL)], ids=lambda model: type(model).__name__)
def test_a_model_must_be_a_model(model: Any) -> None:
    with pytest.raises(UserError, match=r"^model must be an RWKV model"):
        generate(model, BYTES, "a")
    with pytest.raises(UserError, match=r"^model must be an RWKV model"):
        embed(model, BYTES, ["a"])


def test_a_compiled_model_generates_as_before() -> None:
    expected = [*generate(MODEL, BYTES, "a", max_new_tokens=5)]
    assert [*generate(torch.compile(MODEL, backend="eager"), BYTES, "a", max_new_tokens=5)] == expected       # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [
    *(("prompt", value) for value in (["a"], None, b"a", [1, 2], torch.tensor([1]), Path("a"))),
    ("context", MODEL), ("context", "state.safetensors"), ("cache", 1), ("grammar", "[a-z]+"), ("grammar", {"type": "object"}),
    ("draft", "ngram"), ("draft", MODEL)])
def test_other_arguments_of_generate(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name} must be "):
        generate(MODEL, BYTES, **{"prompt": "a", name: value})


@pytest.mark.parametrize(("name", "part"), [("max_tokens", r"\bmax_new_tokens\b"), ("temprature", r"\btemperature\b"),
                                            ("do_sample", r"\bstop_tokens\b.*\btop_k\b")])
def test_an_unknown_argument_is_named_with_the_function_and_the_known_ones(name: str, part: str) -> None:
    for function, prompt in ((generate, "a"), (generate_batch, ["a"])):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\).*\b{name}\b.*{part}"):
            function(MODEL, BYTES, prompt, **{name: 1})          # type: ignore[operator]


@pytest.mark.parametrize(("call", "part"), [
    (lambda: RWKV.from_pretrained(None), "path"), (lambda: RWKV.from_pretrained(MODEL), "path"),
    (lambda: RWKV.from_pretrained(""), "path"), (lambda: MODEL.save_pretrained(""), "path"),
    (lambda: RWKV.from_pretrained("model.pth", lora=3), "lora"), (lambda: MODEL.save_pretrained(None), "path"),
    (lambda: RWKV.from_pretrained("model.pth", device=None), "device"),
    (lambda: RWKV.from_pretrained("model.pth", dtype=torch.bfloat16), "dtype"),
    (lambda: RWKV.from_pretrained("model.pth", dtype=["int8"]), "dtype"),
    (lambda: RWKV.from_pretrained("model.pth", kernel=["auto"]), "kernel"),
    (lambda: RWKV.from_pretrained("model.pth", kernel=None), "kernel"),
    *((lambda alpha=alpha: RWKV.from_pretrained("model.pth", lora="a.pth", lora_alpha=alpha), "lora_alpha")
      for alpha in ("32", [32], 0, -1.0, math.nan)),
    (lambda: MODEL.save_pretrained("model.safetensors", dtype=["float16"]), "dtype"),
    (lambda: MODEL.save_pretrained("model.safetensors", dtype=torch.float16), "dtype"),
    (lambda: Tokenizer.named(None), "tokenizer"), (lambda: Tokenizer.named(BYTES), "tokenizer"),
    (lambda: Tokenizer.named(Path("gpt2")), "tokenizer"), (lambda: Tokenizer.from_file(None), "file"),
    (lambda: BYTES.encode(None), "string"), (lambda: BYTES.encode_batch([["a"]]), "string"),
    (lambda: BYTES.encode_batch("ab"), "texts"), (lambda: world().encode_batch("ab"), "texts"),
    *((lambda ids=ids: BYTES.decode(ids), "ids") for ids in (None, 65, "ab", [65.0], [[65]], ["A"], torch.tensor([[65, 66]]))),
    (lambda: Chat(MODEL, BYTES, "g1", Sampling(), 5), "template"), (lambda: Chat("a", BYTES, G1, Sampling(), 5), "model"),
    (lambda: Chat(MODEL, BYTES, G1, {"top_k": 5}, 5), "sampling"), (lambda: chat_template(None), "template"),
    (lambda: Grammar.lark(None), "string")])
def test_arguments_of_files_and_tokenizers(call: Any, part: str) -> None:
    with pytest.raises(UserError, match=rf"\b{part} must|a text must be a {part}"):
        call()


def test_a_tokenizer_of_another_model_is_reported() -> None:
    """The ids of a much smaller vocabulary are valid for the model, but mean something else."""
    model = small_model(vocab_size=BYTES.vocab_size + 256)
    for call in (lambda: generate(model, BYTES, "a"), lambda: generate_batch(model, BYTES, ["a"], max_new_tokens=1),
                 lambda: embed(model, BYTES, ["a"])):
        with pytest.warns(UserWarning, match="the tokenizer has 256 tokens, but the model has 512"):
            call()
    generate(small_model(vocab_size=BYTES.vocab_size + 255), BYTES, "a")         # some vocabulary sizes are rounded up


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not expand ~, so a file would be written into a folder named ~."""
    monkeypatch.setenv("USERPROFILE" if sys.platform == "win32" else "HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    MODEL.save_pretrained("~/models/model.safetensors", BYTES)
    model = RWKV.from_pretrained(Path("~/models/model.safetensors"))
    engine = Engine(model, BYTES)
    engine.add_all([Request("a", 0, StoppingCriteria(1))])
    engine.run()
    save_context("~/state.safetensors", engine.context(), model, BYTES)
    assert load_context("~/state.safetensors", model, BYTES).last_ids == engine.context().last_ids
    (tmp_path / "tokenizer.json").write_text(chatml())
    assert Tokenizer.named("~/tokenizer.json").hash == Tokenizer.from_file(Path("~/tokenizer.json")).hash
    assert not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_named_like_the_home_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Path("./~/x") equals Path("~/x")."""
    monkeypatch.setenv("USERPROFILE" if sys.platform == "win32" else "HOME", str(tmp_path))
    (tmp_path / "here" / "~").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    MODEL.save_pretrained(kind("./~/model.safetensors"), BYTES)
    (tmp_path / "here" / "~" / "tokenizer.json").write_text(chatml())
    assert RWKV.from_pretrained(kind("./~/model.safetensors")).vocab_size == MODEL.vocab_size
    assert Tokenizer.named(kind("./~/tokenizer.json")).hash == Tokenizer.from_file(kind("./~/tokenizer.json")).hash
    convert.main(["./~/model.safetensors", "./~/model.pth"])
    assert len([*(tmp_path / "here" / "~").iterdir()]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_path_names_a_tokenizer() -> None:
    assert Tokenizer.named(Path("byte")).kind == "byte"


@pytest.mark.parametrize("tokens", [[[1, 2]], None, "a"])
def test_tokens_must_be_a_tensor(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be a tensor"):
        MODEL(tokens)


@pytest.mark.parametrize("tokens", [torch.tensor([[1, 256]]), torch.tensor([[-100, 1]]), torch.tensor([[1.0]]),
                                    torch.tensor([[1]], dtype=torch.uint8)], ids=["large", "negative", "float32", "uint8"])
def test_tokens_must_be_ids_of_the_vocabulary(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        MODEL(tokens)


def test_the_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path / "model", BYTES)
    MODEL.save_pretrained(tmp_path / "model.pth")
    assert RWKV.tokenizer_of(tmp_path / "model").hash == BYTES.hash
    assert RWKV.tokenizer_of(tmp_path / "model.pth", "byte").hash == BYTES.hash
    with pytest.raises(UserError, match="contains no tokenizer: pass tokenizer="):
        RWKV.tokenizer_of(tmp_path / "model.pth")
