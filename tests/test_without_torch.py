"""Mistakes that can be known without PyTorch, which takes seconds to import, are refused before it is imported.

Each command runs in a process in which importing PyTorch or Lightning is an error that no program shows as a user's mistake.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "lightning"):
            raise RuntimeError(f"{{name}} is imported")
sys.meta_path.insert(0, Refused())
program = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_module(program, run_name="__main__")
"""
TRAIN = "rwkv.programs.train"
LORA = (TRAIN, "tune=lora")
TALKS = ("data=chat", "data.path=talks.jsonl")
SWEEP = (TRAIN, "-m", "seed=0,1", "logger=csv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text\n" * 100, encoding="utf-8")
    (tmp_path / "talks.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("", encoding="utf-8")
    return tmp_path


@pytest.mark.programs
@pytest.mark.parametrize(("command", "said"), [
    ((TRAIN, "init_from=nothing.pth"), "nothing.pth"),
    ((*LORA, *TALKS, "init_from=nothing.pth"), "nothing.pth"),
    (LORA, "init_from="),
    ((TRAIN, "tune.objective=dpo", *TALKS), "init_from="),
    ((TRAIN, "init_from=text.txt", "tune.guard=nothing.txt"), "nothing.txt"),
    ((TRAIN, "data=text", "data.path=nothing"), "data.path=nothing"),
    ((TRAIN, "data=binidx"), "NAME.bin"),
    ((TRAIN, "data.tokenizer=nothing.json"), "nothing.json"),
    ((TRAIN, "data.tokenizer=wrong"), "data.tokenizer"),
    ((TRAIN, "data.end_of_text=X"), "data.end_of_text"),
    ((TRAIN, *TALKS, "data.template=nothing.jinja"), "nothing.jinja"),
    ((TRAIN, *TALKS, "data.think=true"), "data.think"),
    ((TRAIN, "data.field=x"), "data.field"),
    ((TRAIN, "trainer.max_steps=3", "trainer.epochs=2"), "trainer.epochs"),
    ((TRAIN, "resume=nothing"), "'nothing'"),
    ((TRAIN, "resume=auto", "init_from=text.txt"), "resume="),
    ((TRAIN, "resume=auto", "out_dir=new", "tune=lora"), "init_from="),
    ((TRAIN, "out_dir=used"), "used"),
    ((*SWEEP, "out_dir=used"), "used"),
    ((*SWEEP, "tune=lora"), "init_from="),
    ((*SWEEP, "data=text", "data.path=nothing"), "data.path=nothing"),
    ((*SWEEP, "init_from=nothing.pth"), "nothing.pth"),
    (("rwkv.programs.generate", "checkpoint=nothing.pth"), "nothing.pth"),
    (("rwkv.programs.generate", "checkpoint=text.txt", "prompt=a", "prompts=text.txt"), "prompts="),
    (("rwkv.programs.generate", "checkpoint=text.txt", "prompts=nothing"), "nothing"),
    (("rwkv.programs.generate", "checkpoint=text.txt", "json_schema=nothing"), "nothing"),
    (("rwkv.programs.generate", "checkpoint=text.txt", "state=nothing"), "nothing"),
    (("rwkv.programs.generate", "checkpoint=text.txt", "tokenizer=nothing.json"), "nothing.json"),
    (("rwkv.programs.chat", "checkpoint=nothing.pth"), "nothing.pth"),
    (("rwkv.programs.chat", "checkpoint=text.txt", "template=nothing"), "nothing"),
    (("rwkv.programs.chat", "checkpoint=text.txt", "state=nothing"), "nothing"),
    (("rwkv.programs.serve", "checkpoint=nothing.pth"), "nothing.pth"),
    (("rwkv.programs.serve", "checkpoint=text.txt", "template=nothing"), "nothing"),
    (("rwkv.programs.serve", "checkpoint=text.txt", "adapters=a=nothing"), "adapters=a"),
    (("rwkv.tools.evaluate", "checkpoint=text.txt"), "data.path="),
    (("rwkv.tools.evaluate", "checkpoint=nothing.pth", "data.path=text.txt"), "nothing.pth"),
    (("rwkv.tools.evaluate", "checkpoint=text.txt", "data.path=nothing"), "nothing"),
    (("rwkv.tools.convert", "nothing.pth", "out.pth"), "nothing.pth"),
    (("rwkv.tools.convert", "text.txt", "out.xyz"), "out.xyz"),
    (("rwkv.tools.report", "nothing"), "nothing"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_mistake_is_refused_without_torch(command: tuple[str, ...], said: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = subprocess.run([sys.executable, "-c", WITHOUT, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.programs
def test_an_import_of_torch_would_be_noticed(folder: Path) -> None:
    command = ("rwkv.programs.generate", "checkpoint=text.txt")
    done = subprocess.run([sys.executable, "-c", WITHOUT, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert "torch is imported" in done.stderr
