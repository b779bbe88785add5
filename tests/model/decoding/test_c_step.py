"""Tests a model's step in one call of C, for any rows, prompts, formats and levels.

test_model_conformance.py compares the values with the formulas.
"""

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_state, each_generation, exact, in_format, small_model, tokens

from kernels import native
from kernels.matvec import BLOCKS, FORMATS
from kernels.matvec.cases import width
from rwkv.generation.decoder import CDecoder, Decoder, decoder_of
from rwkv.model.base import optional_module
from rwkv.model.decoding import c_step
from rwkv.model.decoding.c_step import CStep, step_of, why_not
from rwkv.model.quantized import Int8Linear, to_packed
from rwkv.pretrained import RWKV

in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
SIZES = {"whole blocks": {"n_embd": 64, "n_ffn": 96}, "pieces of blocks": {"n_embd": 40, "n_ffn": 1032, "n_layer": 2}}


UNUSUAL_BLOCKS = [format for format in BLOCKS if format not in ("q8_0", "q4_k")]
# make soak tests unusual blocks for their bits, too; make test compares their values with float64
FORMATS_HERE = [*(pytest.param(format, marks=pytest.mark.soak if format in UNUSUAL_BLOCKS else ()) for format in FORMATS)]


def model_in(format: str, generation: str, sizes: str = "whole blocks", **others: int) -> RWKV:
    chosen = {name: size if name == "n_layer" else width(format, size) for name, size in {**SIZES[sizes], **others}.items()}
    return in_format(small_model("reference", generation=generation, **chosen), format)


@in_c
@pytest.mark.parametrize(("generation", "format"), [
    pytest.param(generation, format, marks=() if format not in UNUSUAL_BLOCKS else pytest.mark.thorough
                 if generation == "rwkv7" else pytest.mark.soak) for generation in ("rwkv4", "rwkv7") for format in BLOCKS])
@torch.no_grad()
def test_steps_with_blocks_equal_the_model_in_float64(level: str, format: str, generation: str) -> None:
    """A difference in the last bit may round an input of a row differently, and the row differs from then on."""
    model = model_in(format, generation)
    several = tokens(model, B=3, T=6)
    decoder, reference = CDecoder(model, model.empty_state(3)), Decoder(exact(model), model.empty_state(3))
    errors = torch.stack([(decoder.step(several[:, t]) - reference.step(several[:, t])).abs().amax(-1) for t in range(6)])
    assert errors.amin(1).max() <= 2e-5
    assert errors.max() <= 0.1
    assert_same_state(decoder.state(), reference.state(), 0.1)


def longer(struct: Any) -> Any:
    """Returns the named tuple with an additional field."""
    kind = namedtuple(type(struct).__name__, [*struct._fields, "extra"])  # type: ignore[misc]
    return kind(*struct, 0)


LONGER: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: model._replace(common=model.common._replace(ln_out=longer(model.common.ln_out))),
    "matrix": lambda model: model._replace(common=model.common._replace(head=longer(model.common.head))),
    "common": lambda model: model._replace(common=longer(model.common)),
    "layer": lambda model: model._replace(layers=tuple(map(longer, model.layers))),
    "model": longer}


@in_c
@each_generation
@pytest.mark.parametrize("struct", LONGER)
def test_a_field_that_only_python_has_is_refused(struct: str, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in("float32", generation)
    step_of(model)
    step_c = optional_module(model.config, "step_c")
    c_model = step_c.c_model
    monkeypatch.setattr(step_c, "c_model", lambda model, builder: LONGER[struct](c_model(model, builder)))
    with pytest.raises(AssertionError, match=f"{generation}_{struct} must have the same fields"):
        CStep(model)


@in_c
@pytest.mark.parametrize(("head_size", "rank"), [(16, 6), (24, 6), (48, 6), (8, 100)])
@torch.no_grad()
def test_heads_and_ranks_of_other_sizes(head_size: int, rank: int) -> None:
    """The last case has a rank that is larger than the width."""
    model = small_model("reference", generation="rwkv7", n_embd=48, head_size=head_size, gate_low_rank_dim=rank).eval()
    several = tokens(model, B=3, T=4)
    decoder, plain = CDecoder(model, model.empty_state(3)), Decoder(model, model.empty_state(3))
    for t in range(4):
        torch.testing.assert_close(decoder.step(several[:, t]), plain.step(several[:, t]), rtol=0, atol=1e-5)


@in_c
@each_generation
@torch.no_grad()
def test_a_matrix_read_in_place_gives_the_bits_of_its_copy_by_input(level: str, generation: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in("bfloat16", generation, n_embd=40, n_ffn=1032)
    several, steps = tokens(model, B=7, T=3), []
    for copied in (c_step.COPIED, 0):
        monkeypatch.setattr(c_step, "COPIED", copied)
        step = CStep(model)
        decoder = CDecoder(model, model.empty_state(7))
        decoder._c_step, decoder._weights = step, []
        steps.append((sum(tensor.nbytes for tensor in step.own_tensors),
                      [decoder.step(several[:, t]).clone() for t in range(3)]))
    (with_copy, expected), (in_place, logits) = steps
    assert in_place <= with_copy - 3 * 2 * 40 * 1032
    for right, read in zip(expected, logits, strict=True):
        assert torch.equal(right, read)


@in_c
@each_generation
@torch.no_grad()
def test_an_int8_matrix_by_input_gives_the_bits_of_one_by_output(level: str, generation: str) -> None:
    model = model_in("int8", generation, n_embd=40, n_ffn=1032)
    by_output = copy.deepcopy(model)
    for block in by_output.blocks:
        packed = block.ffn.value.packed
        assert packed.by_input
        block.ffn.value = Int8Linear(packed.map(torch.Tensor.contiguous), non_negative=True)
    for rows in (1, 7, 9):
        several, decoders = tokens(model, B=rows, T=3), [CDecoder(each, each.empty_state(rows)) for each in (model, by_output)]
        for t in range(3):
            logits, expected = (decoder.step(several[:, t]) for decoder in decoders)
            assert torch.equal(logits, expected)


@in_c
@each_generation
@pytest.mark.parametrize("format", FORMATS_HERE)
@torch.no_grad()
def test_nonfinite_numbers_stay_nonfinite(level: str, format: str, generation: str) -> None:
    """A model that overflows must fail instead of writing random text. Other rows are not affected."""
    model = model_in(format, generation)
    decoder = CDecoder(model, model.empty_state(3))
    if format in BLOCKS:
        offset = BLOCKS[format].halves[0]
        model.emb.weight[2, offset:offset + 2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    else:
        model.emb.weight[2, 5] = float("nan")
    logits = decoder.step(torch.tensor([1, 2, 3]))
    assert logits.isfinite().all(1).tolist() == [True, False, True]
    assert not logits[1].isfinite().any()


@in_c
@each_generation
def test_a_number_that_is_not_a_token_gives_nan(generation: str) -> None:
    model = model_in("float32", generation)
    logits = CDecoder(model, model.empty_state(3)).step(torch.tensor([model.vocab_size, 2, -1]))
    assert logits.isnan().all(1).tolist() == [True, False, True]


@in_c
@each_generation
@pytest.mark.parametrize("format", FORMATS_HERE)
@torch.no_grad()
def test_a_row_has_the_same_bits_alone_and_among_others(level: str, format: str, generation: str) -> None:
    """The numbers of rows cover every tile size."""
    model, rows = model_in(format, generation), 15
    several = tokens(model, B=rows, T=4)
    together = CDecoder(model, model.empty_state(rows))
    alone = [CDecoder(model, model.empty_state(1)) for _ in range(rows)]
    for t in range(4):
        logits = together.step(several[:, t])
        for row, decoder in enumerate(alone):
            assert torch.equal(decoder.step(several[row:row + 1, t])[0], logits[row])


@in_c
@each_generation
@pytest.mark.parametrize("format", FORMATS_HERE)
@torch.no_grad()
def test_a_text_read_in_one_call_has_the_bits_of_its_steps(level: str, format: str, generation: str) -> None:
    """Several texts continue from nonempty states that are not adjacent in memory."""
    model = model_in(format, generation)
    several = tokens(model, B=4, T=12)
    decoders = [CDecoder(model, model.empty_state(4)) for _ in range(2)]
    for decoder in decoders:
        decoder.step(several[:, 0])
        decoder.keep([3, 0, 2])
    for t in range(1, 12):
        expected = decoders[0].step(several[[3, 0, 2], t])
    actual = decoders[1].read(several[[3, 0, 2], 1:])
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, decoders[1].state(), decoders[0].state()))


@in_c
@each_generation
@pytest.mark.parametrize("format", FORMATS_HERE)
@torch.inference_mode()
def test_tokens_read_ahead_have_the_bits_of_steps(level: str, format: str, generation: str) -> None:
    """The logits and the state after each token are compared, for rows that read ahead and rows that read one token.

    Each row then continues from another of its states, while free memory holds NaN.
    """
    model = model_in(format, generation)
    several = tokens(model, B=3, T=20)
    rows, lengths = [2, 0, 1], (7, 1, 4)
    alone = [CDecoder(model, model.empty_state(1)) for _ in rows]
    decoder = CDecoder(model, model.empty_state(3))
    decoder.step(several[:, 0])
    decoder.keep(rows)
    for row, single in zip(rows, alone, strict=True):
        single.step(several[row:row + 1, 0])
    positions = [1, 1, 1]
    for accepted in ((1, 1, 4), (7, 1, 2), (3, 1, 1)):
        before = decoder.state()
        actual = decoder.read_ahead([several[row, i:i + n].tolist()
                                     for row, i, n in zip(rows, positions, lengths, strict=True)])
        assert all(map(torch.equal, decoder.state(), before))
        for index, (row, n, single, logits) in enumerate(zip(rows, accepted, alone, actual.split(lengths), strict=True)):
            for t in range(n):
                assert torch.equal(single.step(several[row:row + 1, positions[index] + t])[0], logits[t])
            decoder.advance(index, n)
            positions[index] += n
        decoder.drop_ahead()
        for index, single in enumerate(alone):
            assert all(map(torch.equal, decoder.state([index]), single.state()))
        decoder._states[sorted(set(range(len(decoder._states))) - set(decoder._state_rows))] = torch.nan


@in_c
@each_generation
@torch.no_grad()
def test_rows_join_and_leave_while_others_have_read_ahead(generation: str) -> None:
    model = model_in("float32", generation)
    several = tokens(model, B=3, T=9)
    alone = CDecoder(model, model.empty_state(1))
    expected = [alone.step(several[1:2, t]).clone() for t in range(6)]
    decoder = CDecoder(model, model.empty_state(2))
    decoder.read_ahead([several[0, :3].tolist(), several[1, :2].tolist()])
    decoder.read_ahead([[], several[1, 2:4].tolist()])
    decoder.join(model.empty_state(2))
    decoder.keep([3, 1])
    decoder.advance(1, 3)
    assert torch.equal(decoder.read_ahead([several[2, :2].tolist(), several[1, 4:6].tolist()])[2:3], expected[4])
    decoder.advance(1, 1)
    decoder.drop_ahead()
    assert torch.equal(decoder.step(several[[2, 1], 4])[1:], expected[4])


@in_c
@each_generation
@torch.no_grad()
def test_matrices_in_bfloat16_change_no_bit(level: str, generation: str) -> None:
    """If the numbers of a float32 model fit bfloat16, decoding with bfloat16 matrices has the same bits."""
    model = model_in("bfloat16", generation).float()
    trained = copy.deepcopy(model).requires_grad_(True)
    whole, by_copies = CDecoder(trained, model.empty_state(5)), CDecoder(model, model.empty_state(5))
    several = tokens(model, B=5, T=4)
    for t in range(4):
        assert torch.equal(by_copies.step(several[:, t]), whole.step(several[:, t]))
    assert step_of(model).reads_copies
    assert not step_of(trained).reads_copies


@in_c
@each_generation
@torch.inference_mode()
def test_rows_join_and_leave(generation: str) -> None:
    """Rows that stay are not affected, even if free memory holds NaN."""
    model = model_in("float32", generation)
    several = tokens(model, B=5, T=8)
    decoder = CDecoder(model, model.empty_state(0))
    for row in range(5):
        decoder.join(model.prefill(several[row:row + 1, :3])[1])
        decoder._states[sorted(set(range(len(decoder._states))) - set(decoder._state_rows))] = torch.nan
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


@in_c
@each_generation
@pytest.mark.parametrize(("format", "vocab_size"), [("float32", 1), ("bfloat16", 7), ("int8", 33), ("int4", 100), ("q8_0", 64)])
def test_nothing_is_written_past_the_end_of_a_buffer(level: str, format: str, vocab_size: int, generation: str) -> None:
    model = model_in(format, generation, "pieces of blocks", vocab_size=vocab_size)
    step, state = step_of(model), sum(part[:, 0].numel() for part in model.empty_state(1))
    states, work, logits = torch.full((3, state), 7.0), torch.full((3, step.size), 7.0), torch.full((3, vocab_size), 7.0)
    for layer, part in zip(states[1].view(len(model.blocks), -1), (torch.cat([part.flatten() for part in layer])
                                                                   for layer in model.empty_state(1).layers()), strict=True):
        layer.copy_(part)
    step(torch.tensor([0]), torch.tensor([1]), states, work[1:], logits[1:])
    for whole in (states, work, logits):
        assert (whole[0] == 7).all()
        assert (whole[2] == 7).all()
    assert (logits[1] != 7).all()


@pytest.mark.parametrize(("make_model", "expected_word"), [
    (lambda: small_model("reference", generation="rwkv7", n_embd=48, head_size=12), "12"),
    (lambda: small_model("reference", n_att=20), "20"),
    (lambda: small_model("reference").double(), "float64"),
    (lambda: small_model("reference").to("meta"), "meta")], ids=["head", "width", "dtype", "device"])
def test_a_model_without_a_step_in_c_says_why(make_model: Any, expected_word: str) -> None:
    assert expected_word in str(why_not(make_model()))


@each_generation
def test_a_model_that_came_back_from_a_gpu_is_decoded_by_pytorch(generation: str) -> None:
    """Lightning moves a model to the CPU at the end, even one whose frozen weights are packed for a GPU."""
    model = to_packed(small_model(generation=generation), "int4", "cpu").requires_grad_(False)
    ids = tokens(model, T=3)
    decoder = decoder_of(model, model.empty_state(len(ids)))
    with torch.no_grad():
        steps = torch.stack([decoder.step(ids[:, t]) for t in range(3)], 1)
        torch.testing.assert_close(steps, model(ids)[0], rtol=0, atol=1e-2 * steps.abs().max().item())
