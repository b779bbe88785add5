"""The interface of chat templates."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self
from uuid import uuid4

from rwkv.chat.messages import Message, Tools
from rwkv.chat.thoughts import Think

END = f"\ufdd0{uuid4().hex}\ufdd0"      # end_of_text in a rendered text; random, so that no message can contain it

Part = tuple[str, bool]


class ChatTemplate(ABC):
    """Renders conversations.

    A rendered text and its parts have END for the template's end_of_text; encode() in rendered.py replaces it by the id.

    stop: each of these texts ends an answer; so does the end-of-text token. thinks: answers may begin with thoughts, as in
    thoughts.py. supports_tools: render() writes `tools` and an answer's tool_calls. call_start: the text of a call
    before its name, and the text between its name and its arguments; None if the template writes calls in another form than
    rwkv/chat/calls.py. definition: equal for equal templates. learns: how learnt answers begin (for_learning).
    """

    name: str
    definition: str
    stop: tuple[str, ...]
    thinks: bool = False
    supports_tools: bool = False
    call_start: tuple[str, str] | None = None
    learns: Think = False

    def for_learning(self, think: Think) -> Self:
        """A template whose parts() put answers after a prompt that asks for thoughts in this way.

        With True these are the answers with thoughts. With "fake" it is the last answer if it has no thoughts; earlier answers
        have no empty thought, as in a chat. The beginning of an answer that is in the prompt is not learnt. Raises UserError
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
        """Why the template refuses tools, and which templates support them."""
        return (f"the chat template {self.name} does not support tools; g1 and flower, the forms of the series G1, do, and "
                "a jinja2 file may")

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        """The conversation as text; add_generation_prompt adds the beginning of an answer.

        think: how that beginning asks for thoughts. effort: how long they should be, one of thoughts.HINTS; it requires
        think=True and a template with a form for it. Raises UserError, with the field's name, for a wrong message, and for
        anything that the template does not support.
        """

    @abstractmethod
    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        """render(messages, add_generation_prompt=False, tools) in pieces, each with whether a model learns it.

        A model learns the assistant's answers and the text that ends them, unless the message says otherwise (is_learnt in
        messages.py). Raises UserError as render does.
        """

    @abstractmethod
    def answer_start(self, think: Think = False) -> str:
        """The beginning of the answer's thoughts with which the prompt of render(..., think=think) ends; "" for none.

        Raises UserError if the template cannot ask for thoughts in this way.
        """
