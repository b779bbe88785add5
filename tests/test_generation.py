"""Text from a model: streamed whole, the same for a seed, at constant cost, and ended by end_of_text."""

import pytest
import torch
from models import small_model, tokens

from rwkv import RWKV, Tokenizer, generate, generation
from rwkv.sampling import sample
from rwkv.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer

PROMPT = "naïve — 你好\n"
TOKENIZERS = {"byte": ByteTokenizer(), "char": CharTokenizer(PROMPT + "abcdefghij"),
              "bpe": JsonTokenizer.train([PROMPT * 20], 300)}


def model_for(tokenizer: Tokenizer, kernel: str = "conv1d") -> RWKV:
    return small_model(kernel, vocab_size=tokenizer.vocab_size)


def constant(model: RWKV, token: int) -> RWKV:
    """The model, made to say `token` whatever it reads."""
    with torch.no_grad():
        model.ln_out.weight.zero_()
        model.ln_out.bias.fill_(1)
        model.head.weight.zero_()
        model.head.weight[token] = 100
    return model


@pytest.mark.parametrize("prompt", [PROMPT, ""])
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_pieces_are_the_text_of_the_tokens(tokenizer: Tokenizer, prompt: str) -> None:
    model, generator = model_for(tokenizer), torch.Generator().manual_seed(3)
    logits, state = model.prefill(torch.tensor([[*tokenizer.encode(prompt)] or [tokenizer.end_of_text]]))
    written: list[int] = []
    while len(written) < 40 and (token := sample(logits, generator, 0.9, 20, 0.95)) != tokenizer.end_of_text:
        written.append(int(token))
        logits, state = model.prefill(token[:, None], state)
    assert len(written) > 10
    pieces = list(generate(model, tokenizer, prompt, 40, temperature=0.9, top_k=20, top_p=0.95, seed=3))
    assert all(pieces)
    assert "".join(pieces) == tokenizer.decode(written)


def test_pieces_come_before_the_text_is_finished() -> None:
    pieces = generate(constant(model_for(TOKENIZERS["char"]), 5), TOKENIZERS["char"], max_new_tokens=10 ** 9)
    assert next(pieces) == next(pieces) != ""


def test_a_character_of_several_tokens_is_one_piece() -> None:
    """An incomplete one at the end is a U+FFFD."""
    model = constant(model_for(TOKENIZERS["byte"]), 0xE4)
    assert list(generate(model, TOKENIZERS["byte"], max_new_tokens=2)) == ["�", "�"]


def test_a_seed_is_a_text_and_no_other_random_state_is_touched() -> None:
    model, before = model_for(TOKENIZERS["byte"]), torch.get_rng_state()
    first, again, other = ("".join(generate(model, TOKENIZERS["byte"], "x", 30, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_end_of_text_ends_a_text() -> None:
    assert list(generate(constant(model_for(TOKENIZERS["byte"]), 0), TOKENIZERS["byte"], "a")) == []


@pytest.mark.parametrize("n", [0, 1, 7])
def test_no_more_tokens_than_asked_for(n: int) -> None:
    model = constant(model_for(TOKENIZERS["byte"]), ord("a"))
    assert "".join(generate(model, TOKENIZERS["byte"], "a", n)) == n * "a"


def test_a_token_costs_the_same_however_much_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is read at a time, and the state keeps its size."""
    model, seen = model_for(TOKENIZERS["byte"]), []
    prefill = RWKV.prefill

    def watched(self: RWKV, tokens: torch.Tensor, state: object = None) -> object:
        logits, state = prefill(self, tokens, state)
        seen.append((tokens.shape[1], sum(part.untyped_storage().nbytes() for part in state)))
        return logits, state

    monkeypatch.setattr(RWKV, "prefill", watched)
    list(generate(model, TOKENIZERS["byte"], "a long prompt", 25))
    assert seen[0][0] == len("a long prompt")
    assert {length for length, _ in seen[1:]} == {1}
    assert len({size for _, size in seen}) == 1


def test_a_long_prompt_is_read_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("conv1d")
    read = tokens(model, B=1, T=23)
    whole, _ = generation.prefill(model, read)
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 4)
    torch.testing.assert_close(generation.prefill(model, read)[0], whole, rtol=0, atol=1e-5)


def test_a_prompt_outside_the_vocabulary_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^'!', 'z': not among the \d+ characters") as error:
        generate(model_for(TOKENIZERS["char"]), TOKENIZERS["char"], "az!")
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the tokenizer has 256 tokens and the model 255: they do not belong together"):
        generate(small_model(vocab_size=255), TOKENIZERS["byte"], "a")


@torch.no_grad()
def test_a_model_with_spare_tokens_never_says_them() -> None:
    """Vocabularies are often padded: a token that the tokenizer lacks has no text."""
    model = constant(small_model("conv1d", vocab_size=300), 299)
    model.head.weight[ord("a")] = 50
    assert "".join(generate(model, TOKENIZERS["byte"], "a", 3)) == "aaa"
