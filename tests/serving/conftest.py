"""A server with a small model in a process of its own, one for all tests here, and others for tests that end theirs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from models import small_model, writing
from serving_runs import Running, client_of, serving, wait_until

from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="package", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx would read all authorities' certificates for each request, for 70 ms; all here is this machine's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "tiny.pth"
    small_model("reference", vocab_size=256, n_embd=32).save_pretrained(path, ByteTokenizer(), format="pth")
    return path


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> RWKV:
    """That of the server, in this process."""
    return RWKV.from_pretrained(checkpoint, "reference")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Running]:
    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "max_rows=4", "max_queue=4",
                 "max_tokens=100000", "receive_s=1.5", "max_body_mib=1") as running:
        yield running


@pytest.fixture(scope="session")
def g1(checkpoint: Path) -> Iterator[Running]:
    """A server whose chat template shows tools and has thoughts."""
    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "template=g1", "max_rows=8") as running:
        yield running


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Running]]:
    """start("option=value", ...) -> a server of the test's own."""
    started: list[Running] = []

    def begin(*options: str) -> Running:
        started.append(Running(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", *options))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator["openai.OpenAI"]:
    with client_of(server) as made:
        yield made


@pytest.fixture(scope="session")
def tool_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator["openai.OpenAI"]:
    """Of a server whose model writes the rows of test_tools.py."""
    from test_tools import ROWS, TEMPLATE

    folder = tmp_path_factory.mktemp("tools")
    model, tokenizer = writing(*([piece.encode() for piece in row] for row in ROWS))
    model.save_pretrained(folder / "tiny.safetensors", tokenizer)
    (folder / "template.jinja").write_text(TEMPLATE)
    with serving(folder, "checkpoint=tiny.safetensors", "template=template.jinja") as server, client_of(server) as made:
        yield made


@pytest.fixture
def api(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        yield client


@pytest.fixture
def idle(server: Running) -> Iterator[None]:
    """Before and after the test nothing is generated."""
    wait_until(lambda: server.running_texts() == 0)
    yield
    wait_until(lambda: server.running_texts() == 0)
