"""Tests names on the Hub in every option that names a file, with a local server in place of the Hub."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, Repository, environment, forked_python, hub_server, timemix
from models import small_model
from training_runs import SMALL, TEXT
from tuned_runs import write_run

from rwkv.generation.prefill import prefill
from rwkv.generation.state_files import save_context
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.programs
MODEL = "org/g1/rwkv7-g1-tiny.safetensors"
DIRECTORY = "RWKV/RWKV7-1.5B-20260805"
IN_PYTHON = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from rwkv import RWKV
from rwkv.checkpoint.option_files import on_disk
from rwkv.config import ServeConfig
from rwkv.programs.serve import load
from rwkv.tools.convert import convert

models = [RWKV.from_pretrained(name) for name in ({model!r}, {directory!r}, Path({model!r}))]
assert all(torch.equal(each.head.weight, models[0].head.weight) for each in models)
convert(Path("hf://org/g1@main"), Path("out.pth"))
assert torch.equal(torch.load("out.pth")["head.weight"], models[0].head.weight)
config = on_disk(ServeConfig(checkpoint="org/g1", template="org/extra/chat.jinja",
                             adapters=["lora=org/extra/lora.ckpt", "read=org/extra/state.safetensors"]))
loaded = load(config)
assert {{*loaded.adapters}} == {{"lora", "read"}}
assert config.model_name == "rwkv7-g1-tiny", config.model_name
assert on_disk(ServeConfig(checkpoint={directory!r})).model_name == "RWKV7-1.5B-20260805"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Serves a model as a file and as a directory, and a state, a chat template and a run's LoRA adapter."""
    folder = tmp_path_factory.mktemp("made")
    model = small_model(generation="rwkv7", vocab_size=256)
    file = folder / "rwkv7-g1-tiny.safetensors"
    model.save_pretrained(file, ByteTokenizer())
    model.save_pretrained(folder / "directory", ByteTokenizer())
    save_context(folder / "state.safetensors", prefill(model, torch.tensor([[1, 2, 3]])), model, ByteTokenizer())
    random = torch.Generator().manual_seed(0)
    write_run(folder / "run", file, "lora", {f"blocks.{layer}.att.key.lora_{part}.weight": torch.randn(*shape, generator=random)
                                             for layer in range(3) for part, shape in (("A", (2, 16)), ("B", (16, 2)))})
    shutil.move(folder / "run" / "checkpoints" / "last.ckpt", folder / "lora.ckpt")
    generation = {"do_sample": True, "temperature": 0.25}
    repositories = {
        "org/g1": Repository({file.name: file.read_bytes(), "README.md": b"---\nlicense: apache-2.0\n---\n"}),
        DIRECTORY: Repository({path.name: path.read_bytes() for path in (folder / "directory").iterdir()} |
                              {"generation_config.json": json.dumps(generation).encode(), "logo.png": b"x"}),
        "org/extra": Repository({"state.safetensors": (folder / "state.safetensors").read_bytes(),
                                 "lora.ckpt": (folder / "lora.ckpt").read_bytes(),
                                 "chat.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"})}
    with hub_server(repositories) as running:
        yield running


def test_one_command_with_a_name_on_the_hub_gives_an_answer(server: HubServer, tmp_path: Path) -> None:
    """The last command runs offline. Names and files of a directory on the Hub have the same effect as on disk."""
    options = ("max_new_tokens=3", "kernel=reference")
    variables = environment(server.endpoint, tmp_path)
    process = timemix("chat", f"checkpoint={MODEL}", *options, variables=variables, folder=tmp_path, input="hello\n")
    assert process.returncode == 0, process.stderr
    assert f"loading {MODEL}" in process.stderr
    assert "belongs to the series G1" in process.stderr
    process = timemix("generate", f"checkpoint={DIRECTORY}", "state=org/extra/state.safetensors", "prompt=a", *options,
                      variables=variables, folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "sampling: generation_config.json" in process.stderr
    listed = timemix("list", variables=variables, folder=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == [DIRECTORY, "org/extra/state.safetensors", MODEL]
    offered = timemix("list", "org/extra", variables=variables, folder=tmp_path).stdout.splitlines()
    assert [(line.split()[0], line.split()[-1]) for line in offered] == [
        ("org/extra/lora.ckpt", "GB"), ("org/extra/state.safetensors", "downloaded")]
    pulled = timemix("pull", "org/extra/lora.ckpt", MODEL, variables=variables, folder=tmp_path).stdout.splitlines()
    assert [Path(path).is_file() for path in pulled] == [True, True]
    again = timemix("evaluate", f"checkpoint={MODEL}", "data.path=text.txt", folder=tmp_path,
                    variables={**variables, "HF_HUB_OFFLINE": "1"})
    assert again.returncode == 2
    assert "text.txt" in again.stderr


def test_python_and_the_server_take_names(server: HubServer, tmp_path: Path) -> None:
    code = IN_PYTHON.format(model=MODEL, directory=DIRECTORY, tests=str(Path(__file__).parent.parent))
    process = forked_python("-c", code, variables=environment(server.endpoint, tmp_path), folder=tmp_path)
    assert process.returncode == 0, process.stderr


def test_a_run_that_begins_with_a_name_names_its_commit(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    variables = environment(server.endpoint, tmp_path, OMP_NUM_THREADS="1")
    process = timemix("train", *SMALL, f"init_from={MODEL}", "tune=lora", "tune.rank=2", "trainer.max_steps=2", "out_dir=run",
                      "logger=csv", "kernel=reference", "tune.guard=null", variables=variables, folder=tmp_path)
    assert process.returncode == 0, process.stderr
    pinned = f"{MODEL}@{server.repositories['org/g1'].commit}"
    assert pinned in (tmp_path / "run" / "config.yaml").read_text()
    process = timemix("generate", "checkpoint=run", "prompt=a", "max_new_tokens=2", folder=tmp_path,
                      variables={**variables, "HF_HUB_OFFLINE": "1"})
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(("name", "message"), [("org/g1/rwkv7-g1-tny.safetensors", MODEL), ("org/g2", "no repository org/g2"),
                                               ("models/rwkv7.pth", "no checkpoint at models/rwkv7.pth")])
def test_a_wrong_name_is_reported_in_one_sentence_before_torch(server: HubServer, tmp_path: Path, name: str,
                                                               message: str) -> None:
    variables = environment(server.endpoint, tmp_path)
    process = timemix("generate", f"checkpoint={name}", "prompt=a", variables=variables, folder=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
