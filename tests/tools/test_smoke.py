"""Tests timemix smoke, which checks a model with a short run of everything."""

import json
from pathlib import Path

import pytest
import torch
from forked import ROOT, Forked
from models import small_model
from programs import one_sentence
from training_runs import finish

from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import smoke


@pytest.mark.programs
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_smoke_passes_here(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "smoke.json"
    path = tmp_path / "small.safetensors"
    small_model(generation="rwkv7", vocab_size=256, n_embd=32).save_pretrained(path, ByteTokenizer())
    assert smoke.main([str(path), "--dtype", dtype, "--device", "cpu", "--out", str(out)]) == 0, capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["result"] == "PASS"
    assert [check["check"] for check in report["checks"]] == ["load", "read", "compare", "generate", "train"]
    assert report["machine"]["packages"]["torch"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS")


@pytest.mark.thorough
def test_smoke_needs_no_checkpoint(tmp_path: Path) -> None:
    assert smoke.main(["--out", str(tmp_path / "smoke.json")]) == 0


@pytest.mark.programs
def test_smoke_fails_if_the_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.safetensors"
    model = small_model(vocab_size=256)
    with torch.no_grad():
        model.blocks[1].ffn.key.weight.fill_(1e30)
    model.save_pretrained(path, ByteTokenizer())
    assert smoke.main([str(path), "--out", str(tmp_path / "smoke.json")]) == 1
    report = json.loads((tmp_path / "smoke.json").read_text())
    assert report["result"] == "FAIL"
    assert {check["check"] for check in report["checks"] if not check["passed"]} >= {"read", "compare", "train"}
    assert "Traceback" in "".join(check["traceback"] or "" for check in report["checks"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL")


@pytest.mark.programs
@pytest.mark.parametrize("arguments", [("nowhere.pth",), ("--out", "no/such/folder.json"), ("--kernel", "nothing")],
                         ids=str)
def test_a_mistake_is_reported_in_one_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = finish(Forked(tmp_path, ("-m", "rwkv.tools.smoke", *arguments), environment))
    one_sentence((result.status, "", result.error))
    assert not (tmp_path / "smoke.json").exists()


def test_a_checkpoint_without_tokenizer_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model(vocab_size=256).save_pretrained(tmp_path / "small.pth")
    with pytest.raises(SystemExit):
        smoke.main([str(tmp_path / "small.pth"), "--out", str(tmp_path / "smoke.json")])
    assert "--tokenizer=" in capsys.readouterr().err
