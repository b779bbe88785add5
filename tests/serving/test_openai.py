"""Tests that the official client gets from the real server what generate gives."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serving_runs import Running

from rwkv.generation.engine import generate_batch
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.programs
MODEL = "tiny"
BYTES = ByteTokenizer()


def sample_of(model: RWKV, prompt: str, n: int, seed: int = 0, **options: Any) -> Any:
    sample, = generate_batch(model, BYTES, [prompt], n, seeds=[seed], **{"temperature": 1.0, "top_p": 1.0, **options})
    return sample


def test_models(client: "openai.OpenAI") -> None:
    import openai

    models = client.models.list()
    assert [each.id for each in models] == [MODEL]
    assert models._request_id.startswith("req_")
    assert client.models.retrieve(MODEL).id == client.models.retrieve(f"gateway/{MODEL}").id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.7, "presence_penalty": 1.5, "logit_bias": {"65": 20}}, {"stop": ["o", "e"]},
    {"extra_body": {"penalty_decay": 0.9, "frequency_penalty": 2.0, "no_penalty": [" e", 10], "banned": [32], "order": "rwkv",
                    "top_p": 0.5}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_equals_the_text_of_generate(client: "openai.OpenAI", model: RWKV, options: dict[str, Any],
                                                  stream: bool) -> None:
    sampling = {**options, **options.get("extra_body", {}), "logit_bias": {int(k): v for k, v in
                                                                        options.get("logit_bias", {}).items()}}
    sampling.pop("extra_body", None)
    sample = sample_of(model, "once", 30, 7, **sampling)
    answer = client.completions.create(model=MODEL, prompt="once", max_tokens=30, seed=7, stream=stream, **options)
    if stream:
        chunks = list(answer)
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        assert len(chunks) > 2 or not sample.text
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len(sample.tokens)
    assert (text, reason) == (sample.text, {"end_of_text": "stop"}.get(sample.finish_reason, sample.finish_reason))


def test_a_text_among_others_equals_the_text_alone(client: "openai.OpenAI", model: RWKV) -> None:
    """12 clients, more than may run and wait, send different prompts, lengths and seeds. Some ask for streams."""
    import openai

    def ask(seed: int) -> str:
        prompt, n = "a prompt " * (1 + 7 * seed % 40), 5 + 9 * seed % 50
        while True:
            try:
                if seed % 2:
                    return "".join(chunk.choices[0].text for chunk in client.completions.create(
                        model=MODEL, prompt=prompt, max_tokens=n, seed=seed, stream=True))
                return client.completions.create(model=MODEL, prompt=prompt, max_tokens=n, seed=seed).choices[0].text
            except openai.RateLimitError:
                time.sleep(0.05)

    with ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(ask, range(12)))
    assert texts == [sample_of(model, "a prompt " * (1 + 7 * seed % 40), 5 + 9 * seed % 50, seed).text for seed in range(12)]


def test_several_prompts_and_several_texts_of_each(client: "openai.OpenAI", model: RWKV) -> None:
    prompts = ["ab", "c", "c"]
    answer = client.completions.create(model=MODEL, prompt=prompts[:2], n=2, max_tokens=6, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [sample_of(model, prompt, 6, seed).text
                                                          for prompt in prompts[:2] for seed in (3, 4)]
    assert answer.usage.prompt_tokens == 3, "the prompt of n texts counts once"
    assert client.completions.create(model=MODEL, prompt=prompts, max_tokens=1).usage.prompt_tokens == 4
    ids = client.completions.create(model=MODEL, prompt=[[*b"ab"], [*b"c"]], max_tokens=6, seed=3)
    assert [choice.text for choice in ids.choices] == [answer.choices[0].text, answer.choices[2].text]


def test_a_completion_has_as_many_logprobs_as_a_chat(client: "openai.OpenAI") -> None:
    import openai

    top, = client.completions.create(model=MODEL, prompt="abc", logprobs=20, max_tokens=1).choices[0].logprobs.top_logprobs
    assert 20 <= len(top) <= 21
    with pytest.raises(openai.BadRequestError):                  # a long prompt would have megabytes of them
        client.completions.create(model=MODEL, prompt="abc", logprobs=20, max_tokens=1, echo=True)


def test_echo_and_logprobs(client: "openai.OpenAI", model: RWKV) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=3, max_tokens=2, seed=1)
    logprobs, sample = answer.choices[0].logprobs, sample_of(model, "abc", 2, 1)
    assert answer.choices[0].text == "abc" + sample.text
    assert logprobs.tokens[:3] == ["a", "b", "c"]
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 5
    for token, logprob, top in zip(logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert top[token] == logprob
        assert 3 <= len(top) <= 4
    assert logprobs.text_offset[:3] == [0, 1, 2]
    bytewise = client.completions.create(model=MODEL, prompt="aéb", echo=True, logprobs=1, max_tokens=1, seed=1).choices[0]
    assert bytewise.logprobs.text_offset == [0, 1, 1, 2, 3]      # both bytes have the offset of their character
    streamed = list(client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=3, max_tokens=2, seed=1,
                                              stream=True))
    assert streamed[-1].choices[0].logprobs.tokens == logprobs.tokens
    only = client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (only.text, len(only.logprobs.tokens)) == ("abc", 3)
    long = client.completions.create(model=MODEL, prompt="abc" * 150, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (long.text, len(long.logprobs.tokens)) == ("abc" * 150, 450)
    ended = client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=1, max_tokens=1, logit_bias={"0": 100})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("abc", "stop")
    assert ended.choices[0].logprobs.token_logprobs[:3] == only.logprobs.token_logprobs
    assert len(ended.choices[0].logprobs.tokens) == 4, "the token that ended the text is the last"


def test_chat(client: "openai.OpenAI", model: RWKV) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=12, seed=5, logprobs=True,
                                            top_logprobs=2)
    sample = sample_of(model, "System: be\n\nUser: hi\n\nAssistant:", 12, 5, stop=["\n\n"])
    choice = answer.choices[0]
    assert choice.message.content == sample.text.lstrip()
    assert len(choice.logprobs.content) == len(sample.tokens)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=12, seed=5, stream=True,
                                                 stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], answer.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_each_turn_of_a_chat_reads_only_what_is_new(client: "openai.OpenAI", model: RWKV) -> None:
    """What the last turn has read is cached: its prompt and its answer, but not the answer's last token, which was only drawn.

    If the template renders an answer differently, for example with another space before it, only the prompt is used.
    """
    messages: list[dict[str, str]] = []
    rendered, prompt, read = "", "", ""
    cached: list[int] = []
    outcomes = set()
    for turn in range(20):
        messages.append({"role": "user", "content": f"question {turn}"})
        rendered += f"User: question {turn}\n\nAssistant:"
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=turn,
                                                logit_bias={"32": 100, "97": 100})
        usage, choice = answer.usage, answer.choices[0]
        assert usage.prompt_tokens == len(rendered)
        cached.append(usage.prompt_tokens_details.cached_tokens)
        if turn:
            assert cached[-1] == (len(read) if rendered.startswith(read) else len(prompt))
            outcomes.add(rendered.startswith(read))
        sample = sample_of(model, rendered, 8, turn, stop=["\n\n"], logit_bias={32: 100, 97: 100})
        prompt, read = rendered, rendered + BYTES.decode(sample.tokens[:-1])
        messages.append({"role": "assistant", "content": choice.message.content})
        rendered += f" {choice.message.content.strip()}\n\n"
    assert cached[1:] == sorted({*cached[1:]}), "it grows in each turn"
    assert outcomes == {True, False}


def test_tokenizer(server: Running) -> None:
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer == {"tokens": [*"aé".encode()], "count": 3, "max_model_len": 32768,
                      "token_strs": ["a", "token_id:195", "token_id:169"]}
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": [*"aé".encode()]}).json() == {"prompt": "aé"}
    assert httpx.get(f"{server.url}/tokenizer_info").json()["eos_token_id"] == 0


def test_the_server_s_description_of_itself(server: Running) -> None:
    for path in ("/health", "/ready"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/openapi.json").json()["openapi"].startswith("3.")
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.metric("timemix_generated_tokens_total") >= 0


def test_log_probabilities_of_several_texts_are_the_same_again(client: "openai.OpenAI") -> None:
    """The log-probabilities are the same to the last bit, whole or as a stream, because the texts of a request begin together.

    Products of more rows may differ in their last bits.
    """
    for seed in range(8):
        fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (7 * seed + 1)}], "n": 3,
                                  "seed": seed, "temperature": 1.5, "logprobs": True, "top_logprobs": 5, "max_tokens": 9}
        whole = {choice.index: choice.logprobs.content for choice in client.chat.completions.create(**fields).choices}
        streamed: dict[int, list[Any]] = {index: [] for index in whole}
        for chunk in client.chat.completions.create(stream=True, **fields):
            for choice in chunk.choices:
                streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert streamed == whole
