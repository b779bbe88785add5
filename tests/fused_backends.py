"""Checks an implementation of the fused layers against the formulas in float64.

test_model_conformance.py and the tests of GPU implementations use these checks.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_state, exact, small_model, tokens
from torch import Tensor

from rwkv.model import fused
from rwkv.model.fused import backend as fused_backend
from rwkv.pretrained import RWKV

CASES = ("whole", "packed")


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the implementation for training. "recompute" is C with recomputed activations, as used with frozen weights."""
    if backend == "formulas":
        monkeypatch.setattr(fused, "can_use_functions", lambda: False)
    elif backend == "pytorch":
        monkeypatch.setattr(fused_backend, "SUFFIXES", {})
    elif backend == "triton":
        monkeypatch.setattr(fused_backend, "SUFFIXES", {"cpu": "triton"})


def results(model: RWKV, case: str, half: bool = False) -> dict[str, Tensor]:
    """Returns the head's input, the final state, and the gradients of the parameters and of the initial state, in float64."""
    model = copy.deepcopy(model)
    dtype, read = model.emb.weight.dtype, tokens(model, 2, 9)
    generator = torch.Generator().manual_seed(0)

    def random_like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)

    before = model.zero_state(2, "cpu")
    before = before.each(lambda part: (random_like(part) / 4).abs().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        if case == "packed":
            starts = torch.zeros(read.shape, dtype=torch.bool).index_fill_(1, torch.tensor([0, 5, 6]), True)
            outputs = {"hidden": model.forward_features(read, starts)}
        else:
            hidden, after = model.hidden(read, before)
            outputs = {"hidden": hidden} | after.named()
    sum((output * random_like(output)).sum() for output in outputs.values()).backward()          # type: ignore[union-attr]
    leaves = dict(model.named_parameters()) | {f"state before: {name}": part for name, part in before.named().items()}
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: value.detach().double() for name, value in (outputs | gradients).items()}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {name: float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


def check_training(generation: str, backend: str, case: str, half: bool, monkeypatch: pytest.MonkeyPatch,
                   factor: float = 3) -> None:
    """Checks that errors are at most `factor` times those of the formulas in the same precision."""
    model = small_model(generation=generation, n_layer=2)
    if backend == "recompute":
        model.blocks[1].att.key.weight.requires_grad_(False)
    with monkeypatch.context() as patch:
        use("formulas", patch)
        expected, plain = results(copy.deepcopy(model).double(), case), results(model, case, half)
    with monkeypatch.context() as patch:
        use(backend, patch)
        actual = errors(results(model, case, half), expected)
    allowed = errors(plain, expected)
    floor = 1e-2 if half else 2e-6
    misses = {name: (error, allowed[name]) for name, error in actual.items() if not error <= factor * allowed[name] + floor}
    assert not misses, misses


@torch.no_grad()
def check_step(model: RWKV, decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, T: int = 6) -> Tensor:
    """Returns the largest error of each row's logits in T steps.

    Asserts that rows with the right logits have the right state.
    """
    several = tokens(model, B=3, T=T)
    with monkeypatch.context() as patch:
        use("formulas", patch)
        expected, after = exact(model)(several)
    steps = decoder(model, model.empty_state(3))
    largest_errors = torch.stack([(steps.step(several[:, t]) - expected[:, t]).abs().amax(-1) for t in range(T)]).amax(0)
    right = (largest_errors <= 2e-5).nonzero().flatten().tolist()
    assert_same_state(steps.state(right), after.rows(right), 1e-4)
    return largest_errors
