"""Tests train.py init_from=PATH: the file's weights, sizes and tokenizer."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from models import small_model
from programs import Run, one_sentence

from kernels.select import select
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import DataConfig, TrainConfig, TuneConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.model.lora import LoraLinear
from rwkv.model.quantized import PackedLinear
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import JsonTokenizer
from rwkv.training.run.directory import as_plain
from rwkv.training.run.opening import open_run
from rwkv.training.setup import new_model
from rwkv.training.tuning.init_from import open_init_checkpoint

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
FAST = ("trainer=cpu", "kernel=torch_scan", "data=text", "data.path=text.txt", "data.cache_dir=cache", "logger=none",
        "model.ctx_len=16", "trainer.max_steps=1", "trainer.val_every=1", "trainer.checkpoint_every=1",
        "trainer.sample_tokens=3", "out_dir=out")


@pytest.fixture
def tokenizer(tmp_path: Path) -> JsonTokenizer:
    (tmp_path / "text.txt").write_text(TEXT)
    tokenizer = JsonTokenizer.train([TEXT], 270)
    (tmp_path / "own.json").write_text(tokenizer.definition)
    return tokenizer


def save(tokenizer: JsonTokenizer, path: Path, spare_rows: int = 0, with_tokenizer: bool = True) -> RWKV:
    model = small_model("reference", tokenizer.vocab_size + spare_rows, n_layer=2, n_att=8)
    model.save_pretrained(path, tokenizer if with_tokenizer else None)
    return model


@pytest.mark.programs
def test_a_run_begins_with_a_file_and_can_be_resumed(run: Run, tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    model = save(tokenizer, tmp_path / "model", spare_rows=3)
    status, _, error = run("train", "init_from=model", "optim.lr=1e-9", *FAST)
    assert status == 0
    assert "weights    weights, sizes and tokenizer come from model" in error
    checkpoint = read_checkpoint(tmp_path / "out")
    assert checkpoint.config == replace(model.config, ctx_len=16)
    assert (checkpoint.tokenizer_hash, checkpoint.vocab_size) == (tokenizer.hash, tokenizer.vocab_size + 3)
    torch.testing.assert_close(dict(checkpoint.weights), dict(model.state_dict()), rtol=0, atol=1e-6)
    status, _, error = run("train", "resume=auto", "trainer.max_steps=2", "trainer.sample_tokens=0")
    assert status == 0
    assert read_checkpoint(tmp_path / "out").step == 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_same_command_begins_a_run_and_resumes_it(tmp_path: Path, tokenizer: JsonTokenizer, method: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems repeat a command. A run with tune=lora has saved the absolute path of its file."""
    monkeypatch.chdir(tmp_path)
    for name in ("base.safetensors", "other.safetensors"):
        save(tokenizer, tmp_path / name)
    config = TrainConfig(init_from="base.safetensors", resume="auto", out_dir="run", tune=TuneConfig(method=method))
    run = open_run(config, ["init_from", "resume", "out_dir"], ["tune.method"])
    Path("run").mkdir()
    Path("run/config.yaml").write_text(yaml.safe_dump(as_plain(run.config)), encoding="utf-8")
    assert open_run(config, ["init_from", "resume", "out_dir"], ["tune.method"]).config.init_from == run.config.init_from
    base = r"base\.safetensors"
    for other, message in (("other.safetensors", base), (None, base), ("missing.pth", "missing")):
        with pytest.raises(UserError, match=message):
            open_run(replace(config, init_from=other), ["init_from", "resume", "out_dir"], ["tune.method"])


@pytest.mark.programs
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_debug_run_sets_no_sizes_at_a_resume(run: Run, tmp_path: Path, tokenizer: JsonTokenizer, checkpoints: bool) -> None:
    """A resume keeps sizes and tokenizer even without a first checkpoint. Sizes that the user gives are refused."""
    model = save(tokenizer, tmp_path / "model")
    options = ("debug=fast", *FAST, "data.val_fraction=0.1")
    status, _, error = run("train", "init_from=model", *options)
    assert status == 0, error
    if not checkpoints:
        shutil.rmtree(tmp_path / "out" / "checkpoints")
    longer = ("resume=auto", *options, "trainer.max_steps=2")
    one_sentence(run("train", *longer, "model.n_embd=64"), "model.n_embd")
    status, _, error = run("train", *longer)
    assert status == 0, error
    checkpoint = read_checkpoint(tmp_path / "out")
    assert (checkpoint.step, checkpoint.tokenizer_hash) == (2, tokenizer.hash)
    assert checkpoint.config == replace(model.config, ctx_len=16)


def test_the_model_to_train_is_that_of_the_file(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    model = save(tokenizer, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    new = new_model(replace(checkpoint.config, ctx_len=7), checkpoint, tokenizer, select("wkv4", "reference"))
    assert (new.config.ctx_len, new.training) == (7, True)
    with torch.no_grad():
        for name, weight in new.named_parameters():
            assert weight.requires_grad
            assert torch.equal(weight, model.state_dict()[name])
            weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert torch.equal(checkpoint.weights["emb.weight"], model.emb.weight)


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_frozen_layers_for_a_gpu_can_compute_there(tmp_path: Path, tokenizer: JsonTokenizer, base: str) -> None:
    """The layers for a CPU multiply in C or FBGEMM, and do not move to a GPU."""
    save(tokenizer, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path / "model.safetensors")
    wkv = select("wkv4", "reference")
    model = new_model(checkpoint.config, checkpoint, tokenizer, wkv, TuneConfig(method="lora", base=base), torch.device("cuda"))
    layers = [layer.base for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert layers
    assert {(type(layer), layer.format) for layer in layers} == {(PackedLinear, base)}
    model.forward_features(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".lora_B." in name)


def test_a_released_model_gives_its_tokenizer_template_and_length(tmp_path: Path) -> None:
    """The file contains only weights; its vocabulary size and its name determine the tokenizer, the template and the length."""
    pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
    path = tmp_path / "rwkv7-g1k-0.1b-20260930-ctx25600.pth"
    small_model("conv1d", 65536, n_layer=1, n_embd=2).save_pretrained(path)
    config = TrainConfig(init_from=str(path), data=DataConfig(name="chat"))
    run_config, checkpoint, tokenizer = open_init_checkpoint(config, [])
    assert (run_config.data.template, tokenizer.kind, checkpoint.config.ctx_len) == ("g1", "world", 25600)
    assert run_config.model.ctx_len == config.model.ctx_len
    with pytest.raises(CheckpointError):
        open_init_checkpoint(config, ["data.tokenizer"])


@pytest.mark.parametrize(("arguments", "part"), [
    (("init_from=none.pth",), "data.tokenizer"),
    (("init_from=own.ckpt", "data.tokenizer=byte"), "data.tokenizer=byte"),
    (("init_from=large.pth", "data.tokenizer=own.json"), "large.pth"),
    (("init_from=own.ckpt", "model.n_embd=24"), "model.n_embd"),
    *(pytest.param(*more, marks=pytest.mark.thorough) for more in (
        (("init_from=own.ckpt", "data.tokenizer=bpe"), "data.tokenizer"),
        (("init_from=own.ckpt", "data.vocab_size=300"), "data.vocab_size"),
        (("init_from=own.ckpt", "model=small"), "model.")))])
def test_a_file_that_does_not_fit_the_options_is_refused(run: Run, tmp_path: Path, tokenizer: JsonTokenizer,
                                                         arguments: tuple[str, ...], part: str) -> None:
    save(tokenizer, tmp_path / "own.ckpt")
    save(tokenizer, tmp_path / "none.pth", with_tokenizer=False)
    small_model("reference", 600).save_pretrained(tmp_path / "large.pth")
    one_sentence(run("train", *arguments, *FAST), part)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.programs
def test_a_tokenizer_may_be_named_for_a_file_without_one(run: Run, tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    save(tokenizer, tmp_path / "none.pth", with_tokenizer=False)
    status, _, error = run("train", "init_from=none.pth", "data.tokenizer=own.json", *FAST)
    assert (status, read_checkpoint(tmp_path / "out").tokenizer_hash) == (0, tokenizer.hash), error
