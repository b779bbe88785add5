"""Tests of drawing the next token: which tokens can come, how often, and in which order the options act."""

import importlib.util
import math
import pickle
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from every_option import OTHER_OPTIONS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.draw import Draw
from rwkv.config import Sampling
from rwkv.generation.logprobs import logprobs
from rwkv.generation.sampling import (
    PENALTY_BYTES,
    SHORTLIST,
    Penalties,
    PenaltyTable,
    adjust_logits,
    distribution,
    next_tokens,
    pick,
)
from rwkv.model.decoding.c_step import token_sampler

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)         # the tokens, from the most likely on, are 1, 3, 2, 0
DRAWS = 20_000
PLAIN = {"temperature": 1.0, "top_p": 1.0}


@pytest.fixture(scope="module", params=["torch", "native"])
def draw(request: pytest.FixtureRequest) -> Draw | None:
    """Returns the `draw` argument of next_tokens: None for PyTorch, or the native implementation."""
    if request.param == "native" and token_sampler() is None:
        pytest.skip("no implementation of kernels/draw runs on this CPU")
    return token_sampler() if request.param == "native" else None


def draw_tokens(draw: Draw | None, logits: Tensor, n: int = DRAWS, **options: Any) -> Tensor:
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return next_tokens(logits.expand(n, -1), uniform, Sampling(**PLAIN | options), draw=draw)


def support(draw: Draw | None, **options: Any) -> set[int]:
    return set(draw_tokens(draw, torch.tensor(PROBABILITIES).log(), **options).tolist())


def exact(logits: np.ndarray, options: Sampling) -> np.ndarray:
    """Returns the probabilities of a row's tokens in float64, in the order of operations of rwkv/generation/sampling.py."""
    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

    hf = options.order == "hf"
    before = softmax(logits / options.temperature) if hf else softmax(logits)
    likeliest = sorted(range(len(logits)), key=lambda token: -logits[token])
    by_k = set(likeliest[:options.top_k or len(logits)])
    nucleus = before / sum(before[token] for token in by_k) if hf else before
    survivors, total = set(), 0.0
    for token in likeliest:
        if (total < options.top_p or options.top_p == 1) and (token in by_k or not hf):
            survivors.add(token)
            total += nucleus[token]
    away = (logits - logits.max()) / (options.temperature if hf else 1)
    survivors = {token for token in survivors & by_k if options.min_p == 0 or away[token] >= math.log(options.min_p)}
    after = before if hf else softmax(logits / options.temperature)
    after = np.array([probability if token in survivors else 0.0 for token, probability in enumerate(after)])
    return after / after.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    assert not counts[expected == 0].any()
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


@pytest.mark.parametrize("V", [1, 7, 1000, pytest.param(20_003, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("options", [
    {}, {"top_p": 0.95}, {"top_p": 0.5, "temperature": 1.5}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.05}, {"top_k": 30, "top_p": 0.8, "min_p": 0.1},
    {"order": "rwkv", "top_p": 0.9, "temperature": 0.7}, {"order": "rwkv", "temperature": 0.6},
    {"order": "rwkv", "top_k": 10, "top_p": 0.9, "temperature": 1.3}], ids=str)
def test_a_drawn_token_is_the_one_at_its_random_number(draw: Draw | None, options: dict[str, Any], V: int) -> None:
    """The random number lies in the token's part of PyTorch's cumulative probabilities.

    Rounding in float32 moves each bound by up to 1e-5. The rows of the logits are not adjacent in memory.
    """
    sampling, rows = Sampling(**PLAIN | options), 48
    logits = torch.randn(rows, V + 3, generator=torch.Generator().manual_seed(V))[:, :V] * 3
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(V), dtype=torch.float64)
    tokens = next_tokens(logits, uniform, sampling, draw=draw)
    ids, probabilities = distribution(adjust_logits(logits, sampling, None), sampling)
    after = probabilities.double().cumsum(-1)
    place = (tokens.unsqueeze(-1) == (torch.arange(V) if ids is None else ids)).int().argmax(-1, keepdim=True)
    end, begin = after.gather(-1, place).squeeze(-1), (after - probabilities).gather(-1, place).squeeze(-1)
    assert (begin - 1e-5 <= uniform).all()
    assert (uniform <= end + 1e-5).all()


LOGITS = st.sampled_from([-math.inf, -100, -90.5, -3, -1, -1e-7, 0, 1e-7, 1, 1 + 2**-23, 2, 30])
BIASES = st.sampled_from([-100.0, 100.0, 1e-6])
TEMPERATURES = st.sampled_from([1e-30, 1e-6, 0.5, 1.0, 100.0, 1e6, 1e30])


@given(st.lists(LOGITS, min_size=2, max_size=200), TEMPERATURES, st.sampled_from([0, 1, 2, 7, 300]),
       st.sampled_from([2e-30, 0.51, 0.97, 1.0]), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["hf", "rwkv"]),
       st.dictionaries(st.integers(0, 1), BIASES), st.booleans())
def test_a_draw_equals_that_of_float64_also_with_equal_tokens(draw: Draw | None, values: list[float], temperature: float,
                                                              top_k: int, top_p: float, min_p: float, order: str,
                                                              biases: dict[int, float], ban: bool) -> None:
    """Draws are compared at any temperature, even where different logits round to the same weight.

    A case within rounding of a bound is left out.
    """
    options = Sampling(temperature, top_k, top_p, min_p, logit_bias=biases, banned=(0,) if ban else (), order=order)
    biased = np.array(values, dtype=np.float32)
    for token, bias in biases.items():
        biased[token] += np.float32(bias)
    biased[list(options.banned)] = -math.inf
    if biased.max() == -math.inf:
        return
    shifted = biased.astype(float) - biased.max()
    expected, *near = (exact(shifted, replace(options, top_p=min(1.0, top_p + p), min_p=min(1.0, max(0.0, min_p + p))))
                       for p in (0, -1e-6 * top_p, 1e-6))
    if not all(np.allclose(expected, each, atol=1e-4) for each in near):
        return
    ranked = np.argsort(-shifted, kind="stable") if 0 < top_k < len(values) or top_p < 1 else np.arange(len(values))
    ends = expected[ranked].cumsum()
    uniform = (ends + np.concatenate(([0], ends[:-1])))[expected[ranked] > 1e-3] / 2
    tokens = next_tokens(torch.tensor(values).expand(len(uniform), -1), torch.tensor(uniform), options, draw=draw)
    assert tokens.tolist() == ranked[expected[ranked] > 1e-3].tolist()


@pytest.mark.parametrize(("V", "options", "expected"), [
    (4, {"top_p": 0.5}, {0, 1}),         # the tokens before 2 sum to exactly top_p
    (4, {"top_p": 0.75}, {0, 1, 2}),
    (4, {"top_p": 0.5, "top_k": 3}, {0, 1}),
    (3, {"top_p": 0.5}, {0, 1}),
    (8, {"top_p": 0.5, "order": "rwkv", "temperature": 2.0}, {0, 1, 2, 3}),
    (8, {"top_p": 0.25, "top_k": 7, "order": "rwkv"}, {0, 1}),
    (4, {"top_k": 2}, {0, 1}),
    (300, {"top_k": 2}, {0, 1}),         # C looks for the second largest logit before it collects tokens
    (300, {"top_k": 2, "order": "rwkv"}, {0, 1}),
    (3, {"min_p": 1.0}, {0, 1, 2}),
], ids=str)
def test_filters_keep_the_lower_ids_of_equal_tokens(draw: Draw | None, V: int, options: dict[str, Any],
                                                    expected: set[int]) -> None:
    """top_p drops a token if those before it sum to exactly top_p, as transformers does."""
    assert {*draw_tokens(draw, torch.zeros(V), 64, **options).tolist()} == expected


def penalties_of(options: Sampling, prompt: list[int], text: list[int]) -> Penalties:
    """Returns the penalties of a row after `text`. Strings in no_penalty are ignored."""
    penalties = Penalties(options, prompt, [token for token in options.no_penalty if isinstance(token, int)])
    for token in text:
        penalties.add(token)
    return penalties


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_each_option_changes_draws_as_in_pytorch(draw: Draw | None, name: str) -> None:
    """Options that change penalties are tried beside other penalties."""
    rows = 100
    logits = torch.randn(rows, 12, generator=torch.Generator().manual_seed(0)) * 2
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    without = {"presence_penalty": 1.0, "frequency_penalty": 0.7} if name in ("penalty_decay", "no_penalty") else {}

    def draw_rows(draw: Draw | None, **more: Any) -> Tensor:
        options = Sampling(**without | more)
        penalties = [penalties_of(options, [0, 1], [2, 3, 3]) for _ in range(rows)] if options.has_penalties else None
        return next_tokens(logits, uniform, options, penalties, draw)

    chosen = {name: OTHER_OPTIONS[name]}
    assert torch.equal(draw_rows(draw, **chosen), draw_rows(None, **chosen))
    assert not torch.equal(draw_rows(draw, **chosen), draw_rows(draw))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_banned_token_may_have_any_logit(draw: Draw | None, wrong: float) -> None:
    assert set(draw_tokens(draw, torch.tensor([0.0, wrong, 0.0]), 50, banned=(1,)).tolist()) == {0, 2}


def test_temperature_zero_draws_the_most_likely_token(draw: Draw | None) -> None:
    assert support(draw, temperature=0) == {1}
    logits = torch.tensor([[0.0, 2.0], [3.0, -1.0]])
    assert next_tokens(logits, torch.zeros(2), Sampling(temperature=0), draw=draw).tolist() == [1, 0]


def test_hugging_face_applies_the_temperature_first_and_chatrwkv_last(draw: Draw | None) -> None:
    """At temperature 0.5, token 1 has 0.53 of the mass, and among the two most likely tokens it has 0.57.

    Both cover a top_p of 0.5.
    """
    assert support(draw, top_p=0.5) == {1, 3}
    assert support(draw, top_p=0.5, temperature=0.5) == {1}
    assert support(draw, top_p=0.5, top_k=2) == {1}
    assert support(draw, top_p=0.5, temperature=0.5, order="rwkv") == {1, 3}
    assert support(draw, top_p=0.5, top_k=2, order="rwkv") == {1, 3}


@given(st.integers(1, 3 * SHORTLIST), st.floats(0.05, 20), st.integers(0, 400), st.floats(0.01, 1.0), st.floats(0, 1),
       st.sampled_from(["hf", "rwkv"]), st.integers(0, 5))
def test_the_distribution_equals_that_of_float64(V: int, temperature: float, top_k: int, top_p: float, min_p: float, order: str,
                                                 seed: int) -> None:
    """The shortlist may hold any number of tokens. A token within rounding of a bound may be kept or dropped."""
    logits = np.random.default_rng(seed).normal(0, 2, V)
    options = Sampling(temperature, top_k, top_p, min_p, order=order)
    ids, probabilities = distribution(adjust_logits(torch.tensor(logits)[None], options, None), options)
    actual = np.zeros(V)
    actual[slice(None) if ids is None else ids[0].numpy()] = probabilities[0].numpy()
    expected, near = exact(logits, options), [exact(logits, Sampling(temperature, top_k, min(1, max(1e-9, top_p + p)),
                    min(1, max(0, min_p + m)), order=order)) for p in (-1e-5, 1e-5) for m in (-1e-5, 1e-5)]
    assert min(np.abs(actual - each).max() for each in (expected, *near)) < 1e-5


def test_banned_tokens_never_come_and_biased_ones_more_often(draw: Draw | None) -> None:
    assert support(draw, banned=(1, 3)) == {0, 2}
    assert support(draw, temperature=0, logit_bias={0: 5.0}) == {0}
    assert support(draw, logit_bias={1: -100, 2: -100}) == {0, 3}              # the biases are integers
    counts = np.bincount(draw_tokens(draw, torch.tensor(PROBABILITIES).log(), logit_bias={0: math.log(4)}), minlength=4)
    assert chi_square(counts, np.array([0.4, 0.4, 0.2, 0.3]) / 1.3) < 16.3


@pytest.mark.parametrize("V", [4, 257, 1000])
def test_a_bias_does_not_change_the_callers_logits(draw: Draw | None, V: int) -> None:
    """One token is biased and banned, and the rows are parts of longer rows."""
    memory = torch.randn(3, V + 100, generator=torch.Generator().manual_seed(0))
    before, logits = memory.clone(), memory[:, 50:50 + V]
    options = Sampling(top_k=40, logit_bias={0: 30, 1: 2.5}, banned=(0, 2))
    drawn = next_tokens(logits, torch.tensor([0.0, 0.5, 0.999]), options, draw=draw)
    assert not {0, 2} & set(drawn.tolist())
    assert torch.equal(memory, before)


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_many_biases_take_as_many_operations_as_one() -> None:
    """A request may bias every token of the vocabulary, and all other sequences wait for its draw."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    counts = []
    for n in (1, 300):
        options = Sampling(logit_bias={token: token / 3 - 50 for token in range(n)}, banned=(0, 0, 7))
        with Operations() as operations:
            adjusted = adjust_logits(logits, options, None)
        counts.append(operations.count)
        expected = logits.clone()
        for token, bias in options.logit_bias.items():
            expected[:, token] += bias
        expected[:, [0, 7]] = -math.inf
        assert torch.equal(adjusted, expected)
    assert counts[0] == counts[1]


def test_penalties_by_their_definitions() -> None:
    """Token 0 is in the prompt alone, token 1 is twice in the text, token 2 is once in the text, and token 3 is nowhere."""
    logits = torch.tensor([[2.0, 3.0, -1.0, 4.0]])

    def after(**fields: Any) -> list[float]:
        options = Sampling(**fields)
        values = adjust_logits(logits, options, [penalties_of(options, [0], [1, 2, 1])])[0]
        return [round(float(value), 5) for value in values]

    assert after(repetition_penalty=2.0) == [1.0, 1.5, -2.0, 4.0]
    assert after(presence_penalty=0.5) == [2.0, 2.5, -1.5, 4.0]
    assert after(frequency_penalty=0.5) == [2.0, 2.0, -1.5, 4.0]
    assert after(frequency_penalty=0.5, penalty_decay=0.5) == [2.0, 2.375, -1.25, 4.0]      # the counts are 1.25 and 0.5
    assert after(frequency_penalty=0.5, penalty_decay=0) == [2.0, 2.5, -1.0, 4.0]           # the last token alone counts
    assert after(presence_penalty=0.5, penalty_decay=0) == [2.0, 2.5, -1.5, 4.0]            # presence does not fade
    assert after(frequency_penalty=0.5, no_penalty=(1,)) == [2.0, 3.0, -1.5, 4.0]
    assert after(repetition_penalty=2.0, presence_penalty=0.5, no_penalty=(0, 1)) == [2.0, 3.0, -2.5, 4.0]


def test_a_token_seen_long_ago_still_has_its_presence() -> None:
    """The token's count is so small that it is 0 in float64."""
    options = Sampling(presence_penalty=1.0, frequency_penalty=1.0, penalty_decay=0.5)
    penalties = penalties_of(options, [], [0, *[1] * 2000])
    assert adjust_logits(torch.zeros(1, 3), options, [penalties]).tolist() == [[-1.0, -3.0, 0.0]]


def test_bfloat16_logits_are_drawn_in_float32(draw: Draw | None) -> None:
    assert set(draw_tokens(draw, torch.zeros(300, dtype=torch.bfloat16), n=30_000).tolist()) == set(range(300))


def test_logprobs_are_the_models_own() -> None:
    own, ids, values = logprobs(torch.tensor([PROBABILITIES]).log() + 3, torch.tensor([2]), 2)
    assert own.exp().tolist() == pytest.approx([0.2])
    assert ids.tolist() == [[1, 3]]
    assert values[0].exp().tolist() == pytest.approx([0.4, 0.3])


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_logits_that_are_not_finite_are_reported_in_one_sentence(draw: Draw | None, logits: list[float]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  ValueError, because the mistake is not the user's
        next_tokens(torch.tensor([logits]), torch.zeros(1), Sampling(), draw=draw)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 2}, {"top_p": 0}, {"top_k": -1},
                                     {"min_p": 1.1}, {"repetition_penalty": 0}, {"presence_penalty": math.inf},
                                     {"order": "mine"}, {"temperature": 1e-50}, {"temperature": 1e39}, {"top_p": 1e-50},
                                     {"frequency_penalty": 1e39}, {"logit_bias": {0: math.nan}}, {"logit_bias": {0: math.inf}},
                                     {"logit_bias": {0: 1e39}}, {"temperature": "hot"}, {"top_k": 2.5}, {"logit_bias": [0]},
                                     {"logit_bias": {"0": 1.0}}, {"banned": "ab"}, {"banned": 3}, {"banned": (1.5,)},
                                     {"temperature": 10**400},
                                     {"penalty_decay": 1.1}, {"penalty_decay": -0.1}, {"penalty_decay": math.nan},
                                     {"no_penalty": 3}, {"no_penalty": (1.5,)}, {"no_penalty": (-1,)}, {"no_penalty": ("",)}],
                         ids=str)
def test_invalid_options_are_reported_in_one_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"\A{next(iter(options))}\b.*\Z"):
        Sampling(**options)


def test_a_negative_id_is_not_taken_for_a_bias() -> None:
    """A bias may be negative, so the error must be about the id."""
    with pytest.raises(ValueError, match="logit_bias: each token id"):
        Sampling(logit_bias={-1: -5.0})


def test_integers_of_numpy_are_integers() -> None:
    options = Sampling(top_k=np.int64(2), banned=np.array([1]), logit_bias={np.int64(3): 0.5})
    assert options == Sampling(top_k=2, banned=(1,), logit_bias={3: 0.5})


def test_fractions_and_numbers_of_numpy_become_floats() -> None:
    numbers = {"temperature": 0.5, "top_p": 0.75, "presence_penalty": 1.5, "repetition_penalty": 1.25}
    options = Sampling(**{name: Fraction(number) for name, number in numbers.items()}, logit_bias={1: np.float16(2)})
    assert options == Sampling(**numbers, logit_bias={1: 2.0})
    assert all(type(getattr(options, name)) is float for name in numbers)


def test_ids_outside_the_vocabulary_are_reported_in_one_sentence() -> None:
    for options in ({"banned": (7,)}, {"logit_bias": {3: 1.0}}, {"banned": (0, 1, 2)}, {"no_penalty": ("a", 3)}):
        with pytest.raises(ValueError, match=rf"\A{next(iter(options))}\b.*\Z"):
            Sampling(**options).check_ids(3)


@pytest.mark.parametrize("N", [1, 511, 512, 513, 2000])
def test_the_cumulative_sum_exceeds_the_random_number_at_the_drawn_token(N: int) -> None:
    """The ends of [0, 1) are tried, too, and no token of probability 0 is drawn."""
    probabilities = torch.rand(40, N, generator=torch.Generator().manual_seed(0))
    probabilities[:, 1::2] = 0
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform[0], uniform[1] = 0, 1 - 2**-53
    cumulative = probabilities.double().cumsum(-1)
    expected = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    assert torch.equal(pick(probabilities, uniform), expected)
    assert (probabilities.gather(-1, expected.unsqueeze(-1)) > 0).all()


def test_the_penalties_of_a_gpu_take_no_more_memory_than_the_plan_states() -> None:
    table = PenaltyTable(100, torch.device("cpu"))
    for rows in range(1, 10):
        table.slot()
        assert table._counts.nbytes + table._flags.nbytes <= PENALTY_BYTES * 100 * rows


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_one_compilation_draws_from_a_slice_of_wider_logits_and_from_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have more tokens than its tokenizer; a server must not compile the kernel again while it answers requests."""
    from triton.runtime.jit import JITFunction

    from kernels.draw import NO_BIAS, Filters, triton_v0

    variants = set()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        specialised = [(arg == 1, arg % 16 == 0) for param, arg in zip(kernel.params, args, strict=False)
                       if isinstance(arg, int) and not param.do_not_specialize]
        variants.add((*specialised, *constants.items()))

    monkeypatch.setattr(JITFunction, "run", record)
    wide = torch.zeros(2, 96)
    for logits in (wide[:, :70], wide[:, :70].contiguous()):
        triton_v0.draw(logits, torch.zeros(2), Filters(), NO_BIAS)
    assert len(variants) == 1


def test_a_pickled_hash_is_not_used_in_another_process() -> None:
    """In another process strings have other hashes, so that rows with equal options would not be drawn together."""
    options = Sampling(top_k=3)
    vars(options)["_hash"] = hash(options) + 1           # as if another process had computed it
    assert hash(pickle.loads(pickle.dumps(options))) == hash(Sampling(top_k=3))
