"""Fixtures for the tests of the server: clients, shared servers with a small model, and servers that one test starts itself."""

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
    """Gives httpx an empty folder of certificates.

    Reading the system's certificates takes 70 ms per request, and no test here needs them, because all connections stay on this
    machine.
    """
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
    """Returns the server's model, loaded in this process."""
    return RWKV.from_pretrained(checkpoint, "reference")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Running]:
    """Yields the server of most tests, which is started as a user starts it."""
    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "max_rows=4", "max_queue=4",
                 "max_tokens=100000", "receive_s=1.5", "max_body_mib=1", apart=True) as running:
        yield running


@pytest.fixture(scope="session")
def g1(checkpoint: Path) -> Iterator[Running]:
    """Yields a server whose chat template g1 supports tools and thoughts."""
    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "template=g1", "max_rows=8") as running:
        yield running


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Running]]:
    """Yields start("option=value", ...), which starts a server for this test alone."""
    started: list[Running] = []

    def begin(*options: str, apart: bool = False) -> Running:
        started.append(Running(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", *options, apart=apart))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator["openai.OpenAI"]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="session")
def tool_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator["openai.OpenAI"]:
    """Yields a client of a server whose model writes the rows of test_tools.py."""
    from test_tools import ROWS, TEMPLATE

    folder = tmp_path_factory.mktemp("tools")
    model, tokenizer = writing(*([piece.encode() for piece in row] for row in ROWS))
    model.save_pretrained(folder / "tiny.safetensors", tokenizer)
    (folder / "template.jinja").write_text(TEMPLATE)
    with serving(folder, "checkpoint=tiny.safetensors", "template=template.jinja") as server, client_of(server) as client:
        yield client


@pytest.fixture
def api(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        yield client


@pytest.fixture
def idle(server: Running) -> Iterator[None]:
    """Waits before and after the test until the server generates nothing."""
    wait_until(lambda: server.running_texts() == 0)
    yield
    wait_until(lambda: server.running_texts() == 0)
