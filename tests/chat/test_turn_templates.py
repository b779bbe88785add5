"""Tests of chat templates: the published formats, the parts that are trained on, jinja2 files, and invalid messages."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv.chat.encoding import encode
from rwkv.chat.interface import END, ChatTemplate
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import check_messages, is_learnt
from rwkv.chat.thoughts import Think, answer_message
from rwkv.chat.turn_templates import chat_template
from rwkv.config import DataConfig
from rwkv.data.sources.chat import template_of
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
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


@pytest.mark.parametrize("name", ["world", "g1", "chatml"])
def test_answers_and_their_ends_are_learnt(name: str, chatml: str) -> None:
    template = chat_template(chatml if name == "chatml" else name)
    parts = template.parts(CONVERSATION)
    assert "".join(text for text, _ in parts) == template.render(CONVERSATION, add_generation_prompt=False)
    learnt = [text for text, is_learnt in parts if is_learnt]
    assert learnt == (["Hello.\n\nWhat is it?<|im_end|>\n", "A model.<|im_end|>\n"] if name == "chatml"
                      else [" Hello.\nWhat is it?\n\n", " A model.\n\n"])
    for i in (2, 4):                     # the text before an answer equals the prompt for that answer
        text = template.render(CONVERSATION[:i])
        assert "".join(piece for piece, _ in parts).startswith(text)


def test_a_template_shows_tools_if_it_names_them(tmp_path: Path, chatml: str) -> None:
    file = tmp_path / "tools.jinja"
    file.write_text("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
                    "{% generation %}!{% endgeneration %}")
    template = chat_template(str(file))
    assert template.supports_tools
    assert template.render(CONVERSATION[1:2], tools=[{"name": "größe <b>"}]) == '[{"name": "größe <b>"}]Hi!'
    for name in ("world", chatml):
        with pytest.raises(UserError):
            chat_template(name).render(CONVERSATION[1:2], tools=[{"name": "f"}])


@pytest.mark.parametrize(("style", "shown"), [
    ("", '{"b": "ü", "a": 1}'), ("(ensure_ascii=False)", '{"b": "ü", "a": 1}'), ("(true)", '{"b": "\\u00fc", "a": 1}'),
    ("(separators=(',', ':'), sort_keys=true)", '{"a":1,"b":"ü"}'), ("(indent=1)", '{\n "b": "ü",\n "a": 1\n}')])
def test_tojson_accepts_the_arguments_that_transformers_accepts(tmp_path: Path, style: str, shown: str) -> None:
    (tmp_path / "tools.jinja").write_text("{{ tools | tojson" + style + " if tools }}{{ messages[0].content }}")
    template = chat_template(str(tmp_path / "tools.jinja"))
    assert template.render(CONVERSATION[1:2], tools={"b": "ü", "a": 1}) == f"{shown}Hi"                  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{% if %}", "{{ raise_exception('no such role') if messages }}", "You are kind.",
                                  "{{ messages.__class__.__mro__ }}"])
def test_a_wrong_template_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        template_file(tmp_path, text)


def test_a_template_that_rewrites_earlier_turns_has_no_parts(tmp_path: Path) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}")
    template = chat_template(str(tmp_path / "last.jinja"))
    with pytest.raises(UserError, match=r"messages\[2\]"):
        template.parts(CONVERSATION)


PROMPT = "{% if add_generation_prompt %}{{ 'PROMPT' }}{% endif %}"
ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"


def turns(user: str, answer: str, prompt: str = "", before: str = "", after: str = "") -> str:
    """Returns a template made of the jinja2 expressions for a user's turn, an answer and a prompt."""
    return (before + "{% for m in messages %}" + ALTERNATE + "{% if m.role == 'user' %}{{ " + user + " }}{% else %}{{ " + answer
            + " }}{% endif %}{% endfor %}" + (PROMPT.replace("'PROMPT'", prompt) if prompt else "") + after)


# a case has the template, its stop strings, and the trained answers
FAMILIES: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "llama 3": (turns("'<|s|>user<|h|>\\n\\n' + m.content | trim + '<|eot|>'",
                      "'<|s|>assistant<|h|>\\n\\n' + m.content | trim + '<|eot|>'", "'<|s|>assistant<|h|>\\n\\n'"),
                ("<|eot|>",), ["yes<|eot|>", "no<|eot|>"]),
    "gemma": (turns("'<turn>user\\n' + m.content | trim + '<end>\\n'", "'<turn>model\\n' + m.content | trim + '<end>\\n'",
                    "'<turn>model\\n'", before="{{ bos_token }}"), ("<end>",), ["yes<end>\n", "no<end>\n"]),
    "a system prompt of its own": (turns("'<s>user\\n' + m.content + '<e>\\n'", "'<s>assistant\\n' + m.content + '<e>\\n'",
                                         "'<s>assistant\\n'", before="{{ '<s>system\\nBe kind.<e>\\n' }}"),
                                   ("<e>",), ["yes<e>\n", "no<e>\n"]),
    "mistral 1": (turns("'[INST] ' + m.content + ' [/INST]'", "m.content + eos_token + ' '"), (), [f"yes{END}", f"no{END}"]),
    "mistral 3": (turns("'[INST] ' + m.content + '[/INST]'", "' ' + m.content + eos_token"), (), [f" yes{END}", f" no{END}"]),
    "llama 2": (turns("bos_token + '[INST] ' + m.content + ' [/INST]'", "' ' + m.content + ' ' + eos_token"),
                (), [f" yes {END}", f" no {END}"]),
    "zephyr": (turns("'<|user|>\\n' + m.content + eos_token + '\\n'", "'<|assistant|>\\n' + m.content + eos_token + '\\n'",
                     "'<|assistant|>\\n'"), (), [f"yes{END}", f"no{END}"]),
    "phi 3": (turns("'<|user|>\\n' + m.content + '<|end|>\\n'", "'<|assistant|>\\n' + m.content + '<|end|>\\n'",
                    "'<|assistant|>\\n'", after="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"),
              ("<|end|>",), ["yes<|end|>\n", f"no<|end|>\n{END}"]),
    "deepseek": (turns("'User: ' + m.content + '\\n\\n'", "'Assistant: ' + m.content + eos_token", "'Assistant:'"),
                 (), [f" yes{END}", f" no{END}"]),
    "command r": (turns("'<s><user>' + m.content.strip() + '<e>'", "'<s><bot>' + m.content.strip() + '<e>'", "'<s><bot>'"),
                  ("<e>",), ["yes<e>", "no<e>"]),
    "an end between turns": (turns("'@user\\n' + m.content", "'@assistant\\n' + m.content", "'@end\\n@assistant\\n'").replace(
        "{% endfor %}", "{% if not loop.last %}{{ '@end\\n' }}{% endif %}{% endfor %}"), ("@end",), ["yes@end\n", "no"]),
    "a prompt always": (turns("'@user\\n' + m.content + '@end\\n'", "'@assistant\\n' + m.content + '@end\\n'",
                              after="{{ '@assistant\\n' }}"), ("@end",), ["yes@end\n", "no@end\n"]),
    "blank lines": (turns("'Q: ' + m.content + '\\n\\n'", "'A: ' + m.content + '\\n\\n'", "'A:'"),
                    ("\n\nQ:",), [" yes\n\n", " no\n\n"]),
    "no end": (turns("'<user>' + m.content", "'<assistant>' + m.content", "'<assistant>'"), ("<user>",), ["yes", "no"]),
    "no end, after something": (turns("'<|user|>' + m.content", "'<|bot|>' + m.content", "'<|bot|>'", before="[sop]"),
                                ("<|user|>",), ["yes", "no"]),
    "a prompt always, after a system prompt": (
        turns("'@user\\n' + m.content + '@end\\n'", "'@assistant\\n' + m.content + '@end\\n'",
              before="{{ '<bos>@system\\nBe kind.@end\\n' }}", after="{{ '@assistant\\n' }}"),
        ("@end",), ["yes@end\n", "no@end\n"]),
    "an end of the whole text": (
        turns("'<|user|>' + m.content + '<|end|>\\n'", "'<|assistant|>' + m.content + '<|end|>\\n'", "'<|assistant|>'",
              before="{{ '<bos>\\n' }}", after="{% if not add_generation_prompt %}{{ '<last>' }}{% endif %}"),
        ("<|end|>",), ["yes<|end|>", "no<|end|>\n<last>"]),
    "lines": (turns("'User: ' + m.content", "'Assistant: ' + m.content", "'\\nAssistant:'").replace(
        "{% if m.role ==", "{% if not loop.first %}{{ '\n' }}{% endif %}{% if m.role =="), ("\nUser:",), [" yes", " no"]),
    "another end at the end": (
        turns("'<s>user<m>' + m.content + '<e>'",
              "'<s>bot<m>' + m.content + ('<r>' if loop.last and not add_generation_prompt else '<e>')", "'<s>bot'"),
        ("<e>", "<r>"), ["<m>yes<e>", "<m>no<r>"]),
    "a system prompt demanded": ("{{ messages[0].content if messages[0].role == 'system' else raise_exception('no system') }}"
                                 "{% for m in messages[1:] %}{{ '<' + m.role + '>' + m.content + '<e>' }}{% endfor %}" +
                                 PROMPT.replace("PROMPT", "<assistant>"), ("<e>",), ["yes<e>", "no<e>"]),
}
TWO = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"},
       {"role": "user", "content": "b"}, {"role": "assistant", "content": "no"}]


def template_file(folder: Path, text: str) -> ChatTemplate:
    (folder / "t.jinja").write_text(text, encoding="utf-8")
    return chat_template(str(folder / "t.jinja"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_an_answer_is_found(family: str) -> None:


    """The string that ends an answer is a stop string, and is trained on.

    A prompt is a prefix of the text in which its answer is trained on.
    """
    text, stop, answers = FAMILIES[family]
    template = JinjaTemplate(text, family)
    system = [{"role": "system", "content": "Be kind."}] if "no system" in text else []
    parts = template.parts([*system, *TWO])
    assert template.stop == stop
    assert [part for part, learnt in parts if learnt] == answers
    whole = "".join(part for part, _ in parts)
    assert whole == template.render([*system, *TWO], add_generation_prompt=False)
    for i in (1, 3):
        prompt = template.render([*system, *TWO[:i]])
        assert whole.startswith(prompt + answers[i // 2])


TEXTS = st.text("ab \n<|>@[]:", max_size=6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=3))
def test_parts_are_the_text_and_follow_their_prompts(conversation: list[tuple[str, str, bool]]) -> None:
    messages: list[dict[str, Any]] = []
    for question, answer, weight in conversation:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "weight": int(weight)}]
    for template in _families():
        prompts = [template.render(messages[:i]) for i in range(1, len(messages), 2)]
        text = ""
        for part, learnt in template.parts(messages):
            assert not learnt or text in prompts
            text += part
        assert text == template.render(messages, add_generation_prompt=False)


@cache
def _families() -> list[ChatTemplate]:
    return [JinjaTemplate(text, name) for name, (text, _, _) in FAMILIES.items() if "no system" not in text]


QWEN = """{% set ns = namespace(asked=0) %}
{% for m in messages if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endfor %}
{% set at = namespace(n=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set at.n = at.n + 1 %}{{ '<s>user\n' + m.content + '<e>\n' }}{% else %}
{{ '<s>assistant\n' }}
{%- if at.n == ns.asked %}{{ '<think>\n' + m.reasoning_content | default('') + '\n</think>\n\n' }}{% endif %}
{{- m.content + '<e>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{% endif %}"""


def test_a_template_that_removes_thoughts_from_earlier_answers(tmp_path: Path) -> None:
    """The last answer follows its prompt, with reasoning if the answer has some; an earlier answer does not."""
    template = template_file(tmp_path, QWEN)
    thought = {**TWO[1], "reasoning_content": "2 + 2"}
    assert template.stop == ("<e>",)
    for messages, learnt in ((TWO[:2], "yes<e>\n"), ([TWO[0], thought], "<think>\n2 + 2\n</think>\n\nyes<e>\n"),
                             ([TWO[0], {**thought, "weight": 0}, *TWO[2:]], "no<e>\n")):
        parts = template.parts(messages)
        assert [part for part, is_learnt in parts if is_learnt] == [learnt]
    with pytest.raises(UserError, match=r"messages\[1\].*weight"):
        template.parts([TWO[0], thought, *TWO[2:]])


def test_a_template_that_moves_the_system_prompt_with_the_turns_is_refused(tmp_path: Path) -> None:
    text = turns("'[INST] ' + (s + ' ' if loop.last else '') + m.content + '[/INST]'", "m.content + eos_token").replace(
        "messages %}", "messages[1:] %}").replace("{% for", "{% set s = messages[0].content %}{% for")
    with pytest.raises(UserError, match=r"messages\[2\]"):
        template_file(tmp_path, text).parts([{"role": "system", "content": "Be kind."}, *TWO])


def test_eos_token_is_the_id_end_of_text_and_nobody_can_write_it() -> None:
    tokenizer = ByteTokenizer()
    assert encode(tokenizer, ["a", f"b{END}c{END}", END, ""]) == [[97], [98, 0, 99, 0], [0], []]
    assert len(END) > 30


CALLS = """{% for m in messages %}{% if m.tool_calls is defined %}{{ 'calls ' + m.tool_calls | tojson }}{% else %}
{{ m.content }}{% endif %}{% for key in m if key not in ('role', 'content', 'tool_calls') %}{{ ' ' + key }}{% endfor %}
{{ '\n' }}{% endfor %}{% if tools is not none %}{{ 'tools' }}{% endif %}"""


@pytest.mark.parametrize("empty", [None, [], "", {}], ids=repr)
def test_an_empty_field_equals_a_missing_field(tmp_path: Path, empty: Any) -> None:
    template = template_file(tmp_path, CALLS)
    for field in ("tool_calls", "function_call", "name", "refusal", "audio", "annotations", "tool_call_id",
                  "reasoning_content"):
        assert template.render([{**message, field: empty} for message in TWO], tools=[]) == "a\nyes\nb\nno\n", field


def test_openai_s_older_calls_are_calls(tmp_path: Path) -> None:
    template = template_file(tmp_path, CALLS)
    call = {"name": "f", "arguments": "{\"x\": 1}"}
    old = [TWO[0], {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "content": "3"}]
    calls = [{"type": "function", "function": call}]
    new = [TWO[0], {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "3"}]
    assert template.render(old) == template.render(new)
    assert "calls" in template.render(new)


def test_an_answer_without_content_is_its_refusal_or_nothing() -> None:
    parts = [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "."}]
    for message, content in (({"content": None}, ""), ({"content": None, "refusal": "No."}, "No."),
                             ({"content": parts}, "No\n."), ({"reasoning_content": "Hm."}, "")):
        assert check_messages([{"role": "assistant", **message}])[0]["content"] == content


def test_reasoning_is_another_name_of_reasoning_content() -> None:
    """If a message has both fields, as some clients send them, reasoning_content is used."""
    template = chat_template("g1")
    expected = template.render([TWO[0], {**TWO[1], "reasoning_content": "2 + 2"}, TWO[0]])
    for fields in ({"reasoning": "2 + 2"}, {"reasoning": "2 + 2", "reasoning_content": None},
                   {"reasoning": "other", "reasoning_content": "2 + 2"}):
        assert template.render([TWO[0], {**TWO[1], **fields}, TWO[0]]) == expected
    assert template.render([{**TWO[0], "reasoning": "x"}]) == template.render([TWO[0]])
    assert template.render([TWO[0], {**TWO[1], "reasoning": None}]) == template.render(TWO[:2])


@pytest.mark.parametrize(("fields", "learnt"), [
    ({}, True), ({"weight": 0}, False), ({"weight": 0.0}, False), ({"weight": 1}, True), ({"weight": None}, True),
    ({"train": False}, False), ({"training": False}, False), ({"trainable": 0}, False), ({"loss": False}, False),
    ({"loss": True}, True), ({"masked": True}, False), ({"masked": False}, True), ({"weight": 1, "train": False}, False)])
@pytest.mark.parametrize("name", ["world", "chatml"])
def test_an_answer_that_is_not_learnt_is_context(name: str, chatml: str, fields: dict[str, Any], learnt: bool) -> None:
    template = chat_template(chatml if name == "chatml" else name)
    conversation = [*CONVERSATION[:2], CONVERSATION[2] | fields, *CONVERSATION[3:]]
    parts = template.parts(conversation)
    assert "".join(text for text, _ in parts) == template.render(CONVERSATION, False)
    assert sum(is_learnt for _, is_learnt in parts) == 1 + learnt
    assert parts[-1][1]


@pytest.mark.parametrize(("message", "field"), [
    ({"role": "assistant", "weight": 0.5}, "weight"), ({"role": "assistant", "weight": 2}, "weight"),
    ({"role": "assistant", "loss": "no"}, "loss"), ({"role": "user", "train": True}, "train"),
    ({"role": "assistant", "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail")])
def test_a_fractional_weight_or_a_partial_answer_is_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=rf"messages\[0\]\.{field}"):
        is_learnt(message, "messages[0]")
    assert chat_template("world").render([{"content": "a", **message}])              # rendering ignores these fields


@pytest.mark.parametrize(("messages", "field"), [
    ("Hi", "messages must be a list"), ([], "messages must be a list"), (["Hi"], r"messages\[0\] must be an object"),
    ([{"content": "Hi"}], r"messages\[0\]\.role must be one of system, user, assistant, tool; got null"),
    ([*CONVERSATION[:1], {"role": "human", "content": "Hi"}], r"messages\[1\]\.role"),
    ([{"role": ["user"], "content": "Hi"}], r"messages\[0\]\.role"),
    ([{"role": "user", "content": None}], r"messages\[0\]\.content must be a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\] must be text; got an image"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], r"messages\[0\]\.tool_calls"),
    ([{"role": "user", "content": "Hi", "reasoning_content": "?"}], r"messages\[0\]\.reasoning_content"),
    ([{"role": "assistant", "content": "Hi", "reasoning": ["?"]}], r"messages\[0\]\.reasoning must be a string"),
])
def test_a_wrong_message_is_named(messages: object, field: str) -> None:
    with pytest.raises(UserError, match=field):
        chat_template("world").render(messages)                          # type: ignore[arg-type]


def test_other_names_are_refused() -> None:
    with pytest.raises(UserError):
        chat_template("chatgpt")


THOUGHT: list[dict[str, Any]] = [
    {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "T"},
    {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}]
SWITCHED = ("{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
        "{% elif m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ '<think>\n' if enable_thinking else '<think></think>' }}{% endif %}")


@pytest.mark.parametrize("name", ["g1", "flower", "switched"])
@pytest.mark.parametrize(("think", "conversation"), [(True, THOUGHT[:2]), ("fake", THOUGHT[2:])])
def test_an_answer_is_learnt_after_the_prompt_of_a_chat(tmp_path: Path, name: str, think: Think,
                                                        conversation: list[dict[str, Any]]) -> None:
    (tmp_path / "switched.jinja").write_text(SWITCHED)
    template = chat_template(str(tmp_path / "switched.jinja") if name == "switched" else name).for_learning(think)
    parts = template.parts(conversation)
    assert "".join(text for text, learnt in parts if not learnt) == template.render(conversation[:1], think=think)
    start = template.answer_start(think)
    assert answer_message(start, parts[-1][0].partition("✿")[0].replace(END, "")) == conversation[1]


def test_what_is_learnt_of_a_conversation_with_and_without_thoughts() -> None:
    """An earlier answer is rendered as in later turns of a chat, so without empty reasoning."""
    def learnt(think: Think) -> list[str]:
        return [text for text, is_learnt in chat_template("g1").for_learning(think).parts(THOUGHT) if is_learnt]

    assert learnt(False) == [" <think>\nT\n</think>\nA\n\n", " B\n\n"]
    assert learnt(True) == [">\nT\n</think>\nA\n\n", " B\n\n"]
    assert learnt("fake") == [" <think>\nT\n</think>\nA\n\n", ">\nB\n\n"]
    earlier = [*THOUGHT[2:], *THOUGHT[2:]]
    whole = "".join(text for text, _ in chat_template("g1").for_learning("fake").parts(earlier))
    assert whole.startswith(chat_template("g1").render(earlier[:3], think="fake"))
    definitions = {chat_template("g1").for_learning(think).definition for think in (False, True, "fake")}
    assert len(definitions) == 3, "tokens made for one setting must not be used for another"


def test_a_template_without_reasoning_cannot_train_it() -> None:
    with pytest.raises(UserError):
        chat_template("world").for_learning(True)
    with pytest.raises(UserError):
        template_of(DataConfig(name="chat", think="fake"))
    assert template_of(DataConfig(name="chat", template="g1", think="fake")).learns == "fake"


def test_a_template_that_changes_its_format_with_tools(tmp_path: Path) -> None:
    """Each rendering has its own stop string, results are objects, and reasoning is requested by rwkv-rs's variable."""
    (tmp_path / "two.jinja").write_text(
        "{% for m in messages %}{% if tools %}\n### {{ m.role }}\n"
        "{{ m.rwkv_json_content.sky if m.role == 'tool' else m.content }}{% else %}{{ m.role }}: {{ m.content }}\n\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}A: {{ '<think' if rwkv_generation_prompt == 'open_think' else "
        "'<think></think' }}{% endif %}")
    template = chat_template(str(tmp_path / "two.jinja"))
    assert template.stop == ("\n\nuser:", "### user")
    assert [template.answer_start(think) for think in (False, True, "fake")] == ["<think></think", "<think", "<think></think"]
    conversation = [{"role": "user", "content": "?"}, {"role": "tool", "content": '{"sky": "rain"}'}]
    assert "### tool\nrain" in template.render(conversation, False, tools=[{"name": "f"}])
