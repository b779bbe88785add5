"""Tests that log-probabilities are those of the visible text: whole or as a stream, their tokens add up to the text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import writing
from serving_runs import client_of, serving

from rwkv.serving.logprobs import ShownTokens
from rwkv.tokenizer.tokenizers import ByteTokenizer

if TYPE_CHECKING:
    import openai

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}{{ '' if tools }}"
CALL = '{"name": "f", "arguments": {}}</tool_call>'
# The model writes these tokens after a question. Each token occurs once.
ROWS: dict[str, list[bytes]] = {
    "1": [b" ", b"#", b"___"],
    "2": [b"\n", b" #a", b"b c"],
    "3": [b"\xe2", b"\x80", b"\x83", b"\xc3", b"\xa9", b"."],
    "4": [b"one", b" two<e", b"nd> no"],
    "5": [b"x", b"yST", b"OPz"],
    "6": [b"Say ", b"so <tool_", b"call>" + CALL.encode(), b" \n then", b" end <tool"],
    "7": [b"\xd0", b"\xb6"],
    "8": [b"\xd1", b"\x88STOP"],
    "9": [b"\t ", b"\n\n", b"\r"],
    "0": [b"u", b"\xd2", b" vWX"],        # the character is never completed
}
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator["openai.OpenAI"]:
    folder = tmp_path_factory.mktemp("logprobs")
    model, tokenizer = writing(*([question.encode(), *row] for question, row in ROWS.items()))
    path = folder / "tiny.safetensors"
    model.save_pretrained(path, tokenizer)
    (folder / "template.jinja").write_text(TEMPLATE)
    with serving(folder, f"checkpoint={path}", f"template={folder / 'template.jinja'}") as server, client_of(server) as made:
        yield made


def ask(client: "openai.OpenAI", question: str, **options: Any) -> Any:
    return client.chat.completions.create(**{
        "model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 20,
        "logprobs": True, "top_logprobs": 2, **options})


@pytest.mark.programs
@pytest.mark.parametrize(("question", "options", "content", "tokens"), [
    ("1", {"n": 2}, "#___", ["#", "___"]),
    ("1", {"max_tokens": 1}, "", []),
    ("2", {}, "#ab c", ["#a", "b c"]),
    ("3", {}, "é.", ["token_id:196", "token_id:170", "."]),
    ("4", {}, "one two", ["one", " two"]),
    ("5", {"stop": "STOP"}, "xy", ["x", "y"]),
    ("5", {"stop": "x"}, "", []),
    ("6", {"tools": TOOLS}, "Say so\nthen end <tool", ["Say ", "so", "\nthen", " end <tool"]),
    ("7", {"max_tokens": 1}, "\ufffd", ["token_id:209"]),
    ("7", {}, "ж", ["token_id:209", "token_id:183"]),
    ("8", {"stop": "STOP"}, "ш", None),
    ("9", {}, "", []),
    ("0", {}, "u\ufffd vWX", ["u", "token_id:211", " vWX"]),
    ("0", {"stop": " v"}, "u\ufffd", ["u", "token_id:211"]),
    ("0", {"stop": "WX"}, "u\ufffd v", ["u", "token_id:211", " v"])], ids=str)
def test_a_chats_tokens_add_up_to_its_content(client: "openai.OpenAI", question: str, options: dict[str, Any], content: str,
                                              tokens: list[str] | None) -> None:
    whole = ask(client, question, **options)
    streamed: dict[int, list[Any]] = {choice.index: [] for choice in whole.choices}
    texts = dict.fromkeys(streamed, "")
    for chunk in ask(client, question, stream=True, **options):
        choice, = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        entries = choice.logprobs.content
        assert (choice.message.content or "") == texts[choice.index] == content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == content
        assert [entry.bytes for entry in streamed[choice.index]] == [entry.bytes for entry in entries]
        if tokens is not None:
            assert [entry.token for entry in entries] == tokens
        assert all(entry.token in [other.token for other in entry.top_logprobs] for entry in entries), "the likeliest was drawn"


@pytest.mark.programs
@pytest.mark.parametrize(("prompt", "options", "text"), [
    ("1", {}, " #___"), ("1", {"echo": True}, "1 #___"), ("5", {"stop": "STOP"}, "xy"), ("5", {"stop": "x"}, ""),
    ("5", {"stop": "STOP", "echo": True}, "5xy"), ("4", {"stop": ["nd>", "o<"]}, "one tw"), ("8", {"stop": "STOP"}, "ш")],
    ids=str)
def test_a_completions_tokens_add_up_to_its_text(client: "openai.OpenAI", prompt: str, options: dict[str, Any],
                                                 text: str) -> None:
    fields = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 20, "logprobs": 1, **options}
    choice = client.completions.create(**fields).choices[0]
    logprobs = choice.logprobs
    assert choice.text == text
    # with echo, an end-of-text token at the end also has an entry, with the string token_id:ID
    text_tokens = [token for token in logprobs.tokens if not token.startswith("token_id:")]
    assert "".join(text_tokens) == text
    assert logprobs.text_offset[:len(text_tokens)] == [len("".join(text_tokens[:i])) for i in range(len(text_tokens))]
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **fields)]
    assert "".join(choice.text for choice in streamed) == text
    parts = [choice.logprobs for choice in streamed if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset


@pytest.mark.programs
@pytest.mark.parametrize(("stop", "offsets"), [(None, [0, 1, 2]), (" v", [0, 1]), ("WX", [0, 1, 2])])
def test_a_token_s_offset_is_after_an_incomplete_character(client: "openai.OpenAI", stop: str | None,
                                                           offsets: list[int]) -> None:
    choice = client.completions.create(model="tiny", prompt="0", temperature=0, max_tokens=20, logprobs=1, stop=stop).choices[0]
    assert choice.logprobs.text_offset == offsets
    assert choice.text[2:] == "".join(choice.logprobs.tokens[2:])


@given(st.text("aé\u3000", max_size=12), st.lists(st.integers(0, 13), max_size=6), st.lists(st.integers(0, 13), max_size=3))
def test_tokens_are_cut_to_the_visible_text_however_it_is_split(text: str, edges: list[int], steps: list[int]) -> None:
    """Each token is one byte, and the visible parts are every second part between the edges."""
    edges = sorted({min(edge, len(text)) for edge in edges})
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    tokens = ShownTokens(ByteTokenizer().decoder())
    tokens.add([{"token": value, "text": "", "logprob": 0.0, "top": []} for value in text.encode()])
    entries = []
    position = 0
    for decided in sorted(min(step, len(text)) for step in steps):
        tokens.show([(max(start, position), min(end, decided)) for start, end in spans if start < decided and end > position])
        entries += tokens.take(decided)
        position = decided
    tokens.show([(max(start, position), end) for start, end in spans if end > position])
    entries += tokens.take_rest()
    assert bytes(entry["token"] for entry in entries).decode() == "".join(text[start:end] for start, end in spans)
