"""Programs of kernels/decoding: a model's step in one launch is the reference's in float64, for any rows and in every form."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens

from kernels import registry
from kernels.backends import bitcode
from kernels.decoding import Program, reference, taichi_v0, taichi_v1, taichi_v2
from kernels.matvec import FORMS, pack
from kernels.registry import KernelUnavailable
from rwkv.generation.decoder import Decoder, FallbackDecoder, ProgramDecoder
from rwkv.model import quantized
from rwkv.model.decoding.program import Runner, program_of
from rwkv.model.quantized import to_int4, to_int8
from rwkv.model.state import State
from rwkv.pretrained import RWKV

pytestmark = pytest.mark.compiles

WHOLE = {"n_embd": 64, "n_ffn": 96}      # widths that every form takes
NATIVE = pytest.mark.skipif(registry.level() is None, reason=f"the CPU has the instructions of none of {[*registry.LEVELS]}")
IN_ONE_LAUNCH = [taichi_v0, pytest.param(taichi_v2, marks=NATIVE)]


def model_in(form: str, generation: str) -> RWKV:
    model = small_model("reference", generation=generation, **WHOLE).requires_grad_(False).eval()
    if form in ("int8", "int4"):
        return {"int8": to_int8, "int4": to_int4}[form](model)
    return model.to(getattr(torch, form))


def decoder_of(model: RWKV, state: State, implementation: object = taichi_v0) -> ProgramDecoder:
    program = program_of(model)
    assert program is not None
    return ProgramDecoder(model, state, program, implementation.bind(program.program, program.form))


@each_generation
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", [*IN_ONE_LAUNCH, taichi_v1])
@torch.no_grad()
def test_steps_are_the_references_in_float64(implementation: object, form: str, generation: str) -> None:
    """Where inputs are rounded, a last bit may round one to its other neighbour, in a row here or there, which is off from then
    on: to bfloat16 more often than to integers. PyTorch rounds the outputs to bfloat16, too."""
    model = model_in(form, generation)
    several = tokens(model, B=3, T=6)
    decoder, exact = (decoder_of(model, model.empty_state(3), each) for each in (implementation, reference))
    exact._registers = exact._registers.double()
    off = torch.stack([(decoder.step(several[:, t]) - exact.step(several[:, t])).abs().amax(-1) for t in range(6)]).amax(0)
    if not (form == "bfloat16" and implementation is taichi_v1):
        assert (off.min() if form == "bfloat16" else off.median()) <= 2e-5
    assert off.max() <= (2e-5 if form == "float32" else 0.1)
    right = (off <= 2e-5).nonzero().flatten().tolist()
    for mine, theirs in zip(decoder.state(right), exact.state(right), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@each_generation
@pytest.mark.parametrize(("form", "allowed"), [("float32", 1e-5), ("bfloat16", 0.1), ("int8", 0.1), ("int4", 1e-5)])
@pytest.mark.parametrize("implementation", IN_ONE_LAUNCH)
@torch.no_grad()
def test_steps_are_the_decoders(implementation: object, form: str, allowed: float, generation: str) -> None:
    """After a prompt. With integers a last bit may round an input to its other neighbour, up to 1/63 of its row's largest."""
    model = model_in(form, generation)
    several = tokens(model, B=2, T=9)
    _, state = model.prefill(several[:, :4])
    decoder, plain = decoder_of(model, state, implementation), Decoder(model, state)
    for t in range(4, 9):
        torch.testing.assert_close(decoder.step(several[:, t]), plain.step(several[:, t]).float(), rtol=0, atol=allowed)


@pytest.mark.parametrize(("head_size", "rank"), [(16, 6), (24, 6), (48, 6), (8, 100)])
@pytest.mark.parametrize("implementation", IN_ONE_LAUNCH)
@torch.no_grad()
def test_heads_and_ranks_of_other_sizes(implementation: object, head_size: int, rank: int) -> None:
    """A rank above the width, too."""
    model = small_model("reference", generation="rwkv7", n_embd=48, head_size=head_size, gate_low_rank_dim=rank).eval()
    several = tokens(model, B=3, T=4)
    decoder, plain = decoder_of(model, model.empty_state(3), implementation), Decoder(model, model.empty_state(3))
    for t in range(4):
        torch.testing.assert_close(decoder.step(several[:, t]), plain.step(several[:, t]), rtol=0, atol=1e-5)


@each_generation
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IN_ONE_LAUNCH)
@torch.no_grad()
def test_no_number_becomes_finite_that_was_not(implementation: object, form: str, generation: str) -> None:
    """Or a model that overflows would write random text instead of an error. The rows beside it stay as they are."""
    model = model_in(form, generation)
    decoder = decoder_of(model, model.empty_state(3), implementation)
    model.emb.weight[2, 5] = float("nan")
    logits = decoder.step(torch.tensor([1, 2, 3]))
    assert logits.isfinite().all(1).tolist() == [True, False, True]
    assert not logits[1].isfinite().any()


def test_heads_that_do_not_fill_vectors_have_no_program() -> None:
    assert program_of(small_model("reference", generation="rwkv7", n_embd=48, head_size=12)) is None


@each_generation
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("implementation", "rows"), [(taichi_v0, 5), pytest.param(taichi_v2, 15, marks=NATIVE)])
@torch.no_grad()
def test_a_row_is_the_same_to_the_bit_alone_and_beside_others(implementation: object, rows: int, form: str,
                                                              generation: str) -> None:
    """rows: every size of a tile is among them."""
    model = model_in(form, generation)
    several = tokens(model, B=rows, T=4)
    together = decoder_of(model, model.empty_state(rows), implementation)
    alone = [decoder_of(model, model.empty_state(1), implementation) for _ in range(rows)]
    for t in range(4):
        logits = together.step(several[:, t])
        for row, decoder in enumerate(alone):
            assert torch.equal(decoder.step(several[row:row + 1, t])[0], logits[row])


@NATIVE
@each_generation
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_older_cpus_have_the_same_steps(form: str, generation: str, avx2: None) -> None:
    model = model_in(form, generation)
    several = tokens(model, B=7, T=4)
    decoder, exact = (decoder_of(model, model.empty_state(7), each) for each in (taichi_v2, reference))
    exact._registers = exact._registers.double()
    alone = decoder_of(model, model.empty_state(1), taichi_v2)
    for t in range(4):
        logits = decoder.step(several[:, t])
        off = (logits - exact.step(several[:, t])).abs().amax(-1)
        assert (off.min() if form == "bfloat16" else off.median()) <= 2e-5
        assert off.max() <= (2e-5 if form == "float32" else 0.1)
        assert torch.equal(alone.step(several[:1, t])[0], logits[0])


def _same_with_copies(generation: str) -> None:
    """A model in float32 with the numbers of a file in bfloat16: all that is computed is the same to the bit."""
    model = model_in("bfloat16", generation).float()
    whole = decoder_of(model, model.empty_state(5), taichi_v2)
    program = program_of(model)
    assert program is not None
    several, runner = tokens(model, B=5, T=4), Runner(model, program)
    by_copies = ProgramDecoder(model, model.empty_state(5), program, runner)
    assert not model.bfloat16_copies
    for t in range(4):
        assert torch.equal(by_copies.step(several[:, t]), whole.step(several[:, t]))
    assert model.bfloat16_copies


@NATIVE
@each_generation
@torch.no_grad()
def test_matrices_in_bfloat16_change_no_bit(generation: str) -> None:
    _same_with_copies(generation)


@NATIVE
@each_generation
@torch.no_grad()
def test_on_older_cpus_matrices_in_bfloat16_change_no_bit(generation: str, avx2: None) -> None:
    _same_with_copies(generation)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a CPU without AVX-512, where PyTorch's products in int8 take 7 bits of an input."""
    caches = (bitcode.function, bitcode.version_of, taichi_v2._kernel)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "level", lambda: "avx2")
        patched.setattr(quantized, "multiplies", lambda dtype: False)
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


@each_generation
@torch.no_grad()
def test_in_int8_products_by_pytorch_change_no_bit(generation: str) -> None:
    model = model_in("int8", generation)
    several = tokens(model, B=5, T=4)
    by_torch, in_launch = (decoder_of(model, model.empty_state(5), each) for each in (taichi_v1, taichi_v0))
    for t in range(4):
        assert torch.equal(by_torch.step(several[:, t]), in_launch.step(several[:, t]))


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


@each_generation
@torch.inference_mode()
def test_rows_cross_from_one_launch_to_pytorchs_products_and_on_to_pytorch_alone(generation: str) -> None:
    """One launch up to two rows, here; and then the program cannot run any more."""
    model = model_in("float32", generation)
    several, program = tokens(model, B=3, T=7), program_of(model)
    runner = Runner(model, program)
    runner._most = 2
    runs = [runner]
    by_program = ProgramDecoder(model, model.empty_state(0), program, lambda registers: runs[-1](registers))
    decoder = FallbackDecoder(model, by_program, runner.warm_up)
    decoder.warm_up()
    decoder.join(model.prefill(several[:2, :4])[1])
    decoder.step(several[:2, 4])
    decoder.join(model.prefill(several[2:, :5])[1])
    decoder.step(several[:, 5])
    runs.append(unavailable)
    expected = model(several)[0][:, -1]
    torch.testing.assert_close(decoder.step(several[:, 6]), expected, rtol=0, atol=1e-5)
    assert isinstance(decoder._decoder, Decoder)


def unavailable(registers: torch.Tensor) -> None:
    raise KernelUnavailable("as after Taichi was started for a GPU")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IN_ONE_LAUNCH)
def test_a_product_of_inputs_that_are_no_whole_blocks(implementation: Any, form: str) -> None:
    program = Program()
    x, y = program.register(40), program.register(16)
    program.product(x, y, pack(torch.randn(16, 40), form), 40)
    registers = torch.randn(2, program.size)
    exact = registers.double()
    implementation.bind(program, form)(registers)
    reference.bind(program, form)(exact)
    torch.testing.assert_close(registers[:, y:y + 16], exact[:, y:y + 16].float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", IN_ONE_LAUNCH)
def test_a_product_of_any_number_of_outputs(implementation: Any) -> None:
    """Fewer than a tile, not whole tiles; between others, so that nothing is written beyond them."""
    for N in (1, 7, 33, 100):
        program = Program()
        x, before, y, after = program.register(64), program.register(8), program.register(N), program.register(8)
        weight = torch.randn(N, 64)
        program.product(x, y, pack(weight, "float32"), 64)
        registers = torch.randn(3, program.size)
        kept = [registers[:, place:place + 8].clone() for place in (before, after)]
        implementation.bind(program, "float32")(registers)
        torch.testing.assert_close(registers[:, y:y + N], registers[:, x:x + 64] @ weight.T)
        assert all(torch.equal(registers[:, place:place + 8], was) for place, was in zip((before, after), kept, strict=True))


def test_weights_out_of_reach_take_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [pack(torch.randn(16, 32), "float32") for _ in range(4)]
    program = Program()
    x, y = program.register(32), [program.register(16) for _ in weights]
    for place, weight in zip(y, weights, strict=True):
        program.product(x, place, weight, 32)
    monkeypatch.setattr(taichi_v0, "NUMEL_MAX", 16 * 32 + 1)
    assert len(taichi_v0._within_reach(program)) == len(weights)
    registers = torch.randn(1, program.size)
    taichi_v0.bind(program, "float32")(registers)
    for place, weight in zip(y, weights, strict=True):
        torch.testing.assert_close(registers[:, place:place + 16], registers[:, x:x + 32] @ weight.weight.T)


def test_a_width_that_is_not_whole_vectors_has_no_program() -> None:
    assert program_of(small_model("reference", n_att=20).requires_grad_(False)) is None
