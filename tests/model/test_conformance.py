"""Every form of every generation beside its formulas in float64: values, the state, and gradients where the form trains.

The forms of training compute a whole model, with a state before the first token, or rows of several sequences; in float32, and
under autocast, where an error may be a few times that of the formulas in the same precision. A step reads tokens one at a time,
with weights in every form. The forms on a GPU run the same checks under Triton's interpreter: fused/fused_triton_interpreted.py
and tests/generation/gpu_interpreted.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_state, each_generation, exact, in_form, small_model, tokens
from torch import Tensor

from kernels import native
from rwkv.generation.decoder import CDecoder, Decoder
from rwkv.model import fused
from rwkv.model.fused import form as fused_form
from rwkv.pretrained import RWKV

in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
TRAINING = [pytest.param("pytorch"), pytest.param("c", marks=in_c), pytest.param("recompute", marks=in_c)]
CASES = ("whole", "packed")
SIZES = {"whole blocks": {"n_embd": 64, "n_ffn": 96}, "pieces of blocks": {"n_embd": 40, "n_ffn": 1032, "n_layer": 2}}
WEIGHTS = pytest.mark.parametrize(("weights", "sizes"), [
    ("float32", "whole blocks"), ("bfloat16", "pieces of blocks"), ("int8", "whole blocks"), ("int4", "whole blocks"),
    ("int4", "pieces of blocks")])


# Training


def use(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the form of training; "recompute" is C with recomputed activations, which frozen weights need."""
    if form == "formulas":
        monkeypatch.setattr(fused, "can_use_functions", lambda: False)
    elif form == "pytorch":
        monkeypatch.setattr(fused_form, "SUFFIXES", {})
    elif form == "triton":
        monkeypatch.setattr(fused_form, "SUFFIXES", {"cpu": "triton"})


def results(model: RWKV, case: str, half: bool = False) -> dict[str, Tensor]:
    """The head's input, the state, and the gradients of the trained parameters and of the state before the first token."""
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


def check_training(generation: str, form: str, case: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(generation=generation, n_layer=2)
    if form == "recompute":
        model.blocks[1].att.key.weight.requires_grad_(False)
    with monkeypatch.context() as patch:
        use("formulas", patch)
        expected, plain = results(copy.deepcopy(model).double(), case), results(model, case, half)
    with monkeypatch.context() as patch:
        use(form, patch)
        found = errors(results(model, case, half), expected)
    allowed = errors(plain, expected)
    floor = 1e-2 if half else 2e-6
    assert not {name: (error, allowed[name]) for name, error in found.items() if not error <= 3 * allowed[name] + floor}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", TRAINING)
@each_generation
def test_a_form_of_training_computes_the_formulas(generation: str, form: str, case: str, half: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(generation, form, case, half, monkeypatch)


# Steps


def model_in(weights: str, generation: str, sizes: str) -> RWKV:
    return in_form(small_model("reference", generation=generation, **SIZES[sizes]), weights)


@torch.no_grad()
def check_step(model: RWKV, decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Any]:
    """The largest error of each row's logits, and the decoder after the sequences."""
    several = tokens(model, B=3, T=6)
    with monkeypatch.context() as patch:
        use("formulas", patch)
        expected, after = exact(model)(several)
    steps = decoder(model, model.empty_state(3))
    off = torch.stack([(steps.step(several[:, t]) - expected[:, t]).abs().amax(-1) for t in range(6)]).amax(0)
    right = (off <= 2e-5).nonzero().flatten().tolist()
    assert_same_state(steps.state(right), after.rows(right), 1e-4)
    return off, steps


@in_c
@WEIGHTS
@each_generation
def test_a_step_in_c_computes_the_formulas(level: str, weights: str, sizes: str, generation: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs are rounded, a last bit may round one to its other neighbour, in a row here or there, which is off from then
    on: to bfloat16 more often than to integers."""
    off, _ = check_step(model_in(weights, generation, sizes), CDecoder, monkeypatch)
    assert (off.min() if weights == "bfloat16" else off.median()) <= 2e-5
    assert off.max() <= (2e-5 if weights == "float32" else 0.1)


@WEIGHTS
@each_generation
def test_a_step_in_pytorch_computes_the_formulas(weights: str, sizes: str, generation: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 every operation rounds: 2^-8 of logits of order 1, a few times."""
    off, _ = check_step(model_in(weights, generation, sizes), Decoder, monkeypatch)
    if weights != "bfloat16":
        assert off.median() <= 2e-5
    assert off.max() <= (2e-5 if weights == "float32" else 0.15)
