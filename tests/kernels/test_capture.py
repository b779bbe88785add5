"""Tests the capture of CUDA graphs with a fake torch.cuda."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.backends.graphs import capture


def test_after_a_failed_capture_kernels_are_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a capture is impossible, as with CUDA_LAUNCH_BLOCKING=1, can still generate."""
    streams = ["default"]

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        streams.append("of the capture")
        try:
            yield
        finally:                         # as in torch's, whose own error replaces the cause
            raise torch.AcceleratorError("operation failed due to a previous error during capture")

    cuda = SimpleNamespace(device=lambda device: nullcontext(), synchronize=lambda: None, Stream=lambda: None, graph=graph,
                           CUDAGraph=lambda: SimpleNamespace(replay=lambda: None), set_stream=streams.append,
                           current_stream=lambda: streams[-1])
    monkeypatch.setattr(torch, "cuda", cuda)
    launches: list[int] = []

    def launch() -> None:
        launches.append(1)
        if streams[-1] == "of the capture":
            raise torch.AcceleratorError("operation not permitted when stream is capturing\nmore")

    with pytest.warns(UserWarning, match="operation not permitted when stream is capturing"):
        replay = capture(launch, torch.device("cuda"))
    assert streams[-1] == "default"
    before = len(launches)
    replay()
    assert len(launches) == before + 1
