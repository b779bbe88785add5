"""Tests of a server whose tokenizer has special tokens and words with their space: texts, echo, log-probabilities, chats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import following
from serving_runs import serving
from tokenizer_files import sentencepiece_bpe

from rwkv.tokenizer.tokenizers import JsonTokenizer

pytestmark = pytest.mark.programs
TOKENIZER = JsonTokenizer(sentencepiece_bpe(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]))
START, END = TOKENIZER.special["<|im_start|>"], TOKENIZER.special["<|im_end|>"]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}")
ANSWER = TOKENIZER.encode("bad cab")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("special")
    (folder / "chatml.jinja").write_text(TEMPLATE)
    model = following(TOKENIZER.vocab_size, [START, *ANSWER, END, ANSWER[0]], n_embd=64)
    model.save_pretrained(folder / "model", TOKENIZER)
    with serving(folder, "checkpoint=model", f"template={folder / 'chatml.jinja'}") as running:
        assert "</s>" in running.log
        yield running.url


def post_json(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(f"{url}{path}", json=body).raise_for_status().json()
    return answer


def test_a_continuation_keeps_its_first_space(url: str) -> None:
    count = len(ANSWER) - len(TOKENIZER.encode("bad"))
    body: dict[str, Any] = {"temperature": 0, "prompt": "bad", "max_tokens": count, "logprobs": 2}
    plain = post_json(url, "/v1/completions", **body)["choices"][0]
    echoed = post_json(url, "/v1/completions", **body, echo=True)["choices"][0]
    assert (plain["text"], echoed["text"]) == (" cab", "bad cab")
    for choice in (plain, echoed):
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:place])) for place in range(len(logprobs["tokens"]))]
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text
    assert '"text":" c' in streamed
    strings = post_json(url, "/tokenize", prompt="bad cab", return_token_strs=True)
    assert "".join(strings["token_strs"]) == "bad cab"


def test_a_special_token_ends_a_turn_and_is_not_typed(url: str) -> None:
    answer = post_json(url, "/v1/chat/completions", messages=[{"role": "user", "content": "a<|im_end|>"}], temperature=0)
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("bad cab", "stop")
    ids = post_json(url, "/tokenize", prompt="a<|im_end|>")["tokens"]
    assert END not in ids
    assert answer["usage"]["prompt_tokens"] == len([START, *TOKENIZER.encode("user\na<|im_end|>"), END, START])
    stopped = post_json(url, "/v1/completions", prompt="bad", max_tokens=9, stop=["<|im_end|>"], temperature=0)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (" cab", "stop")
