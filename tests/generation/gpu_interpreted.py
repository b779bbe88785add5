"""Tests the GPU's decoding step on a CPU, under Triton's interpreter. The replay of a graph launches its kernels again.

test_gpu.py runs this file in a process with TRITON_INTERPRET=1.
"""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fused_backends import check_step
from models import each_generation, exact, small_model, tokens
from triton_interpreter import speed_up_interpreter

from kernels.draw import NO_BIAS, Bias, Filters, c_v0, triton_v0
from rwkv.config import Sampling
from rwkv.generation import engine as engine_module
from rwkv.generation import prefill as prefill_module
from rwkv.generation.decoder import Decoder, GpuDecoder
from rwkv.generation.engine import WARM_SAMPLINGS, Engine
from rwkv.generation.request import Request
from rwkv.generation.sampling import Penalties, PenaltyTable, TablePenalties, draw_filters
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.decoding import triton_step
from rwkv.model.decoding.triton_step import GpuStep, bucket_of, step_of, why_not_on_gpu
from rwkv.model.quantized import to_packed
from rwkv.model.state import State
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

rwkv4_in_soak = pytest.mark.parametrize("generation", ["rwkv7", pytest.param("rwkv4", marks=pytest.mark.soak)])
LONGEST_PROMPT = 33                      # tokens of a prompt that one graph reads
LENGTHS = 3, 4, 3, 6, 3                  # tokens of generated texts
CLOSE = 2e-6     # relative error; PyTorch's step differs from float64 by up to 6e-7, and NumPy's sums depend on the CPU
speed_up_interpreter()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_v0, "BLOCK", 128)
    monkeypatch.setattr(triton_v0, "LISTED", 64)


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each program of a product compute 64 outputs instead of 16, as for many outputs.

    The interpreter takes about as long for 64 outputs as for 16. test_a_step_computes_the_formulas has tiles of 16.
    """
    monkeypatch.setattr(triton_step, "MANY_OUTPUTS", 0)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits prompt graphs to 33 rows, which take two tiles, as 64 rows do."""
    monkeypatch.setattr(triton_step, "PROMPT_BUCKETS", (8, LONGEST_PROMPT))
    for module in (prefill_module, engine_module):
        monkeypatch.setattr(module, "SHORT_PROMPT", LONGEST_PROMPT)


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the bits of each row of a product independent of the row's place in a tile, as on tensor cores.

    NumPy's own products depend on the place.
    """
    def product(a: Any, b: Any, dtype: Any = None) -> Any:
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    monkeypatch.setattr(np, "matmul", product)


def model_of(generation: str, **sizes: int) -> RWKV:
    sizes = {"n_layer": 2, "n_embd": 32, "n_ffn": 48, **({"head_size": 16} if generation == "rwkv7" else {}), **sizes}
    return small_model("reference", generation=generation, **sizes).requires_grad_(False).eval()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@each_generation
def test_a_step_computes_the_formulas(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_step, "MANY_OUTPUTS", 8192)
    assert check_step(model_of(generation), GpuDecoder, monkeypatch, T=3).max() <= 2e-5


@rwkv4_in_soak
def test_rows_that_join_and_leave_equal_pytorchs_in_float64(generation: str) -> None:
    model = model_of(generation)
    decoder, reference = GpuDecoder(model, model.empty_state(0)), Decoder(exact(model), model.empty_state(0))
    joined = 0
    for join, leave in ((2, []), (3, [1]), (0, [0, 3]), (1, [])):
        for each in (decoder, reference):
            each.join(model.empty_state(join))
        joined += join
        read = tokens(model, B=joined, T=1)[:, 0]
        assert error(decoder.step(read), reference.step(read)) < CLOSE
        for each in (decoder, reference):
            each.keep([row for row in range(joined) if row not in leave])
        joined -= len(leave)
        for mine, theirs in zip(decoder.state(), reference.state(), strict=True):
            torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=CLOSE)


@pytest.mark.parametrize(("C", "N"), [(64, 64), (128, 128), (48, 24)])
def test_heads_of_other_sizes(C: int, N: int) -> None:
    model = model_of("rwkv7", n_layer=1, n_embd=C, head_size=N)
    decoder, reference = GpuDecoder(model, model.empty_state(1)), Decoder(exact(model), model.empty_state(1))
    for token in (3, 7):
        assert error(decoder.step(torch.tensor([token])), reference.step(torch.tensor([token]))) < CLOSE


@rwkv4_in_soak
@pytest.mark.parametrize(("format", "allowed"), [("bfloat16", 0.015), ("int4", 0.015), *(
    pytest.param(*case, marks=pytest.mark.soak) for case in (("float16", 0.002), ("int8", 0.015)))])
def test_weights_of_16_8_and_4_bits_are_unpacked_exactly(generation: str, format: str, allowed: float) -> None:
    """The reference multiplies the same weights in float64, but the kernels round the inputs of products to 16 bits."""
    model = model_of(generation, n_embd=48, n_ffn=264)
    low = to_packed(model, format, "cpu") if format.startswith("int") else model.to(getattr(torch, format))
    dense = model_of(generation, n_embd=48, n_ffn=264)
    for name, weight in dense.named_parameters():
        layer = low.get_submodule(name.rpartition(".")[0])
        packed = getattr(layer, "packed", None)
        weight.copy_(packed.dense() if packed is not None and name.endswith(".weight") else low.get_parameter(name))
    decoder, reference = GpuDecoder(low, low.empty_state(3)), Decoder(exact(dense), dense.empty_state(3))
    for read in tokens(dense, B=3, T=2).T:
        assert error(decoder.step(read), reference.step(read)) < allowed


@rwkv4_in_soak
def test_a_row_has_the_same_bits_in_every_bucket(generation: str) -> None:
    model = model_of(generation)
    read = tokens(model, B=6, T=2)
    together = GpuDecoder(model, model.empty_state(6))
    alone = GpuDecoder(model, model.empty_state(1))
    for t in range(2):
        assert torch.equal(together.step(read[:, t])[4], alone.step(read[4:5, t])[0])


@pytest.mark.usefixtures("sums_in_order")
@rwkv4_in_soak
def test_prompts_that_are_read_together_have_the_bits_of_steps_alone(generation: str) -> None:
    """The prompts have one or more tokens and follow empty and other states. A running sequence is not changed."""
    model = model_of(generation)
    ids = tokens(model, B=4, T=9)
    running = GpuDecoder(model, model.empty_state(1))
    running.step(ids[3, :1])
    lengths = 1, 4, 2
    expected = []
    for row, length in enumerate(lengths):
        alone = GpuDecoder(model, model.empty_state(1))
        for t in range(8 - length, 8 + 1) if row == 2 else range(length):
            logits = alone.step(ids[row, t:t + 1])
        expected.append((logits[0], alone.state()))
    context = GpuDecoder(model, model.empty_state(1))
    context.step(ids[2, 6:7])
    states = State.cat([model.empty_state(2), context.state()])
    reader = running.with_state(states)
    logits = reader.read([ids[0, :1], ids[1, :4], ids[2, 7:9]])
    for row, (own, state) in enumerate(expected):
        assert torch.equal(logits[row], own), row
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(reader.state([row]), state, strict=True)), row
    other = GpuDecoder(model, model.empty_state(1))
    other.step(ids[3, :1])
    assert torch.equal(running.step(ids[3, 1:2]), other.step(ids[3, 1:2]))


@pytest.mark.usefixtures("sums_in_order")
@rwkv4_in_soak
def test_an_engine_reads_short_prompts_together(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has the same result as alone, even beside a long prompt, a row with log-probabilities and a cancelled row."""
    model = small_model("reference", generation=generation, vocab_size=257, n_layer=1, n_embd=16, n_ffn=16)
    model.requires_grad_(False)
    monkeypatch.setattr(engine_module, "decoder_of", GpuDecoder)
    replays: list[list[int]] = []
    read = GpuStep.read_prompts

    def record_prompts(step: GpuStep, prompts: Any, slots: torch.Tensor) -> torch.Tensor:
        replays.append([*map(len, prompts)])
        return read(step, prompts, slots)

    monkeypatch.setattr(GpuStep, "read_prompts", record_prompts)
    monkeypatch.setattr(prefill_module, "ON_CPU", prefill_module.ON_GPU)
    prompts = ["abc", "a", "bc" * 11, "abcabc", "c" * (LONGEST_PROMPT + 3), "cab"]
    alone = []
    for prompt in prompts:
        engine = Engine(model, ByteTokenizer())
        row = engine.add(Request(prompt, 1, StoppingCriteria(1), keep_context=True))
        engine.run()
        alone.append(row.final_context)
    replays.clear()
    engine = Engine(model, ByteTokenizer())
    rows = [engine.add(Request(prompt, 1, StoppingCriteria(1), keep_context=True, n_logprobs=n, prompt_logprobs=n is not None))
            for prompt, n in zip(prompts, (None, None, None, None, None, 2), strict=True)]
    rows[1].cancel()
    engine.run()
    assert replays == [[3, 22, 6], [3]]
    for row, expected in zip(rows, alone, strict=True):
        if row.final_context is None:
            assert row is rows[1]
        else:
            assert expected is not None
            assert torch.equal(row.final_context.logits, expected.logits)


@rwkv4_in_soak
def test_decoders_of_one_model_share_slots_and_not_rows(generation: str) -> None:
    model = model_of(generation)
    one = GpuDecoder(model, model.empty_state(2))
    logits = one.step(torch.tensor([1, 2]))
    before = logits.clone()
    other = GpuDecoder(model, model.empty_state(3))
    other.step(torch.tensor([3, 4, 5]))
    assert torch.equal(logits, before)
    expected = Decoder(model, model.empty_state(2))
    expected.step(torch.tensor([1, 2]))
    assert error(one.step(torch.tensor([6, 7])), expected.step(torch.tensor([6, 7]))) < CLOSE
    step = one._step
    in_use = len(step.states) - 1 - len(step._free)
    del other
    assert in_use - (len(step.states) - 1 - len(step._free)) == 3


@rwkv4_in_soak
def test_graphs_of_a_warm_up_serve_every_later_decoder(generation: str) -> None:
    model = model_of(generation, n_layer=1)
    first = GpuDecoder(model, model.empty_state(0))
    first.warm_up(5)
    captured = dict(first._step._graphs)
    assert sorted(captured) == [1, 2, 4, 8]
    others = [GpuDecoder(model, model.empty_state(rows)) for rows in (1, 3)]
    for decoder, rows in zip(others, (1, 3), strict=True):
        decoder.step(torch.zeros(rows, dtype=torch.int64))
    first.join(model.empty_state(1))
    assert first._step._graphs == captured


def test_after_an_engines_warm_up_no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("reference", generation="rwkv4", vocab_size=257, n_layer=1, n_embd=16, n_ffn=16).requires_grad_(False)
    monkeypatch.setattr(engine_module, "decoder_of", GpuDecoder)
    monkeypatch.setattr(engine_module, "prefill", lambda model, tokens: None)    # the interpreter is slow with long prompts
    engine = Engine(model, ByteTokenizer())
    engine.warm_up(2)
    step = step_of(model)
    captured = dict(step._graphs)
    assert sorted(captured) == [1, 2]
    for seed in range(2):
        engine.add(Request([1], seed, StoppingCriteria(2)))
    engine.run()
    assert step._graphs == captured


@rwkv4_in_soak
def test_a_model_without_references_is_freed_at_once(generation: str) -> None:
    """The garbage collector is off, because the GPU may have no room for the next model until the collector runs."""
    model = model_of(generation, n_layer=1)
    decoder = GpuDecoder(model, model.empty_state(1))
    decoder.step(torch.tensor([1]))
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model, decoder
        assert reference() is None
    finally:
        gc.enable()


@each_generation
def test_a_number_that_is_not_a_token_gives_nan(generation: str) -> None:
    decoder = GpuDecoder(model_of(generation), model_of(generation).empty_state(3))
    assert decoder.step(torch.tensor([1, 10**6, -1])).isfinite().all(1).tolist() == [True, False, False]


@each_generation
def test_launches_per_layer(generation: str) -> None:
    """Packed weights are multiplied in a separate launch from the gates, whose weights are floats."""
    budget = {"rwkv4": 7, "rwkv7": 8}[generation]
    assert len(GpuStep(model_of(generation)).launches) == 2 * budget + 2
    packed = GpuStep(to_packed(model_of(generation), "int4", "cpu")).launches
    assert len(packed) <= 2 * 9 + 2


def test_what_the_kernels_cannot_compute() -> None:
    assert why_not_on_gpu(model_of("rwkv7")) is None
    assert "multiple" in str(why_not_on_gpu(model_of("rwkv7", n_ffn=49)))
    assert "DeepEmbed" in str(why_not_on_gpu(model_of("rwkv7", deep_embed_dim=4)))


def test_buckets() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 9, 512, 513)] == [1, 2, 4, 4, 8, 16, 512, 1024]


def assert_draws_match(n: int, seed: int, rows: int = 4) -> None:
    """Asserts that n draws of several rows with random options are those of C for the same logits."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(n):
        V = pick.choice((5, 64, 200, 300, 520))
        logits = torch.randn(rows, V, generator=generator) * pick.choice((0.1, 1, 3, 10))
        kind = pick.choice(("plain", "ties", "peaked", "banned"))
        if kind == "ties":
            logits = logits.round()
        elif kind == "peaked":
            logits[:, 1] += 20
        elif kind == "banned":
            logits[:, ::3] = -torch.inf
        filters = Filters(temperature=pick.choice((0.3, 1.0, 1.7)), top_k=pick.choice((0, 0, 1, 3, 40, 1000)),
                          top_p=pick.choice((1.0, 1.0, 0.9, 0.5, 0.05, 0.999)), min_p=pick.choice((0, 0, 0.05, 0.3, 1.0)),
                          filters_first=pick.random() < 0.5)
        bias = pick.choice((NO_BIAS, Bias(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.5, -torch.inf]))))
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
        uniform[0] = pick.choice((0.0, 0.5, 1 - 1e-5))           # nearer to 1, the rounding of C's float32 sums decides
        expected = c_v0.draw(logits.clone(), uniform, filters, bias)
        assert torch.equal(triton_v0.draw(logits, uniform, filters, bias), expected), (V, kind, filters, bias)


def test_a_few_draws_equal_those_of_c() -> None:
    assert_draws_match(6, seed=1, rows=2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 7))
def test_2000_draws_equal_those_of_c(seed: int) -> None:
    assert_draws_match(100, seed)


def test_a_warm_up_draws_with_every_variant_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant takes seconds to compile, and no sequence of a server advances meanwhile."""
    launched: set[frozenset[tuple[str, Any]]] = set()

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: launched.add(frozenset(constants.items()))

    monkeypatch.setattr(triton_v0, "_draw", Recorder())
    warm = [draw_filters(options) for options in WARM_SAMPLINGS if options.temperature]
    every = [Filters(top_k=top_k, top_p=top_p, min_p=min_p, filters_first=first)
             for top_k in (0, 1, 16) for top_p in (0.5, 1) for min_p in (0, 0.1, 1) for first in (False, True)]
    sets = []
    for all_filters in (warm, every):
        launched.clear()
        for filters in all_filters:
            triton_v0.draw(torch.zeros(1, 70), torch.zeros(1), filters, NO_BIAS)
        sets.append({*launched})
    assert sets[0] == sets[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")       # NumPy warns of invalid values
def test_logits_that_are_not_finite_give_no_token() -> None:
    logits = torch.zeros(4, 70)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    for filters in (Filters(), Filters(top_k=3), Filters(top_p=0.5)):
        assert triton_v0.draw(logits, torch.full((4,), 0.5), filters, NO_BIAS)[1:].tolist() == [-1, -1, -1]


def test_penalties_equal_those_of_the_host_bit_for_bit() -> None:
    torch.manual_seed(0)
    table = PenaltyTable(40, torch.device("cpu"))
    options = [Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, penalty_decay=0.9),
               Sampling(presence_penalty=1.0, frequency_penalty=0.1, penalty_decay=0.988), Sampling(repetition_penalty=1.1)]
    host = [Penalties(each, [1, 2, 3, 9], [9, 5]) for each in options]
    device = [table.row(each, [1, 2, 3, 9], [9, 5]) for each in options]
    for step in range(12):
        logits = torch.randn(len(host), 40)
        assert torch.equal(Penalties.apply_all(logits.clone(), host), TablePenalties.apply_all(logits, device))
        for mine, theirs, token in zip(host, device, torch.randint(0, 12, (len(host),)).tolist(), strict=True):
            mine.add(token)
            theirs.add(token)
        if step == 5:                    # a row leaves, and a new row gets the freed slot
            table.forget_rows()
            del host[1], device[1]
            host.append(Penalties(options[1], [4]))
            device.append(table.row(options[1], [4]))


def texts(model: RWKV, n: int = 5) -> list[tuple[str, str | None]]:
    """Returns the text and the finish reason of n rows, each with its own options.

    Most rows join after two steps, and one row is cancelled.
    """
    engine = Engine(model, ByteTokenizer())
    options = [Sampling(), Sampling(temperature=0), Sampling(top_k=5, top_p=0.8, presence_penalty=0.5, penalty_decay=0.9),
               Sampling(logit_bias={65: 3.0}, banned=(66,)), Sampling(min_p=0.1, temperature=0.7)]
    rows = [engine.add(Request(f"p{i}", i, StoppingCriteria(LENGTHS[i]), options[i])) for i in range(2)]
    for step in range(20):
        if step == 2:
            rows += [engine.add(Request(f"p{i}", i, StoppingCriteria(LENGTHS[i]), options[i], n_logprobs=1))
                     for i in range(2, n)]
        if step == 4:
            rows[3].cancel()
        engine.step()
    assert all(row.complete for row in rows)
    return [(row.sample.text, row.sample.finish_reason) for row in rows]


@rwkv4_in_soak
def test_texts_equal_those_of_pytorchs_decoder(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary fits in one block, because draws from several blocks are compared above."""
    monkeypatch.setattr(triton_v0, "BLOCK", 512)
    monkeypatch.setattr(triton_v0, "LISTED", 512)
    model = small_model("reference", generation=generation, vocab_size=257, n_layer=1, n_embd=16, n_ffn=16)
    model.requires_grad_(False)
    monkeypatch.setattr(engine_module, "decoder_of", Decoder)
    expected = texts(model)

    class OnGpu(Engine):
        def _decode_from(self, state: State) -> None:
            super()._decode_from(state)
            self._draw_function = triton_v0.draw
            self._penalty_table = PenaltyTable(257, torch.device("cpu"))

    monkeypatch.setattr(engine_module, "decoder_of", GpuDecoder)
    monkeypatch.setitem(globals(), "Engine", OnGpu)
    for (text, reason), (theirs, why) in zip(texts(model), expected, strict=True):
        assert reason == why
        # the GPU's decoder reads short prompts sooner, so a row that is cancelled may have one token more
        assert text == theirs or (reason == "cancelled" and text.startswith(theirs))
