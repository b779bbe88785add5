"""The common interface of all chat templates."""

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

    In rendered text, END stands for the end-of-text token; encode() in rwkv/chat/encoding.py replaces it by the token's id.

    stop: each of these strings ends an answer; so does the end-of-text token. thinks: whether answers may begin with thoughts,
    as in rwkv/chat/thoughts.py. supports_tools: whether render() writes `tools` and tool_calls. call_start: the text of a call
    before its name, and the text between its name and its arguments; None if the template does not write calls in a format of
    rwkv/chat/calls.py. definition: a string that differs for different templates. learns: how learnt answers begin; see
    for_learning().
    """

    name: str
    definition: str
    stop: tuple[str, ...]
    thinks: bool = False
    supports_tools: bool = False
    call_start: tuple[str, str] | None = None
    learns: Think = False

    def for_learning(self, think: Think) -> Self:
        """A template for training: in its parts(), the beginning of thoughts that a prompt for `think` contains belongs to the
        prompt, and so is not learnt.

        think=True affects all answers with thoughts. think="fake" affects only the last answer, if it has no thoughts; as in a
        chat, earlier answers have no empty thoughts. Raises UserError as answer_start does.
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
        """The message for a template without tools, which says which templates support them."""
        return (f"the chat template {self.name} does not support tools: use g1 or flower, the templates of the G1 models, or "
                "a jinja2 file that supports tools")

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True,
               tools: Tools = None, think: Think = False, effort: str | None = None) -> str:
        """The conversation as text. add_generation_prompt: whether to append the prompt for an answer.

        think: how that prompt asks for thoughts. effort: how long the thoughts should be, a key of thoughts.HINTS; it has an
        effect only with think=True, and if the template supports it. Raises UserError, naming the field, for a malformed
        message, and for anything that the template does not support.
        """

    @abstractmethod
    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        """The text of render(messages, add_generation_prompt=False, tools), split into (text, whether a model learns it).

        A model learns the assistant's answers and the text that ends them, unless the message excludes it (see is_learnt in
        rwkv/chat/messages.py). Raises UserError as render does.
        """

    @abstractmethod
    def answer_start(self, think: Think = False) -> str:
        """The beginning of thoughts with which the prompt of render(..., think=think) ends; "" if it has none.

        Raises UserError if the template cannot ask for thoughts in this way.
        """
