"""Tests that embeddings are the model's final hidden states and independent of other requests in the engine."""

import pytest
import torch
from models import small_model

from rwkv import embed
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation.engine import Engine
from rwkv.generation.prefill import ON_CPU
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.tokenizer.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
CHUNK = ON_CPU.longest
TEXTS = ["a", "A cat.", "x" * (2 * CHUNK + 7), "", "A cat."]


@pytest.mark.parametrize("generation", ["rwkv4", "rwkv7"])
def test_an_embedding_is_computed_from_the_hidden_states(generation: str) -> None:
    model = small_model("reference", generation=generation, vocab_size=256)
    for pooling in ("mean", "last"):
        vectors = embed(model, BYTES, TEXTS, pooling)
        for text, vector in zip(TEXTS, vectors, strict=True):
            ids = torch.tensor([BYTES.encode(text) or [BYTES.end_of_text]])
            hidden = next(output for output in model.hidden_in_parts(ids, None, 1) if output)[0][0].double()
            expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
            torch.testing.assert_close(vector.double(), expected / expected.norm(), atol=1e-4, rtol=0)
        assert torch.equal(vectors[1], vectors[4])
        assert torch.equal(vectors[1], embed(model, BYTES, ["A cat."], pooling)[0])      # the text alone has the same bits


def test_embeddings_change_neither_generated_texts_nor_the_cache() -> None:
    model = small_model("reference", generation="rwkv7", vocab_size=256)
    cache = PrefixCache()
    alone = Engine(model, BYTES)
    beside = Engine(model, BYTES, cache)
    texts = [engine.add(Request("A cat", 3, StoppingCriteria(20))) for engine in (alone, beside)]
    rows = [beside.add(Request(text, stopping=StoppingCriteria(0), pooling="mean")) for text in TEXTS]
    alone.run()
    beside.run()
    assert texts[0].sample.tokens == texts[1].sample.tokens
    assert torch.equal(torch.stack([row.embedding for row in rows]), embed(model, BYTES, TEXTS))
    assert cache.longest(BYTES.encode(TEXTS[2]))[1] is None


def test_running_sequences_get_a_token_at_every_step() -> None:
    engine = Engine(small_model("reference", generation="rwkv7", vocab_size=256), BYTES)
    running = engine.add(Request("A cat", 3, StoppingCriteria(40, stop_tokens=()), Sampling(banned=(BYTES.end_of_text,))))
    engine.step()
    rows = [engine.add(Request("x" * CHUNK, stopping=StoppingCriteria(0), pooling="mean")) for _ in range(4)]
    rows.append(engine.add(Request("y" * CHUNK, stopping=StoppingCriteria(0), pooling="last")))
    before = len(running.sample.tokens)
    for _ in range(20):
        engine.step()
    assert len(running.sample.tokens) == before + 20
    engine.run()
    assert all(row.embedding.isfinite().all() for row in rows)


def test_what_cannot_be_embedded_is_refused() -> None:
    model = small_model("reference", vocab_size=256)
    assert embed(model, BYTES, []).shape == (0, model.config.n_embd)
    with pytest.raises(UserError, match="pooling must be one of mean, last"):
        embed(model, BYTES, ["a"], "max")                        # type: ignore[arg-type]
    with pytest.raises(UserError, match="texts"):
        embed(model, BYTES, "a")
