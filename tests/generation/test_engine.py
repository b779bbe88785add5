"""Tests of the engine: a sequence depends only on its prompt, seed and options, and every piece of its text costs the same."""

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_state, following, saying, small_model, tokens
from tokenizer_files import KINDS, chatml
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rwkv.errors import UserError
from rwkv.generation import prefill as prefill_module
from rwkv.generation.decoder import CDecoder
from rwkv.generation.engine import Engine, generate, generate_batch
from rwkv.generation.prefill import Prefill, prefill
from rwkv.generation.prefix_cache import PrefillResult, PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.row import Row, Sample
from rwkv.generation.sampling import Sampling, next_tokens
from rwkv.generation.state_files import load_context, save_context
from rwkv.generation.stopping import StoppingCriteria
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer

PROMPT = "naïve — 你好\n"
BYTES = ByteTokenizer()
TOKENIZERS = {"byte": BYTES, "char": CharTokenizer(PROMPT + "abcdefghij"), "bpe": JsonTokenizer.train([PROMPT * 20], 300)}
KERNELS = ("conv1d", "torch_scan", "reference", "rwkv7")                 # three kernels of RWKV-4, and one of RWKV-7
MODELS = {kernel: small_model(kernel, vocab_size=256) for kernel in KERNELS[:-1]}
MODELS["rwkv7"] = small_model("reference", vocab_size=256, generation="rwkv7")
PROMPTS = st.lists(st.text("ab\n", max_size=12), min_size=1, max_size=5)
OPTIONS = st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.7, 1.3]), "top_p": st.sampled_from([0.5, 1.0]),
                                 "repetition_penalty": st.sampled_from([1.0, 1.2]),
                                 "frequency_penalty": st.sampled_from([0.0, 0.5]), "penalty_decay": st.sampled_from([1.0, 0.9]),
                                 "no_penalty": st.sampled_from([(), ("a", 10)])})


def model_for(tokenizer: Tokenizer, kernel: str = "conv1d") -> RWKV:
    return small_model(kernel, vocab_size=tokenizer.vocab_size)


def always_predict(model: RWKV, token: int) -> RWKV:
    """Changes the model to predict `token` after every input, and returns the model."""
    with torch.no_grad():
        model.ln_out.weight.zero_()
        model.ln_out.bias.fill_(1)
        model.head.weight.zero_()
        model.head.weight[token] = 100
    return model


def cut_into(patch: pytest.MonkeyPatch, chunk: int, budget: int) -> None:
    """Makes prefill read chunks of `chunk` tokens, in stages with the work of `budget` tokens."""
    patch.setattr(prefill_module, "ON_CPU", prefill_module.ON_CPU._replace(longest=chunk, budget=budget))


def by_hand(model: RWKV, ids: list[int], n: int, seed: int, options: Sampling) -> list[int]:
    """Generates one token after another by calling the model itself."""
    generator, drawn_ids = torch.Generator().manual_seed(seed), []
    logits, state = model.prefill(torch.tensor([ids]))
    while len(drawn_ids) < n:
        token = next_tokens(logits, torch.rand(1, generator=generator, dtype=torch.float64), options)
        if token == 0:
            break
        drawn_ids.append(int(token))
        logits, state = model.prefill(token[:, None], state)
    return drawn_ids


def read_prompts(model: RWKV, prompts: list[list[int]], start: PrefillResult | None = None,
                 cache: PrefixCache | None = None) -> list[PrefillResult | None]:
    """Prefills the prompts and returns each result."""
    prefills = [Prefill(model, prompt, start, cache) for prompt in prompts]
    for reading in prefills:
        while reading.next_cost:
            reading.advance()
    return [reading.result for reading in prefills]


class Adapter(nn.Module):
    """A layer like LoRA's, which has the weight of the layer that it replaces, and computes something else."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(3 * self.layer(x))


class Tanh(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(3 * super().forward(x))


def adapt(model: RWKV) -> None:
    model.blocks[1].att.output = Adapter(model.blocks[1].att.output)


def subclass(model: RWKV) -> None:
    model.blocks[1].ffn.value.__class__ = Tanh


def add_bias(model: RWKV) -> None:
    model.head.bias = nn.Parameter(4 * torch.randn(256, generator=torch.Generator().manual_seed(0)))


def patch(model: RWKV) -> None:
    forward = model.blocks[1].ln2.forward
    model.blocks[1].ln2.forward = lambda x: -forward(x)


def roll(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (output[0].roll(1, -1), *output[1:]) if isinstance(output, tuple) else output.roll(1, -1)


CHANGES = {"adapter": adapt, "subclass": subclass, "bias": add_bias, "own forward": patch,
           **{f"hook on {name or 'the model'}": lambda model, name=name: model.get_submodule(name).register_forward_hook(roll)
              for name in ("", "emb", "blocks.1", "blocks.1.att", "blocks.1.att.key", "blocks.1.ffn", "ln_out", "head")}}


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_changed_module_acts_on_every_token(change: Callable[[RWKV], Any]) -> None:
    """The text is that of a loop over model(token, state), and differs from the unchanged model's text."""
    model = small_model("reference", vocab_size=256)
    options = {"temperature": 0.0, "logit_bias": {0: -1e9}}             # 0 would end the text
    unchanged = generate_batch(model, BYTES, ["ab"], 12, **options)[0].tokens
    change(model)
    tokens, expected, state = torch.tensor([[*b"ab"]]), [], None
    for _ in range(12):
        logits, state = model(tokens, state)
        tokens = 1 + logits[:, -1:, 1:].argmax(-1)
        expected.append(int(tokens))
    several = generate_batch(model, BYTES, ["ab", "ab", "c"], 12, **options)
    assert several[0].tokens == several[1].tokens == expected
    assert unchanged[1:] != expected[1:]


@pytest.mark.thorough
@pytest.mark.parametrize("prompt", [PROMPT, ""])
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_pieces_join_to_the_text_of_the_tokens(tokenizer: Tokenizer, prompt: str) -> None:
    model, options = model_for(tokenizer), Sampling(0.9, 20, 0.95, banned=(0,))
    drawn_ids = by_hand(model, tokenizer.encode(prompt) or [tokenizer.end_of_text], 40, 3, options)
    assert len(drawn_ids) == 40
    pieces = list(generate(model, tokenizer, prompt, 40, temperature=0.9, top_k=20, top_p=0.95, banned=(0,), seed=3))
    assert all(pieces)
    assert "".join(pieces) == tokenizer.decode(drawn_ids)


@pytest.mark.thorough
@given(st.sampled_from(KERNELS), PROMPTS, st.lists(st.integers(0, 3), min_size=5, max_size=5), OPTIONS,
       st.lists(st.text("ab", min_size=1, max_size=2), max_size=2))
@settings(max_examples=20, deadline=None)
def test_a_text_in_a_batch_equals_the_text_alone(kernel: str, prompts: list[str], seeds: list[int], options: dict[str, float],
                                                 stop: list[str]) -> None:
    """Rows end at different times. Neither the batch size nor a row's position changes its tokens or the reason for its end."""
    model, seeds = MODELS[kernel], seeds[:len(prompts)]
    together = generate_batch(model, BYTES, prompts, 12, seeds=seeds, stop=stop, **options)
    for prompt, seed, sample in zip(prompts, seeds, together, strict=True):
        alone, = generate_batch(model, BYTES, [prompt], 12, seeds=[seed], stop=stop, **options)
        assert (sample.tokens, sample.text, sample.finish_reason) == (alone.tokens, alone.text, alone.finish_reason)
        assert "".join(generate(model, BYTES, prompt, 12, seed=seed, stop=stop, **options)) == sample.text


@pytest.mark.thorough
@given(st.sampled_from(KERNELS), st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=6),
       st.integers(0, 40_000))
@settings(max_examples=20, deadline=None)
def test_a_prefix_cache_changes_no_result(kernel: str, prompts: list[str], max_bytes: int) -> None:
    model, cache = MODELS[kernel], PrefixCache(max_bytes)
    for prompt in prompts:
        result, = read_prompts(model, [[*prompt.encode()]], cache=cache)
        assert_close(result, prefill(model, torch.tensor([[*prompt.encode()]])))
        assert cache.bytes <= max_bytes


def test_cached_tokens_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, chunks = MODELS["conv1d"], PrefixCache(), watch(monkeypatch)
    shared = [*b"a long prompt that all begin with; "]
    read_prompts(model, [shared], cache=cache)
    read_prompts(model, [[*shared, 1], [*shared, 2, 3]], cache=cache)
    read_prompts(model, [[*shared, 2, 3]], cache=cache)
    assert chunks == [(1, len(shared)), (1, 1), (1, 2)]


def test_an_empty_prompt_and_another_prompt_after_a_context() -> None:
    model = MODELS["conv1d"]
    start = prefill(model, torch.tensor([[1, 2]]))
    empty, other = read_prompts(model, [[], [3]], start)
    assert_close(empty, start)
    assert_close(other, prefill(model, torch.tensor([[1, 2, 3]])))


def test_the_cache_evicts_the_least_recently_used() -> None:
    context = prefill(MODELS["conv1d"], torch.tensor([[1]]))
    one = sum(part.nbytes for part in (context.logits, *context.state))
    cache = PrefixCache(2 * one)
    for key in ((1,), (2,)):
        cache.put(cache.key(key), context)
    assert cache.longest((1, 5))[0] == cache.key((1,))
    cache.put(cache.key((3,)), context)
    assert [cache.longest(key)[0].length for key in ((1,), (2,), (3,))] == [1, 0, 1]


def test_threads_may_share_a_cache() -> None:
    context = prefill(MODELS["conv1d"], torch.tensor([[1]]))
    one = sum(part.nbytes for part in (context.logits, *context.state))
    cache = PrefixCache(20 * one)

    def use(thread: int) -> None:
        for number in range(300):
            cache.put(cache.key((thread, number)), context)
            assert cache.longest((thread, number, 0))[0].length in (0, 2)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert (len(cache), cache.bytes) == (20, 20 * one)


def test_samples_of_one_prompt_share_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = watch(monkeypatch)
    samples = generate_batch(MODELS["conv1d"], BYTES, ["a prompt"] * 3, 5, seeds=[0, 1, 0])
    assert chunks == [(1, 8)]
    assert samples[0].tokens == samples[2].tokens != samples[1].tokens


ARRIVALS = st.lists(st.tuples(st.integers(0, 9), st.text("ab\n", max_size=30), st.integers(0, 3), st.integers(0, 9), OPTIONS),
                    min_size=1, max_size=6)


@pytest.mark.thorough
@given(st.sampled_from(KERNELS), ARRIVALS)
@settings(max_examples=12)
def test_rows_join_and_leave_and_each_text_equals_the_text_alone(kernel: str, arrivals: list[Any]) -> None:
    """Rows with different options and prompts of several chunks arrive between steps, and the first row is cancelled."""
    model = MODELS[kernel]
    with pytest.MonkeyPatch.context() as patch:
        cut_into(patch, 16, 8)
        engine, rows = Engine(model, BYTES), []
        cancelled = engine.add(Request("gone"))
        for step in range(200):
            rows += [engine.add(Request(prompt, seed, StoppingCriteria(n), Sampling(**options)))
                     for arrives, prompt, seed, n, options in arrivals if arrives == step]
            engine.step()
            if step == 3:
                cancelled.cancel()
        assert not engine.unfinished
        assert cancelled.sample.finish_reason is not None
        for row, (_, prompt, seed, n, options) in zip(rows, sorted(arrivals, key=lambda each: each[0]), strict=True):
            assert row.sample == generate_batch(model, BYTES, [prompt], n, seeds=[seed], **options)[0]


@pytest.mark.parametrize("checks_weights", [True, False])
def test_new_weights_apply_when_the_engine_checks_them(checks_weights: bool) -> None:
    """The old weights remain in memory until then, because the C step has their addresses."""
    model, greedy = small_model(vocab_size=256), Sampling(temperature=0, banned=(0,))
    engine = Engine(model, BYTES, checks_weights=checks_weights)
    row, = engine.add_all([Request("ab", stopping=StoppingCriteria(6), sampling=greedy)])
    engine.step()
    old_head = StorageWeakRef(model.head.weight.untyped_storage())
    model.head.weight.data = -model.head.weight.detach()             # the state does not depend on the head
    engine.step()
    engine.step()
    assert old_head.expired() == checks_weights
    engine.run()
    assert old_head.expired()
    expected = [by_hand(model, [*b"ab", *row.sample.tokens[:n]], 1, 0, greedy)[0] for n in range(6)]
    assert row.sample.tokens[0] != expected[0]
    assert (row.sample.tokens[1:3] == expected[1:3]) == checks_weights
    assert row.sample.tokens[3:] == expected[3:]


@pytest.mark.parametrize("stop", ["cancel", "new weights"])
def test_a_prefill_that_is_abandoned_is_freed_at_once(monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """Clients that go away while their long prompts are prefilled must not fill the memory until the garbage collector runs."""
    cut_into(monkeypatch, 512, 8)
    model = small_model(vocab_size=256)
    engine = Engine(model, BYTES)
    row = engine.add(Request([1] * 100))
    gc.collect()
    gc.disable()
    try:
        engine.step()
        (abandoned,) = [weakref.ref(each) for each in gc.get_objects() if type(each) is Prefill and len(each.tokens) == 100]
        if stop == "cancel":
            row.cancel()
        else:
            with torch.no_grad():
                model.head.weight.add_(1)
        engine.step()
        assert abandoned() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kernel", ["conv1d", "rwkv7"])
def test_a_text_from_the_cache_is_the_same_text(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn reads only the answer's last token and the new words."""
    model, cache = MODELS[kernel], PrefixCache()
    prompt = "a question of some length: "
    engine = Engine(model, BYTES, cache)
    rows = engine.add_all([Request(prompt, 0, StoppingCriteria(6), Sampling(banned=(0,)))])
    list(engine)
    tokens = [*prompt.encode(), *rows[0].sample.tokens, *b"more"]
    expected = Engine(model, BYTES)
    expected = _run_to_end(expected, expected.add(Request(tokens, 3, StoppingCriteria(20))))
    again = Engine(model, BYTES, cache=cache)
    row = again.add(Request(tokens, 3, StoppingCriteria(20)))
    assert row.cached_tokens == len(prompt) + 5
    assert _run_to_end(again, row) == expected


def _run_to_end(engine: Engine, row: Row) -> Sample:
    list(engine)
    return row.sample


@pytest.mark.parametrize("length", [5, 40])
def test_a_prompt_is_read_as_the_model_reads_it(length: int) -> None:
    """A short prompt is read in one call of C, and log-probabilities change no bit of the result."""
    model, ids = MODELS["rwkv7"], [*range(1, 1 + length)]
    start = prefill(model, torch.tensor([[7, 8]]))
    results = []
    for n_logprobs in (None, 2):
        reading = Prefill(model, ids, start, n_logprobs=n_logprobs, decoder=CDecoder(model, model.empty_state(0)))
        while reading.next_cost:
            reading.advance()
        assert bool(reading.logprobs) == (n_logprobs is not None)
        assert reading.result is not None
        results.append(reading.result)
    assert_close(results[0], prefill(model, torch.tensor([ids]), start))
    assert all(map(torch.equal, (results[0].logits, *results[0].state), (results[1].logits, *results[1].state)))


@pytest.mark.parametrize("n_logprobs", [None, 2])
def test_a_chunk_read_in_stages_has_the_same_bits(n_logprobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = MODELS["rwkv7"], [*range(1, 60)]
    cut_into(monkeypatch, 32, prefill_module.ON_CPU.budget)
    whole = prefill(model, torch.tensor([ids]))
    cut_into(monkeypatch, 32, 8)
    reading, stages = Prefill(model, ids, n_logprobs=n_logprobs), 0
    while reading.next_cost:
        assert reading.next_cost <= 8
        reading.advance()
        stages += 1
    assert stages >= 2 * len(model.blocks), "both chunks are in stages"
    result = reading.result
    assert result is not None
    assert torch.equal(result.logits, whole.logits)
    assert all(map(torch.equal, result.state, whole.state))
    assert sum(len(own) for own, _, _ in reading.logprobs) == (0 if n_logprobs is None else len(ids) - 1)


def test_a_prompt_delays_other_rows_by_at_most_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, 24, 8)
    engine = Engine(MODELS["conv1d"], BYTES)
    engine.add_all([Request("ab", 0, StoppingCriteria(30), Sampling(banned=(0,)))])
    late = [engine.add(Request("c" * length, stopping=StoppingCriteria(4), sampling=Sampling(banned=(0,))))
            for length in (50, 3, 4)]
    chunks, costs, advance = watch(monkeypatch), list[int](), Prefill.advance

    def record_cost(self: Prefill) -> None:
        costs.append(self.next_cost)
        advance(self)

    monkeypatch.setattr(Prefill, "advance", record_cost)
    ended = []
    while engine.unfinished:
        before = len(costs)
        pieces = engine.step()
        assert sum(costs[before:]) <= 8
        assert pieces, "the first text goes on in every step"
        ended += [row.index for row in late if not row.unfinished and row.index not in ended]
    assert ended == [2, 3, 1], "short prompts do not wait for a long one"
    assert sum(length for _, length in chunks) == 57


@torch.no_grad()
def test_logprobs_of_a_prompt_and_of_each_token() -> None:
    model, ids = MODELS["conv1d"], [*b"abcdef" * 40]
    engine = Engine(model, BYTES)
    row = engine.add(Request(ids, 0, StoppingCriteria(4), Sampling(banned=(0,)), n_logprobs=2, prompt_logprobs=True))
    list(engine)
    ids += row.sample.tokens
    expected = torch.log_softmax(model(torch.tensor([ids]))[0][0, :-1], -1)
    entries = [*row.prompt_logprobs, *row.sample.logprobs]
    assert [entry["token"] for entry in entries] == ids[1:]
    for entry, likelihoods in zip(entries, expected, strict=True):
        assert entry["logprob"] == pytest.approx(float(likelihoods[entry["token"]]), abs=1e-4)
        assert [other["token"] for other in entry["top"]] == likelihoods.topk(2).indices.tolist()


def test_rows_end_independently() -> None:
    model = saying("abcdefgh", "xy.", "12345678")
    first, second, third = generate_batch(model, BYTES, ["a", "x", "1"], 5, stop=["d", "y."], temperature=0)
    assert (first.text, first.finish_reason) == ("bc", "stop")
    assert (second.text, second.finish_reason) == ("", "stop")
    assert (third.text, third.finish_reason, third.tokens) == ("23456", "length", [*b"23456"])
    by_token, = generate_batch(model, BYTES, ["a"], 9, stop_tokens=[ord("d")], temperature=0)
    assert (by_token.text, by_token.finish_reason) == ("bc", "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_continues_its_prompt(kind: str, tmp_path: Path) -> None:
    """The prompt and the new text together are the text of all ids: in a stream, after a context, and in tokens' strings."""
    tokenizer = JsonTokenizer(KINDS[kind])
    model = following(tokenizer.vocab_size, tokenizer.encode("bad cab"), n_embd=64)
    options: dict[str, Any] = {"temperature": 0}
    sample, = generate_batch(model, tokenizer, ["bad"], 6, logprobs=2, **options)
    ids = [*tokenizer.encode("bad"), *sample.tokens]
    assert "bad" + sample.text == tokenizer.decode(ids)
    assert sample.text.startswith(" c")
    assert "".join(generate(model, tokenizer, "bad", 6, **options)) == sample.text
    assert "".join(entry["text"] for entry in sample.logprobs) == sample.text
    for entry in sample.logprobs:
        assert {other["token"]: other["text"] for other in entry["top"]}.get(entry["token"], entry["text"]) == entry["text"]

    engine = Engine(model, tokenizer)
    engine.add_all([Request("bad", 0, StoppingCriteria(1), Sampling(**options))])
    first = "".join(piece for _, piece in engine)
    save_context(tmp_path / "state.safetensors", engine.context(), model, tokenizer)
    for context in (engine.context(), load_context(tmp_path / "state.safetensors", model, tokenizer)):
        rest = "".join(generate(model, tokenizer, "", 5, context=context, **options))
        assert f"bad{first}{rest}" == tokenizer.decode(ids)

    engine = Engine(model, tokenizer)
    row = engine.add(Request(ids, n_logprobs=1, prompt_logprobs=True, stopping=StoppingCriteria(0)))
    list(engine)
    assert tokenizer.names(ids[:1])[0] + "".join(entry["text"] for entry in row.prompt_logprobs) == tokenizer.decode(ids)

    engine = Engine(model, tokenizer)
    engine.add_all([Request("bad", 0, StoppingCriteria(0))])
    longer = Engine(model, tokenizer)
    longer.add_all([Request(" cab", 0, StoppingCriteria(0), context=engine.context())])
    longer.run()
    assert longer.context().last_ids == (*tokenizer.encode("bad cab"),), "a prompt after a context has the whole text's ids"


def test_each_end_of_text_and_special_stop_ends_a_text() -> None:
    """A special token has no letters that a stop string could find."""
    specials = ["<|begin|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"]
    definition = {"kind": "json", "definition": chatml(specials), "end_of_text": [1, 2]}
    tokenizer = Tokenizer.from_dict(definition)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for end, stop, reason in ((1, [], "end_of_text"), (2, [], "end_of_text"), (3, ["<|im_end|>"], "stop"), (3, [], "length")):
        model = following(tokenizer.vocab_size, [a, b, end, b], n_embd=64)
        sample, = generate_batch(model, tokenizer, ["a"], 3, stop=stop, temperature=0)
        assert (sample.text, sample.finish_reason) == ("b" if reason != "length" else "bb", reason)
        assert sample.tokens == ([b] if reason != "length" else [b, end, b])


def test_a_context_taken_in_the_middle_has_read_the_text_so_far() -> None:
    model = MODELS["conv1d"]
    engine = Engine(model, BYTES)
    rows = engine.add_all([Request("ab", 0, StoppingCriteria(30), Sampling(banned=(0,)))])
    for count, _ in enumerate(engine, 1):
        if count == 7:
            break
    assert_close(engine.context(), prefill(model, torch.tensor([[*b"ab", *rows[0].sample.tokens]])))


def test_training_can_continue_a_context() -> None:
    """Autograd saves the state for backward, which it refuses to do with tensors made in inference mode."""
    model = small_model("reference", vocab_size=256, generation="rwkv7", n_embd=64, n_ffn=96)
    engine = Engine(model, BYTES)
    engine.add_all([Request("ab")])
    engine.step()
    model(torch.tensor([[1, 2]]), engine.context().state)[0].sum().backward()
    assert model.emb.weight.grad is not None


def test_an_abandoned_iteration_can_be_continued() -> None:
    options = {"repetition_penalty": 1.5, "temperature": 0.5}
    engine = Engine(MODELS["conv1d"], BYTES)
    rows = engine.add_all([Request(prompt, seed, StoppingCriteria(12), Sampling(**options))
                           for seed, prompt in enumerate(["ab", "c"])])
    for _ in engine.step():
        pass
    for _, _ in engine:
        break
    engine.run()
    assert [row.sample for row in rows] == generate_batch(MODELS["conv1d"], BYTES, ["ab", "c"], 12, seeds=[0, 1], **options)


@pytest.mark.parametrize("kernel", ["conv1d", "rwkv7"])
@pytest.mark.parametrize("steps", [3, None], ids=["while others run", "after all have ended"])
def test_rows_can_be_added_all_at_once_to_an_engine_that_has_rows(kernel: str, steps: int | None) -> None:
    model, engine = MODELS[kernel], Engine(MODELS[kernel], BYTES)

    def add(prompts: list[str]) -> list[Row]:
        return engine.add_all([Request(prompt, 0, StoppingCriteria(8 if prompt == "ab" else 2)) for prompt in prompts])

    rows = add(["ab", "c"])
    for _ in range(100 if steps is None else steps):
        engine.step()
    rows += add(["ab", "d"])
    engine.run()
    alone = Engine(model, BYTES)
    expected = _run_to_end(alone, alone.add(Request("ab", 0, StoppingCriteria(8))))
    assert [row.sample for row in rows if row.sample.prompt == "ab"] == [expected] * 2
    assert all(row.complete for row in rows)


def test_pieces_come_before_the_text_is_finished() -> None:
    pieces = generate(always_predict(model_for(TOKENIZERS["char"]), 5), TOKENIZERS["char"], max_new_tokens=10 ** 9)
    assert next(pieces) == next(pieces) != ""


def test_a_seed_determines_the_text_and_no_other_random_state_changes() -> None:
    model, before = MODELS["conv1d"], torch.get_rng_state()
    first, again, other = ("".join(generate(model, BYTES, "x", 30, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks = MODELS["conv1d"], watch(monkeypatch)
    several = tokens(model, B=2, T=23)
    whole = prefill(model, several)
    cut_into(monkeypatch, 8, 8)
    assert_close(prefill(model, several), whole)
    assert chunks == [(2, 23), (2, 8), (2, 8), (2, 7)]


@pytest.mark.parametrize("options", [
    {"stop": [""]}, {"stop": "abc"}, {"stop": [b"a"]}, {"stop": 3}, {"stop_tokens": 3}, {"stop_tokens": [999]},
    {"max_new_tokens": -1}, {"max_new_tokens": 3.5}, {"max_new_tokens": None}, {"top_p": 2}, {"top_k": 2.5},
    {"banned": (999,)}, {"seed": 2 ** 70}, {"seed": 1.5}, {"prompt": b"a"}], ids=str)
def test_a_wrong_option_is_reported_in_one_sentence_before_anything_is_read(options: dict[str, Any],
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks = model_for(TOKENIZERS["char"]), watch(monkeypatch)
    with pytest.raises(UserError, match=rf"\A{next(iter(options))}.*\Z"):
        generate(model, TOKENIZERS["char"], **options)
    assert chunks == []


@pytest.mark.parametrize(("options", "name"), [
    ({"prompts": "abc"}, "prompts"), ({"prompts": [b"a"]}, "prompts"), ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"), ({"seeds": 1}, "seed"), ({"seeds": [0.5]}, "seed"), ({"seeds": [1, 2]}, "seed")], ids=str)
def test_a_wrong_option_of_a_batch_is_reported_in_one_sentence(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"\A.*\b{name}\b.*\Z"):
        generate_batch(MODELS["conv1d"], BYTES, **{"prompts": ["a"], **options})


def test_numpy_numbers_are_numbers_and_no_prompts_give_no_texts() -> None:
    first = generate_batch(MODELS["conv1d"], BYTES, ["a", "b"], 5, seeds=[3, 4])
    assert generate_batch(MODELS["conv1d"], BYTES, ["a", "b"], np.int64(5), seeds=np.array([3, 4])) == first
    assert generate_batch(MODELS["conv1d"], BYTES, []) == []


def test_a_context_of_other_rows_or_of_another_model_is_refused() -> None:
    model = MODELS["conv1d"]
    narrow = small_model("conv1d", vocab_size=256, n_embd=8)
    for context in (prefill(model, tokens(model, B=2)), prefill(narrow, tokens(model, B=1))):
        for prompt in ("", "a"):
            with pytest.raises(ValueError, match="state"):
                generate(model, BYTES, prompt, context=context)


def test_a_prompt_that_cannot_be_encoded_and_a_tokenizer_of_another_model_are_refused() -> None:
    with pytest.raises(UserError):
        generate(model_for(TOKENIZERS["char"]), TOKENIZERS["char"], "az!")
    with pytest.raises(UserError):
        generate(small_model(vocab_size=255), BYTES, "a")


@pytest.mark.parametrize("kernel", ["reference", "rwkv7"])
@pytest.mark.parametrize("options", [Sampling(), Sampling(temperature=0), Sampling(presence_penalty=0.5)], ids=str)
def test_a_damaged_context_ends_only_its_own_row(kernel: str, options: Sampling) -> None:
    """The logits of a damaged context may stop being finite immediately, or when the state grows.

    Rows keep or drop the final context, with or without log-probabilities.
    """
    model = MODELS[kernel]
    good = prefill(model, torch.tensor([[5, 6]]))
    bad = good._replace(state=good.state._replace(**{name: part * torch.nan for name, part in good.state._asdict().items()}))
    alone = Engine(model, BYTES)
    expected = alone.add(Request("ab", 3, StoppingCriteria(6), options, context=good))
    alone.run()
    engine = Engine(model, BYTES)
    row = engine.add(Request("ab", 3, StoppingCriteria(6), options, context=good))
    damaged = [engine.add(Request("cd", seed, StoppingCriteria(6), options, n_logprobs, context=bad, keep_context=keep))
               for seed, (n_logprobs, keep) in enumerate([(None, False), (2, False), (None, True)])]
    nowhere = bad._replace(logits=bad.logits * torch.nan)
    damaged.append(engine.add(Request([], 9, StoppingCriteria(0), options, context=nowhere, keep_context=True)))
    engine.run()
    assert row.sample.tokens == expected.sample.tokens
    assert not row.damaged
    assert all(each.damaged and each.complete and each.final_context is None and not each.sample.tokens for each in damaged)


def test_logits_of_the_model_that_are_not_finite_are_an_error() -> None:
    model = small_model(vocab_size=256)
    model.head.weight.data[7] = torch.nan
    engine = Engine(model, BYTES)
    engine.add(Request("ab"))
    with pytest.raises(UserError, match="logits are not finite"):
        engine.run()


@torch.no_grad()
def test_a_model_with_spare_tokens_never_generates_them() -> None:
    """Vocabularies are often padded: a token that the tokenizer lacks has no text."""
    model = always_predict(small_model("conv1d", vocab_size=300), 299)
    model.head.weight[ord("a")] = 50
    assert "".join(generate(model, BYTES, "a", 3)) == "aaa"


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Records the shapes of all later prefill chunks; short prompts are then prefilled in chunks too."""
    monkeypatch.setattr(prefill_module, "SHORT_PROMPT", 0)
    chunks, embedded = [], RWKV._first_block_inputs

    def record_shape(self: RWKV, several: torch.Tensor, state: Any) -> Any:
        chunks.append(tuple(several.shape))
        return embedded(self, several, state)

    monkeypatch.setattr(RWKV, "_first_block_inputs", record_shape)
    return chunks


def assert_close(actual: PrefillResult, expected: PrefillResult) -> None:
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)
    assert_same_state(actual.state, expected.state)


def test_a_warm_up_also_continues_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the token shift after a state is compiled separately, and the first long prompt would wait for that."""
    model = small_model("reference", vocab_size=256, n_layer=1)
    continued = []
    plain = RWKV.prefill

    def recorded(model: RWKV, ids: torch.Tensor, state: Any = None) -> Any:
        continued.append(state is not None)
        return plain(model, ids, state)

    monkeypatch.setattr(RWKV, "prefill", recorded)
    Engine(model, ByteTokenizer()).warm_up()
    assert {*continued} == {False, True}
