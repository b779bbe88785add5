"""Tests files that a program writes when it ends: a wrong path is an error before the work, and no input is overwritten."""

import os
from pathlib import Path

import pytest
import torch
from models import small_model
from programs import Run, caller, one_sentence
from safetensors.torch import save_file

from rwkv.errors import UserError
from rwkv.io.output_file import require_writable
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Returns a function that runs programs in a folder with a model and prompts."""
    monkeypatch.chdir(tmp_path)
    small_model(vocab_size=256).save_pretrained("model.safetensors", ByteTokenizer())
    Path("prompts.txt").write_text("one\ntwo\n")
    Path("schema.json").write_text('{"type": "boolean"}')
    save_file({"blocks.0.att.key.lora_A": torch.ones(2, 16), "blocks.0.att.key.lora_B": torch.ones(16, 2)}, "lora.safetensors")
    return caller(monkeypatch, capsys)


@pytest.mark.parametrize(("program", "arguments", "input_name"), [
    ("generate", ("prompts=prompts.txt", "out=prompts.txt"), "prompts.txt"),
    ("generate", ("prompt=a", "out=model.safetensors"), "model.safetensors"),
    ("generate", ("prompt=a", "save_state=model.safetensors"), "model.safetensors"),
    ("generate", ("prompt=a", "lora=lora.safetensors", "lora_alpha=1", "out=lora.safetensors"), "lora.safetensors"),
    ("generate", ("prompt=a", "draft=lora.safetensors", "save_state=lora.safetensors"), "lora.safetensors"),
    ("generate", ("prompt=a", "json_schema=schema.json", "out=schema.json"), "schema.json"),
    ("evaluate", ("data.path=prompts.txt", "lora=lora.safetensors", "out=lora.safetensors"), "lora.safetensors"),
    ("evaluate", ("data.path=prompts.txt", "out=prompts.txt"), "prompts.txt"),
    ("evaluate", ("data.path=prompts.txt", "out=./model.safetensors"), "model.safetensors"),
])
def test_a_program_does_not_replace_the_files_that_it_reads(run: Run, program: str, arguments: tuple[str, ...],
                                                            input_name: str) -> None:
    before = Path(input_name).read_bytes()
    one_sentence(run(program, "checkpoint=model.safetensors", *arguments), "would overwrite", input_name)
    assert Path(input_name).read_bytes() == before


@pytest.mark.usefixtures("run")
def test_an_adapter_is_not_replaced_by_its_merge() -> None:
    before = Path("lora.safetensors").read_bytes()
    with pytest.raises(SystemExit) as stop:
        convert.main(["model.safetensors", "lora.safetensors", "--lora", "lora.safetensors", "--lora-alpha", "1"])
    assert stop.value.code == 2
    assert Path("lora.safetensors").read_bytes() == before


def test_a_state_may_be_replaced_by_its_continuation(run: Run) -> None:
    command = ("generate", "checkpoint=model.safetensors", "prompt=a", "max_new_tokens=2", "save_state=state.safetensors")
    assert run(*command)[0] == 0
    assert run(*command, "state=state.safetensors")[0] == 0


def test_a_folder_with_its_own_and_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoints/last.ckpt", "config.yaml", "result.json"):
        (tmp_path / name).write_text("")
    require_writable("out", tmp_path / "result.json", [tmp_path, None])
    require_writable("out", tmp_path / "new.json", [tmp_path])
    for name in ("checkpoints/last.ckpt", "config.yaml"):
        with pytest.raises(UserError):
            require_writable("out", tmp_path / name, [tmp_path])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError):
        require_writable("out", tmp_path / "out.json")


@pytest.mark.parametrize("name", ["", "missing/out.json"])
def test_a_folder_is_not_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        require_writable("out", tmp_path / name)
