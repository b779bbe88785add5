"""Limits the number of GPU launches per layer of a training step, because the host needs about 26 us for each launch.

The tests count on a CPU, but along the code path of a GPU. Each Triton kernel counts as one launch without being executed, and
each PyTorch operation counts as one; views and empty tensors do not count. A change with more launches fails, and a change with
fewer should lower the budget.
"""

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from models import small_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv.config import TrainerConfig
from rwkv.model import fused, loss
from rwkv.model.base import Model
from rwkv.model.fused import backend as fused_backend
from rwkv.training.trainer import prepare_blocks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HALF = torch.bfloat16
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")
# launches per layer in the forward and the backward pass
BUDGET = {("rwkv7", True): (27, 51), ("rwkv7", False): (27, 49), ("rwkv4", True): (23, 35), ("rwkv4", False): (23, 33)}


class Launches(TorchDispatchMode):
    """Counts the operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if not views and name not in ALLOCATIONS:
            self.counts[name] += 1
        if func is torch.ops.aten.mm.dtype:      # this operation does not exist on a CPU
            return (args[0] @ args[1]).to(args[2])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Returns a mode that counts launches, Triton's kernels included, and selects the forms of a GPU on this CPU."""
    from rwkv.model.fused import loss_triton
    from rwkv.model.fused import triton as fused_triton
    from rwkv.model.rwkv7 import fused_triton as rwkv7_triton

    mode = Launches()

    def count(kernel: Any, *_: Any, **__: Any) -> None:
        mode.counts[kernel.__name__] += 1

    for module in (fused_triton, loss_triton, rwkv7_triton):
        monkeypatch.setattr(module, "launch", count)
    monkeypatch.setitem(fused_backend.SUFFIXES, "cpu", "triton")
    for module in (fused, loss):
        monkeypatch.setattr(module, "WIDE_PRODUCTS", ("cpu",))
    return mode


def prepared_model(generation: str, n_layer: int, half: bool) -> Model:
    model = small_model("c_v0", generation=generation, n_layer=n_layer)
    return prepare_blocks(model, TrainerConfig(precision="bf16-mixed" if half else "32-true"))


def step(model: Model, launches: Launches, half: bool) -> tuple[Counter[str], Counter[str]]:
    """Returns the launches in a forward and in a backward pass, after a first step that rounds the weights."""
    x = tokens(model, 2, 8)
    counts_of_passes = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with launches:
            launches.counts.clear()
            with torch.autocast("cpu", HALF, enabled=half):
                hidden = model.forward_features(x)
            forward = launches.counts.copy()
            launches.counts.clear()
            hidden.backward(torch.zeros_like(hidden))
            counts_of_passes = [forward, launches.counts.copy()]
    return counts_of_passes[0], counts_of_passes[1]


@pytest.mark.parametrize(("generation", "half"), BUDGET)
def test_the_launches_of_a_layer_are_within_their_budget(launches: Launches, generation: str, half: bool) -> None:
    more, fewer = (step(prepared_model(generation, n_layer, half), launches, half) for n_layer in (4, 3))
    layer = [counts - others for counts, others in zip(more, fewer, strict=True)]
    counts_of_passes = tuple(counts.total() for counts in layer)
    assert all(mine <= budget for mine, budget in zip(counts_of_passes, BUDGET[generation, half], strict=True)), layer


def test_a_step_converts_no_weight_but_those_that_the_optimiser_has_changed(launches: Launches) -> None:
    model = prepared_model("rwkv7", 3, True)
    forward, _ = step(model, launches, True)
    assert forward["_foreach_copy_"] == 0
    with torch.no_grad():
        model.blocks[1].att.key.weight += 1
    forward, _ = step(model, launches, True)
    assert forward["_foreach_copy_"] == 0, "the second of two batches"
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    with launches, torch.autocast("cpu", HALF):
        launches.counts.clear()
        model.forward_features(tokens(model, 2, 8))
    assert launches.counts["_foreach_copy_"] == 1


@pytest.mark.parametrize("half", [False, True])
def test_the_head_has_one_product_in_each_direction_and_only_the_kernels_read_the_logits(launches: Launches,
                                                                                         half: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 16))
    hidden = torch.randn(600, 16, requires_grad=True)
    targets = torch.zeros(600, dtype=torch.long)
    with launches, torch.autocast("cpu", HALF, enabled=half):
        launches.counts.clear()
        loss.head_loss(hidden, weight, targets).backward()
    assert launches.counts["mm"] == 3
    assert launches.counts["_cross_entropy"] == 1
    assert launches.counts.total() < 25, launches.counts


def test_several_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a GPU whose memory holds only a part of the logits; the CPU computes the products."""
    for module in (fused, loss):
        monkeypatch.setattr(module, "WIDE_PRODUCTS", ("cpu",))

    def wide(dtype: torch.dtype, one: Tensor, other: Tensor) -> Tensor:
        return (one.float() @ other.float()).to(dtype)

    monkeypatch.setattr(loss, "product_in", wide)
    torch.manual_seed(0)
    hidden, targets = torch.randn(700, 8), torch.randint(20, (700,))
    grads = []
    for rows in (64, 1024):
        monkeypatch.setattr(loss, "rows_per_chunk", lambda *_, rows=rows: rows)
        weight = torch.nn.Parameter(torch.randn(20, 8, generator=torch.Generator().manual_seed(1)))
        with torch.autocast("cpu", HALF):
            loss.head_loss(hidden.requires_grad_(), weight, targets).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)
