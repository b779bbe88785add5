"""A server with a small model in a process of its own, one for all tests here, and others for tests that end theirs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from models import small_model
from serving_runs import Running, client_of, serving, wait_until

from rwkv.tokenizer.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import openai

BYTES = ByteTokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "tiny.pth"
    small_model("reference", vocab_size=256, n_embd=32).save_pretrained(path, BYTES, format="pth")
    return path


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Running]:
    with serving(checkpoint.parent, f"checkpoint={checkpoint}", "tokenizer=byte", "max_rows=4", "max_queue=4",
                 "max_tokens=100000", "receive_s=3", "max_body_mib=1") as running:
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
