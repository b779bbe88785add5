"""Tests of speculative decoding: a draft changes the number of passes, but no bit of a sequence."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from every_option import OTHER_OPTIONS
from models import in_format, saying, small_model

from kernels import native
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation import proposal_cost
from rwkv.generation.decoder import CDecoder
from rwkv.generation.draft import Draft, ModelDraft, NGram, continuation
from rwkv.generation.engine import Engine, generate, generate_batch
from rwkv.generation.grammar import Grammar
from rwkv.generation.prefix_cache import PrefillResult, PrefixCache
from rwkv.generation.proposal_cost import FEWEST_PASSES, PASSES, REFRESH, STEPS, ProposalCost
from rwkv.generation.request import Request
from rwkv.generation.row import NO_TOKEN, Row
from rwkv.generation.speculation import MOST_ROWS, Pace, Speculation
from rwkv.generation.stopping import StoppingCriteria
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.thorough
BYTES = ByteTokenizer()
in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
PASS_COST = proposal_cost.pass_cost      # which cheap_passes replaces
N = 24                                   # each sequence has at most this many tokens


@pytest.fixture(autouse=True)
def cheap_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the number of proposed tokens the same on all CPUs and at all speeds."""
    monkeypatch.setattr(proposal_cost, "pass_cost", lambda: 0.2)
    monkeypatch.setattr(Speculation, "record_time", lambda *_: None)
    monkeypatch.setattr(ProposalCost, "needs_step", lambda *_: False)


@pytest.fixture
def measured_costs(monkeypatch: pytest.MonkeyPatch, cheap_passes: None) -> None:
    """Makes speculation measure the cost of proposals, as it does outside these tests."""
    monkeypatch.undo()
    monkeypatch.setattr(proposal_cost, "pass_cost", lambda: 0.2)


class Random:
    """A draft that proposes the row's next token with probability `right`, and otherwise a random token."""

    def __init__(self, texts: dict[int, list[int]], right: float = 0.5, seed: int = 0, most_tokens: int = 6) -> None:
        self.cost = ProposalCost(0.0)
        self.texts = texts               # maps a row's index to the ids that it draws without a draft
        self.right = right
        self.most_tokens = most_tokens
        self._random = random.Random(seed)

    def propose(self, row: Row, n: int) -> list[int]:
        following = self.texts.get(row.index, [])[len(row.sample.tokens):][:n]
        following += [0] * (n - len(following))
        return [token if self._random.random() < self.right else self._random.randrange(256) for token in following]


def model_in(format: str = "float32", generation: str = "rwkv7", seed: int = 0) -> RWKV:
    return in_format(small_model("reference", vocab_size=256, generation=generation, seed=seed), format)


def draft_model(model: RWKV, target: RWKV) -> ModelDraft:
    """Returns `model` as a draft whose cost is that of a smaller model."""
    draft = ModelDraft(model, target, BYTES)
    draft.cost = ProposalCost(0.01)
    return draft


def results(model: RWKV, requests: Sequence[Request], draft: Draft | None, cache: PrefixCache | None = None,
            steps: Callable[[Engine], Any] = Engine.run) -> list[Row]:
    engine = Engine(model, BYTES, cache, draft)
    rows = [engine.add(request) for request in requests]
    steps(engine)
    return rows


def assert_same(rows: Sequence[Row], expected: Sequence[Row]) -> None:
    """Checks that everything that a request returns is bit-identical."""
    for row, other in zip(rows, expected, strict=True):
        assert row.sample == other.sample
        assert row.stop == other.stop
        assert row.read_after_text == other.read_after_text
        assert (row.final_context is None) == (other.final_context is None)
        if row.final_context is not None and other.final_context is not None:
            assert_same_result(row.final_context, other.final_context)


def assert_same_result(result: PrefillResult, other: PrefillResult) -> None:
    assert result.last_ids == other.last_ids
    assert torch.equal(result.logits, other.logits)
    assert all(map(torch.equal, result.state, other.state))


def texts_of(rows: Sequence[Row]) -> dict[int, list[int]]:
    return {row.index: [*row.sample.tokens, BYTES.end_of_text] for row in rows}


# The same sequence


@in_c
@pytest.mark.parametrize("generation", ["rwkv4", "rwkv7"])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8", "int4"])
def test_a_draft_changes_no_bit(format: str, generation: str) -> None:
    """Compares texts, log-probabilities and final states at several temperatures in one batch.

    tests/model/test_c_step.py compares the passes on every level of the C library.
    """
    model = model_in(format, generation)
    requests = [Request(prompt, seed, StoppingCriteria(N), Sampling(temperature=temperature), n_logprobs=2, keep_context=True)
                for seed, (prompt, temperature) in enumerate([("ab", 0.0), ("ba" * 40, 1.0), ("", 0.7)])]
    expected = results(model, requests, None)
    for draft in (Random(texts_of(expected), 0.8), draft_model(model, model), NGram()):
        assert_same(results(model, requests, draft), expected)


@in_c
@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_a_draft_changes_no_sampling_option(name: str) -> None:
    model = model_in()
    of_penalties = {"frequency_penalty": 2.0} if name in ("penalty_decay", "no_penalty") else {}
    requests = [Request("abab", seed, StoppingCriteria(N), Sampling(**of_penalties | {name: OTHER_OPTIONS[name]}), 1,
                        keep_context=True) for seed in range(3)]
    expected = results(model, requests, None)
    for draft in (Random(texts_of(expected), 0.9), draft_model(model, model)):
        rows = results(model, requests, draft)
        assert_same(rows, expected)
        assert sum(row.accepted_tokens for row in rows) > N // 3


@in_c
@pytest.mark.parametrize("stopping", [
    StoppingCriteria(1), StoppingCriteria(2), StoppingCriteria(7), StoppingCriteria(N, stop=["c"]),
    StoppingCriteria(N, stop=["cde"]), StoppingCriteria(N, stop_tokens=[*b"d"])], ids=str)
def test_a_draft_does_not_change_where_a_sequence_ends(stopping: StoppingCriteria) -> None:
    """A sequence may also end in the middle of the accepted tokens.

    The cache and the state are then those without a draft.
    """
    model = saying("abcdefgabcdefg")
    requests = [Request("ab", 0, stopping, Sampling(temperature=0), keep_context=True)]
    before, after = PrefixCache(), PrefixCache()
    expected = results(model, requests, None, before)
    rows = results(model, requests, Random(texts_of(expected) | {0: [*b"cdefgabcdefg"]}, 1.0), after)
    assert_same(rows, expected)
    ids = rows[0].tokens_read()
    (key, cached), (_, other) = after.longest(ids), before.longest(ids)
    assert key.length == len(ids)
    assert cached is not None
    assert other is not None
    assert_same_result(cached, other)


@in_c
def test_only_some_rows_have_a_draft_and_rows_come_and_go() -> None:
    """Rows join in the middle, are cancelled, and have different options."""
    model = model_in("int8")
    requests = [Request("ab" * (1 + 9 * i), i, StoppingCriteria(N - 3 * i), Sampling(temperature=i / 2)) for i in range(4)]
    alone = [results(model, [request], None)[0] for request in requests]
    for good in ((0,), (1, 2), (0, 1, 2, 3)):
        draft = Random({index: texts_of([alone[index]])[0] for index in good}, 0.9)
        engine = Engine(model, BYTES, draft=draft)
        rows = [engine.add(requests[0])]
        for request in requests[1:]:
            engine.step()
            engine.step()
            rows.append(engine.add(request))
        leaving = engine.add(requests[1])
        engine.step()
        leaving.cancel()
        engine.run()
        assert [row.sample for row in rows] == [row.sample for row in alone]
        assert all((row.accepted_tokens > 0) == (row.index in good) for row in rows)


@in_c
def test_a_draft_changes_no_text_of_a_grammar() -> None:
    pytest.importorskip("llguidance")
    model = model_in()
    requests = [Request("ab", seed, StoppingCriteria(N), grammar=Grammar.regex("(ab|cd)*e?[0-9]{3,9}")) for seed in range(4)]
    expected = results(model, requests, None)
    rows = results(model, requests, Random(texts_of(expected), 0.8))
    assert_same(rows, expected)
    assert all(row.accepted_tokens for row in rows)


@in_c
def test_the_context_after_a_dead_end_of_a_grammar() -> None:
    """The text ends in the middle of a pass, and the context has read the text's last token."""
    pytest.importorskip("llguidance")
    model = model_in()
    banned = Sampling(banned=(BYTES.end_of_text,))
    request = Request("ab", stopping=StoppingCriteria(N), grammar=Grammar.regex("abcabc"), sampling=banned)
    contexts = []
    for draft in (None, Random({0: [*b"abcabc"]}, 1.0)):
        engine = Engine(model, BYTES, draft=draft)
        row = engine.add(request)
        engine.run()
        assert (row.sample.text, row.sample.finish_reason) == ("abcabc", NO_TOKEN)
        contexts.append(engine.context())
    assert_same_result(*contexts)
    by_hand, = results(model, [Request("ababcabc", stopping=StoppingCriteria(0), keep_context=True)], None)
    assert by_hand.final_context is not None
    assert torch.equal(contexts[0].logits, by_hand.final_context.logits)


@in_c
def test_a_stream_that_is_cut_can_be_continued() -> None:
    """The pieces that were yielded are the text so far, and the context is the one after that text."""
    model = model_in()
    expected, = generate_batch(model, BYTES, ["ab"], N)
    engine = Engine(model, BYTES, draft=draft_model(model, model))
    row, = engine.add_all([Request("ab", stopping=StoppingCriteria(N))])
    yielded_text = ""
    for _, piece in engine:
        yielded_text += piece
        if len(row.sample.tokens) >= N // 2:
            break
    assert yielded_text == row.sample.text
    context = engine.context()
    rest = "".join(generate(model, BYTES, "", N, context=context, temperature=0))
    alone = results(model, [Request([*b"ab", *row.sample.tokens], stopping=StoppingCriteria(N),
                                    sampling=Sampling(temperature=0))], None)
    assert rest == alone[0].sample.text
    assert expected.tokens[:len(row.sample.tokens)] == row.sample.tokens


@in_c
def test_new_weights_apply_from_the_next_pass_on() -> None:
    texts = []
    for draft in (None, Random({}, 0.0)):
        model = model_in()
        engine = Engine(model, BYTES, draft=draft)
        row = engine.add(Request("ab", stopping=StoppingCriteria(N), sampling=Sampling(banned=(0,))))
        while len(row.sample.tokens) < 5:
            engine.step()
        with torch.no_grad():
            model.head.weight.neg_()
        engine.run()
        texts.append(row.sample.tokens)
    assert texts[0] == texts[1]


# Acceptance


@in_c
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_model_is_always_right(temperature: float) -> None:
    """The draft is also right at temperature 1, because it draws with the row's random numbers.

    The draft reads a prompt of few tokens whole.
    """
    model = model_in()
    rows = results(model, [Request("ab", seed, StoppingCriteria(60), Sampling(temperature=temperature, top_p=0.9, banned=(0,)))
                           for seed in range(2)], draft_model(model, model))
    assert [row.accepted_tokens for row in rows] == [row.proposed_tokens for row in rows]
    assert sum(row.accepted_tokens for row in rows) > 60


@in_c
def test_another_draft_is_seldom_right_and_pauses() -> None:
    model = model_in()
    row, = results(model, [Request("ab", 0, StoppingCriteria(400), Sampling(banned=(0,)))],
                   draft_model(model_in(seed=1), model))
    assert len(row.sample.tokens) == 400
    assert row.accepted_tokens < 12
    assert row.proposed_tokens < 30


@in_c
def test_a_draft_that_overflows_proposes_nothing() -> None:
    broken = model_in()
    with torch.no_grad():
        broken.head.weight.fill_(float("nan"))
    model = model_in()
    draft = draft_model(broken, model)
    requests = [Request("ab", 0, StoppingCriteria(N))]
    rows = results(model, requests, draft)
    assert_same(rows, results(model, requests, None))
    assert rows[0].proposed_tokens == 0


@in_c
def test_a_draft_model_reads_only_the_end_of_long_prompts_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in()
    draft = draft_model(model, model)
    read: list[int] = []
    original = CDecoder.read

    def record_read(self: CDecoder, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        read.extend(map(len, prompts))
        return original(self, prompts)

    monkeypatch.setattr(CDecoder, "read", record_read)
    ids = [random.Random(0).randrange(1, 256) for _ in range(1000)]
    row = Row(0, Request(ids, stopping=StoppingCriteria(999)), ids, BYTES)
    row.sample.tokens += [*b"a"]
    first = draft.propose(row, 3)
    row.sample.tokens += [*first, *b"b"]
    draft.propose(row, 3)
    row.sample.tokens += [*b"d" * 500]
    assert len(draft.propose(row, 3)) == 3
    assert read == [64, 2, 64], "the first two of the three proposed tokens had been read when the row drew them"


def test_the_longest_and_then_the_latest_match_is_continued() -> None:
    def after(text: bytes, n: int) -> bytes:
        return bytes(continuation(np.array([*text], np.int32), n))

    assert after(b"abcd1 xbcd2 abcd", 2) == b"1 "
    assert after(b"abcd1 abcd2 abcd", 2) == b"2 "
    assert after(b"xyzxyz", 5) == b"xyzxy"
    assert after(b"aaaa", 3) == b"aaa"
    for text in (b"", b"a", b"aa", b"ab", b"xyay", b"xyzxz"):
        assert after(text, 3) == b""


def test_ngrams_follow_each_row_separately() -> None:
    draft = NGram()
    rows = [Row(index, Request(prompt), [*prompt.encode()], BYTES) for index, prompt in enumerate(["one two, one", "a b"])]
    assert bytes(draft.propose(rows[0], 4)) == b" two"
    assert draft.propose(rows[1], 4) == []
    rows[1].sample.tokens += [*b" b b"]
    assert bytes(draft.propose(rows[1], 4)) == b" b b"
    rows[0].sample.tokens += [*b" two"]
    assert bytes(draft.propose(rows[0], 4)) == b", on"


def test_tokens_of_the_context_count_once() -> None:
    """A chat gives the whole conversation as `earlier`, and its new part as the prompt."""
    for earlier, expected in (([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2], [1, 2, 3, 4]), ([], [3, 4]), ([4], [4, 3, 4])):
        assert Row(0, Request([3, 4], earlier=earlier), [3, 4], BYTES).known_ids == expected


def test_random_numbers_can_be_seen_before_they_are_drawn() -> None:
    row, other = (Row(0, Request([1], seed=3), [1], BYTES) for _ in range(2))
    numbers = [other.uniform() for _ in range(300)]
    assert row.next_uniform(5) == numbers[:5]
    for i in range(0, 200, 7):
        assert row.next_uniform(90) == numbers[i:i + 90]
        assert [row.uniform() for _ in range(7)] == numbers[i:i + 7]


# The number of proposals


@pytest.mark.parametrize(("level", "expected"), [("avx512bf16", 0.2), ("avx512", 0.2), ("avx2", 0.4), (None, 0.4)])
def test_a_pass_costs_less_with_avx512(level: str | None, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    assert PASS_COST() == expected


def simulate_pace(right: Callable[[int], bool], n: int, cost: ProposalCost, seconds: float = 0.2,
                  rows: int = 1) -> tuple[int, float, int]:
    """Returns the number of drawn tokens, their time in steps, and the last number of proposals.

    `right(i)` says whether the draft would propose the right token i. A step takes a second, and each proposed token `seconds`.
    """
    pace, drawn, time, k = Pace(8, cost), 0, 0.0, 0
    while drawn < n:
        k = pace.n_tokens(rows)
        accepted = 0
        while accepted < k and right(drawn + accepted):
            accepted += 1
        time += 1 + seconds * k
        cost.record(rows, rows * k, 1 + seconds * k)
        drawn += 1 + accepted
        if k:
            pace.record(k, accepted, rejected=accepted < k)
    return drawn, time, k


def some_right(p: float, n: int) -> Callable[[int], bool]:
    draw = random.Random(0)
    return [draw.random() < p for _ in range(n)].__getitem__


@pytest.mark.parametrize("estimate", [0.0, 0.16, 0.4])
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.8])
def test_a_draft_that_is_never_right_costs_at_most_three_percent(seconds: float, estimate: float, measured_costs: None) -> None:
    """The estimate of the draft's cost may be wrong."""
    for n in (400, 2000):
        drawn, time, _ = simulate_pace(lambda i: False, n, ProposalCost(estimate), seconds)
        assert drawn / time >= 0.97


@pytest.mark.parametrize("p", [0.25, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 0.6, 1.0])
def test_a_wrong_estimate_of_the_cost_is_corrected(seconds: float, p: float, measured_costs: None) -> None:
    """A draft whose proposals cost more than they gain is dropped, and one that costs less than was estimated is used."""
    cost = ProposalCost(0.0)
    drawn, time, _ = simulate_pace(some_right(p, 5000), 4000, cost, seconds)
    best = max(sum(p ** i for i in range(k + 1)) / (1 + seconds * k) for k in range(9))
    assert drawn / time > max(0.97, 0.85 * best if p >= 0.5 else 0.0)


def test_more_tokens_are_proposed_if_more_are_accepted() -> None:
    for seconds, at_80_percent, always_right in ((0.4, 1.2, 2), (0.2, 1.5, 3)):
        gains = []
        for p in (0.1, 0.6, 0.8, 0.95, 1.0):
            drawn, time, _ = simulate_pace(some_right(p, 4100), 4000, ProposalCost(0.0), seconds)
            gains.append(drawn / time)
        assert gains == sorted(gains)
        assert gains[0] > 0.95
        assert gains[2] > at_80_percent
        assert gains[-1] > always_right
    assert simulate_pace(lambda i: True, 200, ProposalCost(0.0))[2] == 8


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    drawn, time, last = simulate_pace(lambda i: i > 300, 1000, ProposalCost(0.0))
    assert last == 8
    assert drawn / time > 1.4


def test_the_cost_of_a_proposal_is_the_median_of_recent_times(measured_costs: None) -> None:
    cost = ProposalCost(0.1)
    assert cost.relative(1, 3) == pytest.approx(0.9)
    assert cost.relative(2, 1) == pytest.approx(2 * 0.3 / 1.2)
    for _ in range(STEPS):
        assert cost.needs_step(1)
        cost.record(1, 0, 10.0)
    assert not cost.needs_step(1)
    for seconds in (90.0, *[18.0] * FEWEST_PASSES):
        cost.record(1, 4, seconds)       # the first one takes much longer, as when kernels are prepared
    assert cost.relative(1, 4) == pytest.approx(0.8)
    assert cost.relative(1, 1) == pytest.approx(0.2)
    for _ in range(FEWEST_PASSES):
        cost.record(1, 1, 15.0)          # a constant cost of 4 s, and 1 s for each token
    assert [cost.relative(1, n) for n in (1, 2, 3, 8)] == pytest.approx([0.5, 1.0, 0.6, 1.6])
    assert cost.needs_step(2)
    for _ in range(STEPS):
        cost.record(2, 0, 16.0)
    assert cost.relative(2, 2) == pytest.approx(0.5)     # four proposals of 8 s, and steps of 16 s
    for _ in range(REFRESH):
        assert not cost.needs_step(2)
        cost.record(2, 4, 24.0)
    assert cost.needs_step(2)


@in_c
def test_the_engine_measures_the_cost(measured_costs: None) -> None:
    model = model_in()
    draft = Random({}, 0.0)
    row, = results(model, [Request("ab", 0, StoppingCriteria(100), Sampling(banned=(0,)))], draft)
    assert row.proposed_tokens
    assert not draft.cost.needs_step(1)
    assert draft.cost.needs_step(2)
    for _ in range(PASSES):
        draft.cost.record(1, 1, 1e9)
    row, = results(model, [Request("ab", 0, StoppingCriteria(100), Sampling(banned=(0,)))], draft)
    assert 0 < row.proposed_tokens < 10                  # one proposal after each pause


def test_many_rows_have_no_draft() -> None:
    assert Pace(8, ProposalCost(0.0)).n_tokens(MOST_ROWS + 1) == 0
    fewer = [Pace(8, ProposalCost(0.0)).n_tokens(rows) for rows in range(1, 5)]
    assert fewer == sorted(fewer, reverse=True)
    model = model_in()
    requests = [Request("abab", seed, StoppingCriteria(N)) for seed in range(MOST_ROWS + 1)]
    expected = results(model, requests, None)
    rows = results(model, requests, Random(texts_of(expected), 1.0), steps=lambda engine: [engine.step() for _ in range(4)])
    assert not any(row.proposed_tokens for row in rows)
    assert_same(results(model, requests, Random(texts_of(expected), 1.0)), expected)


# Invalid drafts


def test_a_draft_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="256"):
        ModelDraft(small_model(vocab_size=50), model_in(), BYTES)


def test_a_draft_is_ignored_if_pytorch_computes_the_steps() -> None:
    model = model_in().double()
    requests = [Request("abab", 0, StoppingCriteria(N))]
    engine = Engine(model, BYTES, draft=NGram())
    assert not engine.speculates
    rows = results(model, requests, NGram())
    assert_same(rows, results(model, requests, None))
    assert not rows[0].proposed_tokens
