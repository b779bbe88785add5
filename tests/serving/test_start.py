"""What the server does before it says that it is ready."""

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import small_model
from serving_runs import Running

from rwkv.config import ServeConfig
from rwkv.generation.decoder import decoder_of
from rwkv.generation.engine import Engine
from rwkv.generation.prefill import PrefixCache
from rwkv.serving import worker
from rwkv.serving.messages import Ready
from rwkv.tokenizer.tokenizers import ByteTokenizer


def test_the_engine_is_warm_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt was read and tokens were written before Ready is sent."""
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    done: list[str] = []

    def load(config: ServeConfig) -> worker.Loaded:
        model = small_model("reference", vocab_size=256)
        prefill, made = model.prefill, decoder_of(model, model.empty_state(0))
        monkeypatch.setattr(model, "prefill", lambda *given: done.append("read") or prefill(*given))
        step = type(made).step
        monkeypatch.setattr(type(made), "step", lambda *given: done.append("step") or step(*given))
        return worker.Loaded(model, ByteTokenizer(), "raw", [], 0, {})

    class Connection:
        def send(self, message: Any) -> None:
            done.append(type(message).__name__)

        def poll(self, wait: float | None) -> bool:
            return True

        def recv(self) -> None:
            return None

    worker.main(Connection(), ServeConfig(), load)       # type: ignore[arg-type]
    assert done[-1] == Ready.__name__
    assert {"read", "step"} <= set(done[:-1])


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
def test_it_says_what_it_loads_first_and_how_to_ask_it_last(start: Callable[..., Running], checkpoint: Path) -> None:
    server = start("api_key=sesame")
    first, *_, last = (line.split(maxsplit=1) for line in server.log.splitlines())
    assert first == ["loading", str(checkpoint)]
    assert last[0] == "try"
    assert "sesame" not in last[1]
    program, *arguments = shlex.split(last[1].replace("$KEY", "sesame"))
    assert program == "curl"
    if shutil.which("curl") is None:
        pytest.skip("the command that is printed needs curl")
    done = subprocess.run([program, "-sS", "--fail", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"content"' in done.stdout
