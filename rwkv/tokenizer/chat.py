r"""Conversations as text: the templates that training data, the server and the chat share.

A conversation is a list of messages, {"role": "user", "content": "..."}; the roles are system, user, assistant and tool.

world: the form of the RWKV World models (the model card of BlinkDL/rwkv-7-world on Hugging Face, and API_DEMO_CHAT.py of
ChatRWKV). A blank line ends a turn, therefore blank lines inside a message become single line ends:

    System: {system}\n\nUser: {user}\n\nAssistant: {answer}\n\nUser: {user}\n\nAssistant:

g1: the same with thoughts, as in the model card of BlinkDL/rwkv7-g1: an answer is "<think>\n{thoughts}\n</think>\n{answer}"
where its message has "reasoning_content", and a prompt that asks for thoughts ends in "Assistant: <think".

FILE: a jinja2 file with the conventions of the transformers library (apply_chat_template). It is rendered in a sandbox.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rwkv.errors import UserError
from rwkv.io.utf8 import read_text

ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
THINK = "<think"                         # without ">", as in the model card: the model writes the rest
_G1 = re.compile(r"(?<![a-z0-9])g[01][a-z]?\d*(?![a-z0-9])")

Message = Mapping[str, Any]
Part = tuple[str, bool]


class ChatTemplate(ABC):
    """Renders conversations.

    stop: texts of which each ends an answer; the end-of-text token ends it too. supports_tools: render() shows `tools` and an
    answer's tool_calls to the model. call_start: what a call of a tool begins with, before its name and between that and its
    arguments; None where the template's form of calls is not that of rwkv/serving/tools.py. definition: equal where templates
    are.
    """

    name: str
    definition: str
    stop: tuple[str, ...]
    supports_tools: bool = False
    call_start: tuple[str, str] | None = None

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False) -> str:
        """The conversation as text, with the beginning of an answer if add_generation_prompt.

        think: that beginning asks for thoughts. Raises UserError, with the field's name, for a message that is not one, and for
        what the template cannot show.
        """

    @abstractmethod
    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        """The pieces of render(messages, add_generation_prompt=False, tools), and of each whether a model learns it.

        Learnt are the assistant's answers with what ends them. Raises UserError as render does.
        """

    def answer_start(self, think: bool = False) -> str:
        """What the prompt of render(..., think=think) already holds of the answer."""
        return ""


def chat_template(name: str) -> ChatTemplate:
    """The template world or g1, or that of a jinja2 file. Raises UserError for other names and for a file that is not one."""
    if name in ("world", "g1"):
        return TurnTemplate(name)
    if not Path(name).is_file():
        raise UserError(f"a chat template is world, g1 or a jinja2 file; there is no file {name}")
    return JinjaTemplate(read_text(Path(name), f"the chat template {name}"), name)


def default_template(*names: str | None) -> str:
    """The template's name for a checkpoint, by the name of its file and others that it has: g1 for rwkv7-g1b, else world."""
    return "g1" if any(_G1.search(Path(name).name.lower()) for name in names if name) else "world"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages, each with a string as its content. Raises UserError with the field's name, as messages[1].content.

    The content may be a list of {"type": "text", "text": "..."}, as in OpenAI's interface, and may be missing beside
    tool_calls.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError("messages is a list of at least one message, such as {\"role\": \"user\", \"content\": \"...\"}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is an object with role and content; got {_shown(message)}")
    role = "system" if message.get("role") == "developer" else message.get("role")       # OpenAI's newer name
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}.role is one of {', '.join(ROLES)}; got {_shown(role)}")
    for field in ("tool_calls", "reasoning_content"):
        if message.get(field) and message["role"] != "assistant":
            raise UserError(f"{where}.{field} belongs to the assistant; the role is {message['role']}")
    if not isinstance(message.get("reasoning_content") or "", str):
        raise UserError(f"{where}.reasoning_content is a string; got {_shown(message['reasoning_content'])}")
    calls = {"tool_calls": _tool_calls(message, where)} if message.get("tool_calls") else {}
    return {**message, "role": role, "content": _content(message, where), **calls}


def _tool_calls(message: Message, where: str) -> list[dict[str, Any]]:
    """The calls with objects as arguments, which templates expect; OpenAI's interface has them as JSON in a string."""
    if not isinstance(message["tool_calls"], list):
        raise UserError(f"{where}.tool_calls is a list; got {_shown(message['tool_calls'])}")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f'{where} is a call, {{"type": "function", "function": {{"name": "...", "arguments": "{{}}"}}}}; got '
                        f"{_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise UserError(f"{where}.function.arguments is a JSON object; got {_shown(arguments)}")
    known = {**function, "arguments": arguments or {}}
    return {**call, "function": known} if "function" in call else known


def _read_arguments(written: str) -> Mapping[str, Any] | None:
    """The arguments that a model wrote. What is no JSON object becomes the only argument, and the conversation can go on."""
    with suppress(ValueError, RecursionError):
        arguments = json.loads(written or "{}")
        if arguments is None or isinstance(arguments, Mapping):
            return arguments
    return {"arguments": written}


def _content(message: Message, where: str) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}.content is a string, or a list of texts; got {_shown(content)}")
    for i, item in enumerate(content):
        if not (isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str)):
            raise UserError(f'{where}.content[{i}] is a text, {{"type": "text", "text": "..."}}; got {_shown(item)}')
    return "".join(item["text"] for item in content)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)[:60]


class TurnTemplate(ChatTemplate):
    """world and g1: a turn is "Role: text" and a blank line."""

    def __init__(self, name: str) -> None:
        self.name = self.definition = name
        self.thinks = name == "g1"
        self.stop = ("\n\nUser:",) if self.thinks else ("\n\n",)         # thoughts may hold blank lines

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False) -> str:
        text = "".join(piece for piece, _ in self.parts(messages, tools))
        return f"{text}Assistant:{self._thought(think)}" if add_generation_prompt else text

    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        if tools:
            raise UserError(f"tools: the chat template {self.name} has no form for tools; use a jinja2 file that has one")
        found: list[Part] = []
        for i, message in enumerate(check_messages(messages)):
            if message.get("tool_calls"):
                raise UserError(f"messages[{i}].tool_calls: the chat template {self.name} has no form for them; use a jinja2 "
                                "file that has one")
            body = f" {self._body(message)}\n\n"
            found += [(f"{ROLES[message['role']]}:", False), (body, message["role"] == "assistant")]
        return found

    def answer_start(self, think: bool = False) -> str:
        return self._thought(think).lstrip()

    def _thought(self, think: bool) -> str:
        if think and not self.thinks:
            raise UserError(f"think: the chat template {self.name} has no thoughts; g1 has")
        return f" {THINK}" if think else ""

    def _body(self, message: Message) -> str:
        thoughts = message.get("reasoning_content") if self.thinks else None
        answer = _one_paragraph(message["content"])
        return f"<think>\n{_one_paragraph(thoughts)}\n</think>\n{answer}" if thoughts else answer


def _one_paragraph(text: str) -> str:
    """`text` without blank lines, and without white space around it."""
    return re.sub(r"\n(?:[ \t]*\n)+", "\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


class JinjaTemplate(ChatTemplate):
    """A template in jinja2 with the variables messages, add_generation_prompt, tools, bos_token and eos_token, and with
    enable_thinking for `think`.

    bos_token and eos_token are empty: the data and the sampler put the end-of-text token where a conversation ends.
    """

    def __init__(self, text: str, name: str) -> None:
        from jinja2 import TemplateError

        self.name, self.definition = name, text
        self.supports_tools = bool(re.search(r"\btools\b", text))
        try:
            self._template = _sandbox().from_string(text)
        except TemplateError as error:
            raise UserError(f"the chat template {name} is not a jinja2 template: {error}") from None
        if not re.search(r"\bmessages\b", text):
            raise UserError(f"the chat template {name} does not use `messages`, so the model would not see the conversation: "
                            "is it a jinja2 template?")
        self.stop = self._find_stop()
        self.call_start = self._find_call_start() if self.supports_tools else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False) -> str:
        if tools and not self.supports_tools:
            raise UserError(f"tools: the chat template {self.name} has no form for tools")
        return self._render(check_messages(messages), add_generation_prompt, tools, think)

    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        """An answer is what the template adds to the prompt that stands before it."""
        messages = check_messages(messages)
        whole = self.render(messages, False, tools)
        found: list[Part] = []
        done = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:i], True, tools), self._render(messages[:i + 1], False, tools)
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= done):
                raise UserError(f"messages[{i}]: the chat template {self.name} does not write this answer after the prompt for "
                                "it; what a model is to learn is found only where later messages leave earlier ones alone")
            found += [(whole[done:len(before)], False), (after[len(before):], True)]
            done = len(after)
        return [part for part in [*found, (whole[done:], False)] if part[0]]

    def _render(self, messages: Sequence[Message], prompt: bool, tools: Any, think: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, tools=tools, bos_token="",
                                         eos_token="", enable_thinking=think)
        except (TemplateError, TypeError, ValueError) as error:              # the template's own raise_exception is one
            raise UserError(f"the chat template {self.name} refuses the conversation: {error}") from None

    def _find_stop(self) -> tuple[str, ...]:
        """What the template writes after an answer."""
        answer = "An answer that no template contains."
        text = self._render([{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}], False, None)
        after = text.partition(answer)[2]
        return (after.strip() or after,) if after else ()

    def _find_call_start(self) -> tuple[str, str] | None:
        call = {"type": "function", "function": {"name": "a_name", "arguments": {"a_key": "a value"}}}
        tool = {"type": "function", "function": {"name": "a_name", "description": "A tool.", "parameters": {}}}
        messages: list[Message] = [{"role": "user", "content": "A question."},
                                   {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **call}]}]
        try:
            text = self._render(messages, False, [tool])
        except UserError:
            return None
        found = re.search(r'(<tool_call>\s*\{"name":\s*")a_name(",\s*"arguments":\s*)\{"a_key":\s*"a value"\}\}\s*</tool_call>',
                          text)
        return (found[1], found[2]) if found else None


def _sandbox() -> Any:
    """transformers' environment: its functions, its whitespace, and a tojson that leaves letters and quotes as they are."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, indent: int | str | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().astimezone().strftime(format)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_generation_block(), "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _generation_block() -> type:
    """{% generation %}, with which some templates mark answers; its content is rendered as it is."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = {"generation"}                                    # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock
