"""Tests names on the Hub against a local server that implements the Hub's interface."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Repository, environment, hub_server, python

from rwkv.errors import CheckpointError
from rwkv.io.hub import Contents, Name, cached_models, choose, contents_of, local, model_paths, parse

INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}).encode()
REPOSITORIES = {
    "org/files": ["rwkv7-g1k-1.5b-ctx25600.pth", "rwkv7-g1k-2.9b-ctx25600.pth", "rwkv-g1k-3b-temp-5441.pth", "README.md",
                  "old/rwkv7-g1a-0.1b.pth"],
    "org/whole": ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin",
                  "README.md", "logo.png", "onnx/model.onnx", "additional_chat_templates/tool_use.jinja"],
    "org/parts": ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
                  "model-00002-of-00002.safetensors", "consolidated.safetensors"],
    "org/shards": ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
                   "vocab.txt"],
    "org/gguf": ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m.f16.gguf", "m-IQ4_XS.gguf", "config.json"],
    "org/gguf-parts": ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"],
    "org/two": ["rwkv7-1.5b_Q4_0.gguf", "rwkv7-2.9b_q4_0.gguf"],
    "org/releases": ["rwkv7-a/config.json", "rwkv7-a/model.safetensors", "rwkv7-b/config.json", "rwkv7-b/model.safetensors"],
    "org/lora": ["adapter_config.json", "adapter_model.safetensors", "checkpoint-10/optimizer.pt"],
    "org/one": ["README.md", "model.pth", "training_args.bin", "rng_state_0.pth"],
    "org/both": ["config.json", "model.safetensors", "pytorch_model.bin"],
    "org/none": ["README.md", "train.py"]}


def contents(name: str) -> Contents:
    return Contents("0" * 40, dict.fromkeys(REPOSITORIES[name], 1))


@pytest.mark.parametrize(("text", "name"), [
    ("BlinkDL/rwkv7-g1/a.pth", Name("BlinkDL/rwkv7-g1", "a.pth")),
    ("RWKV/RWKV7-1.5B-20260805", Name("RWKV/RWKV7-1.5B-20260805")),
    ("ORG/REPO:Q4_K_M", Name("ORG/REPO", "", "Q4_K_M")),
    ("ORG/REPO:Q4_K_M@v1", Name("ORG/REPO", "", "Q4_K_M", "v1")),
    ("ORG/REPO@v1:Q4_K_M", Name("ORG/REPO", "", "Q4_K_M", "v1")),
    ("ORG/REPO/sub:Q8_0", Name("ORG/REPO", "sub", "Q8_0")),
    ("ORG/REPO/a.pth@feature/x", Name("ORG/REPO", "a.pth", None, "feature/x")),
    ("ORG/REPO@refs/pr/3/a.pth", Name("ORG/REPO", "a.pth", None, "refs/pr/3")),
    ("hf://ORG/REPO@v1/sub/a.pth", Name("ORG/REPO", "sub/a.pth", None, "v1")),
    ("hf:ORG/a.pth", Name("ORG/a.pth")),
    ("https://huggingface.co/ORG/REPO/blob/main/sub/a.pth", Name("ORG/REPO", "sub/a.pth", None, "main")),
    ("https://huggingface.co/ORG/REPO/resolve/v2/a.pth?download=true", Name("ORG/REPO", "a.pth", None, "v2")),
    ("https://huggingface.co/ORG/REPO/tree/main", Name("ORG/REPO", "", None, "main")),
    ("hf.co/ORG/REPO:Q4_0", Name("ORG/REPO", "", "Q4_0")),
    ("models/a.pth", None), ("a.pth", None), ("./a/b", None), ("../a/b", None), ("/a/b/c.pth", None), ("~/a/b", None),
    ("a\\b\\c.pth", None), ("C:/a/b.pth", None), ("runs/latest", None), ("runs/2026-11-28/checkpoints/last.ckpt", None),
    ("a/../b", None), ("ORG/REPO/", None), ("world", None), ("-", None), ("", None)])
def test_a_name_is_a_path_or_one_on_the_hub(text: str, name: Name | None, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(text) == name
    if name is not None and not name.path.endswith("/"):
        assert parse(str(name)) == name or text == "hf:ORG/a.pth"
        assert parse(Path(text)) == name or "?" in text


@pytest.mark.parametrize("text", ["hf://", "hf://ORG", "https://huggingface.co/ORG", "hf://ORG/REPO/../a"])
def test_a_scheme_without_a_name_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="hf://ORG/REPO"):
        parse(text)


def test_an_existing_path_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "files").write_bytes(b"")
    assert local("org/files") == Path("org/files")
    assert local("org/other/missing") == Path("org/other/missing")       # a missing file in an existing folder


@pytest.mark.parametrize(("text", "target", "needed"), [
    ("org/files/rwkv-g1k-3b-temp-5441.pth", "rwkv-g1k-3b-temp-5441.pth", {"rwkv-g1k-3b-temp-5441.pth"}),
    ("org/files/old", "old/rwkv7-g1a-0.1b.pth", {"old/rwkv7-g1a-0.1b.pth"}),
    ("org/whole", "", {"config.json", "generation_config.json", "tokenizer.json", "README.md", "model.safetensors",
                       "additional_chat_templates/tool_use.jinja"}),
    ("org/parts", "", {"config.json", "model.safetensors.index.json"}),
    ("org/shards", "", {"pytorch_model.bin.index.json", "vocab.txt"}),
    ("org/gguf:q4_k_m", "m-Q4_K_M.gguf", {"m-Q4_K_M.gguf"}),
    ("org/gguf:IQ4_XS", "m-IQ4_XS.gguf", {"m-IQ4_XS.gguf"}),
    ("org/gguf:F16", "m.f16.gguf", {"m.f16.gguf"}),
    ("org/gguf-parts:Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf",
     {"Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"}),
    ("org/releases/rwkv7-a", "rwkv7-a", {"rwkv7-a/config.json", "rwkv7-a/model.safetensors"}),
    ("org/lora", "", {"adapter_config.json", "adapter_model.safetensors"}),
    ("org/lora/adapter_model.safetensors", "", {"adapter_config.json", "adapter_model.safetensors"}),
    ("org/releases/rwkv7-a/model.safetensors", "rwkv7-a", {"rwkv7-a/config.json", "rwkv7-a/model.safetensors"}),
    ("org/both/pytorch_model.bin", "pytorch_model.bin", {"config.json", "pytorch_model.bin"}),
    ("org/one", "model.pth", {"model.pth"})])
def test_only_the_needed_files_are_chosen(text: str, target: str, needed: set[str]) -> None:
    name = parse(text)
    assert name
    path, files = choose(name, contents(name.repository))
    assert (path, {*files}) == (target, needed)


@pytest.mark.parametrize(("text", "message"), [
    ("org/files/rwkv7-g1k-1.5b-ctx2560.pth", "did you mean org/files/rwkv7-g1k-1.5b-ctx25600.pth"),
    ("org/files/RWKV7-g1k-2.9B-ctx25600.pth", "org/files/rwkv7-g1k-2.9b-ctx25600.pth"),
    ("org/files/rwkv7-g1a-0.1b.pth", "org/files/old/rwkv7-g1a-0.1b.pth"),
    ("org/files/zzz", "org/files/old/rwkv7-g1a-0.1b.pth"),
    ("org/releases/rwkv7-c", "org/releases/rwkv7-a"),
    ("org/files", "org/files/rwkv7-g1k-1.5b-ctx25600.pth"), ("org/releases", "org/releases/rwkv7-a"),
    ("org/gguf:Q4_K", "F16, IQ4_XS, Q4_K_M, Q4_K_S, Q8_0"), ("org/files:Q4_0", "no GGUF file"),
    ("org/two:Q4_0", "org/two/rwkv7-2.9b_q4_0.gguf"), ("org/gguf", "org/gguf/m-Q4_K_M.gguf"), ("org/none", "no weights")])
def test_an_error_about_a_missing_file_lists_the_repository_s_files(text: str, message: str) -> None:
    name = parse(text)
    assert name
    with pytest.raises(CheckpointError) as error:
        choose(name, contents(name.repository))
    assert message in str(error.value)


def test_a_repository_offers_its_directories_and_files() -> None:
    assert model_paths(contents("org/releases")) == ["rwkv7-a", "rwkv7-b"]
    assert model_paths(contents("org/whole")) == [""]
    assert model_paths(contents("org/parts")) == model_paths(contents("org/shards")) == [""]
    assert model_paths(contents("org/gguf-parts")) == ["Q8_0/m-Q8_0-00001-of-00002.gguf"]


# Each download runs in a separate process, because huggingface_hub reads its variables when it is imported

FETCH = "import sys; from rwkv.io.hub import fetch\nfor name in {names!r}: print(*fetch(name)[:2])"
REFUSED = "from rwkv.io.hub import local\ntry: local({name!r})\nexcept ValueError as error: print(error)"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    repositories = {name: Repository({file: INDEX if file.endswith("index.json") else file.encode() * 1000 for file in files})
                    for name, files in REPOSITORIES.items()}
    repositories["org/private"] = Repository({"model.pth": b"secret"}, token="hf_right")
    repositories["org/gated"] = Repository({"model.pth": b"secret"}, token="hf_right", gated=True)
    repositories["org/tagged"] = Repository({"model.pth": b"tagged"}, revisions=("main", "v1"))
    repositories["org/long"] = Repository({"model.pth": bytes(range(256)) * (3 * 2**14)})
    with hub_server(repositories) as running:
        yield running


def fetch(server: HubServer, home: Path, *names: str, **variables: str) -> tuple[list[Path], list[str], str]:
    process = python(FETCH.format(names=names), environment(server.endpoint, home, **variables), home)
    assert process.returncode == 0, process.stderr
    lines = [line.rsplit(" ", 1) for line in process.stdout.splitlines()]
    return [Path(path) for path, _ in lines], [pinned for _, pinned in lines], process.stderr


def error_of(name: str, home: Path, endpoint: str, **variables: str) -> str:
    process = python(REFUSED.format(name=name), environment(endpoint, home, **variables), home)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.programs
def test_a_file_and_directories_are_downloaded_once_and_then_cached(server: HubServer, tmp_path: Path) -> None:
    server.requests.clear()
    names = ("org/files/old/rwkv7-g1a-0.1b.pth", "org/whole", "org/parts", "org/gguf-parts:Q8_0", "hf://org/one@main")
    paths, pinned, error = fetch(server, tmp_path, *names)
    assert paths[0].read_bytes() == b"old/rwkv7-g1a-0.1b.pth" * 1000
    assert paths[1].is_dir()
    assert sorted(server.downloads()) == sorted([
        "README.md", "old/rwkv7-g1a-0.1b.pth",           # the card of the repository states the licence
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md",
        "additional_chat_templates/tool_use.jinja", "config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf", "README.md", "model.pth"])
    assert f"hub: {names[0]}: 0.0 MB from {server.endpoint}: {paths[0]}" in error.splitlines()
    server.requests.clear()
    again, _, error = fetch(server, tmp_path, *names, *pinned)
    assert again == paths + paths
    assert server.downloads() == []
    assert f"hub: {names[1]}: from the cache: {paths[1]}" in error.splitlines()
    server.requests.clear()
    offline, _, error = fetch(server, tmp_path, *names, *pinned, HF_HUB_OFFLINE="1")
    assert offline == again
    assert server.requests == []
    assert f"hub: {names[1]}: from the cache, because HF_HUB_OFFLINE is set: {paths[1]}" in error.splitlines()


@pytest.mark.programs
def test_a_pinned_name_does_not_follow_the_branch(server: HubServer, tmp_path: Path) -> None:
    first, (pinned,), _ = fetch(server, tmp_path, "org/tagged/model.pth@v1")
    repository = server.repositories["org/tagged"]
    assert pinned == f"org/tagged/model.pth@{repository.commit}"
    repository.files = {"model.pth": b"changed"}
    (old, new), _, _ = fetch(server, tmp_path, pinned, "org/tagged/model.pth")
    assert ([old], new.read_bytes()) == (first, b"changed")


@pytest.mark.programs
def test_a_download_whose_connection_breaks_is_resumed(server: HubServer, tmp_path: Path) -> None:
    whole = server.repositories["org/long"].files["model.pth"]
    server.requests.clear()
    server.cut = 11 * 2**20               # huggingface_hub saves a partial download in units of 10 MiB
    (path,), _, _ = fetch(server, tmp_path, "org/long")
    server.cut = None
    assert path.read_bytes() == whole
    ranges = [range_header for method, _, range_header in server.requests if method == "GET" and range_header]
    assert len(ranges) == 1              # one request asks for the rest


@pytest.mark.programs
def test_a_private_repository_requires_a_token(server: HubServer, tmp_path: Path) -> None:
    for variables in ({}, {"HF_TOKEN": "hf_wrong"}):
        message = error_of("org/private/model.pth", tmp_path, server.endpoint, **variables)
        assert "org/private" in message
        assert "HF_TOKEN" in message
    assert "gated" in error_of("org/gated", tmp_path, server.endpoint)
    (path,), _, _ = fetch(server, tmp_path, "org/private", HF_TOKEN="hf_right")
    assert path.read_bytes() == b"secret"


def test_a_cache_without_the_branch_names_its_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of a commit writes no refs/main, and a copied cache may lack refs or have links without their files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshots = tmp_path / "models--org--pinned" / "snapshots"
    for commit in ("a" * 40, "b" * 40):
        (snapshots / commit).mkdir(parents=True)
    (snapshots / ("a" * 40) / "model.pth").write_bytes(b"")
    (snapshots / ("b" * 40) / "model.pth").symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError) as error:
        contents_of(Name("org/pinned"))
    assert "a" * 40 in str(error.value)
    assert "b" * 40 not in str(error.value)
    with pytest.raises(CheckpointError, match="does not contain"):
        contents_of(Name("org/other"))


def test_another_programs_file_among_the_refs_of_the_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--one"
    for file, content in (("snapshots/" + "a" * 40 + "/model.pth", b"12"), ("refs/main", b"a" * 40),
                          ("refs/.DS_Store", b"\0\0\0\1Bud1\xff")):
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).write_bytes(content)
    assert [(each.name, each.size) for each in cached_models()] == [(Name("org/one", "model.pth"), 2)]


@pytest.mark.programs
def test_a_missing_name_on_the_hub_is_reported_in_one_sentence(server: HubServer, tmp_path: Path) -> None:
    assert "no repository org/nowhere" in error_of("org/nowhere/model.pth", tmp_path, server.endpoint)
    assert "no revision 'v9'" in error_of("org/tagged@v9", tmp_path, server.endpoint)
    message = error_of("org/files/rwkv7-g1k-1.5b-ctx2560.pth", tmp_path, server.endpoint)
    assert "rwkv7-g1k-1.5b-ctx25600.pth" in message
    assert "HF_HUB_OFFLINE is set" in error_of("org/one", tmp_path, server.endpoint, HF_HUB_OFFLINE="1")
    assert "cannot be reached" in error_of("org/one", tmp_path, "http://127.0.0.1:9")


@pytest.mark.programs
def test_a_hub_that_answers_with_an_error_is_not_called_unreachable(server: HubServer, tmp_path: Path) -> None:
    """An expired token is refused even for public repositories. A login page answers every request with HTML."""
    expired = {"X-Error-Message": "Invalid credentials in Authorization header"}
    for refusal, part in (((401, b"{}", expired), "token"), ((200, b"<html>log in</html>", {}), "login page")):
        server.refusal = refusal
        message = error_of("org/one", tmp_path, server.endpoint, HF_TOKEN="hf_old")
        server.refusal = None
        assert part in message
        assert "cannot be reached" not in message
    assert "token" in error_of("org/one", tmp_path, server.endpoint, HF_TOKEN="\u201chf_quoted\u201d")
    assert "no repository org--old/one" in error_of("org--old/one", tmp_path, server.endpoint)
    (tmp_path / "file").touch()
    message = error_of("org/one", tmp_path, server.endpoint, HF_HUB_CACHE=str(tmp_path / "file" / "hub"))
    assert str(tmp_path / "file") in message
    assert "repeat" not in message


def test_a_missing_package_is_reported_in_one_sentence(tmp_path: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None\n" + REFUSED.format(name="org/one")
    process = python(code, environment("http://127.0.0.1:9", tmp_path), tmp_path)
    assert "pip install huggingface_hub" in process.stdout
    assert len(process.stdout.splitlines()) == 1


def test_the_weights_of_a_directory_are_those_that_the_format_reads() -> None:
    from rwkv.checkpoint.formats.huggingface import INDICES, WHOLE
    from rwkv.io.hub import DIRECTORY_WEIGHTS

    assert {*WHOLE, *INDICES} <= {*DIRECTORY_WEIGHTS}
