"""Renders chat templates in jinja2, in a sandbox, with the conventions of transformers' apply_chat_template."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property
from itertools import product
from typing import NamedTuple

from rwkv.chat.interface import END, ChatTemplate, Part
from rwkv.chat.messages import ROLES, Message, Tools, check_messages, is_learnt
from rwkv.chat.thoughts import Think, thoughts_at_end, with_hint
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject

WORLD_END = "<|rwkv_tokenizer_end_of_text|>"             # occurs in flash-linear-attention's templates

A_TOOL = {"type": "function", "function": {"name": "a_name", "description": "A tool.", "parameters": {}}}
SYSTEM: Message = {"role": "system", "content": "Answer."}
INSTRUCTIONS: Message = {"role": "system", "content": "Instructions that no template contains."}
QUESTION: Message = {"role": "user", "content": "A question that no template contains."}
ANSWER: Message = {"role": "assistant", "content": "An answer that no template contains."}
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00001", "type": "function", "function": {"name": "a_name", "arguments": {"a_key": "a value"}}}]}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "a_name",
                   "content": "A result that no template contains."}
PART = re.compile("""['"]type['"]: ?['"]text['"]""")     # appears if a template wrote parts as data
THOUGHTS_PROMPT = re.compile(r"(\n\nAssistant: ?|\nBot✿)<think>?\s*\Z")  # the end of a prompt of g1 or flower for thoughts


class TemplateLimit(UserError):
    """Raised if a template takes too much time or memory (rwkv/chat/sandbox.py)."""


@contextmanager
def _ignore_refusals() -> Iterator[None]:
    try:
        yield
    except TemplateLimit:                # not ignored, because further attempts would take as long
        raise
    except UserError:
        pass


class Ending(NamedTuple):
    """The texts that a template writes after an answer."""

    closed: str                          # the text after an answer that is the last turn
    end: str                             # the text between an answer and the next turn, whatever the role of the next turn
    prompt: str                          # the prompt that some templates write at the end of `closed` unasked, or ""
    stop: tuple[str, ...]                # stop strings, as in ChatTemplate


class JinjaTemplate(ChatTemplate):
    """Renders conversations with a jinja2 template.

    The template's variables are messages, add_generation_prompt, tools, documents (None), bos_token, eos_token, the special
    tokens of the template's files, such as unk_token, enable_thinking (from `think`) and, if there is an `effort`,
    reasoning_effort. bos_token is empty, because no end_of_text precedes a prompt, but becomes END after
    begin_with_end_of_text(). eos_token is END. Some published templates contain the name of World's token 0 instead. This name
    is replaced by END.

    The template in rwkv-rs/transformers-rwkv, temp/rwkv_chat_template.jinja, requires two more variables.
    rwkv_generation_prompt is open_think if enable_thinking is true, and otherwise fake_think. The rwkv_json_content of a tool
    message is the content parsed as JSON.
    """

    def __init__(self, text: str, name: str, tool_use: str | None = None, special_tokens: JsonMapping | None = None) -> None:
        """Compiles the template `text`, and renders small conversations to find which form of content the template expects.

        `tool_use` is the source of a separate template for conversations with tools, if there is one. `special_tokens` are
        variables with the names of tokens (metadata.special_tokens_for). Raises UserError if the template cannot be used.
        """
        from jinja2 import TemplateError

        from rwkv.chat.sandbox import LimitReached, Sandbox, limited

        self.name = name
        self.definition = text
        self.supports_tools = bool(re.search(r"\btools\b", text))
        self.thinks = bool(re.search("<think|enable_thinking|reasoning_content", text))
        self._bos_token = ""
        self._special_tokens = _without_end_names(special_tokens or {})
        if self._special_tokens:         # tokens cached with other variables are not used
            self.definition += f", {self._special_tokens}".replace(END, "END")
        try:
            with limited():
                self._template = Sandbox().from_string(text.replace(WORLD_END, END))
        except (TemplateError, LimitReached, RecursionError, MemoryError) as error:
            raise UserError(f"the chat template {name} is not a jinja2 template: {error}") from None
        if not re.search(r"\bmessages\b", text):
            raise UserError(f"the chat template {name} does not use `messages`, so the model would not see the conversation. "
                            "Use a jinja2 template that writes `messages`")
        self._opening: list[Message] = []                # the template requires these turns before a user turn
        self._roles_in_parts: frozenset[str] = frozenset()               # their content must be a list of parts
        self._dropped_roles: frozenset[str] = frozenset()                # the template may drop their content
        self._find_content_forms()
        self._ending = self._ending_after(self._opening)
        self.stop = self._ending.stop
        if self.supports_tools:
            with _ignore_refusals():     # turns may have a different format in conversations with tools
                tool_stops = self._ending_after(self._opening, [A_TOOL]).stop
                self.stop += tuple(stop for stop in tool_stops if stop not in self.stop)
            self.call_start = self._find_call_start()
        if self._roles_in_parts:         # changes the definition, so that cached tokens of the other format are not used
            self.definition += f", parts: {sorted(self._roles_in_parts)}"
        self._tool_use: JinjaTemplate | UserError | None = None          # an error is raised only when the template is used
        if tool_use is not None:
            try:
                self._tool_use = JinjaTemplate(tool_use, f"{name} (tool_use)", None, special_tokens)
            except UserError as error:
                self._tool_use = error
        if isinstance(self._tool_use, JinjaTemplate):
            self.definition += f", tool_use: {self._tool_use.definition}"
            self.supports_tools = True
            self.call_start = self._tool_use.call_start
            self.stop += tuple(stop for stop in self._tool_use.stop if stop not in self.stop)

    def _find_content_forms(self) -> None:
        """Finds, for each role, whether the template expects content as a string or as a list of parts.

        Raises UserError if the template writes the user's text in neither form.
        """
        refusal = None
        lost = False
        for opening, in_parts in product(([], [SYSTEM]), (frozenset[str](), frozenset(ROLES), frozenset({"user"}))):
            self._opening = [*opening]
            try:
                lost = self._loses_text("user", in_parts, [*opening, QUESTION], [*opening, QUESTION, ANSWER])
            except TemplateLimit:
                raise
            except UserError as error:
                refusal = refusal or error
                continue
            if not lost:
                break
        else:
            if not lost and refusal is not None:
                raise refusal
            raise UserError(f"the chat template {self.name} does not write the content of messages: the template must accept "
                            'a string or a list of parts, {"type": "text", "text": "..."}')
        turns = [*self._opening, QUESTION]
        self._find_role_content("assistant", [*turns, ANSWER], [*turns, ANSWER, QUESTION])
        self._find_role_content("system", [INSTRUCTIONS], [INSTRUCTIONS, QUESTION], [INSTRUCTIONS, QUESTION, ANSWER])
        self._find_role_content("tool", [*turns, CALL, RESULT], [*turns, CALL, RESULT, ANSWER])

    def _find_role_content(self, role: str, *conversations: Sequence[Message]) -> None:
        """Finds whether the template expects the role's content as a string or as a list of parts.

        Adds the role to _dropped_roles if the template writes neither.
        """
        unread = False
        previous = self._roles_in_parts
        for in_parts in (previous, previous ^ {role}):
            with _ignore_refusals():     # rendering reports a role that the template refuses
                unread = self._loses_text(role, in_parts, *conversations)
                if not unread:
                    return
        self._roles_in_parts = previous - {role}
        if unread:
            self._dropped_roles |= {role}

    def _loses_text(self, role: str, in_parts: frozenset[str], *conversations: Sequence[Message]) -> bool:
        """Returns True if the role's text is missing or changed in all of the rendered conversations.

        `in_parts` has the roles whose content is a list of parts. Raises UserError if the template refuses all conversations.
        """
        self._roles_in_parts = in_parts
        refusal = None
        lost = False
        for conversation in conversations:
            try:
                tools = [A_TOOL] if self.supports_tools and CALL in conversation else None
                text = self._render(conversation, conversation[-1]["role"] != "assistant", tools)
            except TemplateLimit:
                raise
            except UserError as error:
                refusal = error
                continue
            lost = True
            if all(message["content"] in text for message in conversation if message["role"] == role) and not PART.search(text):
                return False
        if refusal is not None and not lost:
            raise refusal
        return lost

    def _select_template(self, messages: Sequence[Message], tools: Tools) -> "JinjaTemplate":
        """Returns the tool_use template if it exists and the conversation has tools, calls or results; otherwise self."""
        has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if self._tool_use is None or not (tools or has_calls):
            return self
        if isinstance(self._tool_use, UserError):
            raise self._tool_use
        template = copy(self._tool_use)
        template.learns = self.learns
        return template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        if tools and not self.supports_tools:
            raise UserError(f"tools: {self.no_tools}")
        messages = check_messages(messages)
        template = self._select_template(messages, tools)
        if template is not self:
            return template.render(messages, add_generation_prompt, tools, think, effort)
        if think is not True:
            effort = None
        if effort and self._takes_hints:
            messages = with_hint(messages, effort)
        text = self._render(messages, add_generation_prompt, tools, think is True, effort)
        self._require_read(messages, tools)
        return text if add_generation_prompt else text.removesuffix(self._ending.prompt)

    @cached_property
    def _takes_hints(self) -> bool:
        return bool(THOUGHTS_PROMPT.search(self._short_prompt(True)))

    def begin_with_end_of_text(self) -> None:
        """Sets bos_token to END, for a tokenizer that uses one token for the beginning and the end of a text."""
        self._bos_token = END
        if isinstance(self._tool_use, JinjaTemplate):
            self._tool_use.begin_with_end_of_text()

    def _require_read(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises UserError for a message whose content the template drops. Only the roles in _dropped_roles are checked."""
        for i, message in enumerate(messages):
            if message["role"] not in self._dropped_roles or not message["content"]:
                continue
            empty = [*messages[:i], {**message, "content": ""}, *messages[i + 1:]]
            if self._render(messages, False, tools) == self._render(empty, False, tools):
                raise UserError(f"messages[{i}]: the chat template {self.name} omits the content of messages with the role "
                                f"{message['role']}, so the model would not see this content")

    def answer_start(self, think: Think = False) -> str:
        start = thoughts_at_end(self._short_prompt(think is True))
        closed = "</think" in start
        if think == "fake" and not closed:
            raise UserError(f"think=fake: the chat template {self.name} cannot write empty reasoning. Use think=true or "
                            "think=false")
        if think is True and (closed or not self.thinks):
            raise UserError(f"think: the chat template {self.name} does not support reasoning")
        return start

    def _short_prompt(self, think: bool) -> str:
        return self._render([*self._opening, {"role": "user", "content": "A question."}], True, None, think)

    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        """Returns the parts that ChatTemplate.parts describes.

        An answer is the text that the template writes after the prompt for an answer, up to and including eos_token if the
        template writes one. Text after eos_token is not learnt.
        """
        messages = check_messages(messages)
        template = self._select_template(messages, tools)
        if template is not self:
            return template.parts(messages, tools)
        whole = self.render(messages, False, tools)
        parts: list[Part] = []
        done = 0
        for i, message in enumerate(messages):
            if not is_learnt(message, f"messages[{i}]"):
                continue
            begin, end = self._answer_span(whole, messages, i, tools)
            if begin < done:
                raise self._not_found(i)
            eos = whole.rfind(END, begin, end)
            end = end if eos < 0 else eos + len(END)
            parts += [(whole[done:begin], False), (whole[begin:end], True)]
            done = end
        return [part for part in [*parts, (whole[done:], False)] if part[0]]

    def _answer_span(self, whole: str, messages: Sequence[Message], i: int, tools: Tools) -> tuple[int, int]:
        """Returns the start and end offsets of answer i in the whole text. The prompt before it may ask for thoughts."""
        after = whole
        if i + 1 < len(messages):
            alone = self._render(messages[:i + 1], False, tools)
            followed = alone.removesuffix(self._ending.closed) + self._ending.end
            after = followed if whole.startswith(followed) else alone
        for think in (True, False) if self.learns is True else (False, True):
            before = self._render(messages[:i], True, tools, think)
            if after.startswith(before) and whole.startswith(after):
                return len(before), len(after)
        raise self._not_found(i)

    def _not_found(self, i: int) -> UserError:
        return UserError(f"messages[{i}]: a model cannot learn this answer, because the chat template {self.name} does not "
                         "write the answer directly after the prompt, or changes the answer when more messages follow. To "
                         "exclude this answer from learning, set \"weight\": 0 in the message")

    def _render(self, messages: Sequence[Message], prompt: bool, tools: Tools, think: bool = False,
                effort: str | None = None) -> str:
        from jinja2 import TemplateError

        from rwkv.chat.sandbox import LimitReached, limited

        extra = {"reasoning_effort": effort} if effort else {}
        turns = [dict(message) for message in messages]
        for message in turns:
            if message["role"] == "tool":
                message["rwkv_json_content"] = message["content"]
                with suppress(ValueError, RecursionError):
                    message["rwkv_json_content"] = json.loads(message["content"])
            if message["role"] in self._roles_in_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
        variables = {**self._special_tokens, "messages": turns, "add_generation_prompt": prompt, "tools": tools or None,
                     "documents": None, "bos_token": self._bos_token, "eos_token": END, "enable_thinking": think,
                     "rwkv_generation_prompt": "open_think" if think else "fake_think", **extra}
        try:
            with limited(sum(len(message["content"]) for message in messages)) as limit:
                pieces = []
                for piece in self._template.generate(**variables):
                    limit.make(len(piece))
                    pieces.append(piece)
                return "".join(pieces)
        except (LimitReached, MemoryError) as error:
            raise TemplateLimit(f"the chat template {self.name} cannot be rendered: {error}") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # these errors come from the template's code, for example from raise_exception
            raise UserError(f"the chat template {self.name} rejects the conversation: {error}") from None

    def _ending_after(self, turns: Sequence[Message], tools: Tools = None) -> Ending:
        """Finds the template's Ending by rendering small conversations, which end with an answer, a prompt or a question."""
        answer = "An answer that no template contains."
        question = "Another question."
        conversation = [*turns, {"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
        text = self._render(conversation, False, tools)
        closed = text.partition(answer)[2]
        prompted = between = ""
        with _ignore_refusals():         # some templates do not allow a prompt after an answer
            prompted = self._render(conversation, True, tools).partition(answer)[2]
        with _ignore_refusals():
            longer = self._render([*conversation, {"role": "user", "content": question}], False, tools)
            between = longer.partition(answer)[2].partition(question)[0]
        end = _answer_end(text, closed, prompted, between)
        stop = _stop_strings(end, between)
        if end.startswith(closed) and not end.strip():
            end = closed                 # the rest is only the white space that ends a conversation
        elif closed != prompted and not (end and closed.startswith(end)) and not end.startswith(closed):
            stop = (*stop, *_stop_strings(closed, ""))
        last = closed.removeprefix(end) if closed.startswith(end) else ""
        prompt = last if last != END and closed == prompted else ""
        return Ending(closed, end, prompt, stop)

    def _find_call_start(self) -> tuple[str, str] | None:
        call = {"type": "function", "function": {"name": "a_name", "arguments": {"a_key": "a value"}}}
        messages: list[Message] = [{"role": "user", "content": "A question."},
                                   {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **call}]}]
        text = ""
        with _ignore_refusals():
            text = self._render(messages, False, [A_TOOL])
        match = re.search(r'(<tool_call>\s*\{"name":\s*")a_name(",\s*"arguments":\s*)\{"a_key":\s*"a value"\}\}\s*</tool_call>',
                          text)
        return (match[1], match[2]) if match else None


def _without_end_names(tokens: JsonMapping) -> JsonObject:
    """Returns the variables without bos_token and eos_token, and with END for the name of the token that ends a text."""
    ends = (WORLD_END, tokens.get("eos_token"))

    def replace_ends(value: object) -> object:
        return [*map(replace_ends, value)] if isinstance(value, list) else END if value in ends else value

    return {name: replace_ends(value) for name, value in tokens.items() if name not in ("bos_token", "eos_token")}


def _answer_end(text: str, closed: str, prompted: str, between: str) -> str:
    """Returns the text that follows an answer in every conversation.

    Args:
        text: a rendered conversation that ends with an answer.
        closed: the text after the answer if the conversation ends there.
        prompted: the text after the answer if a prompt for another answer follows.
        between: the text after the answer if a question of the user follows.
    """
    for end in (closed, closed.removesuffix(END)):       # some templates end a conversation with eos_token
        if end and between.startswith(end):
            return end
    if not between:
        return closed
    differ = next((n for n, (a, b) in enumerate(zip(prompted, between, strict=False)) if a != b), None)
    common = prompted[:differ] if differ is not None else min(prompted, between, key=len)
    return common[:len(common) - _next_turn_length(common, text)]


def _next_turn_length(common: str, text: str) -> int:
    """Returns the number of characters at the end of `common` that belong to the next turn.

    `common` is the text that follows every answer: the mark that ends an answer, and perhaps characters with which every turn
    begins. Such characters also occur in `text` before the first mark. A mark has no unclosed bracket: in "<|end|><|", the
    mark is "<|end|>". White space alone can be a mark.
    """
    for n in range(len(common) - 1, 0, -1):
        opening = text.find(common[-n:])
        end = text.find(common[:-n])
        if 0 <= opening and (opening < end or end < 0) and _unclosed_bracket(common[:-n]) is None:
            return n
    unclosed = _unclosed_bracket(common)
    if unclosed is not None:
        return len(common) - unclosed
    return len(common) if not common.isspace() and text.startswith(common) else 0


def _unclosed_bracket(text: str) -> int | None:
    place = max(text.rfind("<"), text.rfind("["))
    return None if place < 0 or re.search("[>\\]]", text[place:]) else place


def _stop_strings(end: str, between: str) -> tuple[str, ...]:
    """Returns the stop string that ends an answer, or () if only eos_token does, because the engine always stops at eos_token.

    If the end is white space, an answer may contain the same white space. The stop string then includes the beginning of the
    next user turn.
    """
    stop = end.partition(END)[0].strip()
    if not stop and END not in end:
        stop = between.partition(END)[0].rstrip() or between or end
    return (stop,) if stop else ()
