r"""The chat templates by name: world, g1, flower, and those of jinja2 files.

world: the form of the RWKV World models (the model card of BlinkDL/rwkv-7-world on Hugging Face, and API_DEMO_CHAT.py of
ChatRWKV). A blank line ends a turn, so blank lines inside a message become single line ends:

    System: {system}\n\nUser: {user}\n\nAssistant: {answer}\n\nUser: {user}\n\nAssistant:

g1: the same with thoughts (RWKV7-G1x-templates.txt in BlinkDL/RWKV-LM, RWKV-v7). An answer is
"<think>\n{thoughts}\n</think>\n{answer}" if its message has "reasoning_content", in earlier turns too; thoughts.py says how a
prompt asks for thoughts. Thoughts may hold blank lines, so an answer ends where the user's next turn begins, and not at a blank
line. Tools have the form of calls.py.

flower: another form, for G1h and later models (vllm/tokenizers/rwkv_chat.py in rwkv-rs/vllm-rwkv). A flower, a
World token, ends a turn, and end_of_text precedes the text. Texts, thoughts and tools are as in g1:

    System✿{system}✿\nUser✿{user}✿\nBot✿{answer}✿\nUser✿{user}✿\nBot✿<think

FILE: a jinja2 template (jinja.py), in its own file or in one of a checkpoint's files (stated.py).
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rwkv.chat import calls
from rwkv.chat.jinja import JinjaTemplate
from rwkv.chat.messages import ROLES, Message, Tools, check_messages, is_learnt
from rwkv.chat.stated import template_in, tool_template_in
from rwkv.chat.template import END, ChatTemplate, Part
from rwkv.chat.thoughts import BEGUN, Think, thoughts_end, with_hint
from rwkv.errors import UserError
from rwkv.io import hub

FLOWER = "✿"


class Form(NamedTuple):
    """A turn is the role's name, after_role, space, the text and end; without text there is no `space`.

    start: before the first turn. between: before every other turn. assistant: the assistant's name. stop: as in ChatTemplate.
    """

    thinks: bool
    stop: tuple[str, ...]
    assistant: str = "Assistant"
    start: str = ""
    after_role: str = ":"
    space: str = " "
    end: str = "\n\n"
    between: str = ""


FORMS = {"world": Form(thinks=False, stop=("\n\n",)),
         "g1": Form(thinks=True, stop=("\n\nUser:",)),
         "flower": Form(thinks=True, stop=(FLOWER,), assistant="Bot", start=END, after_role=FLOWER, space="", end=FLOWER,
                        between="\n")}


def chat_template(name: str) -> ChatTemplate:
    """The template world, g1 or flower, or the one in a file: a jinja2 file, or a file in which stated.py finds a template.

    Raises UserError for other names and for a file without a template.
    """
    if name in FORMS:
        return TurnTemplate(name)
    file = hub.local(name, "chat template")
    if not file.is_file():
        raise UserError(f"a chat template must be {', '.join(FORMS)} or a jinja2 file; there is no file {name}")
    text = template_in(file)
    if text is None:
        raise UserError(f"{name} must hold a chat template: name a jinja2 file, or one of {', '.join(FORMS)}")
    return JinjaTemplate(text, name, tool_template_in(file))


class TurnTemplate(ChatTemplate):
    """world, g1 and flower: a turn is a role and a text, and all turns have the same form."""

    def __init__(self, name: str) -> None:
        self.name = self.definition = name
        self._form = FORMS[name]
        self.thinks = self._form.thinks
        self.stop = self._form.stop
        self.supports_tools = name != "world"            # the author documents calls only for the series G1
        if self.supports_tools:
            self.definition = f"{name}, {calls.REQUEST}"         # so that cached tokens of an older form of calls are not used
            self.call_start = f"{self._form.space}{calls.CALL_START[0]}", calls.CALL_START[1]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        messages = check_messages(messages)
        if effort and think is True:
            messages = with_hint(messages, effort)
        text = "".join(head + body for head, body, _ in self._turns(messages, tools))
        if not add_generation_prompt:
            return text
        form = self._form
        begun = self.answer_start(think)
        return f"{text}{form.between}{form.assistant}{form.after_role}{form.space if begun else ''}{begun}"

    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        turns = [*self._turns(check_messages(messages), tools)]
        first = len(turns) - len(messages)       # 1 if the tools are a turn
        parts: list[Part] = []
        for i, (head, body, message) in enumerate(turns):
            learnt = is_learnt(message, f"messages[{i - first}]")
            begun, rest = self._begun(message, body, last=i + 1 == len(turns)) if learnt else ("", body)
            parts += [(f"{head}{begun}", False), (rest, learnt)]
        return parts

    def _begun(self, message: Message, body: str, last: bool) -> tuple[str, str]:
        """A learnt answer in two parts: the beginning that would be in the prompt, and the rest. body: all after the role."""
        start = f"{self._form.space}{BEGUN[self.learns]}"
        if self.learns is True and message.get("reasoning_content"):
            return start, body.removeprefix(start)
        if self.learns == "fake" and last and not message.get("reasoning_content"):
            return start, f"{thoughts_end(start)}{body.removeprefix(self._form.space)}"
        return "", body

    def _turns(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, str, Message]]:
        """For each turn: (the text up to after_role, the rest of the turn, its message)."""
        form = self._form
        shown = messages
        if self.supports_tools:
            shown = calls.shown(messages, tools)
        elif tools:
            raise UserError(f"tools: {self.no_tools}")
        before = form.start
        for i, message in enumerate(shown, start=len(messages) - len(shown)):
            if message.get("tool_calls") and not self.supports_tools:
                raise UserError(f"messages[{i}].tool_calls: {self.no_tools}")
            field = next((field for field in ("content", "reasoning_content") if FLOWER in message.get(field, "")), None)
            if form.end == FLOWER and field:
                raise UserError(f"messages[{i}].{field} must not have a {FLOWER}, which ends a turn in the chat template "
                                f"{self.name}: remove it, or take the template g1")
            role = form.assistant if message["role"] == "assistant" else ROLES[message["role"]]
            body = _one_paragraph(message["content"])
            if self.thinks and (thoughts := message.get("reasoning_content")):
                body = f"<think>\n{_one_paragraph(thoughts)}\n</think>\n{body}"
            yield f"{before}{role}{form.after_role}", f"{form.space if body else ''}{body}{form.end}", message
            before = form.between

    def answer_start(self, think: Think = False) -> str:
        if think and not self.thinks:
            raise UserError(f"think: the chat template {self.name} has no thoughts; g1 has")
        return BEGUN[think]


def _one_paragraph(text: str) -> str:
    """`text` without blank lines, and without white space around it."""
    return re.sub(r"\n(?:[ \t]*\n)+", "\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip()
