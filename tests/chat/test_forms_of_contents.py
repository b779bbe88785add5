"""Tests of jinja2 templates that read `content` as parts or under other names, without losing text.

Templates that never end are refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rwkv.chat import sandbox
from rwkv.chat.encoding import for_tokenizer, visible_text
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import check_messages
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer

CONVERSATION: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Which?"},
                                      {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "And now?"}]
TEXT = "<system>Be kind.@end\n<user>Which?@end\n<assistant>Blue.@end\n<user>And now?@end\n"
LOOP = ("{% for m in messages %}<{{ m.role }}>CONTENT@end\n{{ '' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("content", [
    "{{ m.content }}", PARTS, "{{ m.content[0].text }}", "{{ m['content'][0]['text'] | trim }}",
    "{{ m.content | map(attribute='text') | join }}",
    "{{ (m.content | selectattr('type', 'equalto', 'text') | list)[0].text }}",
    f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PARTS}{{% endif %}}",
    f"{{% if m.role == 'user' %}}{PARTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}",
    f"{{% if m.role == 'assistant' %}}{PARTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}",
    f"{{% if m.role == 'system' %}}{PARTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}"])
def test_no_text_is_lost(content: str) -> None:
    template = JinjaTemplate(LOOP.replace("CONTENT", content), "t.jinja")
    assert template.render(CONVERSATION) == f"{TEXT}<assistant>"
    assert visible_text(for_tokenizer(template, ByteTokenizer()).render(CONVERSATION)) == f"{TEXT}<assistant>"
    assert [part for part, learnt in template.parts(CONVERSATION[:3]) if learnt] == ["Blue.@end\n"]
    assert template.stop == ("@end",)


@pytest.mark.parametrize("content", ["{{ m.value }}", "{{ m.text }}", "{{ m['from'] }}: {{ m['value'] }}", "", "{{ m.role }}",
                                     "{% for p in m.content %}{{ p.value }}{% endfor %}"])
def test_a_template_that_reads_other_fields_is_refused(content: str) -> None:
    with pytest.raises(UserError, match="content"):
        JinjaTemplate(LOOP.replace("CONTENT", content), "t.jinja")


@pytest.mark.parametrize(("role", "conversation"), [
    ("system", CONVERSATION), ("assistant", CONVERSATION[1:]),
    ("tool", [CONVERSATION[1], {"role": "tool", "content": "rain"}])])
def test_text_of_a_role_that_the_template_omits_is_refused(role: str, conversation: list[dict[str, Any]]) -> None:
    text = LOOP.replace("CONTENT", f"{{% if m.role != '{role}' %}}{{{{ m.content }}}}{{% endif %}}")
    template = JinjaTemplate(text, "t.jinja")
    assert "Which?" in template.render(CONVERSATION[1:2])
    with pytest.raises(UserError, match=rf"messages\[\d\].*{role}"):
        template.render(conversation)


def tool_use_files(folder: Path) -> list[Path]:
    default = LOOP.replace("CONTENT", "{{ m.content }}")
    tools = "{% if tools %}<tools>{{ tools | tojson }}{% endif %}" + default
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": default},
                                                    {"name": "tool_use", "template": tools}]}))
    alone = folder / "chat_template.jinja"
    alone.write_text(default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    return [config, alone]


def test_the_template_named_tool_use_shows_tools(tmp_path: Path) -> None:
    for file in tool_use_files(tmp_path):
        template = chat_template(str(file))
        assert template.supports_tools
        assert template.render(CONVERSATION) == f"{TEXT}<assistant>"
        assert template.render(CONVERSATION, tools=[{"name": "f"}]) == f'<tools>[{{"name": "f"}}]{TEXT}<assistant>'
        assert "<tools>" in "".join(part for part, _ in template.parts(CONVERSATION[:3], [{"name": "f"}]))
        assert template.definition != JinjaTemplate(LOOP.replace("CONTENT", "{{ m.content }}"), "t.jinja").definition


def test_arguments_with_half_a_surrogate_pair_can_be_shown() -> None:
    for arguments in (r'{"a": "\ud800", "\udfff": ["x\ud83d"]}', {"a": "\ud800", "\udfff": ["x\ud83d"]}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message, = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd", "\ufffd": ["x\ufffd"]}
        chat_template("g1").render([{"role": "user", "content": "a"}, message]).encode()


GROWING = "{% set n = namespace(s=START) %}{% for i in range(64) %}{% set n.s = MORE %}{% endfor %}{{ n.s }}"


@pytest.mark.parametrize("text", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 10 ** 10 }}", "{{ (2 ** 9000) ** 9000 }}", "{{ 'a' | center(10 ** 9) }}", "{{ 'a'.ljust(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '{:>1000000000}'.format(1) }}", "{{ [1] | tojson(indent=10 ** 9) }}",
    GROWING.replace("START", "'aaaa'").replace("MORE", "n.s ~ n.s"),
    GROWING.replace("START", "[1]").replace("MORE", "n.s + n.s"),
    GROWING.replace("START", "'a'").replace("MORE", "[n.s, n.s]"), GROWING.replace("START", "3").replace("MORE", "n.s * n.s"),
    "{% set s = 'a' * 1000000 %}{{ s.join(range(99999)) }}", "{% set s = 'a' * 1000000 %}{{ range(99999) | join(s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{{ range(99999) | map('string') | map('center', 9000) | list | length }}"])
def test_a_template_takes_bounded_time_and_memory(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(UserError, match="chat template"):
        JinjaTemplate(text + LOOP.replace("CONTENT", "{{ m.content }}"), "t.jinja")


def test_a_long_conversation_is_rendered() -> None:
    conversation = [{"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(2000)]
    assert len(JinjaTemplate(LOOP.replace("CONTENT", "{{ m.content | trim }}"), "t.jinja").render(conversation)) > 4_000_000
