"""What the server does before it says that it is ready."""

from types import SimpleNamespace
from typing import Any

import pytest
from models import small_model

from rwkv.config import ServeConfig
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
