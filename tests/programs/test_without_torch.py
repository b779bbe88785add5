"""Tests that mistakes which can be found without PyTorch are refused before its import, which takes seconds.

The commands run one after the other in one process, in which importing PyTorch or Lightning raises RuntimeError. Programs do
not show this error as a user's mistake.
"""

import json
import subprocess
import sys

import pytest
from programs import one_sentence
from training_runs import ENVIRONMENT, ROOT

WITHOUT = """
import io, json, runpy, sys, traceback
from contextlib import redirect_stderr, redirect_stdout

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "lightning"):
            raise RuntimeError(f"{name} is imported")

def run(command):
    sys.argv = command
    output, error, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(error):
        try:
            runpy.run_module(command[0], run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        except BaseException:
            traceback.print_exc()
    return status, output.getvalue(), error.getvalue()

sys.meta_path.insert(0, Refused())
print(json.dumps([run(command) for command in json.loads(sys.argv[1])]))
"""
TRAIN = "rwkv.programs.train"
LORA = (TRAIN, "tune=lora")
CONVERSATIONS = ("data=chat", "data.path=conversations.jsonl")
SWEEP = (TRAIN, "-m", "seed=0,1", "logger=csv")
MISTAKES = (
    ((TRAIN, "model.n_layer=two"), "model.n_layer"),
    ((TRAIN, "init_from=nothing.pth"), "nothing.pth"),
    ((*LORA, *CONVERSATIONS, "init_from=nothing.pth"), "nothing.pth"),
    (LORA, "init_from="),
    ((TRAIN, "tune.objective=dpo", *CONVERSATIONS), "init_from="),
    ((TRAIN, "init_from=text.txt", "tune.guard=nothing.txt"), "nothing.txt"),
    ((TRAIN, "data=text", "data.path=nothing"), "data.path=nothing"),
    ((TRAIN, "data=binidx"), "NAME.bin"),
    ((TRAIN, "data.tokenizer=nothing.json"), "nothing.json"),
    ((TRAIN, "data.tokenizer=wrong"), "data.tokenizer"),
    ((TRAIN, "data.end_of_text=X"), "data.end_of_text"),
    ((TRAIN, *CONVERSATIONS, "data.template=nothing.jinja"), "nothing.jinja"),
    ((TRAIN, *CONVERSATIONS, "data.think=true"), "data.think"),
    ((TRAIN, "data.field=x"), "data.field"),
    ((TRAIN, "trainer.max_steps=3", "trainer.epochs=2"), "trainer.epochs"),
    ((TRAIN, "resume=nothing"), "resume=nothing "),
    ((TRAIN, "resume=text.txt", "init_from=text.txt"), "resume=auto"),
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
)
NO_MISTAKE = ("rwkv.programs.generate", "checkpoint=text.txt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[int, str, str]]:
    """Returns the exit status and the output of each command, after checking that the commands write no file."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "text.txt").write_text("a text\n" * 100, encoding="utf-8")
    (folder / "conversations.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    (folder / "used").mkdir()
    (folder / "used" / "file").write_text("", encoding="utf-8")
    before = sorted(folder.rglob("*"))
    commands = [*(command for command, _ in MISTAKES), NO_MISTAKE]
    process = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-c", WITHOUT, json.dumps(commands)],
                             cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                             text=True, check=True)
    assert sorted(folder.rglob("*")) == before
    return {command: tuple(result) for command, result in zip(commands, json.loads(process.stdout), strict=True)}


@pytest.mark.programs
@pytest.mark.parametrize(("command", "part"), MISTAKES,
                         ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_mistake_is_refused_without_torch(command: tuple[str, ...], part: str,
                                            results: dict[tuple[str, ...], tuple[int, str, str]]) -> None:
    one_sentence(results[command], part)


@pytest.mark.programs
def test_an_import_of_torch_would_be_noticed(results: dict[tuple[str, ...], tuple[int, str, str]]) -> None:
    assert "torch is imported" in results[NO_MISTAKE][2]
