"""Tests timemix doctor, smoke and completion, and the names under which tools run."""

import json
import shutil
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from models import small_model
from programs import one_sentence

from kernels.registry import names, operators
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import completion, doctor, smoke
from rwkv.tools.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = ("dev", "notebook")            # extras that doctor does not report


def requirement(text: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else " " for char in text).split()[0].lower()


def test_doctor_knows_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {requirement(each) for each in project["dependencies"]}
    assert required == {name for key in ("", *doctor.ALWAYS) for name in doctor.PACKAGES[key]}
    for extra, packages in project["optional-dependencies"].items():
        assert extra in OUTSIDE or {*map(requirement, packages)} == {*doctor.PACKAGES[extra]}, extra
    assert {*doctor.FEATURES} == {*doctor.PACKAGES} - {""}


def test_doctor_says_where_each_kernel_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    for op in operators():
        state = report["kernels"][op]["cpu"]
        assert {*state["run"], *state["elsewhere"], *state["not"]} == {*names(op)}
    assert report["packages"]["torch"] == metadata.version("torch")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("C library", "gpu", "wkv7", *report["kernels"]["wkv7"]["cpu"]["run"]))


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {**doctor.PACKAGES, "": ("torch", "no-such-package"), "serve": ("no-server",)})
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "! package     all programs require no-such-package" in printed
    assert "timemix serve requires no-server" in printed


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
def test_smoke_fails_where_a_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, cwd=folder,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})


@pytest.mark.programs
@pytest.mark.parametrize("arguments", [("nowhere.pth",), ("--out", "no/such/folder.json"), ("--kernel", "nothing")],
                         ids=str)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    process = run("rwkv.tools.smoke", *arguments, folder=tmp_path)
    one_sentence((process.returncode, "", process.stderr))
    assert not (tmp_path / "smoke.json").exists()


@pytest.mark.programs
def test_a_tool_has_one_name_with_and_without_the_program(tmp_path: Path) -> None:
    for command in ("completion", "lm_eval", "lm-eval"):
        process = run("rwkv.tools", command, "--help", folder=tmp_path)
        assert "unknown command" not in process.stderr, process.stderr
    alone = run("rwkv.tools.completion", "fish", folder=tmp_path)
    assert (alone.returncode, alone.stdout) == (0, run("rwkv.tools", "completion", "fish", folder=tmp_path).stdout)


COMPLETIONS = [                          # lines, and what completion must and must not offer
    ("timemix ", {"train", "doctor", "completion"}, {"dtype="}), ("timemix tr", {"train"}, {"serve"}),
    ("timemix serve dty", {"dtype="}, {"device="}), ("timemix serve dtype=", {"bfloat16", "int8"}, {"adamw"}),
    ("timemix train optim=a", {"adamw", "adam"}, {"muon"}), ("timemix train kernel=taichi_v", {"taichi_v3"}, {"conv1d"}),
    ("timemix train trainer.max_st", {"trainer.max_steps="}, {"trainer.devices="}),
    ("timemix train optim.compile=x -", {"-m", "--help"}, {"optim="}),
    ("timemix convert --for", {"--format"}, {"--dtype="}), ("timemix smoke --dt", {"--dtype="}, {"--device="}),
    ("timemix smoke --dtype=", {"bfloat16", "int4"}, {"cuda"}), ("timemix smoke --kernel=conv", {"conv1d"}, {"torch_scan"}),
    ("timemix completion z", {"zsh"}, {"bash"}),
    ("timemix generate checkpoint=some.f", {"some.file"}, {"dtype="})]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("line", "offered", "withheld"), COMPLETIONS, ids=[line for line, *_ in COMPLETIONS])
def test_bash_completes(line: str, offered: set[str], withheld: set[str], tmp_path: Path) -> None:
    (tmp_path / "some.file").write_text("")
    words = line.split() + [""] * line.endswith(" ")
    comp_words = " ".join(f"'{word}'" for word in words)
    code = (f"compopt() {{ :; }}\n{completion.script('bash')}\n"
            f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}\n"
            f"COMP_WORDS=({comp_words})\n_timemix\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"")
    process = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    report = {*process.stdout.split()}
    assert offered <= report
    assert not withheld & report
    assert process.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str) -> None:
    script = completion.script(shell)
    assert all(name in script for name in COMMANDS)
    assert "dtype=bfloat16" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "offered", "withheld"), COMPLETIONS, ids=[line for line, *_ in COMPLETIONS])
def test_fish_completes(line: str, offered: set[str], withheld: set[str], tmp_path: Path) -> None:
    """Files are offered only after options with free values."""
    for name in ("some.file", "intend", "adapt"):
        (tmp_path / name).write_text("")
    (tmp_path / "timemix.fish").write_text(completion.script("fish"))
    code = f"source timemix.fish; complete -C '{line}'"
    process = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    report = {word.split("\t")[0] for word in process.stdout.splitlines()}
    key, equals, _ = line.split(" ")[-1].partition("=")
    before = f"{key}=" * bool(equals)
    assert {before + word for word in offered} <= {*report, *(f"{word.partition('=')[0]}=" for word in report)}
    assert not {before + word for word in {*withheld, "intend", "adapt"}} & report
    assert process.stderr == ""


@pytest.mark.skipif(shutil.which("tmux") is None or shutil.which("zsh") is None, reason="needs tmux and zsh")
@pytest.mark.soak
def test_zsh_completes_in_a_terminal(tmp_path: Path) -> None:
    """zsh completes words only in a terminal."""
    (tmp_path / "timemix.zsh").write_text(completion.script("zsh"))
    (tmp_path / "some.file").write_text("")
    tmux = ["tmux", "-S", str(tmp_path / "tmux")]

    def send(*keys: str) -> None:
        subprocess.run([*tmux, "send-keys", "-t", "zsh", *keys], check=True)

    def shows(text: str) -> bool:
        """Returns True if the terminal shows the text within a minute."""
        for _ in range(300):
            pane = subprocess.run([*tmux, "capture-pane", "-p", "-t", "zsh"], capture_output=True, text=True, check=True)
            if text in pane.stdout:
                return True
            time.sleep(0.2)
        return False

    subprocess.run([*tmux, "new-session", "-d", "-s", "zsh", "-x", "80", "-y", "24", "zsh", "-f"], check=True, cwd=tmp_path)
    try:
        send("autoload -U compinit; compinit -D -u; source ./timemix.zsh; clear; echo 're'ady", "Enter")
        assert shows("ready")
        for line, whole in (("timemix tr", "timemix train "), ("timemix serve dtype=bf", "dtype=bfloat16 "),
                            ("timemix train optim.sched", "optim.schedule="), ("timemix smoke --dt", "--dtype="),
                            ("timemix generate checkpoint=so", "checkpoint=some.file ")):
            send(line, "Tab")
            assert shows(whole.strip()), line
            send("C-u")
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
