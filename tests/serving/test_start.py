"""What the server does before it says that it is ready, and with what loop."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from models import small_model
from serving_runs import Running

from rwkv.config import ServeConfig
from rwkv.generation.engine import Engine
from rwkv.generation.prefill import PrefixCache
from rwkv.serving import worker
from rwkv.serving.messages import Ready
from rwkv.tokenizer.tokenizers import ByteTokenizer


@pytest.mark.usefixtures("handlers")             # the engine's process ignores some signals
def test_the_engine_is_warm_before_it_is_ready() -> None:
    """A prompt was read and tokens were written before Ready is sent."""
    done: list[Any] = []

    def load(config: ServeConfig) -> worker.Loaded:
        model = small_model("reference", vocab_size=256)
        model.emb.register_forward_hook(lambda emb, inputs, output: done.append(inputs[0].numel() > 1))
        return worker.Loaded(model, ByteTokenizer(), "raw", [], 0, {})

    connection = SimpleNamespace(send=done.append, poll=lambda wait: True, recv=lambda: None)
    worker.main(connection, ServeConfig(), load)         # type: ignore[arg-type]
    *before, ready = done
    assert isinstance(ready, Ready)
    assert {*before} == {True, False}, "several tokens at once, and one after the other"


def test_warming_up_leaves_nothing_behind() -> None:
    cache = PrefixCache(2**20)
    engine = Engine(small_model("reference", vocab_size=256), ByteTokenizer(), cache)
    rows = engine.add_all(["ab"], [1])
    entries = len(cache)
    engine.warm_up()
    for _ in engine:
        pass
    after = rows[0].sample.text
    alone = Engine(small_model("reference", vocab_size=256), ByteTokenizer())
    its_rows = alone.add_all(["ab"], [1])
    for _ in alone:
        pass
    assert after == its_rows[0].sample.text
    assert entries == 1


@pytest.mark.programs
def test_without_uvloop_it_serves_and_stops(start: Callable[..., Running], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200
    assert "asyncio" in server.log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
