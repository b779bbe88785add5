"""Tests of what the server does before it says that it is ready."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import small_model

from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.generation.sampling import GPU_BYTES
from rwkv.model.decoding import triton_step
from rwkv.programs.serve import _gpu_lines
from rwkv.serving.engine import worker
from rwkv.serving.messages import Ready
from rwkv.serving.server import OTHER_FILES, _allow_connections
from rwkv.tokenizer.tokenizers import ByteTokenizer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Returns fake(free), which lets torch report a GPU with `free` free bytes, on which the model's step can be a graph."""
    pytest.importorskip("triton")

    def fake(free: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
        monkeypatch.setattr(triton_step, "why_not", lambda model: None)

    return fake


@pytest.mark.parametrize("copies", [0, 2])
def test_on_a_gpu_the_plan_has_its_memory_the_concurrency_and_the_warm_up(copies: int, gpu: Callable[[float], None]) -> None:
    gpu(70 * 2**30)
    model = small_model("reference", generation="rwkv7", n_embd=32).requires_grad_(False)
    plan = dict(_gpu_lines(model, ServeConfig(max_rows=20), copies, "cuda"))
    assert plan["GPU"] == "NVIDIA A100, 81,920 MiB, 71,680 MiB free after loading the weights"
    assert plan["concurrency"].startswith("20 sequences in ")
    assert "chunks of up to 4,096 tokens" in plan["concurrency"]
    assert plan["warm-up"].endswith("CUDA graphs for 1, 2, 4, 8, 16, 32 sequences")
    step = triton_step.step_of(model)
    expected = step.nbytes_for(20)
    step.grow(20 + triton_step.SPARE_SLOTS)
    assert step.nbytes() == expected
    needed = (1 + copies) * (expected + 20 * GPU_BYTES * model.vocab_size)
    gpu(needed)
    _gpu_lines(model, ServeConfig(max_rows=20), copies, "cuda")
    gpu(needed - 1)
    with pytest.raises(UserError, match="set a smaller max_rows"):
        _gpu_lines(model, ServeConfig(max_rows=20), copies, "cuda")


def test_a_gpu_without_graphs_has_no_warm_up_line_and_a_cpu_has_no_lines(gpu: Callable[[float], None],
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(2**30)
    monkeypatch.setattr(triton_step, "why_not", lambda model: "the model has adapters")
    model = small_model("reference")
    assert [name for name, _ in _gpu_lines(model, ServeConfig(), 0, "cuda")] == ["GPU", "concurrency"]
    assert _gpu_lines(model, ServeConfig(), 0, "cpu") == []


@pytest.mark.usefixtures("handlers")             # the engine's process ignores some signals
def test_the_engine_is_warm_before_it_is_ready() -> None:
    """Before Ready is sent, a prompt has been read and tokens have been written."""
    events: list[Any] = []

    def load(config: ServeConfig) -> worker.Loaded:
        model = small_model("reference", vocab_size=256)
        model.emb.register_forward_hook(lambda emb, inputs, output: events.append(inputs[0].numel() > 1))
        return worker.Loaded(model, ByteTokenizer(), "raw", [], 0, {})

    connection = SimpleNamespace(send=events.append, poll=lambda wait: True, recv=lambda: None)
    worker.main(connection, ServeConfig(), load)         # type: ignore[arg-type]
    *before, ready = events
    assert isinstance(ready, Ready)
    assert {*before} == {True, False}, "several tokens at once, and one after the other"


@pytest.mark.usefixtures("handlers")
def test_a_full_gpu_ends_the_engine_with_one_sentence() -> None:
    events: list[Any] = []

    def load(config: ServeConfig) -> worker.Loaded:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4 GiB. Of")

    worker.main(SimpleNamespace(send=events.append), ServeConfig(), load)         # type: ignore[arg-type]
    (failed,) = events
    assert failed.mistake
    assert "2.00 GiB" in failed.reason
    assert "max_rows=" in failed.reason


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on open files")
def test_connections_fit_into_the_limit_on_open_files(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Linux often allows a process 1024 open files, and macOS 256, until it asks for more."""
    import resource

    def refuse(*arguments: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_limit = resource.setrlimit
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, highest))
    try:
        assert _allow_connections(200) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 200 + OTHER_FILES
        assert not capsys.readouterr().err
        monkeypatch.setattr(resource, "setrlimit", refuse)
        assert _allow_connections(1000) + OTHER_FILES == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert "max_connections=1000" in capsys.readouterr().err
    finally:
        set_limit(resource.RLIMIT_NOFILE, (limit, highest))
