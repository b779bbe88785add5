"""Tests each published kind of file in each program: all programs compute the same, or the error says why they cannot.

The tests compute the expected weights from this file's own models: adapters by their formulas, GGUF with the package gguf.
"""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import gguf_files
import pytest
import torch
from files import SIZES
from hub_server import Repository, hub_server
from huggingface_hub import constants
from models import small_model
from programs import Run, caller, compose, one_sentence
from safetensors.torch import save_file
from test_foreign_adapters import KINDS as ADAPTERS
from test_foreign_adapters import lora, write_peft
from torch import Tensor
from torch.nn.functional import cross_entropy
from tuned_runs import write_run

from kernels.select import select
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import ModelConfig
from rwkv.generation.engine import generate
from rwkv.generation.prefill import prefill
from rwkv.generation.state_files import context_of_state, load_context, save_context
from rwkv.model.rwkv7 import UNUSED
from rwkv.pretrained import RWKV
from rwkv.programs.serve import load
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert
from rwkv.training.setup import new_model
from rwkv.training.tuning.init_from import open_init_checkpoint

pytestmark = pytest.mark.programs
Weights = dict[str, Tensor]
BYTES = ByteTokenizer()
TEXT = "a text to measure"
ALPHA = 6.0
LAYOUTS = ("fla", "official", "transformers-rwkv")
LAYER = "blocks.1.att.key"               # the layer that adapters change


class Kind(NamedTuple):
    """A kind of file, and what the programs do with it.

    Attributes:
        options: options of generate.py that load the file.
        expected: name of a file in expected/ whose weights compute the same.
        refused: a word of the error, for each program that refuses the kind.
    """

    options: tuple[str, ...]
    expected: str
    refused: Mapping[str, str] = MappingProxyType({})


BYTE = "tokenizer=byte"
STATE = {"evaluate": "state"}            # evaluation begins without a state
LORA = {"train": "lora"}                 # an adapter must be merged by convert before training
KINDS = {
    "a run": Kind(("checkpoint=run",), "base"),
    ".safetensors": Kind(("checkpoint=base.safetensors",), "base"),
    ".pth of RWKV-4": Kind(("checkpoint=base4.pth", BYTE), "base4"),
    ".pth of RWKV-7": Kind(("checkpoint=base.pth", BYTE), "base"),
    "transformers' directory of RWKV-4": Kind(("checkpoint=directory4",), "base4"),
    **{f"directory, {layout}": Kind((f"checkpoint={layout}",), "base") for layout in LAYOUTS},
    ".st": Kind(("checkpoint=base.st", BYTE), "half"),
    "GGUF": Kind(("checkpoint=base.gguf", BYTE), "gguf"),
    "RWKV-PEFT's LoRA": Kind(("checkpoint=base.safetensors", "lora=rwkv-0.pth", f"lora_alpha={ALPHA}"), "lora", LORA),
    **{f"PEFT's {kind}": Kind((f"checkpoint=peft-{kind}",), f"peft-{kind}") for kind in ("lora", "dora", "pissa", "miss")},
    "PEFT's directory as lora=": Kind(("checkpoint=base.safetensors", "lora=peft-dora"), "peft-dora", LORA),
    "a run of tune=lora": Kind(("checkpoint=run-lora",), "lora"),
    "a run of tune=state": Kind(("checkpoint=run-state",), "state"),
    "a saved state": Kind(("checkpoint=base.safetensors", "state=saved.safetensors"), "saved",
                          {**STATE, "convert": "state=", "train": "tuned state"}),
    "RWKV-PEFT's state": Kind(("checkpoint=base.safetensors", "state=time_state.pth"), "state", STATE),
    "ai00's state": Kind(("checkpoint=base.safetensors", "state=time_state.st"), "state", STATE),
    "a state in .safetensors": Kind(("checkpoint=base.safetensors", "state=time_state.safetensors", "state_layout=official"),
                                    "state", {**STATE, "train": "state_layout"}),
    "a state beside weights": Kind(("checkpoint=both.pth", BYTE), "state"),
    "a name on the Hub": Kind(("checkpoint=org/model/base.safetensors",), "base"),
    "a GGUF on the Hub": Kind(("checkpoint=org/gguf:Q8_0", BYTE), "gguf"),
    "a directory on the Hub": Kind(("checkpoint=org/directory",), "base"),
    "an adapter on the Hub": Kind(("checkpoint=org/model", "lora=org/adapter"), "peft-dora", LORA),
    "a state on the Hub": Kind(("checkpoint=org/model", "state=org/state/time_state.pth"), "state", STATE),
}
# Other kinds test the readers of these kinds, too
DEEP = (".safetensors", ".pth of RWKV-7", "directory, official", "directory, transformers-rwkv", "PEFT's lora", "PEFT's dora",
        "PEFT's pissa", "PEFT's miss", "RWKV-PEFT's state", "a state in .safetensors", "a GGUF on the Hub",
        "a directory on the Hub", "an adapter on the Hub")
each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.soak) if kind in DEEP else kind
                                             for kind in KINDS])
ALONE = {"rwkv-0.pth": "lora=", "time_state.pth": "state=", "time_state.st": "state=", "saved.safetensors": "state="}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with every kind of file. Its subfolder expected/ has the weights that each stands for, as .pth files."""
    root = tmp_path_factory.mktemp("kinds")
    for name in ("4", ""):
        model = small_model(generation=f"rwkv{name or 7}", vocab_size=256, **SIZES[f"rwkv{name or 7}"])
        model.save_pretrained(root / f"base{name}.pth")
        model.save_pretrained(root / f"base{name}.safetensors", BYTES)
    (root / "expected").mkdir()
    base: Weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected = {"base4": torch.load(root / "base4.pth", weights_only=True), "base": base,
                "half": {key: tensor.half().float() for key, tensor in base.items()}}
    (root / "run" / "checkpoints").mkdir(parents=True)
    model.save_pretrained(root / "run" / "checkpoints" / "last.ckpt", BYTES)
    convert.convert(root / "base4.safetensors", root / "directory4")
    for layout in LAYOUTS:
        convert.convert(root / "base.safetensors", root / layout, layout=layout)
    convert.convert(root / "base.pth", root / "base.st")
    convert.convert(root / "base.pth", root / "base.gguf", dtype="q8_0", tokenizer=None)
    rounded = gguf_files.official_weights(root / "base.gguf")
    expected["gguf"] = {key: tensor if key in UNUSED else torch.tensor(rounded[key]).view(tensor.shape)
                        for key, tensor in base.items()}
    write_adapters(root, base, expected)
    write_states(root, model, base, expected)
    for name, weights in expected.items():
        torch.save(weights, root / "expected" / name)
    (root / "text.txt").write_text(TEXT)
    return root


def write_adapters(root: Path, base: Weights, expected: dict[str, Weights]) -> None:
    W = base[f"{LAYER}.weight"].double()
    for kind in ("lora", "dora", "pissa", "miss"):
        make, settings, scale = ADAPTERS[kind]
        parts, merged = make(W, scale)
        write_peft(root / f"peft-{kind}", {f"base_model.model.{LAYER}.{part}": tensor for part, tensor in parts.items()},
                   base_model_name_or_path=str(root / "base.safetensors"), **settings)
        expected[f"peft-{kind}"] = {**base, f"{LAYER}.weight": merged.float()}
    parts, merged = lora(W, ALPHA / 2)
    torch.save({f"{LAYER}.{part.removesuffix('.weight')}": tensor for part, tensor in parts.items()}, root / "rwkv-0.pth")
    write_run(root / "run-lora", root / "base.safetensors", "lora", {f"{LAYER}.{part}": each for part, each in parts.items()},
              alpha=ALPHA)
    expected["lora"] = {**base, f"{LAYER}.weight": merged.float()}


def write_states(root: Path, model: RWKV, base: Weights, expected: dict[str, Weights]) -> None:
    random = torch.Generator().manual_seed(5)
    states = {f"blocks.{layer}.att.time_state": (0.3 * torch.randn(2, 64, 64, generator=random)).half().float()
              for layer in range(model.config.n_layer)}
    write_run(root / "run-state", root / "base.safetensors", "state", states)
    torch.save(states, root / "time_state.pth")
    save_file(states, root / "time_state.safetensors")
    save_file({key: state.mT.half().contiguous() for key, state in states.items()}, root / "time_state.st")
    torch.save({**base, **states}, root / "both.pth")
    expected["state"], expected["saved"] = {**base, **states}, base
    save_context(root / "saved.safetensors", prefill(model, torch.tensor([[*b"read"]]))._replace(last_ids=(*b"read",)), model,
                 BYTES)


@pytest.fixture(scope="module", autouse=True)
def hub(folder: Path) -> Iterator[None]:
    """Serves the Hub from a local server and gives this process an empty cache."""
    def files(path: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])}

    repositories = {"org/model": Repository(files(folder / "base.safetensors")),
                    "org/directory": Repository(files(folder / "fla")),
                    "org/gguf": Repository({"model-Q8_0.gguf": (folder / "base.gguf").read_bytes(), "model-F16.gguf": b"x"}),
                    "org/adapter": Repository(files(folder / "peft-dora")),
                    "org/state": Repository(files(folder / "time_state.pth"))}
    with hub_server(repositories) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        addresses = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        yield


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(folder)
    return caller(monkeypatch, capsys)


def model_of(folder: Path, name: str) -> RWKV:
    weights: Weights = torch.load(folder / "expected" / name, weights_only=True)
    states = [weights.pop(key) for key in [*weights] if "time_state" in key]
    config: ModelConfig = read_checkpoint(folder / ("base4.pth" if name == "base4" else "base.pth")).config
    model = RWKV.with_weights(config, select("wkv4" if name == "base4" else "wkv7", "reference"), weights)
    if states:
        model.set_time_states(states)
    return model.requires_grad_(False).eval()


def option(options: tuple[str, ...], name: str) -> str | None:
    return next((each.partition("=")[2] for each in options if each.startswith(f"{name}=")), None)


def assert_logits(actual: RWKV, expected: RWKV, name: str = "") -> None:
    ids = torch.tensor([[0, *TEXT.encode()]])
    torch.testing.assert_close(actual(ids)[0], expected(ids)[0], rtol=0, atol=2e-4)


@each_kind
def test_generate(folder: Path, run: Run, kind: str) -> None:
    options, name, _ = KINDS[kind]
    model = model_of(folder, name)
    context = load_context(folder / "saved.safetensors", model, BYTES) if name == "saved" else None
    expected = "".join(generate(model, BYTES, "a", 4, temperature=0, context=context))
    status, text, error = run("generate", *options, "prompt=a", "max_new_tokens=4", "temperature=0", "kernel=reference",
                              "dtype=float32")           # products with a GGUF file's blocks would round their inputs
    assert status == 0, error
    assert text.removesuffix("\n").endswith(expected)


@each_kind
def test_chat(run: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    status, _, error = run("chat", *KINDS[kind].options, "max_new_tokens=2", "kernel=reference")
    assert status == 0, error
    assert "chat template" in error


@each_kind
def test_serve(folder: Path, run: Run, kind: str) -> None:
    """The server lists a state and an adapter as separate models in addition to the checkpoint."""
    options, name, _ = KINDS[kind]
    adapter_file = option(options, "lora") or option(options, "state")
    rest = [each for each in options if not each.startswith(("lora=", "state="))]
    adapters = [f"adapters=it={adapter_file}"] if adapter_file else []
    loaded = load(compose("serve", *rest, *adapters, "kernel=reference", "dtype=float32"))
    expected = model_of(folder, name)
    if adapter_file is None:
        assert_logits(loaded.model, expected)
        return
    model, start = loaded.adapters["it"][:2]
    if start is None:
        assert_logits(model, expected)
        return
    context = load_context(folder / "saved.safetensors", expected, BYTES) if name == "saved" else \
        context_of_state(expected, BYTES, expected.empty_state(1))
    torch.testing.assert_close(start.state, context.state, rtol=0, atol=1e-6)
    torch.testing.assert_close(start.logits, context.logits, rtol=0, atol=1e-4)


@each_kind
def test_evaluate(folder: Path, run: Run, kind: str) -> None:
    options, name, refused = KINDS[kind]
    result = run("evaluate", *options, "data.path=text.txt", "kernel=reference")
    if "evaluate" in refused:
        one_sentence(result, refused["evaluate"])
        return
    assert result[0] == 0, result[2]
    ids = torch.tensor([BYTES.end_of_text, *TEXT.encode()])
    expected = cross_entropy(model_of(folder, name)(ids[None, :-1])[0][0], ids[1:])
    assert json.loads(result[1])["loss"] == pytest.approx(float(expected), abs=1e-4)


@each_kind
def test_convert(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                 kind: str) -> None:
    """Converts a state without its checkpoint, and any other kind to .pth."""
    monkeypatch.chdir(folder)
    options, name, refused = KINDS[kind]
    state, adapter, alpha, layout = (option(options, each) for each in ("state", "lora", "lora_alpha", "state_layout"))
    target = tmp_path / "out.pth"
    arguments = [state or str(option(options, "checkpoint")), str(target)]
    for flag, value in (("--lora", adapter), ("--lora-alpha", alpha), ("--state-layout", layout)):
        arguments += [flag, value] if value else []
    if "convert" in refused:
        with pytest.raises(SystemExit) as exit_info:
            convert.main(arguments)
        one_sentence((int(exit_info.value.code or 0), *capsys.readouterr()), refused["convert"])
        return
    convert.main(arguments)
    expected: Weights = torch.load(folder / "expected" / name, weights_only=True)
    actual: Weights = torch.load(target, weights_only=True)
    compared = [key for key in actual if key in expected and not key.startswith("blocks.0.att.v")]
    assert len(compared) > 2 or state
    assert any("time_state" in key for key in compared) == (name == "state")
    for key in compared:
        torch.testing.assert_close(actual[key].float().squeeze(), expected[key].squeeze(), rtol=0, atol=2e-4)


@each_kind
def test_init_from(folder: Path, run: Run, kind: str) -> None:
    options, name, refused = KINDS[kind]
    tuning = ["tune=state"] if name == "state" else []
    train_names = {"checkpoint": "init_from", "state": "tune.state", "tokenizer": "data.tokenizer"}
    train_options = [f"{train_names.get(key, key)}={value}" for key, _, value in (each.partition("=") for each in options)]
    if "train" in refused:
        one_sentence(run("train", *train_options, "tune=state", "data=text", "data.path=text.txt"), refused["train"])
        return
    config = compose("train", *train_options, *tuning)
    config, checkpoint, tokenizer = open_init_checkpoint(config, ["data.tokenizer"] if BYTE in options else [])
    wkv = select("wkv4" if name == "base4" else "wkv7", "reference")
    assert_logits(new_model(config.model, checkpoint, tokenizer, wkv, config.tune), model_of(folder, name))


@pytest.mark.parametrize("program", ["generate", "evaluate", "train", "convert"])
@pytest.mark.parametrize("name", ALONE)
def test_the_error_for_a_part_in_place_of_weights_names_its_option(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                                   name: str, program: str) -> None:
    if program == "convert":
        if "time_state" in name:
            pytest.skip("states are converted alone")
        with pytest.raises(SystemExit) as exit_info:
            convert.main([name, str(tmp_path / "out.pth")])
        result = int(exit_info.value.code or 0), *capsys.readouterr()
    else:
        more = ["prompt=a"] if program == "generate" else ["data.path=text.txt"]
        more += ["data=text"] if program == "train" else []
        result = run(program, f"{'init_from' if program == 'train' else 'checkpoint'}={name}", *more)
    one_sentence(result, name, ALONE[name])
