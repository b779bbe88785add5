"""make soak: texts are the same in a batch as alone, token for token."""

import random

import pytest
from models import each_generation, in_form, small_model

from rwkv.generation.engine import generate_batch
from rwkv.tokenizer.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
TEXTS, TOGETHER, TOKENS = 200, 20, 24
LARGE = {"n_embd": 256, "n_ffn": 1024, "vocab_size": 8192, "n_layer": 4}


@each_generation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_text_of_a_batch_is_the_text_alone(dtype: str, generation: str) -> None:
    model = in_form(small_model("reference", generation=generation, **LARGE), dtype)
    draw = random.Random(0)
    prompts = ["".join(draw.choices("abcdefgh \n", k=draw.randrange(1, 40))) for _ in range(TEXTS)]
    for first in range(0, TEXTS, TOGETHER):
        batch, seeds = prompts[first:first + TOGETHER], list(range(first, first + TOGETHER))
        samples = generate_batch(model, BYTES, batch, TOKENS, seeds=seeds)
        for prompt, seed, sample in zip(batch, seeds, samples, strict=True):
            alone, = generate_batch(model, BYTES, [prompt], TOKENS, seeds=[seed])
            assert sample.tokens == alone.tokens
