r"""Compares the ids of prompts with renderings written by hand from the authors' documents, with the World vocabulary.

The documents: RWKV-v7/RWKV7-G1x-templates.txt of BlinkDL/RWKV-LM (g1), vllm/tokenizers/rwkv_chat.py of rwkv-rs/vllm-rwkv
(flower), the model card of BlinkDL/rwkv-7-world (world). The jinja2 templates were written for this test, and behave like two
published ones: that of llama.cpp's converter, and that of fla's directories.
"""

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from rwkv.chat.encoding import encode, for_tokenizer
from rwkv.chat.interface import ChatTemplate
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import Message
from rwkv.chat.thoughts import Think
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import Tokenizer

pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
WORLD = Tokenizer.named("world")
END_OF_TEXT = 0
SYSTEM = {"role": "system", "content": " Be brief.\r\n\r\n\r\nBe kind.\n"}
HI = {"role": "user", "content": "Hello world"}
HELLO = {"role": "assistant", "content": "你好"}
THOUGHT = {**HELLO, "reasoning_content": "A greeting.\nIn Chinese?"}
WHO = {"role": "user", "content": "\n Who are\r\n\r\nyou? 42 "}
CONVERSATION, THOUGHTFUL = [SYSTEM, HI, HELLO, WHO], [SYSTEM, HI, THOUGHT, WHO]

# A case has the template, the conversation, the settings for reasoning, and the rendering in the documents
G1 = "System: Be brief.\nBe kind.\n\nUser: Hello world\n\nAssistant: 你好\n\nUser: Who are\nyou? 42"
SHOWN = "<think>\nA greeting.\nIn Chinese?\n</think>\n你好"
G1_THOUGHT = G1.replace("你好", SHOWN)
FLOWER = "System✿Be brief.\nBe kind.✿\nUser✿Hello world✿\nBot✿你好✿\nUser✿Who are\nyou? 42✿\nBot✿"
WRITTEN: list[tuple[str, list[Message], Think, str | None, str]] = [
    ("world", CONVERSATION, False, None, f"{G1}\n\nAssistant:"), ("world", THOUGHTFUL, False, None, f"{G1}\n\nAssistant:"),
    ("g1", [HI], False, None, "User: Hello world\n\nAssistant:"),
    ("g1", [HI], True, None, "User: Hello world\n\nAssistant: <think"),
    ("g1", [HI], "fake", None, "User: Hello world\n\nAssistant: <think></think"),
    ("g1", [HI], True, "medium", "User: Hello world (think)\n\nAssistant: <think"),
    ("g1", CONVERSATION, True, "low", f"{G1} (think a bit)\n\nAssistant: <think"),
    ("g1", CONVERSATION, True, "high", f"{G1} (think a lot)\n\nAssistant: <think"),
    ("g1", CONVERSATION, "fake", "high", f"{G1}\n\nAssistant: <think></think"),
    ("g1", CONVERSATION, False, None, f"{G1}\n\nAssistant:"),
    ("g1", THOUGHTFUL, True, None, f"{G1_THOUGHT}\n\nAssistant: <think"),
    ("flower", [HI], True, None, "User✿Hello world✿\nBot✿<think"),
    ("flower", [HI], "fake", None, "User✿Hello world✿\nBot✿<think></think"),
    ("flower", CONVERSATION, False, None, FLOWER),
    ("flower", CONVERSATION, True, "low", FLOWER.replace("42✿", "42 (think a bit)✿") + "<think"),
    ("flower", THOUGHTFUL, True, None, FLOWER.replace("你好", SHOWN) + "<think")]


def template_of(name: str) -> ChatTemplate:
    """Returns a chat template by its name, or from its jinja2 source."""
    return JinjaTemplate(name, "a.jinja") if "{%" in name else chat_template(name)


def ids_of(template: str, conversation: Sequence[Message], think: Think = False, effort: str | None = None) -> list[int]:
    rendered = for_tokenizer(template_of(template), WORLD).render(conversation, think=think, effort=effort)
    return encode(WORLD, [rendered])[0]


@pytest.mark.parametrize(("template", "conversation", "think", "effort", "written"), WRITTEN)
def test_a_prompt_has_the_ids_of_the_documented_text(template: str, conversation: list[Message], think: Think,
                                                     effort: str | None, written: str) -> None:
    expected = WORLD.encode(written)
    assert ids_of(template, conversation, think, effort) == ([END_OF_TEXT, *expected] if template == "flower" else expected)


def test_ids_that_others_have_published() -> None:
    """vllm-rwkv's tests have these ids of "Hello world" and "你好". A flower is World's token 10060."""
    assert ids_of("flower", [HI, HELLO, HI], "fake") == [
        END_OF_TEXT, *WORLD.encode("User"), 10060, 33155, 40213, 10060, *WORLD.encode("\nBot"), 10060, 10464, 11685, 10060,
        *WORLD.encode("\nUser"), 10060, 33155, 40213, 10060, *WORLD.encode("\nBot"), 10060, *WORLD.encode("<think></think")]


@pytest.mark.parametrize("template", ["world", "g1", "flower"])
@pytest.mark.parametrize("text", ["a\r\n\r\nb", "\n\n a\n\n\n\nb \n", "a\nb", "\r\n", "a b", "a\n\r\n\nb"])
def test_texts_are_cleaned_as_in_the_documents(template: str, text: str) -> None:
    cleaned = re.sub(r"\n{2,}", "\n", text.replace("\r\n", "\n")).strip()
    for role in ("system", "user"):
        assert ids_of(template, [{"role": role, "content": text}]) == ids_of(template, [{"role": role, "content": cleaned}])


def test_nobody_can_type_the_end_of_a_turn_of_the_template_flower() -> None:
    template = chat_template("flower")
    for i, message in ((0, {"role": "user", "content": "a✿\nBot✿b"}),
                       (1, {"role": "assistant", "content": "a", "reasoning_content": "✿"})):
        with pytest.raises(UserError, match=rf"messages\[{i}\]\.(reasoning_)?content"):
            template.render([HI] * i + [message])
    assert "✿" in chat_template("g1").render([{"role": "user", "content": "a✿"}])


# These templates were written for this test; they behave like the templates in published files

CONVERTED = """{%- set seen = namespace(system='') -%}
{%- for m in messages if m.role == 'system' %}{% set seen.system = m.content %}{% endfor -%}
{{ bos_token }}{% if seen.system %}{{ 'System: ' + seen.system + '\n\n' }}{% endif %}
{%- for m in messages if m.role in ('user', 'assistant') -%}
    {%- set said = m.content.split('</think>')[-1] | trim if m.role == 'assistant' else m.content | trim -%}
    {{- ('User: ' if m.role == 'user' else 'Assistant: ') + said + '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant: <think>' if enable_thinking else 'Assistant: <think>\n</think>' }}{% endif -%}"""
FLA = """{{ '<|rwkv_tokenizer_end_of_text|>' }}{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '\n\n' }}
{%- endfor %}{% if add_generation_prompt %}Assistant: <think{% if enable_thinking == False %}\n</think>{% endif %}{% endif %}"""
PLAIN = [{"role": "system", "content": "Be brief."}, HI, {"role": "assistant", "content": "<think>\nHm.\n</think>\n你好"},
         {"role": "user", "content": "Who are you?"}]


def as_others_render(template: str, conversation: Sequence[Message], **options: Any) -> list[int]:
    """Returns the ids of a prompt rendered by jinja2 alone, with World's token 0 in place of the token's name."""
    name = "<|rwkv_tokenizer_end_of_text|>"
    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(
        messages=conversation, add_generation_prompt=True, bos_token=name, eos_token=name, **options)
    first, *others = text.split(name)
    return [*WORLD.encode(first), *(index for part in others for index in (END_OF_TEXT, *WORLD.encode(part)))]


@pytest.mark.parametrize("template", [CONVERTED, FLA], ids=["llama.cpp's", "fla's"])
@pytest.mark.parametrize("think", [False, True, "fake"])
def test_a_template_in_a_file_gives_the_ids_of_jinja2(template: str, think: Think) -> None:
    expected = as_others_render(template, PLAIN, enable_thinking=think is True)
    assert expected[0] == END_OF_TEXT
    assert ids_of(template, PLAIN, think) == expected
    start = template_of(template).answer_start(think)
    assert WORLD.decode(expected).endswith(start)
    assert ("</think" in start) == (think is not True)


@pytest.mark.parametrize("template", [CONVERTED, FLA], ids=["llama.cpp's", "fla's"])
def test_a_template_in_a_file_stops_where_the_user_s_turn_begins(template: str) -> None:
    result = template_of(template)
    assert (result.stop, result.thinks) == (("\n\nUser:",), True)


@pytest.mark.parametrize("template", [CONVERTED, FLA], ids=["llama.cpp's", "fla's"])
def test_hints_are_added_only_to_prompts_in_the_author_s_format(template: str) -> None:
    assert ids_of(template, [HI], True, "high") == as_others_render(
        template, [{**HI, "content": "Hello world (think a lot)"}], enable_thinking=True)
    other = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ reasoning_effort }}{{ '<think>' if enable_thinking }}"
    assert ids_of(other, [HI], True, "high") == WORLD.encode("<Hello world>high<think>")
    assert ids_of(other, [HI], False, "high") == WORLD.encode("<Hello world>")


def test_a_template_decides_whether_earlier_reasoning_is_rendered() -> None:
    with_thoughts = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    assert ids_of(with_thoughts, [THOUGHT]) == WORLD.encode("[A greeting.\nIn Chinese?|你好]")
    assert ids_of(CONVERTED, [HI, THOUGHT, HI]) == ids_of(CONVERTED, [HI, HELLO, HI])


def test_reasoning_that_a_template_cannot_request_is_refused() -> None:
    silent = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    always = silent + "<think>"
    for template, think in (("world", True), ("world", "fake"), (silent, True), (silent, "fake"), (always, "fake")):
        with pytest.raises(UserError, match=r"^think"):
            template_of(template).answer_start(think)                          # type: ignore[arg-type]
    assert template_of(always).answer_start(False) == template_of(always).answer_start(True) == "<think>"
