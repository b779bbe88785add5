"""Tests that each field of rwkv.config.Sampling is an option on every path from the user to the engine.

tests/generation/test_sampling.py tests the effect of each option in the reference and in C.
"""

import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from every_option import OTHER_OPTIONS
from models import small_model
from programs import Run, compose, one_sentence

from kernels.draw import Filters
from kernels.draw import __file__ as draw_file
from rwkv import cli
from rwkv.config import Sampling
from rwkv.generation.engine import generate, generate_batch
from rwkv.generation.sampling import Penalties, next_tokens
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.thorough
NAMES = [item.name for item in fields(Sampling)]
SAMPLERS = ("generate", "chat", "serve")
BYTES = ByteTokenizer()
N = 16                                   # the number of tokens to generate


def format_value(name: str) -> str:
    value = OTHER_OPTIONS[name]
    if isinstance(value, dict):
        return ",".join(f"{key}:{each}" for key, each in value.items())
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def test_the_tests_try_every_option() -> None:
    assert set(OTHER_OPTIONS) == set(NAMES)
    for name, value in OTHER_OPTIONS.items():
        assert Sampling(**{name: value}) != Sampling()


@pytest.mark.parametrize("program", SAMPLERS)
def test_the_command_line_accepts_every_option(program: str) -> None:
    config = compose(program, "sampling=default", *(f"{name}={format_value(name)}" for name in NAMES))
    assert Sampling.from_config(config) == Sampling(**OTHER_OPTIONS)


def test_requests_accept_every_option() -> None:
    pytest.importorskip("msgspec")
    from rwkv.serving.api import ENDPOINTS
    from rwkv.serving.openapi import document
    from rwkv.serving.schema import ChatRequest, CompletionRequest, read

    body_fields = {name: {str(key): each for key, each in value.items()} if isinstance(value, dict) else value
                   for name, value in OTHER_OPTIONS.items()}
    for kind, needed in ((CompletionRequest, {}), (ChatRequest, {"messages": []})):
        request = read(json.dumps({**body_fields, **needed}).encode(), kind)
        sampling = request.sampling(Sampling(), BYTES)
        assert sampling == Sampling(**OTHER_OPTIONS)
        assert pickle.loads(pickle.dumps(sampling)) == sampling          # requests are sent to the engine's process
        properties = document(ENDPOINTS)["components"]["schemas"][kind.__name__]["properties"]
        assert {name: properties[name]["description"] for name in NAMES} == {
            item.name: item.metadata["help"] for item in fields(Sampling)}


def test_a_request_without_options_has_the_server_s() -> None:
    pytest.importorskip("msgspec")
    from rwkv.serving.schema import CompletionRequest, read

    server_options = Sampling(**OTHER_OPTIONS)
    for body, expected in (({}, server_options), ({"top_k": 7}, replace(server_options, top_k=7)),
                           ({"top_k": None}, server_options),
                           ({"temperature": 0, "no_penalty": "a"}, replace(server_options, temperature=0, no_penalty=(97,)))):
        assert read(json.dumps(body).encode(), CompletionRequest).sampling(server_options, BYTES) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_draws_with_every_option(name: str) -> None:
    """The engine generates the tokens that next_tokens draws from the model's logits, and the option changes the text."""
    model = small_model("reference", generation="rwkv7", vocab_size=256)
    penalty = {"frequency_penalty": 2.0} if name in ("penalty_decay", "no_penalty") else {}
    value = tuple(range(0, 256, 2)) if name == "no_penalty" else OTHER_OPTIONS[name]
    options = Sampling(**penalty | {name: value})
    generator, ids, prompt = torch.Generator().manual_seed(3), list[int](), [*b"ab"]
    penalties = Penalties(options, prompt, options.ids_without_penalty(BYTES))
    for _ in range(N):
        uniform = torch.rand(1, generator=generator, dtype=torch.float64)
        logits = model(torch.tensor([prompt + ids]))[0][:, -1]
        token = int(next_tokens(logits, uniform, options, [penalties] if options.has_penalties else None))
        if token == BYTES.end_of_text:
            break
        penalties.add(token)
        ids.append(token)
    sample, = generate_batch(model, BYTES, ["ab"], N, seeds=[3], **penalty | {name: value})
    assert sample.tokens == ids
    assert sample.text != "".join(generate(model, BYTES, "ab", N, seed=3, **penalty))


def test_the_filters_in_c_are_options() -> None:
    """Filters in C have the names of the options. All other options change the logits before the filters."""
    source = (Path(draw_file).parent / "csrc" / "draw.c").read_text()
    match = re.search(r"struct call \{(.*?)\}", source, re.DOTALL)
    assert match
    assert {*Filters._fields} <= {*re.findall(r"\w+", match[1])}
    assert {*Filters._fields} - {*NAMES} == {"filters_first"}            # computed from the option `order`


# Presets


@pytest.mark.parametrize(("program", "preset"), [*((SAMPLERS[0], preset) for preset in cli.choices("sampling")),
                                                 *((program, "g1_think") for program in SAMPLERS[1:])])
def test_a_preset_sets_the_options_in_its_file_and_the_user_s_options_override_it(program: str, preset: str) -> None:
    config = compose(program, f"sampling={preset}", "top_k=7")
    preset_options = cli.preset("sampling", preset)
    assert config.sampling == preset_options.pop("sampling") == preset
    assert Sampling.from_config(config) == Sampling(**{**preset_options, "top_k": 7})


def test_the_presets_of_g1_equal_those_of_its_author() -> None:
    assert Sampling.from_config(compose("chat", "sampling=g1_think")) == Sampling(
        0.96, 32, 0.76, presence_penalty=1.0, frequency_penalty=0.1, penalty_decay=0.988)
    assert Sampling.from_config(compose("serve", "sampling=g1_fake")) == Sampling(1.0, 32, 0.28)


def test_an_unknown_preset_is_reported_in_one_sentence(run: Run) -> None:
    one_sentence(run("generate", "sampling=mine"), "sampling", "'mine'", "g1_think")


@pytest.mark.parametrize("argument", ["penalty_decay=1.5", "penalty_decay=fast", "no_penalty=", "no_penalty=[999]",
                                      "order=mine", "banned=x"])
def test_a_wrong_value_is_reported_in_one_sentence(argument: str, run: Run, tmp_path: Path) -> None:
    small_model("reference", vocab_size=256).save_pretrained(tmp_path / "model.pth", BYTES, format="pth")
    status, output, error = run("generate", f"checkpoint={tmp_path / 'model.pth'}", "tokenizer=byte", argument)
    assert (status, output) == (2, "")
    assert error.splitlines()[-1].startswith("error: ")
    assert argument.partition("=")[0] in error.splitlines()[-1]


def test_the_chosen_sampling_is_one_line(run: Run, tmp_path: Path) -> None:
    small_model("reference", vocab_size=256).save_pretrained(tmp_path / "model.pth", BYTES, format="pth")
    arguments = (f"checkpoint={tmp_path / 'model.pth'}", "tokenizer=byte", "prompt=a", "max_new_tokens=3")
    _, _, error = run("generate", *arguments, "sampling=g1_think", "top_k=5", "no_penalty= ", "no_penalty=[48,49]")
    assert ("sampling: g1_think: temperature 0.96, top_k 5, top_p 0.76, presence_penalty 1, frequency_penalty 0.1, "
            "penalty_decay 0.988, no_penalty [' ',48,49]") in error.splitlines()
    one, other = (run("generate", *arguments, *more)[1] for more in (("sampling=greedy",), ("temperature=0",)))
    assert one == other
