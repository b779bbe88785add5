"""Compares every form of every generation with its formulas in float64: values, the state, and the gradients of training forms.

The training forms compute a whole model with a state before the first token, or rows of several sequences, in float32 and under
autocast. Under autocast an error may be a few times that of the formulas in the same precision. The decoding steps read one
token at a time, with weights in every format. The GPU forms run the same checks under Triton's interpreter, in
fused/fused_triton_interpreted.py and tests/generation/gpu_interpreted.py.
"""

import pytest
from fused_backends import CASES, check_step, check_training
from models import each_generation, in_format, small_model

from kernels import native
from rwkv.generation.decoder import CDecoder, Decoder
from rwkv.pretrained import RWKV

in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
TRAINING = [pytest.param("pytorch"), pytest.param("c", marks=in_c), pytest.param("recompute", marks=in_c)]
SIZES = {"whole blocks": {"n_embd": 64, "n_ffn": 96}, "pieces of blocks": {"n_embd": 40, "n_ffn": 1032, "n_layer": 2}}
WEIGHTS = pytest.mark.parametrize(("weights", "sizes"), [
    ("float32", "whole blocks"), ("bfloat16", "pieces of blocks"), ("int8", "whole blocks"), ("int4", "whole blocks"),
    ("int4", "pieces of blocks")])


# Training


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", TRAINING)
@each_generation
def test_a_form_of_training_computes_the_formulas(generation: str, form: str, case: str, half: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(generation, form, case, half, monkeypatch)


# Steps


def model_in(weights: str, generation: str, sizes: str) -> RWKV:
    return in_format(small_model("reference", generation=generation, **SIZES[sizes]), weights)


@in_c
@WEIGHTS
@each_generation
def test_a_step_in_c_computes_the_formulas(level: str, weights: str, sizes: str, generation: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs are rounded, a difference in the last bit may round an input of some row to its other neighbour.

    Such a row differs from then on. This happens more often in bfloat16 than with integers.
    """
    error = check_step(model_in(weights, generation, sizes), CDecoder, monkeypatch)
    assert (error.min() if weights == "bfloat16" else error.median()) <= 2e-5
    assert error.max() <= (2e-5 if weights == "float32" else 0.1)


@WEIGHTS
@each_generation
def test_a_step_in_pytorch_computes_the_formulas(weights: str, sizes: str, generation: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 every operation rounds, so the errors of logits of order 1 are a few times 2^-8."""
    error = check_step(model_in(weights, generation, sizes), Decoder, monkeypatch)
    if weights != "bfloat16":
        assert error.median() <= 2e-5
    assert error.max() <= (2e-5 if weights == "float32" else 0.15)
