"""Matrices of a model in float32 as bfloat16: only where that is exact, and those that the model has now."""

import pytest
import torch
from models import small_model
from torch import Tensor, nn

from rwkv.model.decoding import bfloat16_copies
from rwkv.model.decoding.bfloat16_copies import exact_copies, has_copies
from rwkv.pretrained import RWKV


def frozen() -> RWKV:
    return small_model("reference").bfloat16().float().requires_grad_(False)


def matrices(model: nn.Module) -> list[Tensor]:
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]


def copies(model: nn.Module) -> list[Tensor]:
    found = exact_copies(model, matrices(model))
    assert found is not None
    return found


def test_copies_are_exact_and_made_once() -> None:
    model = frozen()
    for weight, copy, again in zip(matrices(model), copies(model), copies(model), strict=True):
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy.float(), weight)
        assert copy is again


@pytest.mark.parametrize("through_data", [False, True])
def test_changed_matrices_are_copied_anew(through_data: bool) -> None:
    model = frozen()
    copies(model)
    weight = model.head.weight
    (weight.data if through_data else weight).mul_(2)
    assert all(torch.equal(copy.float(), weight) for weight, copy in zip(matrices(model), copies(model), strict=True))


def test_there_are_none_where_a_number_would_change() -> None:
    model = frozen()
    copies(model)
    model.head.weight[:] = 1 + 2**-20
    assert exact_copies(model, matrices(model)) is None
    assert not has_copies(model), "what is of no use takes no memory"


def test_there_are_none_of_a_model_that_is_trained() -> None:
    model = frozen().requires_grad_(True)
    assert exact_copies(model, matrices(model)) is None


def test_there_are_none_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen()
    monkeypatch.setattr(bfloat16_copies, "available_memory", lambda: 1000)
    assert exact_copies(model, matrices(model)) is None
