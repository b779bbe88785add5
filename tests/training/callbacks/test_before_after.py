"""Tests the measurements of a tuned run before and after: they equal the evaluation tool's and do not change training."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from files import SIZES, byte_model
from models import small_model
from programs import Run, one_sentence
from training_runs import OWN, content, losses, rows, same

from rwkv import report
from rwkv.config import TrainConfig, TuneConfig
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import CharTokenizer
from rwkv.training.run.options import check_new_run
from rwkv.training.tuning.guard import __file__ as GUARD

OPTIONS = ("data=chat", "data.path=conversations.jsonl", "data.batch_size=2", "data.cache_dir=cache", "trainer=cpu",
           "logger=csv", "model.ctx_len=64", "optim.lr=1e-2", "optim.warmup_steps=0", "trainer.sample_tokens=4",
           "trainer.log_every=1", "trainer.malloc=default", "init_from=base7.safetensors")
CONTINUED = ("train", "logger=csv", "trainer.max_steps=6", "resume=auto", "out_dir=out")
ENGLISH = Path(GUARD).with_name("english.txt")
KILLED = "trainer.max_steps=6", "trainer.val_every=3", "trainer.checkpoint_every=3"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder with a model and texts. held_out.jsonl is the first line of conversations.jsonl: its validation split."""
    byte_model(tmp_path / "base7.safetensors", n_layer=2, n_embd=64)             # small, because english.txt is read often
    conversations = [json.dumps({"prompt": f"{number} and one?", "completion": str(number + 1)}) for number in range(9)]
    (tmp_path / "conversations.jsonl").write_text("\n".join(conversations))
    (tmp_path / "held_out.jsonl").write_text(conversations[0])
    (tmp_path / "guard.txt").write_text("Some other text.\n" * 9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune_model(run: Run, *options: str) -> dict[str, Any]:
    status, _, error = run("train", *OPTIONS, "out_dir=out", "trainer.max_steps=3", *options)
    assert status == 0, error
    results: dict[str, Any] = json.loads(Path("out/tuned.json").read_text(encoding="utf-8"))
    return results


def simulate_kill() -> None:
    """Copies the run to `whole`, and deletes from `out` what a kill after step 3 would not leave."""
    shutil.copytree("out", "whole")
    for name in ("last.ckpt", "best.ckpt"):
        Path("out/checkpoints", name).unlink()


def evaluate(run: Run, checkpoint: str, path: str | Path) -> dict[str, float]:
    status, output, error = run("evaluate", f"checkpoint={checkpoint}", f"data.path={path}", "device=cpu")
    assert status == 0, error
    results: dict[str, float] = json.loads(output)
    return results


@pytest.mark.programs
@pytest.mark.parametrize("options", [("tune=lora", "tune.dropout=0.5", "tune.guard=guard.txt"),
                                     ("tune=full", "trainer.accumulate=2")])
def test_losses_are_those_of_the_evaluation_before_and_after(run: Run, options: tuple[str, ...]) -> None:
    results = tune_model(run, *options)
    guard = "guard.txt" if "tune.guard=guard.txt" in options else ENGLISH
    for when, checkpoint in (("before", "base7.safetensors"), ("after", "out/checkpoints/last.ckpt")):
        text, answers = (evaluate(run, checkpoint, path) for path in (guard, "held_out.jsonl"))
        assert results[when]["guard/loss"] == pytest.approx(text["loss"], abs=1e-4)
        assert results[when]["guard/bpb"] == pytest.approx(text["bits_per_byte"], abs=1e-4)
        assert results[when]["val/loss"] == pytest.approx(answers["loss"], abs=1e-4)
    assert results["before"]["guard/loss"] != results["after"]["guard/loss"]
    for name in ("val/loss", "val/bpb", "guard/loss", "guard/bpb"):
        assert losses(Path("out"), name) == {0: results["before"][name], 3: results["after"][name]}


@pytest.mark.programs
def test_answers_to_held_out_prompts(run: Run) -> None:
    (sample,) = tune_model(run, "tune=lora")["samples"]
    assert sample["prompt"] == "User: 0 and one?\n\nAssistant:"
    assert sample["reference"].strip() == "1"
    for when, checkpoint in (("before", "base7.safetensors"), ("after", "out")):
        _, text, _ = run("generate", f"checkpoint={checkpoint}", f"prompt={sample['prompt']}", "temperature=0",
                         "max_new_tokens=4", "device=cpu", "stop=\n\n")
        assert text.removeprefix(sample["prompt"]).rstrip("\n") == sample[when].rstrip("\n")


@pytest.mark.programs
def test_documents_have_prompts_too(run: Run) -> None:
    Path("text.txt").write_text("".join(f"line {number} of a longer text\n" for number in range(300)))
    results = tune_model(run, "tune=lora", "data=text", "data.path=text.txt")
    sample = results["samples"][0]
    assert sample["prompt"] + sample["reference"] in Path("text.txt").read_text()
    assert len(sample["reference"]) == 4


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only names in Unicode")
def test_a_folder_whose_name_is_not_utf_8(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old archives contain folders and files with such names."""
    inside = folder / os.fsdecode(b"b\xe9b\xe9")
    (inside / "texts").mkdir(parents=True)
    for number in range(3):
        (inside / "texts" / os.fsdecode(b"%d\xff.txt" % number)).write_text(f"text {number}\n" * 99)
    for file in folder.glob("*.*"):
        file.rename(inside / file.name)
    monkeypatch.chdir(inside)
    results = tune_model(run, "tune=lora", "data=text", "data.path=texts")
    assert results["tuned"]["base"] == str(Path.cwd() / "base7.safetensors")
    assert {path.name for path in Path("out").glob("*.*")} >= {"report.html", "report.csv", "README.md"}
    report.write(Path())


@pytest.mark.programs
def test_measurements_do_not_change_training(run: Run) -> None:
    options = "tune=lora", "tune.dropout=0.5"
    tune_model(run, *options, "out_dir=out")
    status, _, error = run("train", *OPTIONS, *options, "tune.guard=null", "trainer.sample_tokens=0", "trainer.sample_every=0",
                           "trainer.max_steps=3", "out_dir=bare")
    assert status == 0, error
    ours, bare = (content(Path(name, "checkpoints/last.ckpt")) for name in ("out", "bare"))
    assert all(same(ours[name], bare[name]) for name in bare if name.startswith(("/state_dict", "/optimizer", "/loops")))
    assert all(same(ours[name], bare[name]) for name in bare if "RandomState" in name)
    assert "guard/loss" not in rows(Path("bare"))[0]
    assert "guard/loss" not in json.loads(Path("bare/tuned.json").read_text())["before"]


@pytest.mark.programs
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.soak), "full"])
def test_a_continued_run_keeps_its_earlier_measurements(run: Run, method: str) -> None:
    """Measurements are bit-identical, even without tuned.json and, in full tuning, without the base."""
    whole = tune_model(run, f"tune={method}", *KILLED)
    simulate_kill()
    Path("out/tuned.json").unlink()
    if method == "full":
        Path("base7.safetensors").unlink()
    status, _, error = run(*CONTINUED)
    assert status == 0, error
    assert json.loads(Path("out/tuned.json").read_text()) == whole
    ours, continued = (content(Path(name, "checkpoints/last.ckpt")) for name in ("whole", "out"))
    assert not {name for name in ours if name not in OWN and not same(ours[name], continued[name])}


@pytest.mark.programs
def test_another_general_text_is_refused_when_a_run_continues(run: Run) -> None:
    tune_model(run, "tune=lora", "tune.guard=guard.txt")
    Path("guard.txt").write_text("Another text.")
    one_sentence_at_the_end(run(*CONTINUED), "tune.guard=guard.txt")
    Path("guard.txt").unlink()
    one_sentence_at_the_end(run(*CONTINUED), "tune.guard=guard.txt")
    assert rows(Path("out"))[-1]["step"] == "3"


def one_sentence_at_the_end(result: tuple[int, str, str], part: str) -> None:
    """Checks that the last line is the error, after the lines of the plan."""
    status, _, error = result
    assert status == 2
    last = error.rstrip().splitlines()[-1]
    assert last.startswith("error: ")
    assert part in last


@pytest.mark.programs
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"])
def test_a_general_text_that_cannot_be_read_is_refused(run: Run, content: bytes) -> None:
    Path("bad.txt").write_bytes(content)
    one_sentence(run("train", *OPTIONS, "tune=lora", "tune.guard=bad.txt", "out_dir=out"), "tune.guard=bad.txt")
    without_base = [option for option in OPTIONS if not option.startswith("init_from")]
    one_sentence(run("train", *without_base, "tune.guard=guard.txt", "out_dir=out"), "init_from=")
    assert not Path("out").exists()


def test_a_general_text_that_is_not_measured_need_not_exist() -> None:
    """A run without tune= ignores the text that an experiment's file names, unless the user sets tune.guard."""
    config = TrainConfig(init_from="base7.safetensors", tune=TuneConfig(guard="nothing.txt"))
    check_new_run(config, ["init_from"])
    with pytest.raises(UserError):
        check_new_run(config, ["init_from", "tune.guard"])


@pytest.mark.programs
def test_a_tokenizer_without_the_letters_of_the_default_text_has_no_general_text(run: Run) -> None:
    tokenizer = CharTokenizer("User: Assistant\n0123456789 and one?")
    small_model(generation="rwkv7", vocab_size=tokenizer.vocab_size, **SIZES["rwkv7"]).save_pretrained("base7.safetensors",
                                                                                                       tokenizer)
    results = tune_model(run, "tune=lora")
    assert set(results["before"]) == {"step", "val/loss", "val/bpb"}
    one_sentence(run("train", *OPTIONS, "tune=lora", "tune.guard=guard.txt", "out_dir=other"), "tune.guard")


@pytest.mark.programs
def test_a_run_that_continues_pretraining_is_not_compared_unless_asked(run: Run) -> None:
    Path("text.txt").write_text("".join(f"line {number} of a longer text\n" for number in range(300)))
    text = (*OPTIONS, "data=text", "data.path=text.txt", "trainer.max_steps=1")
    assert run("train", *text, "out_dir=on")[0] == 0
    assert not Path("on/tuned.json").exists()
    assert 0 not in losses(Path("on"), "val/loss")
    assert run("train", *text, "tune=full", "out_dir=tuned")[0] == 0
    assert "guard/loss" in json.loads(Path("tuned/tuned.json").read_text())["after"]


@pytest.mark.soak
def test_a_run_without_a_general_text_is_continued_without_one(run: Run) -> None:
    tune_model(run, "tune=lora", *KILLED)
    simulate_kill()
    for path in Path("out/checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["callbacks"]["BeforeAfter"], checkpoint["timemix"]["run"]["tune"]["guard"]
        torch.save(checkpoint, path)
    Path("out/tuned.json").unlink()
    status, _, error = run(*CONTINUED)
    assert status == 0, error
    assert not Path("out/tuned.json").exists()
    ours, continued = (content(Path(name, "checkpoints/last.ckpt")) for name in ("whole", "out"))
    trained = [name for name in ours if name.startswith(("/state_dict", "/optimizer"))]
    assert all(same(ours[name], continued[name]) for name in trained)
