"""Tests model cards: each written directory gets a card with the known facts, and a card written by hand is kept."""

import ast
import json
import shlex
from pathlib import Path

import pytest
import yaml
from models import small_model
from programs import caller
from training_runs import SMALL, TEXT

from rwkv.checkpoint import card
from rwkv.errors import UserError
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert

LICENSED = "---\nlicense: apache-2.0\nbase_model: x/y\n---\n# A base\n"


def front_matter(file: Path) -> dict[str, object]:
    match = card.FRONT.match(file.read_text())
    assert match
    content = yaml.safe_load(match[1])
    assert isinstance(content, dict)
    return content


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RWKV:
    monkeypatch.chdir(tmp_path)
    model = small_model(generation="rwkv7", vocab_size=256)
    model.save_pretrained("base.safetensors", ByteTokenizer())
    return model


@pytest.mark.parametrize("layout", ["fla", "official"])
def test_a_converted_directory_has_a_card(base: RWKV, layout: str) -> None:
    Path("README.md").write_text(LICENSED)
    convert.main(["base.safetensors", "out dir", "--layout", layout])
    text = Path("out dir/README.md").read_text()
    assert front_matter(Path("out dir/README.md")) == {"license": "apache-2.0", "library_name": "timemix", "tags": ["rwkv"]}
    command = f"timemix convert base.safetensors 'out dir' --layout {layout}"
    for part in ("# out dir", "base.safetensors", command, "from_pretrained"):
        assert part in text
    convert.main(["out dir", "again"])                   # a directory passes its licence on, too
    assert front_matter(Path("again/README.md"))["license"] == "apache-2.0"
    convert.main(["again", "out dir"])                   # a card of timemix is replaced
    assert "`again`" in Path("out dir/README.md").read_text()


def test_no_licence_is_invented_or_taken_from_other_folders(base: RWKV, tmp_path: Path) -> None:
    (tmp_path.parent / "README.md").write_text(LICENSED)
    for content in (None, "# no front matter", "---\n: [\n---\n", "---\n- a\n---\n", "---\nlicense: 3\n---\n"):
        if content:
            Path("README.md").write_text(content)
        convert.main(["base.safetensors", "out"])
        assert "license" not in front_matter(Path("out/README.md"))
        assert "no card states its licence" in Path("out/README.md").read_text()
    Path("README.md").write_text(LICENSED)
    base.save_pretrained("out")          # nothing is known about the base of a model in memory
    assert "license" not in front_matter(Path("out/README.md"))
    assert "Base" not in Path("out/README.md").read_text()


def test_the_commands_of_a_card_with_a_line_that_is_not_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / card.FILE
    path.write_bytes(str(card.Card("run", commands=["timemix train"])).encode() + b"\ncaf\xe9\n")
    assert card.commands_in(path) == ["timemix train"]


def test_a_card_written_by_hand_is_not_replaced(base: RWKV) -> None:
    base.save_pretrained("out")
    Path("out/README.md").write_text("# mine")
    with pytest.raises(UserError, match=r"README\.md"):
        base.save_pretrained("out")
    assert Path("out/README.md").read_text() == "# mine"


@pytest.mark.parametrize("name", ["a b", "it's", 'x"y', "$HOME", "plain", "ü"])
def test_a_name_is_quoted_in_the_lines_that_load_the_model(name: str) -> None:
    command, code = card.loading_commands(name)
    assert shlex.split(command) == ["timemix", "generate", f"checkpoint={name}", "prompt=..."]
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert ast.literal_eval(call.args[0]) == name


@pytest.mark.programs
def test_the_card_of_a_run(base: RWKV, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The card lists the commands of the run and its continuation. A directory converted from the run repeats the facts."""
    Path("text.txt").write_text(TEXT)
    Path("README.md").write_text(LICENSED)
    run = caller(monkeypatch, capsys)
    options = (*SMALL, "init_from=base.safetensors", "tune=lora", "tune.rank=2", "tune.guard=null", "logger=csv",
               "kernel=reference")
    status, _, error = run("train", *options, "trainer.max_steps=2", "out_dir=my run")
    assert status == 0, error
    tuned = json.loads(Path("my run/tuned.json").read_text())
    text = Path("my run/README.md").read_text()
    for part in ("base.safetensors", "apache-2.0", "SHA-256", "tune=lora", "after 2 steps: val/loss", "text.txt",
                 f"{tuned['before']['val/loss']:.4f} before, {tuned['after']['val/loss']:.4f} after"):
        assert part in text
    loads = Path("my run/adapter/README.md").read_text().partition(card.LOADING)[2].strip().splitlines()
    assert shlex.split(loads[0])[3:] == ["lora=my run/adapter", "prompt=..."]
    status, _, error = run("train", "resume=auto", "out_dir=my run", "trainer.max_steps=3")
    assert status == 0, error
    commands = card.commands_in(Path("my run/README.md"))
    assert [command.split()[2] for command in commands] == ["debug=fast", "resume=auto"]
    convert.main(["my run", "merged"])
    text = Path("merged/README.md").read_text()
    for part in ("SHA-256", "after 3 steps", "timemix convert 'my run' merged", 'from_pretrained("merged")', "apache-2.0"):
        assert part in text
    assert 'from_pretrained("my run")' not in text
