"""Chat templates: the published forms, what is learnt, jinja2 files, and messages that are wrong."""

from pathlib import Path

import pytest

from rwkv.errors import UserError
from rwkv.tokenizer.chat import chat_template, default_template

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.\n\nWhat is it?"}, {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."}]
CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture
def chatml(tmp_path: Path) -> str:
    (tmp_path / "chatml.jinja").write_text(CHATML, encoding="utf-8")
    return str(tmp_path / "chatml.jinja")


def test_world_is_the_published_form() -> None:
    assert chat_template("world").render(TALK[:4]) == (
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\nWhat is it?\n\nUser: Who are you?\n\nAssistant:")


@pytest.mark.parametrize("name", ["world", "chatml"])
def test_a_developer_s_message_is_a_system_message(name: str, chatml: str) -> None:
    template = chat_template(chatml if name == "chatml" else name)
    assert template.render([{**TALK[0], "role": "developer"}, TALK[1]]) == template.render(TALK[:2])


def test_g1_asks_for_thoughts() -> None:
    template = chat_template("g1")
    assert template.render(TALK[1:2], think=True) == "User: Hi\n\nAssistant: <think"
    assert template.answer_start(think=True) == "<think"
    assert template.render(TALK[1:2]) == "User: Hi\n\nAssistant:"
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    assert template.render([thought], False) == "Assistant: <think>\n2 + 2\n</think>\n4\n\n"
    assert chat_template("world").render([thought], False) == "Assistant: 4\n\n"


@pytest.mark.parametrize("name", ["world", "g1", "chatml"])
def test_the_answers_with_their_ends_are_learnt(name: str, chatml: str) -> None:
    template = chat_template(chatml if name == "chatml" else name)
    parts = template.parts(TALK)
    assert "".join(text for text, _ in parts) == template.render(TALK, add_generation_prompt=False)
    learnt = [text for text, is_learnt in parts if is_learnt]
    assert learnt == (["Hello.\n\nWhat is it?<|im_end|>\n", "A model.<|im_end|>\n"] if name == "chatml"
                      else [" Hello.\nWhat is it?\n\n", " A model.\n\n"])
    for i in (2, 4):                     # what stands before an answer is the prompt that asks for it
        text = template.render(TALK[:i])
        assert "".join(piece for piece, _ in parts).startswith(text)


@pytest.mark.parametrize("name", ["world", "chatml"])
def test_a_stop_ends_each_answer(name: str, chatml: str) -> None:
    template = chat_template(chatml if name == "chatml" else name)
    assert template.stop == (("<|im_end|>",) if name == "chatml" else ("\n\n",))
    for text, learnt in template.parts(TALK):
        assert not learnt or text.count(template.stop[0]) == 1


def test_a_template_shows_tools_if_it_names_them(tmp_path: Path, chatml: str) -> None:
    file = tmp_path / "tools.jinja"
    file.write_text("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
                    "{% generation %}!{% endgeneration %}")
    template = chat_template(str(file))
    assert template.supports_tools
    assert template.render(TALK[1:2], tools=[{"name": "größe <b>"}]) == '[{"name": "größe <b>"}]Hi!'
    for name in ("world", chatml):
        with pytest.raises(UserError, match="no form for tools"):
            chat_template(name).render(TALK[1:2], tools=[{"name": "f"}])


@pytest.mark.parametrize(("style", "shown"), [
    ("", '{"b": "ü", "a": 1}'), ("(ensure_ascii=False)", '{"b": "ü", "a": 1}'), ("(true)", '{"b": "\\u00fc", "a": 1}'),
    ("(separators=(',', ':'), sort_keys=true)", '{"a":1,"b":"ü"}'), ("(indent=1)", '{\n "b": "ü",\n "a": 1\n}')])
def test_tojson_takes_what_transformers_takes(tmp_path: Path, style: str, shown: str) -> None:
    (tmp_path / "tools.jinja").write_text("{{ tools | tojson" + style + " if tools }}{{ messages[0].content }}")
    template = chat_template(str(tmp_path / "tools.jinja"))
    assert template.render(TALK[1:2], tools={"b": "ü", "a": 1}) == f"{shown}Hi"                  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "said"), [
    ("{% if %}", "not a jinja2 template"),
    ("{{ raise_exception('no such role') if messages }}", "refuses the conversation: no such role"),
    ("You are kind.", "does not use `messages`"),
    ("{{ messages.__class__.__mro__ }}", "refuses the conversation"),
])
def test_a_wrong_template_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.jinja").write_text(text)
    with pytest.raises(UserError, match=said):
        chat_template(str(tmp_path / "wrong.jinja"))


def test_a_template_that_rewrites_earlier_turns_has_no_parts(tmp_path: Path) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}")
    template = chat_template(str(tmp_path / "last.jinja"))
    with pytest.raises(UserError, match=r"messages\[2\].*does not write this answer after the prompt"):
        template.parts(TALK)


@pytest.mark.parametrize(("messages", "field"), [
    ("Hi", "messages is a list"), ([], "messages is a list"), (["Hi"], r"messages\[0\] is an object"),
    ([{"content": "Hi"}], r"messages\[0\]\.role is one of system, user, assistant, tool; got null"),
    ([*TALK[:1], {"role": "human", "content": "Hi"}], r"messages\[1\]\.role"),
    ([{"role": ["user"], "content": "Hi"}], r"messages\[0\]\.role"),
    ([{"role": "user", "content": None}], r"messages\[0\]\.content is a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\] is a text"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], r"messages\[0\]\.tool_calls"),
    ([{"role": "user", "content": "Hi", "reasoning_content": "?"}], r"messages\[0\]\.reasoning_content"),
])
def test_a_wrong_message_is_named(messages: object, field: str) -> None:
    with pytest.raises(UserError, match=field):
        chat_template("world").render(messages)                          # type: ignore[arg-type]


def test_texts_of_a_content_list_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_template("world").render([{"role": "user", "content": content}]) == "User: ab\n\nAssistant:"


def test_thoughts_are_of_g1_alone() -> None:
    with pytest.raises(UserError, match="has no thoughts"):
        chat_template("world").render(TALK[:2], think=True)


def test_other_names_are_refused() -> None:
    with pytest.raises(UserError, match="world, g1 or a jinja2 file; there is no file chatgpt"):
        chat_template("chatgpt")


@pytest.mark.parametrize(("name", "template"), [
    ("models/rwkv7-g1b-1.5b-20251202-ctx8192.pth", "g1"), ("RWKV7-G1a3-0.4B.pth", "g1"), ("rwkv7-g0a.safetensors", "g1"),
    ("RWKV-x070-World-0.1B-v2.8.pth", "world"), ("runs/g1/last.ckpt", "world"), ("big1.pth", "world"),
])
def test_the_default_goes_by_the_name(name: str, template: str) -> None:
    assert default_template(name, None) == template
