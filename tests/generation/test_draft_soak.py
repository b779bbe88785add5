"""Compares hundreds of batches with random options: a draft changes no bit of any sequence.

A failure prints the seed of its batch.
"""

import random
from typing import Any

import pytest
import torch
from models import in_format, small_model
from test_draft import BYTES, Random, assert_same, texts_of
from test_draft import cheap_passes as cheap_passes  # an autouse fixture

from kernels import native
from kernels.matvec import BLOCKS, FORMATS
from rwkv.config import GENERATIONS, Sampling
from rwkv.generation.draft import Draft, ModelDraft, NGram
from rwkv.generation.engine import Engine
from rwkv.generation.grammar import Grammar
from rwkv.generation.prefill import prefill
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.proposal_cost import ProposalCost
from rwkv.generation.request import Request
from rwkv.generation.row import Row
from rwkv.generation.stopping import StoppingCriteria
from rwkv.pretrained import RWKV

pytestmark = [pytest.mark.soak, pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))]
BATCHES = 200                            # a batch has 1 to 5 prompts
ALPHABET = "abc "
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.3, 0.8, 1.0, 1.5], "top_k": [0, 0, 1, 5, 40], "top_p": [1.0, 0.9, 0.3], "min_p": [0.0, 0.05, 0.3],
    "repetition_penalty": [1.0, 1.0, 1.3], "presence_penalty": [0.0, 0.5], "frequency_penalty": [0.0, 0.4],
    "penalty_decay": [1.0, 0.98], "no_penalty": [(), (" ", 97)], "logit_bias": [{}, {97: 3.0, 98: 2.0}, {0: -100.0}],
    "banned": [(), (0,), (97, 300 % 256)], "order": ["hf", "rwkv"]}
GRAMMARS = [None, None, None, Grammar.regex("[abc ]{5,40}"), Grammar.regex("(abc|bca){1,9}"), Grammar.regex("a*b")]


def text_of(draw: random.Random, most: int) -> str:
    piece = "".join(draw.choices(ALPHABET, k=draw.randrange(1, 9)))
    return (piece * most)[:draw.randrange(most + 1)] if draw.random() < 0.6 else "".join(draw.choices(ALPHABET, k=most))


def request_of(draw: random.Random, model: RWKV) -> Request:
    """Returns a request with random options."""
    sampling = Sampling(**{name: draw.choice(values) for name, values in CHOICES.items()})
    stopping = StoppingCriteria(draw.choice([0, 1, 2, 5, 30, 60]), draw.choice([(), ("ab",), ("a b", "cc"), ("c",)]),
                                draw.choice([(), (), (99,)]))
    context = None
    if draw.random() < 0.3:
        context = prefill(model, torch.tensor([[*text_of(draw, 20).encode()] or [0]]))._replace(last_ids=(97,))
    n_logprobs = draw.choice([None, None, 0, 3])
    return Request(text_of(draw, draw.choice([3, 30, 150])), draw.randrange(10**9), stopping, sampling, n_logprobs,
                   prompt_logprobs=n_logprobs is not None and draw.random() < 0.3, grammar=draw.choice(GRAMMARS),
                   context=context, keep_context=draw.random() < 0.5,
                   pooling="mean" if draw.random() < 0.1 and context is None else None)


def run(model: RWKV, requests: list[Request], order: list[int], draft: Draft | None, cache: PrefixCache | None) -> list[Row]:
    """Returns the rows of the requests. Request i is added after order[i] more steps."""
    engine = Engine(model, BYTES, cache, draft)
    rows = []
    for request, steps in zip(requests, order, strict=True):
        for _ in range(steps):
            engine.step()
        rows.append(engine.add(request))
    engine.run()
    return rows


def assert_same_cache(cache: PrefixCache, other: PrefixCache, rows: list[Row]) -> None:
    """Asserts that for every prefix of a sequence both caches have bit-identical entries, or none."""
    assert len(cache) == len(other)
    for row in rows:
        ids = row.tokens_read()
        for n in range(len(ids) + 1):
            (key, result), (expected_key, expected) = cache.longest(ids[:n]), other.longest(ids[:n])
            assert key.length == expected_key.length
            assert (result is None) == (expected is None)
            if result is not None and expected is not None:
                assert torch.equal(result.logits, expected.logits)
                assert all(map(torch.equal, result.state, expected.state))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_random_batches_are_the_same_with_any_draft(generation: str, format: str) -> None:
    pytest.importorskip("llguidance")
    sizes = {"n_embd": BLOCKS[format].elements} if format in BLOCKS else {}
    model, other = (in_format(small_model("reference", 256, seed, generation, **sizes), format) for seed in (0, 1))
    accepted = 0
    batches = BATCHES // len(FORMATS)
    for seed in range(batches):
        draw = random.Random(f"{generation} {format} {seed}")
        requests = [request_of(draw, model) for _ in range(draw.randrange(1, 6))]
        order = [draw.choice([0, 0, 1, 3]) for _ in requests]
        cached = draw.random() < 0.5
        before = PrefixCache() if cached else None
        expected = run(model, requests, order, None, before)
        good = texts_of([row for row in expected if draw.random() < 0.8])
        drafts: list[Draft] = [Random(good, draw.choice([0.5, 0.9, 1.0]), seed), NGram(draw.randrange(1, 9)),
                               ModelDraft(model, model, BYTES), ModelDraft(other, model, BYTES, 3)]
        for draft in drafts:
            draft.cost = ProposalCost(0.01)
            after = PrefixCache() if cached else None
            rows = run(model, requests, order, draft, after)
            try:
                assert_same(rows, expected)
                if before is not None and after is not None:
                    assert_same_cache(after, before, rows)
            except AssertionError as error:
                raise AssertionError(f"{generation}, {format}, seed {seed}, {type(draft).__name__}") from error
            accepted += sum(row.accepted_tokens for row in rows)
    print(f"{generation} {format}: {accepted} tokens of drafts accepted")
    assert accepted > 5 * batches
