r"""Conversations as text: the templates that training data, the server and the chat share.

A conversation is a list of messages, {"role": "user", "content": "..."}; the roles are system, user, assistant and tool.

world: the form of the RWKV World models (the model card of BlinkDL/rwkv-7-world on Hugging Face, and API_DEMO_CHAT.py of
ChatRWKV). A blank line ends a turn, therefore blank lines inside a message become single line ends:

    System: {system}\n\nUser: {user}\n\nAssistant: {answer}\n\nUser: {user}\n\nAssistant:

g1: the same with thoughts, as in the model card of BlinkDL/rwkv7-g1: an answer is "<think>\n{thoughts}\n</think>\n{answer}"
where its message has "reasoning_content", and a prompt that asks for thoughts ends in "Assistant: <think". It has a form for
tools: rwkv/chat/calls.py.

FILE: a jinja2 file with the conventions of the transformers library (apply_chat_template). It is rendered in a sandbox.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rwkv.chat import calls
from rwkv.errors import UserError
from rwkv.io.utf8 import read_text

END = f"\ufdd0{uuid4().hex}\ufdd0"      # end_of_text in a rendered text; random, so that no message can contain it
ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
OTHER_ROLES = {"developer": "system", "function": "tool"}       # OpenAI's newer name, and its older one
NO_TEXT = {"image_url": "an image", "input_audio": "audio", "file": "a file"}          # OpenAI's parts of a content
EMPTY: tuple[Any, ...] = (None, "", [], {})               # a field with such a value counts as missing
LEARNT = ("weight", "loss", "train", "training", "trainable", "masked")         # fields that say whether an answer is learnt
IN_DIRECTORY = "chat_template.jinja"
THINK = "<think"                         # without ">", as in the model card: the model writes the rest
_G1 = re.compile(r"(?<![a-z0-9])g[01][a-z]?\d*(?![a-z0-9])")

Message = Mapping[str, Any]
Part = tuple[str, bool]


class ChatTemplate(ABC):
    """Renders conversations.

    A rendered text, and so a part, holds END wherever the template writes eos_token; encode() in rendered.py makes it the id
    end_of_text.

    stop: texts of which each ends an answer; the end-of-text token ends it too. supports_tools: render() shows `tools` and an
    answer's tool_calls to the model. call_start: what a call of a tool begins with, before its name and between that and its
    arguments; None where the template's form of calls is not that of rwkv/chat/calls.py. definition: equal where templates
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

        Learnt are the assistant's answers with what ends them, but those whose message says that they are not: see `is_learnt`.
        Raises UserError as render does.
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
    """The template's name for a checkpoint, by its path and other names that it has.

    That is the chat_template.jinja in a Hugging Face directory, or else g1 for a name such as rwkv7-g1b, or else world.
    """
    for name in filter(None, names):
        if (template := Path(name) / IN_DIRECTORY).is_file():
            return str(template)
    return "g1" if any(_G1.search(Path(name).name.lower()) for name in names if name) else "world"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages, each with a string as its content. Raises UserError with the field's name, as messages[1].content.

    The content may be a list of {"type": "text", "text": "..."}, as in OpenAI's interface. An answer's may be missing: its
    refusal stands for it, or nothing. Fields that are null or empty are left out, because templates ask whether one is defined.
    OpenAI's other names are known: the role developer for system, the role function for tool, function_call for tool_calls.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError("messages is a list of at least one message, such as {\"role\": \"user\", \"content\": \"...\"}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def is_learnt(message: Message, where: str) -> bool:
    """Whether a model learns a message: an answer is learnt unless one of its fields says otherwise.

    "weight": 0 is OpenAI's and Mistral's form, "loss": false that of ms-swift and XTuner, "train" or "training": false
    axolotl's, "masked": true torchtune's. Raises UserError, with the field's name, for a part of a weight or of an answer.
    """
    answer = message["role"] == "assistant"
    learnt = answer
    for field in LEARNT:
        value = message.get(field)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise UserError(f"{where}.{field} is 0 or 1 (false or true), because an answer is learnt or it is not; got "
                            f"{_shown(value)}")
        if not answer and value == 1 and field in ("train", "training", "trainable"):
            raise UserError(f"{where}.{field}: the role is {message['role']}, and a model learns the assistant's answers alone")
        learnt = learnt and bool(value) != (field == "masked")
    for field in ("train_detail", "training_detail"):
        if message.get(field):
            raise UserError(f"{where}.{field} is for parts of a message, and an answer is learnt whole or not at all")
    return learnt


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is an object with role and content; got {_shown(message)}")
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}.role is one of {', '.join(ROLES)}; got {_shown(role)}")
    given = {field: value for field, value in message.items() if value not in EMPTY}
    for field in ("tool_calls", "function_call", "reasoning_content"):
        if field in given and role != "assistant":
            raise UserError(f"{where}.{field} belongs to the assistant; the role is {role}")
    if not isinstance(given.get("reasoning_content", ""), str):
        raise UserError(f"{where}.reasoning_content is a string; got {_shown(given['reasoning_content'])}")
    call = given.pop("function_call", None)
    if call is not None and "tool_calls" not in given:
        given["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given, where)
    return {**given, "role": role, "content": _content(message.get("content"), given.get("refusal"), role, where)}


def _tool_calls(message: Message, where: str) -> list[dict[str, Any]]:
    """The calls with objects as arguments, which templates expect; OpenAI's interface has them as JSON in a string."""
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise UserError(f"{where}.tool_calls is a list; got {_shown(calls)}")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


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


def _content(content: Any, refusal: Any, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return refusal if isinstance(refusal, str) else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}.content is a string, or a list of texts; got {_shown(content)}")
    return "".join(_text(item, role, f"{where}.content[{i}]") for i, item in enumerate(content))


def _text(item: Any, role: str, where: str) -> str:
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind in NO_TEXT:
        raise UserError(f"{where} is {NO_TEXT[kind]}, and this model reads text alone")
    if kind not in kinds or not isinstance(item.get(kind), str):
        raise UserError(f'{where} is a text, {{"type": "text", "text": "..."}}; got {_shown(item)}')
    text: str = item[kind]
    return text


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)[:60]


class TurnTemplate(ChatTemplate):
    """world and g1: a turn is "Role: text" and a blank line."""

    def __init__(self, name: str) -> None:
        self.name = self.definition = name
        self.thinks = name == "g1"
        self.stop = ("\n\nUser:",) if self.thinks else ("\n\n",)         # thoughts may hold blank lines
        self.supports_tools = name != "world"            # whose models have not learnt calls
        if self.supports_tools:
            self.definition = f"{name}, {calls.REQUEST}"         # tokens made before it had this form are not used
            self.call_start = f" {calls.CALL_START[0]}", calls.CALL_START[1]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False) -> str:
        text = "".join(head + body for head, body, _ in self._turns(messages, tools))
        return f"{text}Assistant:{self._thought(think)}" if add_generation_prompt else text

    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        turns = [*self._turns(messages, tools)]
        first = len(turns) - len(messages)       # 1 where the tools are a turn of their own
        found: list[Part] = []
        for i, (head, body, message) in enumerate(turns):
            found += [(head, False), (body, is_learnt(message, f"messages[{i - first}]"))]
        return found

    def _turns(self, messages: Sequence[Message], tools: Any) -> Iterator[tuple[str, str, Message]]:
        """Of each turn its "Role:", the rest of it, and its message."""
        messages = check_messages(messages)
        if self.supports_tools:
            messages = calls.shown(messages, tools)
        elif tools:
            raise UserError(f"tools: {self._no_tools()}")
        for i, message in enumerate(messages):
            if message.get("tool_calls") and not self.supports_tools:
                raise UserError(f"messages[{i}].tool_calls: {self._no_tools()}")
            yield f"{ROLES[message['role']]}:", f" {self._body(message)}\n\n", message

    def _no_tools(self) -> str:
        return f"the chat template {self.name} has no form for tools; g1 has one, and a jinja2 file may have one"

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


class Ending(NamedTuple):
    """How a template ends an answer.

    closed: what it writes after an answer at the end of a conversation. end: what it writes after an answer before the next
    turn, whoever speaks. prompt: the prompt at the end of `closed`, where one is written whether or not it is asked for. stop:
    as in ChatTemplate.
    """

    closed: str
    end: str
    prompt: str
    stop: tuple[str, ...]


class JinjaTemplate(ChatTemplate):
    """A template in jinja2 with the variables messages, add_generation_prompt, tools, bos_token and eos_token, and with
    enable_thinking for `think`.

    bos_token is empty, as no end_of_text stands before a prompt; eos_token is END.
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
        self._ending = self._find_ending()
        self.stop = self._ending.stop
        self.call_start = self._find_call_start() if self.supports_tools else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False) -> str:
        if tools and not self.supports_tools:
            raise UserError(f"tools: the chat template {self.name} has no form for tools")
        text = self._render(check_messages(messages), add_generation_prompt, tools, think)
        return text if add_generation_prompt else text.removesuffix(self._ending.prompt)

    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        """An answer is what the template adds to the prompt that stands before it, up to eos_token where the template has it.

        What follows eos_token is not learnt: a model that has written it has ended its answer.
        """
        messages = check_messages(messages)
        whole = self.render(messages, False, tools)
        found: list[Part] = []
        done = 0
        for i, message in enumerate(messages):
            if not is_learnt(message, f"messages[{i}]"):
                continue
            begin, end = self._place(whole, messages, i, tools)
            if begin < done:
                raise self._not_found(i)
            ended = whole.rfind(END, begin, end)
            end = end if ended < 0 else ended + len(END)
            found += [(whole[done:begin], False), (whole[begin:end], True)]
            done = end
        return [part for part in [*found, (whole[done:], False)] if part[0]]

    def _place(self, whole: str, messages: Sequence[Message], i: int, tools: Any) -> tuple[int, int]:
        """Where answer i begins and ends in the whole text. The prompt before it may be the one that asks for thoughts."""
        after = whole
        if i + 1 < len(messages):
            alone = self._render(messages[:i + 1], False, tools)
            followed = alone.removesuffix(self._ending.closed) + self._ending.end
            after = followed if whole.startswith(followed) else alone
        for think in (False, True):
            before = self._render(messages[:i], True, tools, think)
            if after.startswith(before) and whole.startswith(after):
                return len(before), len(after)
        raise self._not_found(i)

    def _not_found(self, i: int) -> UserError:
        return UserError(f"messages[{i}]: the chat template {self.name} does not write this answer after the prompt for it; "
                         "what a model is to learn is found only where later messages leave earlier ones alone. An answer "
                         'with "weight": 0 is not learnt, and need not be found')

    def _render(self, messages: Sequence[Message], prompt: bool, tools: Any, think: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, tools=tools or None, bos_token="",
                                         eos_token=END, enable_thinking=think)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # of the template's own, raise_exception among them
            raise UserError(f"the chat template {self.name} refuses the conversation: {error}") from None

    def _find_ending(self) -> Ending:
        try:
            return self._ending_after([])
        except UserError:
            with suppress(UserError):    # some templates demand a system prompt
                return self._ending_after([{"role": "system", "content": "Answer."}])
            raise

    def _ending_after(self, talk: list[Message]) -> Ending:
        """From a small conversation: what follows its answer at its end, before a prompt, and before another question."""
        answer, question = "An answer that no template contains.", "Another question."
        talk = [*talk, {"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
        text = self._render(talk, False, None)
        closed = text.partition(answer)[2]
        prompted = between = ""
        with suppress(UserError):        # of templates that allow no prompt after an answer
            prompted = self._render(talk, True, None).partition(answer)[2]
        with suppress(UserError):
            longer = self._render([*talk, {"role": "user", "content": question}], False, None)
            between = longer.partition(answer)[2].partition(question)[0]
        end = _end(text, closed, prompted, between)
        stop = _stop(end, between)
        if end.startswith(closed) and not end.strip():
            end = closed                 # a model that learns more white space here than at the end does not learn what follows
        elif closed != prompted and not (end and closed.startswith(end)) and not end.startswith(closed):
            stop = (*stop, *_stop(closed, ""))
        last = closed.removeprefix(end) if closed.startswith(end) else ""
        prompt = last if last != END and closed == prompted else ""
        return Ending(closed, end, prompt, stop)

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


def _end(text: str, closed: str, prompted: str, between: str) -> str:
    """What a template writes after an answer, whatever follows.

    text: a conversation that ends in an answer. closed: what follows the answer there; prompted: with a prompt after it;
    between: before a question of the user.
    """
    for end in (closed, closed.removesuffix(END)):       # some write eos_token at the end of the whole conversation
        if end and between.startswith(end):
            return end
    if not between:
        return closed
    same = next((n for n, (one, other) in enumerate(zip(prompted, between, strict=False)) if one != other), None)
    common = prompted[:same] if same is not None else min(prompted, between, key=len)
    return common[:len(common) - _opening(common, text)]


def _opening(common: str, text: str) -> int:
    """How many of the last characters of `common` begin the next turn, whoever speaks, instead of ending the answer.

    They are found in the text before the first end, and an end has no bracket that is not closed: "<|end|><|" ends with
    "<|end|>". common: an end with what all turns begin with. White space is an end.
    """
    for n in range(len(common) - 1, 0, -1):
        opening, end = text.find(common[-n:]), text.find(common[:-n])
        if 0 <= opening and (opening < end or end < 0) and _unclosed(common[:-n]) is None:
            return n
    unclosed = _unclosed(common)
    if unclosed is not None:
        return len(common) - unclosed
    return len(common) if not common.isspace() and text.startswith(common) else 0


def _unclosed(text: str) -> int | None:
    """The place of the last bracket, if it is not closed."""
    place = max(text.rfind("<"), text.rfind("["))
    return None if place < 0 or re.search("[>\\]]", text[place:]) else place


def _stop(end: str, between: str) -> tuple[str, ...]:
    """The text that ends an answer while it is generated; none where eos_token alone does, which the sampler knows.

    White space may stand inside an answer, so the beginning of the user's next turn belongs to the text then.
    """
    stop = end.partition(END)[0].strip()
    if not stop and END not in end:
        stop = between.partition(END)[0].rstrip() or between or end
    return (stop,) if stop else ()


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
