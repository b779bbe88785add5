"""Defines the common interface of all chat templates."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self
from uuid import uuid4

from rwkv.chat.messages import Message, Tools
from rwkv.chat.thoughts import Think

END = f"\ufdd0{uuid4().hex}\ufdd0"      # stands for end_of_text in rendered text; random, so that no message has it

Part = tuple[str, bool]


class ChatTemplate(ABC):
    """Renders conversations as text.

    In rendered text, the constant END stands for the end-of-text token. encode() in rwkv/chat/encoding.py replaces END with the
    token's id.

    Attributes:
        definition: a string that differs for different templates.
        stop: the strings that end an answer. The end-of-text token always ends an answer, too.
        thinks: answers may begin with thoughts (rwkv/chat/thoughts.py).
        supports_tools: render() writes `tools` and tool_calls.
        call_start: the text of a call before the name, and the text between name and arguments. None if the template does not
            write calls in a format of rwkv/chat/calls.py.
        learns: the argument `think` of for_learning(); False without for_learning().
    """

    name: str
    definition: str
    stop: tuple[str, ...]
    thinks: bool = False
    supports_tools: bool = False
    call_start: tuple[str, str] | None = None
    learns: Think = False

    def for_learning(self, think: Think) -> Self:
        """Returns a template for training, in which the beginning of thoughts belongs to the prompt and so is not learnt.

        The beginning is the result of answer_start(think). think=True affects all answers with thoughts. think="fake" affects
        only the last answer, if it has no thoughts, because earlier answers in a chat have no empty thoughts. Raises UserError
        as answer_start does.
        """
        if not think:
            return self
        self.answer_start(think)
        template = copy(self)
        template.learns = think
        template.definition = f"{self.definition}, learns {think}"
        return template

    @property
    def no_tools(self) -> str:
        """Returns the error message for a template that does not support tools."""
        return (f"the chat template {self.name} does not support tools. Use g1 or flower, the templates of the G1 models, or "
                "a jinja2 file that supports tools")

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        """Returns the conversation as text.

        Raises UserError, which names the field, for a malformed message, and for anything that the template does not support.

        Args:
            add_generation_prompt: appends the prompt for an answer.
            think: the way in which this prompt asks for thoughts.
            effort: the requested length of the thoughts, a key of thoughts.HINTS. Has an effect only with think=True, and only
                if the template supports it.
        """

    @abstractmethod
    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        """Returns the text of render(messages, add_generation_prompt=False, tools), split into pairs (text, learnt).

        `learnt` is True if a model learns this text. A model learns the assistant's answers and the text that ends each answer,
        unless the message excludes the answer (see is_learnt in rwkv/chat/messages.py). Raises UserError as render does.
        """

    @abstractmethod
    def answer_start(self, think: Think = False) -> str:
        """Returns the beginning of thoughts at the end of the prompt that render(..., think=think) writes, or "".

        Raises UserError if the template cannot ask for thoughts in this way.
        """
