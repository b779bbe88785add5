"""The interface of chat templates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self
from uuid import uuid4

from rwkv.chat.messages import Message
from rwkv.chat.thoughts import Think

END = f"\ufdd0{uuid4().hex}\ufdd0"      # end_of_text in a rendered text; random, so that no message can contain it

Part = tuple[str, bool]


class ChatTemplate(ABC):
    """Renders conversations.

    A rendered text, and so a part, holds END wherever the template writes end_of_text; encode() in rendered.py makes it the id
    of that.

    stop: texts of which each ends an answer; the end-of-text token ends it too. thinks: its answers may begin with thoughts, as
    in thoughts.py. supports_tools: render() shows `tools` and an answer's tool_calls to the model. call_start: what a call of a
    tool begins with, before its name and between that and its arguments; None where the template's form of calls is not that of
    rwkv/chat/calls.py. definition: equal where templates are. learns: how answers begin that a model learns (for_learning).
    """

    name: str
    definition: str
    stop: tuple[str, ...]
    thinks: bool = False
    supports_tools: bool = False
    call_start: tuple[str, str] | None = None
    learns: Think = False

    def for_learning(self, think: Think) -> Self:
        """The template whose parts() show answers after the prompt that asks for thoughts in this way, where they can.

        With True, an answer with thoughts; with "fake", the last one, if it has none: a chat shows earlier ones without the
        empty thought. What the prompt holds of the answer is not learnt. Raises UserError as answer_start does.
        """
        if not think:
            return self
        self.answer_start(think)
        other = copy(self)
        other.learns = think
        other.definition = f"{self.definition}, learns {think}"
        return other

    @property
    def no_tools(self) -> str:
        """Why the template refuses tools, and which templates show them."""
        return (f"the chat template {self.name} has no form for tools; the templates g1 and flower have one, which models of "
                "the series G1 have learnt, and a jinja2 file may have one")

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, think: Think = False, effort: str | None = None) -> str:
        """The conversation as text, with the beginning of an answer if add_generation_prompt.

        think: how that beginning asks for thoughts. effort: how long they should be, one of thoughts.HINTS; without effect
        unless think is True, and where the template has no form for it. Raises UserError, with the field's name, for a message
        that is not one, and for what the template cannot show.
        """

    @abstractmethod
    def parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:
        """The pieces of render(messages, add_generation_prompt=False, tools), and of each whether a model learns it.

        Learnt are the assistant's answers with what ends them, but those whose message says that they are not: see
        messages.is_learnt. Raises UserError as render does.
        """

    @abstractmethod
    def answer_start(self, think: Think = False) -> str:
        """The beginning of the answer that stands in the prompt of render(..., think=think): of its thoughts, or nothing.

        Raises UserError where the template cannot ask for thoughts in this way.
        """
