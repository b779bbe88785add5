"""Tests timemix completion, and the names under which tools run."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rwkv.tools import completion
from rwkv.tools.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent.parent
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


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, cwd=folder,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})


@pytest.mark.programs
def test_a_tool_has_one_name_with_and_without_the_program(tmp_path: Path) -> None:
    for command in ("completion", "lm_eval", "lm-eval"):
        process = run("rwkv.tools", command, "--help", folder=tmp_path)
        assert "unknown command" not in process.stderr, process.stderr
    alone = run("rwkv.tools.completion", "fish", folder=tmp_path)
    assert (alone.returncode, alone.stdout) == (0, run("rwkv.tools", "completion", "fish", folder=tmp_path).stdout)


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
