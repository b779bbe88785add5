"""Programs of kernels/decoding: a model's step in one call of C is the reference's in float64, for any rows, in every form."""

from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens

from kernels import native
from kernels.decoding import Program, c_v0, reference
from kernels.matvec import FORMS, pack
from rwkv.generation.decoder import Decoder, ProgramDecoder
from rwkv.model import quantized
from rwkv.model.decoding.program import Runner, program_of
from rwkv.model.quantized import to_int4, to_int8
from rwkv.model.state import State
from rwkv.pretrained import RWKV

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))

WHOLE = {"n_embd": 64, "n_ffn": 96}      # widths that every form takes


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU with the instructions of that level alone."""
    monkeypatch.setattr(native, "level", lambda: request.param)
    if not request.param.startswith("avx512"):           # PyTorch's products in int8 then take 7 bits of an input
        monkeypatch.setattr(quantized, "multiplies", lambda dtype: False)
    return str(request.param)


def model_in(form: str, generation: str) -> RWKV:
    model = small_model("reference", generation=generation, **WHOLE).requires_grad_(False).eval()
    if form in ("int8", "int4"):
        return {"int8": to_int8, "int4": to_int4}[form](model)
    return model.to(getattr(torch, form))


def decoder_of(model: RWKV, state: State, implementation: Any = c_v0) -> ProgramDecoder:
    program = program_of(model)
    assert program is not None
    return ProgramDecoder(model, state, program, implementation.bind(program.program, program.form))


@each_generation
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_steps_are_the_references_in_float64(level: str, form: str, generation: str) -> None:
    """Where inputs are rounded, a last bit may round one to its other neighbour, in a row here or there, which is off from then
    on: to bfloat16 more often than to integers."""
    model = model_in(form, generation)
    several = tokens(model, B=3, T=6)
    decoder, exact = (decoder_of(model, model.empty_state(3), each) for each in (c_v0, reference))
    exact._registers = exact._registers.double()
    off = torch.stack([(decoder.step(several[:, t]) - exact.step(several[:, t])).abs().amax(-1) for t in range(6)]).amax(0)
    assert (off.min() if form == "bfloat16" else off.median()) <= 2e-5
    assert off.max() <= (2e-5 if form == "float32" else 0.1)
    right = (off <= 2e-5).nonzero().flatten().tolist()
    for mine, theirs in zip(decoder.state(right), exact.state(right), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@each_generation
@pytest.mark.parametrize(("form", "allowed"), [("float32", 1e-5), ("bfloat16", 0.1), ("int8", 0.1), ("int4", 0.1)])
@torch.no_grad()
def test_steps_are_the_decoders(form: str, allowed: float, generation: str) -> None:
    """After a prompt. With integers a last bit may round an input to its other neighbour, up to 1/63 of its row's largest."""
    model = model_in(form, generation)
    several = tokens(model, B=2, T=9)
    _, state = model.prefill(several[:, :4])
    decoder, plain = decoder_of(model, state), Decoder(model, state)
    for t in range(4, 9):
        torch.testing.assert_close(decoder.step(several[:, t]), plain.step(several[:, t]).float(), rtol=0, atol=allowed)


@pytest.mark.parametrize(("head_size", "rank"), [(16, 6), (24, 6), (48, 6), (8, 100)])
@torch.no_grad()
def test_heads_and_ranks_of_other_sizes(head_size: int, rank: int) -> None:
    """A rank above the width, too."""
    model = small_model("reference", generation="rwkv7", n_embd=48, head_size=head_size, gate_low_rank_dim=rank).eval()
    several = tokens(model, B=3, T=4)
    decoder, plain = decoder_of(model, model.empty_state(3)), Decoder(model, model.empty_state(3))
    for t in range(4):
        torch.testing.assert_close(decoder.step(several[:, t]), plain.step(several[:, t]), rtol=0, atol=1e-5)


@each_generation
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_no_number_becomes_finite_that_was_not(level: str, form: str, generation: str) -> None:
    """Or a model that overflows would write random text instead of an error. The rows beside it stay as they are."""
    model = model_in(form, generation)
    decoder = decoder_of(model, model.empty_state(3))
    model.emb.weight[2, 5] = float("nan")
    logits = decoder.step(torch.tensor([1, 2, 3]))
    assert logits.isfinite().all(1).tolist() == [True, False, True]
    assert not logits[1].isfinite().any()


def test_heads_that_do_not_fill_vectors_have_no_program() -> None:
    assert program_of(small_model("reference", generation="rwkv7", n_embd=48, head_size=12)) is None


@each_generation
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_row_is_the_same_to_the_bit_alone_and_beside_others(level: str, form: str, generation: str) -> None:
    """Every size of a tile is among the rows."""
    model, rows = model_in(form, generation), 15
    several = tokens(model, B=rows, T=4)
    together = decoder_of(model, model.empty_state(rows))
    alone = [decoder_of(model, model.empty_state(1)) for _ in range(rows)]
    for t in range(4):
        logits = together.step(several[:, t])
        for row, decoder in enumerate(alone):
            assert torch.equal(decoder.step(several[row:row + 1, t])[0], logits[row])


@each_generation
@torch.no_grad()
def test_matrices_in_bfloat16_change_no_bit(level: str, generation: str) -> None:
    """A model in float32 with the numbers of a file in bfloat16: all that is computed is the same to the bit."""
    model = model_in("bfloat16", generation).float()
    whole = decoder_of(model, model.empty_state(5))
    program = program_of(model)
    assert program is not None
    several, runner = tokens(model, B=5, T=4), Runner(model, program)
    by_copies = ProgramDecoder(model, model.empty_state(5), program, runner)
    assert not model.bfloat16_copies
    for t in range(4):
        assert torch.equal(by_copies.step(several[:, t]), whole.step(several[:, t]))
    assert model.bfloat16_copies


@each_generation
@torch.inference_mode()
def test_rows_join_and_leave(generation: str) -> None:
    """Also with other numbers in memory than zeros: the texts go on as if nothing had happened."""
    model = model_in("float32", generation)
    several = tokens(model, B=5, T=8)
    decoder = decoder_of(model, model.empty_state(0))
    for row in range(5):
        decoder.join(model.prefill(several[row:row + 1, :3])[1])
        decoder._memory[row + 1:] = torch.nan
    decoder.step(several[:, 3])
    decoder.keep([4, 0, 2])
    decoder.step(several[[4, 0, 2], 4])
    decoder.join(model.prefill(several[1:2, :5])[1])
    decoder.step(several[[4, 0, 2, 1], 5])
    decoder.keep([3, 1])
    together = decoder.step(several[[1, 0], 6])
    for row, logits in zip((1, 0), together, strict=True):
        expected = model(several[row:row + 1, :7])[0][0, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    decoder.keep([])
    assert decoder.step(several[:0, 7]).shape == (0, model.vocab_size)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_inputs_that_are_no_whole_blocks(level: str, form: str) -> None:
    program = Program()
    x, y = program.register(40), program.register(16)
    program.product(x, y, pack(torch.randn(16, 40), form), 40)
    registers = torch.randn(2, program.size)
    exact = registers.double()
    c_v0.bind(program, form)(registers)
    reference.bind(program, form)(exact)
    torch.testing.assert_close(registers[:, y:y + 16], exact[:, y:y + 16].float(), rtol=1e-5, atol=1e-4)


def test_a_product_of_any_number_of_outputs(level: str) -> None:
    """Fewer than a tile, not whole tiles; between others, so that nothing is written beyond them."""
    for N in (1, 7, 33, 100):
        program = Program()
        x, before, y, after = program.register(64), program.register(8), program.register(N), program.register(8)
        weight = torch.randn(N, 64)
        program.product(x, y, pack(weight, "float32"), 64)
        registers = torch.randn(3, program.size)
        kept = [registers[:, place:place + 8].clone() for place in (before, after)]
        c_v0.bind(program, "float32")(registers)
        torch.testing.assert_close(registers[:, y:y + N], registers[:, x:x + 64] @ weight.T)
        assert all(torch.equal(registers[:, place:place + 8], was) for place, was in zip((before, after), kept, strict=True))


def test_a_width_that_is_not_whole_vectors_has_no_program() -> None:
    assert program_of(small_model("reference", n_att=20).requires_grad_(False)) is None
