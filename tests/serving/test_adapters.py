"""Tests of adapters=NAME=PATH,...

Tuned states and LoRA adapters are models of one server, and each generates the same texts as it does alone.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import small_model
from safetensors.torch import save_file
from serving_runs import LETTERS, Running, serving, wait_until
from test_limits import check_error
from torch import Tensor
from tuned_runs import write_run

from rwkv.config import KernelConfig, ServeConfig
from rwkv.errors import UserError
from rwkv.generation.engine import generate, generate_batch
from rwkv.generation.prefill import prefill
from rwkv.generation.state_files import load_context, save_context
from rwkv.pretrained import RWKV, open_checkpoint
from rwkv.programs.adapters import read_adapters, require_room
from rwkv.tokenizer.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
PLAIN = {"temperature": 1.0, "top_p": 1.0}
PROMPT = "once upon a time"
NAMES = ("base", "calm", "wild", "read", "lora", "foreign")
FILE = {"content-type": "application/octet-stream"}


def states(seed: int, *shape: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"blocks.{layer}.att.time_state": torch.randn(*(shape or (4, 8, 8)), generator=random) for layer in range(3)}


def lora_weights(seed: int, out: int = 32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"blocks.{layer}.att.key.lora_{part}.weight": torch.randn(*shape, generator=random)
            for layer in range(3) for part, shape in (("A", (2, 32)), ("B", (out, 2)))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with base.safetensors, three tuned states, a state file and two LoRA adapters."""
    target = tmp_path_factory.mktemp("adapters")
    model = small_model("reference", vocab_size=256, n_embd=32, generation="rwkv7")
    model.save_pretrained(target / "base.safetensors", BYTES)
    for seed, name in enumerate(("calm", "wild")):
        write_run(target / name, target / "base.safetensors", "state", states(seed))
    write_run(target / "lora", target / "base.safetensors", "lora", lora_weights(0))
    write_run(target / "strong", target / "base.safetensors", "lora", lora_weights(0), alpha=16.0)
    save_context(target / "read.safetensors", prefill(model, torch.tensor([[*b"read"]]))._replace(last_ids=(*b"read",)), model,
                 BYTES)
    foreign = {name: state.half().float() for name, state in states(7).items()}
    torch.save(foreign, target / "foreign.pth")
    save_file({name: state.mT.half().contiguous() for name, state in foreign.items()}, target / "foreign.st")
    write_run(target / "foreign", target / "base.safetensors", "state", foreign)
    return target


OPTIONS = ("adapters=calm=calm,wild=wild", "adapters=lora=lora", "adapters=read=read.safetensors,foreign=foreign.st",
           "checkpoint=base.safetensors", "max_rows=16")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder, *OPTIONS, "states_dir=kept", "api_key=one", "api_key=two") as running:
        yield running


def client(server: Running, key: str = "one") -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/v1", timeout=60, headers={"authorization": f"Bearer {key}"})


def text_alone(folder: Path, name: str, prompt: str, seed: int) -> str:
    """Returns the text that generate.py gives with the adapter."""
    path = folder / {"base": "base.safetensors", "read": "base.safetensors"}.get(name, name)
    model = RWKV.from_pretrained(path, "reference")
    if name == "read":
        return "".join(generate(model, BYTES, prompt, 20, seed, context=load_context(folder / "read.safetensors", model, BYTES),
                                **PLAIN))
    return generate_batch(model, BYTES, [prompt], 20, seeds=[seed], **PLAIN)[0].text


def complete(api: httpx.Client, name: str, prompt: str = PROMPT, seed: int = 3, **body: Any) -> Any:
    answer = api.post("/completions", json={"model": name, "prompt": prompt, "seed": seed, "max_tokens": 20, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.programs
def test_models_in_one_batch_give_the_same_texts_as_alone(server: Running, folder: Path) -> None:
    """Asks twice, the second time from the cache, with prompts that all models share."""
    with client(server) as api, ThreadPoolExecutor(10) as threads:
        assert [each["id"] for each in api.get("/models").json()["data"]] == ["base", "calm", "wild", "lora", "read", "foreign"]
        requests = [(name, prompt, seed) for name in NAMES for prompt, seed in ((PROMPT, 3), ("", 4))]
        expected = [text_alone(folder, *each) for each in requests]
        assert len({*expected}) == len(requests), "each adapter matters"
        for turn in range(2):
            answers = [*threads.map(lambda each: complete(api, *each), requests)]
            assert [answer["choices"][0]["text"] for answer in answers] == expected
            assert [answer["model"] for answer in answers] == [name for name, _, _ in requests]
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers[::2]]
            assert cached == [turn * len(PROMPT)] * len(NAMES)
        assert complete(api, "gateway/wild")["model"] == "wild"
        check_error(api.post("/completions", json={"model": "other", "prompt": "a"}), "model")


@pytest.mark.programs
def test_a_tuned_state_of_another_program_is_uploaded(server: Running, folder: Path) -> None:
    """The parameter `state_layout` tells the layout of an uploaded .safetensors, because an upload has no file name."""
    texts = set()
    with client(server) as api:
        for name, parameters in (("foreign.pth", {}), ("foreign.st", {"state_layout": "transposed"})):
            state = api.post("/states", params=parameters, content=(folder / name).read_bytes(), headers=FILE).json()
            assert (state["model"], state["tokens"]) == ("base", 0)
            texts |= {complete(api, "base", prompt, state=state["id"])["choices"][0]["text"] for prompt in (PROMPT, "")}
        assert texts == {text_alone(folder, "foreign", prompt, 3) for prompt in (PROMPT, "")}
        for name, parameters, words in (("foreign.st", {}, "state_layout="), ("foreign.st", {"state_layout": "x"}, "official"),
                                        ("read.safetensors", {"state_layout": "official"}, "state_layout"),
                                        ("base.safetensors", {}, "checkpoint=")):
            answer = api.post("/states", params=parameters, content=(folder / name).read_bytes(), headers=FILE)
            check_error(answer)
            assert words in answer.json()["error"]["message"]


@pytest.mark.programs
def test_api_keys_do_not_share_cached_prompts(server: Running) -> None:
    prompt = "a secret " * 70
    with client(server, "one") as one, client(server, "two") as two:
        texts = {complete(one, "calm", prompt)["choices"][0]["text"]}
        for api, cached in ((one, len(prompt)), (two, 0), (two, len(prompt))):
            answer = complete(api, "calm", prompt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1


@pytest.mark.programs
def test_a_state_belongs_to_the_model_that_has_read_it_also_after_a_restart(server: Running, folder: Path,
                                                                          start: Callable[..., Running]) -> None:
    def go_on(api: httpx.Client, name: str, state: str) -> str:
        text: str = complete(api, name, " and", 5, state=state)["choices"][0]["text"]
        return text

    with client(server) as api:
        saved = {name: api.post("/states", json={"model": name, "prompt": "begin"}).json() for name in NAMES}
        assert {name: state["model"] for name, state in saved.items()} == {name: name for name in NAMES}
        texts = {name: go_on(api, name, state["id"]) for name, state in saved.items()}
        assert texts == {name: text_alone(folder, name, "begin and", 5) for name in NAMES}
        for name in NAMES:
            for other in {*NAMES} - {name}:
                check_error(api.post("/completions", json={"model": other, "prompt": "a", "state": saved[name]["id"]}), "state")
        content = api.get(f"/states/{saved['lora']['id']}/content").content
        again = api.post("/states", content=content, headers={"content-type": "application/octet-stream"}).json()
        assert (again["model"], go_on(api, "lora", again["id"])) == ("lora", texts["lora"])
    wait_until(lambda: all((folder / "kept" / f"{state['id']}.safetensors").exists() for state in saved.values()))
    shutil.copytree(folder / "kept", folder / "copied")          # the first server still uses its folder
    later = start("checkpoint=" + str(folder / "base.safetensors"), f"adapters=quiet={folder}/calm,twin={folder}/wild",
                  f"adapters=wild={folder}/wild,lora={folder}/strong,weak={folder}/lora", f"states_dir={folder}/copied",
                  "api_key=one")
    with client(later) as api:
        for name, now in (("base", "base"), ("calm", "quiet"), ("lora", "weak"), ("wild", "wild")):
            assert go_on(api, now, saved[name]["id"]) == texts[name]
        for name in ("wild", "read"):
            check_error(api.post("/completions", json={"model": "base", "prompt": "a", "state": saved[name]["id"]}), "state")


@pytest.mark.programs
def test_another_model_continues_a_response_from_its_items(server: Running) -> None:
    with client(server) as api:
        def respond(name: str, **body: Any) -> Any:
            options = {"seed": 1, "max_output_tokens": 8, "logit_bias": LETTERS}
            return api.post("/responses", json={"model": name, **options, **body}).json()

        first = respond("calm", input="hi")
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
                 {"role": "user", "content": "and?"}]
        for name in ("calm", "wild"):
            second = respond(name, input="and?", previous_response_id=first["id"])
            whole = respond(name, input=turns)
            assert second["model"] == name
            assert second["output"][0]["content"] == whole["output"][0]["content"]
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (name == "calm")


def refusal(folder: Path, *adapters: str, **options: Any) -> str:
    """Returns the message with which the adapters are refused before a model is loaded."""
    config = ServeConfig(checkpoint=str(folder / "base.safetensors"), kernel=KernelConfig("reference"), adapters=[*adapters],
                         **options)
    with pytest.raises(UserError) as error:
        read_adapters(config, open_checkpoint(config))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_adapter_that_does_not_fit_is_refused_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    base = folder / "base.safetensors"
    other = small_model("reference", vocab_size=256, n_embd=32, generation="rwkv7", seed=1)
    other.save_pretrained(tmp_path / "other.safetensors", BYTES)
    save_context(tmp_path / "state.safetensors", prefill(other, torch.tensor([[1]])), other, BYTES)
    write_run(tmp_path / "elsewhere", tmp_path / "other.safetensors", "state", states(0))
    write_run(tmp_path / "shape", base, "state", states(0, 4, 8, 7))
    write_run(tmp_path / "lacks", base, "state", {name: tensor for name, tensor in states(0).items() if "2" not in name})
    write_run(tmp_path / "wide", base, "lora", lora_weights(0, out=33))
    write_run(tmp_path / "tokens", base, "state", states(0), tokenizer_hash="0" * 64)
    write_run(tmp_path / "infinite", base, "state", {name: tensor / 0 for name, tensor in states(0).items()})
    torch.save(states(0, 2, 16, 16), tmp_path / "time_state.pth")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("nothing")
    (tmp_path / "cut.safetensors").write_bytes((folder / "read.safetensors").read_bytes()[:-9])
    for name in ("nothing", "empty", "text.txt", "elsewhere", "shape", "lacks", "wide", "tokens", "infinite", "time_state.pth",
                 "cut.safetensors", "state.safetensors", "other.safetensors"):
        assert name in refusal(folder, f"a={tmp_path / name}"), name
    assert "base.safetensors" in refusal(folder, f"a={tmp_path}/elsewhere")


@pytest.mark.parametrize("adapters", [["a"], ["a="], ["=b"], ["a=b,a=c"], ["a=b", "a=c"], [""]])
def test_an_invalid_list_of_names_and_paths_is_refused(adapters: list[str]) -> None:
    with pytest.raises(UserError):
        ServeConfig(adapters=adapters)


@given(st.dictionaries(st.text("abé 1.", min_size=1), st.text("ab,=/ .", min_size=1).filter(lambda path: "=" not in path),
                       min_size=1, max_size=4))
def test_formatted_pairs_are_parsed_back(pairs: dict[str, str]) -> None:
    written = [f"{name}={path}" for name, path in pairs.items()]
    assert ServeConfig(adapters=written).adapter_paths == pairs
    assert ServeConfig(adapters=[",".join(written)]).adapter_paths == pairs


def test_the_checkpoint_s_own_name_is_refused_for_an_adapter(folder: Path, run: Any) -> None:
    shutil.copy(folder / "base.safetensors", "base.safetensors")
    for options in (("adapters=base=x",), ("adapters=m=x", "model_name=m")):
        status, _, error = run("serve", "checkpoint=base.safetensors", "port=0", *options)
        assert (status, error.splitlines()[-1][:6]) == (2, "error:")


def test_weights_for_which_there_is_no_room_are_refused() -> None:
    require_room(100, 2, 300)
    require_room(100, 2, None)
    with pytest.raises(UserError):
        require_room(100, 2, 299)


def test_on_a_gpu_the_room_is_that_of_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(checkpoint=str(folder / "base.safetensors"), kernel=KernelConfig("reference"),
                         adapters=[f"lora={folder}/lora"])
    opened = open_checkpoint(config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (opened.nbytes(), 80 * 2**30))
    with pytest.raises(UserError, match="each adapter needs its own copy"):
        read_adapters(config, opened._replace(device="cuda"))


def test_an_adapter_is_merged_before_weights_are_rounded(folder: Path) -> None:
    config = ServeConfig(checkpoint=str(folder / "base.safetensors"), kernel=KernelConfig("reference"), dtype="int8",
                         adapters=[f"lora={folder}/lora"])
    opened = open_checkpoint(config)
    (adapter,) = read_adapters(config, opened)
    assert "int8" in adapter.notes[0]    # the note states how much of the training is lost in int8
    served, _ = adapter.load(opened, opened.model())
    with pytest.warns(UserWarning, match="int8"):
        alone = RWKV.from_pretrained(folder / "lora", "reference", dtype="int8")
    assert served.fingerprint() == alone.fingerprint()
    expected, actual = (generate_batch(model, BYTES, ["once"], 20, seeds=[3], **PLAIN) for model in (alone, served))
    assert actual == expected
