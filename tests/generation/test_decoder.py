"""Tests that the decoder's single steps are the model's own, in every dtype and for any rows."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_state, each_generation, in_format, small_model, tokens
from torch import Tensor

from kernels import native
from kernels.machine.cpu import multiplies_natively
from kernels.registry import why_not
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder, Decoder, decoder_of
from rwkv.model.quantized import Int8Linear, to_int8
from rwkv.model.state import State
from rwkv.pretrained import RWKV

SIZES = {"rwkv4": {"n_att": 24, "n_ffn": 40}, "rwkv7": {"n_ffn": 40}}


def model_in(dtype: str, generation: str = "rwkv4", **sizes: int) -> RWKV:
    return in_format(small_model("reference", generation=generation, **sizes or SIZES[generation]), dtype)


@each_generation
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("int8", 1e-4), ("int4", 1e-5), ("bfloat16", 0.1),
                                                pytest.param("float64", 1e-5, marks=pytest.mark.thorough)])
@torch.no_grad()
def test_steps_equal_the_models_own(dtype: str, allowed: float, generation: str) -> None:
    """In bfloat16 each operation may round differently, so logits of order 1 differ by a few times 2^-8."""
    model = model_in(dtype, generation)
    several = tokens(model, B=3, T=20)
    logits, state = model.prefill(several[:, :5])
    decoder = Decoder(model, state)
    for t in range(5, 20):
        logits, state = model.prefill(several[:, t:t + 1], state)
        torch.testing.assert_close(decoder.step(several[:, t]), logits, rtol=0, atol=allowed)
    assert_same_state(decoder.state(), state, 10 * allowed)


IN_C = pytest.mark.skipif(bool(why_native := native.why_not()), reason=str(why_native))


@each_generation
@pytest.mark.parametrize(("decoder_class", "dtype"), [
    (Decoder, "float32"), pytest.param(CDecoder, "float32", marks=IN_C),
    *(pytest.param(Decoder, dtype, marks=pytest.mark.thorough) for dtype in ("bfloat16", "int8"))])
@torch.no_grad()
def test_rows_join_and_leave(decoder_class: type[Decoder | CDecoder], dtype: str, generation: str) -> None:
    """The decoder begins without rows, and each row continues as in a separate decoder."""
    model = model_in(dtype, generation)
    several = tokens(model, B=3, T=8)
    starts = [model.prefill(several[row:row + 1, :4 + row])[1] for row in range(3)]
    decoder = decoder_class(model, model.empty_state(0))
    decoder.join(starts[0])
    decoder.step(several[:1, 4])
    decoder.join(State.cat(starts[1:]))
    decoder.step(several[:, 5])
    decoder.keep([2, 0])
    logits = decoder.step(several[[2, 0], 6]).clone()
    for row, read in ((0, (4, 5, 6)), (2, (5, 6))):
        alone = Decoder(model, starts[row])
        alone_logits = [alone.step(several[row:row + 1, t]) for t in read][-1]
        allowed = 0.1 if dtype == "bfloat16" else 1e-4
        position = 0 if row == 2 else 1
        torch.testing.assert_close(logits[position:position + 1], alone_logits, rtol=0, atol=allowed)
        assert_same_state(decoder.state([position]), alone.state(), allowed)


@each_generation
def test_a_decoder_does_not_change_its_first_state(generation: str) -> None:
    model = model_in("float32", generation)
    _, state = model.prefill(tokens(model))
    before = copy.deepcopy(state)
    decoder = Decoder(model, state)
    decoder.step(torch.tensor([1, 2]))
    returned_state = decoder.state()
    returned_copy = copy.deepcopy(returned_state)
    decoder.step(torch.tensor([3, 4]))
    assert all(map(torch.equal, state, before))
    assert all(map(torch.equal, returned_state, returned_copy))


BITS = 8 if multiplies_natively(torch.int8) else 7       # with 8 bits, FBGEMM saturates on a CPU without VNNI
NEEDS_VNNI = pytest.mark.skipif(BITS < 8, reason="8 bits without a sign saturate on a CPU without VNNI")


@pytest.fixture(params=["fbgemm", "c_v0"])
def int8_kernel(request: pytest.FixtureRequest) -> None:
    """Selects the implementation of int8 products: torch's FBGEMM, or C where torch has none."""
    if request.param == "c_v0":
        request.getfixturevalue("without_fbgemm")
    if reason := why_not("matvec", request.param):
        pytest.skip(reason)


@pytest.mark.usefixtures("int8_kernel")
@pytest.mark.parametrize(("bits", "non_negative", "allowed"), [
    (8, False, 0.015), pytest.param(8, True, 0.015, marks=NEEDS_VNNI), (7, False, 0.025), (7, True, 0.025)])
def test_int8_products_are_close_and_rows_independent(bits: int, non_negative: bool, allowed: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 64), torch.randn(5, 3, 64) * torch.logspace(-3, 3, 5)[:, None, None]
    x = x.relu() if non_negative else x
    if bits > BITS and why_not("matvec", "c_v0"):
        pytest.skip("FBGEMM saturates with 8 bits on a CPU without VNNI")
    layer, exact = Int8Linear(weight, non_negative, bits), x @ weight.T
    actual = layer(x)
    assert ((actual - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).max() < allowed
    assert torch.equal(layer(x[2, 1]), actual[2, 1])
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, 40))
    assert layer(x[:0]).shape == (0, 3, 40)
    assert torch.equal(copy.deepcopy(layer)(x), actual)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.packed.dense().sum(0).expand_as(x))


IN_BOTH = pytest.mark.skipif(bool(reason := why_not("matvec", "fbgemm") or why_not("matvec", "c_v0")), reason=str(reason))


@IN_BOTH
@given(st.integers(1, 90), st.integers(1, 70), st.integers(1, 200), st.booleans(), st.integers(-4, 4), st.integers(0, 9))
def test_int8_rows_in_c_have_the_bits_of_fbgemm(R: int, N: int, K: int, non_negative: bool, scale: int, seed: int) -> None:
    """A layer for non-negative inputs treats negative inputs as zeros."""
    torch.manual_seed(seed)
    weight, x = torch.randn(N, K) * 10.0 ** scale, torch.randn(R, K)
    layer, by_fbgemm = (Int8Linear(weight, non_negative, BITS, in_c) for in_c in (True, False))
    assert torch.equal(layer(x), by_fbgemm(x))
    assert torch.equal(layer(x.repeat(17, 1))[:R], by_fbgemm(x))


@pytest.mark.skipif(why_not("matvec", "c_v0") is not None, reason=str(why_not("matvec", "c_v0")))
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_signed_int8_has_the_products_of_its_integers(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(33, 1000), torch.randn(rows, 1000)
    layer = Int8Linear(weight)
    largest, steps = x.abs().amax(1, keepdim=True), layer.rounding.steps
    q = (x.double() / largest * steps).round()
    expected = q @ layer.packed.dense(torch.float64).T * largest / steps
    assert steps == 127
    errors = (layer(x) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 1e-6
    assert errors.max() < 1e-2           # an input near a tie may round either way


@IN_BOTH
def test_an_int8_weight_is_only_once_in_memory() -> None:
    """Training needs the weight in FBGEMM's order, and generation needs the weight row by row."""
    weight = torch.randn(40, 64)
    trained = Int8Linear(weight, in_c=False)
    trained(torch.randn(3, 64))
    assert not trained._for_c
    read = Int8Linear(weight)
    read(torch.randn(300, 64))
    assert "_fbgemm_weight" not in vars(read)
    assert torch.equal(read.packed.weight, trained.packed.weight)
    assert torch.equal(read.packed.scale, trained.packed.scale)


@pytest.mark.usefixtures("without_fbgemm")
def test_int8_without_a_kernel_is_reported_in_one_sentence(unavailable: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unavailable.setattr(native, "FOLDER", tmp_path)
    with pytest.raises(UserError):
        to_int8(small_model("reference"))


def test_an_int8_model_is_not_saved_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        to_int8(small_model("reference")).save_pretrained(tmp_path / "model.pth")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("int8_kernel")
@pytest.mark.parametrize(("generation", "allowed"), [("rwkv4", 0.05), ("rwkv7", 0.1)])
@torch.no_grad()
def test_an_int8_model_is_close_and_a_batch_equals_its_rows_bit_for_bit(generation: str, allowed: float) -> None:
    model = small_model("reference", generation=generation, n_embd=64).requires_grad_(False)
    several, exact = tokens(model, B=3, T=16), model(tokens(model, B=3, T=16))[0]
    quantized = to_int8(model)
    logits = quantized(several)[0]
    assert (logits - exact).norm() / exact.norm() < allowed
    torch.testing.assert_close(quantized(several[1:2])[0][0], logits[1], rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("int8_kernel")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@torch.no_grad()
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str) -> None:
    """The widths are whole vectors, because PyTorch computes exponentials of leftover elements in another way."""
    model = model_in(dtype, n_embd=64, n_ffn=128)
    several = tokens(model, B=8, T=12)
    together = Decoder(model, model.empty_state(8))
    alone = [Decoder(model, model.empty_state(1)) for _ in range(8)]
    for t in range(12):
        logits = together.step(several[:, t])
        for row, decoder in enumerate(alone):
            assert torch.equal(decoder.step(several[row:row + 1, t])[0], logits[row])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@torch.no_grad()
def test_steps_do_not_depend_on_torch_s_default_dtype(dtype: str, default: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    small_model(generation="rwkv7", n_embd=128, head_size=64).save_pretrained(path)

    def steps() -> list[Tensor]:
        model = RWKV.from_pretrained(path, dtype=dtype)
        several = tokens(model, B=2, T=8)
        decoder = decoder_of(model, model.prefill(several[:, :4])[1])
        return [decoder.step(several[:, t]).clone() for t in range(4, 8)]

    expected = steps()
    torch.set_default_dtype(default)
    try:
        actual = steps()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
