r"""Defines the chat templates world, g1 and flower, and loads templates from files.

world is the format of the RWKV World models (the model card of BlinkDL/rwkv-7-world on Hugging Face, and API_DEMO_CHAT.py of
ChatRWKV). A blank line ends a turn, so blank lines inside a message become single newlines:

    System: {system}\n\nUser: {user}\n\nAssistant: {answer}\n\nUser: {user}\n\nAssistant:

g1 is the format of world, with thoughts (RWKV7-G1x-templates.txt in BlinkDL/RWKV-LM, RWKV-v7). If an answer's message has
"reasoning_content", the answer is "<think>\n{thoughts}\n</think>\n{answer}", in earlier turns too. thoughts.py describes how a
prompt asks for thoughts. Generated thoughts may contain blank lines, so an answer ends where the next user turn begins, not at
a blank line. Tools and calls have the format described in calls.py.

flower is a different format, for G1h and later models (vllm/tokenizers/rwkv_chat.py in rwkv-rs/vllm-rwkv). The character ✿, a
token of World, ends a turn, and end_of_text precedes the conversation. Contents, thoughts and tools are as in g1:

    System✿{system}✿\nUser✿{user}✿\nBot✿{answer}✿\nUser✿{user}✿\nBot✿<think

Any other name is the path of a file with a jinja2 template (jinja.py): a jinja2 file, or a checkpoint's file (metadata.py).
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rwkv.chat import calls
from rwkv.chat.interface import END, ChatTemplate, Part
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import ROLES, Message, Tools, check_messages, is_learnt
from rwkv.chat.metadata import special_tokens_for, template_in, tool_template_in
from rwkv.chat.thoughts import THOUGHT_STARTS, Think, thoughts_end, with_hint
from rwkv.config import require_path
from rwkv.errors import UserError
from rwkv.io import hub

FLOWER = "✿"


class Style(NamedTuple):
    """The format of a template.

    A turn consists of the role's name, after_role, space, the text and end. If the text is empty, space is omitted. `start`
    precedes the first turn, and `between` precedes every other turn. `assistant` is the name of the assistant's role. `thinks`
    and `stop` are as in ChatTemplate.
    """

    thinks: bool
    stop: tuple[str, ...]
    assistant: str = "Assistant"
    start: str = ""
    after_role: str = ":"
    space: str = " "
    end: str = "\n\n"
    between: str = ""


STYLES = {"world": Style(thinks=False, stop=("\n\n",)),
          "g1": Style(thinks=True, stop=("\n\nUser:",)),
          "flower": Style(thinks=True, stop=(FLOWER,), assistant="Bot", start=END, after_role=FLOWER, space="", end=FLOWER,
                          between="\n")}


def chat_template(name: str) -> ChatTemplate:
    """Returns the chat template world, g1 or flower, or loads a template from the file at the path `name`.

    The file may be a jinja2 file or a checkpoint's file that contains a template (rwkv/chat/metadata.py). Raises UserError for
    an unknown name and for a file without a template.
    """
    require_path("template", name)
    if name in STYLES:
        return TurnTemplate(name)
    file = hub.local(name, "chat template")
    if not file.is_file():
        raise UserError(f"a chat template must be {', '.join(STYLES)} or a jinja2 file, but there is no file at {name}")
    text = template_in(file)
    if text is None:
        raise UserError(f"{name} contains no chat template. Use a jinja2 file, or one of {', '.join(STYLES)}")
    return JinjaTemplate(text, name, tool_template_in(file), special_tokens_for(file))


class TurnTemplate(ChatTemplate):
    """Renders conversations in one of the formats world, g1 and flower, in which every turn is a role and a text."""

    def __init__(self, name: str) -> None:
        self.name = self.definition = name
        self._style = STYLES[name]
        self.thinks = self._style.thinks
        self.stop = self._style.stop
        self.supports_tools = name != "world"            # BlinkDL documents calls only for the G1 models
        if self.supports_tools:
            self.definition = f"{name}, {calls.REQUEST}"         # cached tokens of an older call format are not used
            self.call_start = f"{self._style.space}{calls.CALL_START[0]}", calls.CALL_START[1]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        messages = check_messages(messages)
        if effort and think is True:
            messages = with_hint(messages, effort)
        text = "".join(head + body for head, body, _ in self._turns(messages, tools))
        if not add_generation_prompt:
            return text
        style = self._style
        beginning = self.answer_start(think)
        return f"{text}{style.between}{style.assistant}{style.after_role}{style.space if beginning else ''}{beginning}"

    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        turns = [*self._turns(check_messages(messages), tools)]
        first = len(turns) - len(messages)       # 1 if the tools added a system turn
        parts: list[Part] = []
        for i, (head, body, message) in enumerate(turns):
            learnt = is_learnt(message, f"messages[{i - first}]")
            beginning, rest = self._split_beginning(message, body, last=i + 1 == len(turns)) if learnt else ("", body)
            parts += [(f"{head}{beginning}", False), (rest, learnt)]
        return parts

    def _split_beginning(self, message: Message, body: str, last: bool) -> tuple[str, str]:
        """Splits a learnt answer into the beginning that a prompt would contain, and the rest.

        `body` is all text after the role.
        """
        start = f"{self._style.space}{THOUGHT_STARTS[self.learns]}"
        if self.learns is True and message.get("reasoning_content"):
            return start, body.removeprefix(start)
        if self.learns == "fake" and last and not message.get("reasoning_content"):
            return start, f"{thoughts_end(start)}{body.removeprefix(self._style.space)}"
        return "", body

    def _turns(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, str, Message]]:
        """Yields (the text up to and including after_role, the rest of the turn, the message) for each turn."""
        style = self._style
        shown = messages
        if self.supports_tools:
            shown = calls.write_tools(messages, tools)
        elif tools:
            raise UserError(f"tools: {self.no_tools}")
        before = style.start
        for i, message in enumerate(shown, start=len(messages) - len(shown)):
            if message.get("tool_calls") and not self.supports_tools:
                raise UserError(f"messages[{i}].tool_calls: {self.no_tools}")
            field = next((field for field in ("content", "reasoning_content") if FLOWER in message.get(field, "")), None)
            if style.end == FLOWER and field:
                raise UserError(f"messages[{i}].{field} must not contain the character {FLOWER}, because a turn ends there in "
                                f"the chat template {self.name}. Remove the character, or use the template g1")
            role = style.assistant if message["role"] == "assistant" else ROLES[message["role"]]
            body = _one_paragraph(message["content"])
            if self.thinks and (thoughts := message.get("reasoning_content")):
                body = f"<think>\n{_one_paragraph(thoughts)}\n</think>\n{body}"
            yield f"{before}{role}{style.after_role}", f"{style.space if body else ''}{body}{style.end}", message
            before = style.between

    def answer_start(self, think: Think = False) -> str:
        if think and not self.thinks:
            raise UserError(f"think: the chat template {self.name} does not support reasoning. Use g1")
        return THOUGHT_STARTS[think]


def _one_paragraph(text: str) -> str:
    return re.sub(r"\n(?:[ \t]*\n)+", "\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip()
