"""Records clients' saved states in the HTTP process, decides which requests may continue a state, and renders their prompts.

A conversation's state has read the turns so far, and a request that continues the state has only the later turns. Templates
render the first turn of a conversation differently. So the template renders the new turns after a placeholder message, which
represents the last message that the state has read. The rendered text up to the end of the placeholder is then removed.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rwkv.chat.encoding import encode, mark_special_names
from rwkv.chat.interface import ChatTemplate
from rwkv.chat.messages import Message, Tools, check_messages
from rwkv.chat.thoughts import THOUGHT_STARTS, Think, thoughts_at_end
from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.serving.http.errors import STATE_GONE, ApiError
from rwkv.serving.messages import SavedState, Turn
from rwkv.tokenizer.decoders import LAST_IDS
from rwkv.tokenizer.tokenizers import Tokenizer

# Media types of state files
MEDIA_TYPES = ("application/octet-stream", "application/x-safetensors", "application/vnd.safetensors")
PLACEHOLDER = secrets.token_hex(16)
CONTINUED = secrets.token_hex(16)        # a placeholder for the answer that a prompt continues
BEFORE: dict[str, list[JsonObject]] = {      # turns that a template may require before a placeholder, by the placeholder's role
    "assistant": [{"role": "user", "content": "."}],
    "tool": [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}]}]}


@dataclass
class ClientStates:
    """Finds and describes clients' states. Only a state's owner can find the state.

    The mappings `states` and `adapters` belong to RemoteEngine, which changes them while the server runs.

    Attributes:
        states: the saved states by id.
        adapters: for each adapter, the state from which the adapter's sequences begin, as in messages.Ready.
        state_bytes: the size of one state.
    """

    config: ServeConfig
    states: Mapping[str, SavedState]
    adapters: Mapping[str, SavedState | None]
    tokenizer: Tokenizer
    template: ChatTemplate
    state_bytes: int

    def owned_by(self, owner: str) -> list[SavedState]:
        """Returns the owner's states, the newest first."""
        states = [state for state in self.states.values() if state.owner == owner]
        return sorted(states, key=lambda state: state.created, reverse=True)

    def get(self, state_id: str, owner: str) -> SavedState:
        """Returns the state with this id. Raises ApiError if the owner has no such state."""
        state = self.states.get(state_id)
        if state is None or state.owner != owner:
            raise ApiError(404, f"the state {state_id[:100]!r} is unknown, deleted or evicted, or belongs to another API key",
                           "state", STATE_GONE)
        return state

    def start_state(self, state_id: str | None, owner: str, model: str = "") -> SavedState | None:
        """Returns the state that a request continues. Raises ApiError if this model cannot use the state.

        Without a state_id, returns the state from which all sequences of the model begin, or None for the empty state.
        """
        if state_id is None:
            return self.adapters.get(model)
        state = self.get_usable(state_id, owner)
        if state.model != model:
            reader = f"the model {state.model!r}" if state.model else "the checkpoint's model"
            raise ApiError(400, f'state requires the model that made the state, {reader}: set "model" to the name of this '
                                'model', "state", "state_of_another_model")
        return state

    def get_usable(self, state_id: str, owner: str) -> SavedState:
        """Returns the state as get() does, but raises ApiError if no model of this server can continue the state."""
        state = self.get(state_id, owner)
        if state.refusal is not None:
            raise ApiError(400, state.refusal, "state", "state_of_another_model")
        return state

    @property
    def has_room(self) -> bool:
        return self.state_bytes <= self.config.states_mib * MIB or self.config.states_dir is not None

    def can_continue(self, start: SavedState, tools: Tools) -> bool:
        """Returns True if the state has read a conversation with this server's chat template and these tools."""
        return start.turn is not None and start.turn == replace(start.turn, template=_digest(self.template.definition),
                                                                tools=_digest(tools) if tools else "")

    def new_state(self, owner: str, turn: Turn | None = None, model: str = "") -> SavedState:
        """Returns the record of a new state without content. Raises ApiError if the server has no memory for states."""
        if not self.has_room:
            raise ApiError(400, f"this server cannot save states: a state takes {self.state_bytes / MIB:.3g} MiB, but the "
                                f"server runs with states_mib={self.config.states_mib}", code="states_disabled")
        return SavedState(f"state_{secrets.token_hex(16)}", owner, int(time.time()), None, 0, turn=turn, model=model)

    def prompt(self, start: SavedState | None, messages: Sequence[Message], tools: Tools, think: Think = False,
               effort: str | None = None, add_generation_prompt: bool = True) -> str:
        """Returns the messages, rendered as the continuation of `start`.

        Raises ApiError or UserError if the messages cannot continue this state.
        """
        render = self.template.render
        turn = start.turn if start else None
        if turn is None:
            return render(messages, add_generation_prompt, tools, think, effort)
        if turn.template != _digest(self.template.definition):
            raise ApiError(400, "state requires the chat template with which its conversation began, but this server uses a "
                                "different template", "state")
        if tools and turn.tools != _digest(tools):
            raise ApiError(400, "tools must be the same as those of the saved conversation. Send the same tools, or begin a "
                                "new conversation", "tools")
        before = _placeholder_messages(turn.role, self.template.supports_tools)
        conversation = [*before, *check_messages(messages)]
        try:
            rendered = render(conversation, add_generation_prompt, tools, think, effort)
        except UserError as error:
            raise self._renumbered_error(error, before, tools) from None
        return self._after_placeholder(rendered).removeprefix(turn.tail)

    def continued_prompt(self, start: SavedState | None, messages: Sequence[Message], tools: Tools, think: Think = False,
                         effort: str | None = None) -> str:
        """Returns a prompt that ends with the content of the last message, which is the beginning of an answer.

        A template may close the last turn and change its white space. So the template renders a placeholder instead of the
        content, and the prompt ends where the placeholder begins. Raises ApiError or UserError if the template cannot do this.
        """
        *earlier, last = check_messages(messages)
        answer = last["content"]
        self.prompt(start, messages, tools, add_generation_prompt=False)     # raises if the template cannot render the messages
        rendered = self.prompt(start, [*earlier, {**last, "content": CONTINUED}], tools, think, effort, False)
        before, placeholder, after = rendered.partition(CONTINUED)
        if not placeholder or CONTINUED in after:
            raise ApiError(400, f"messages[{len(earlier)}] cannot be continued, because the chat template {self.template.name} "
                                "omits or repeats the text of this message", f"messages[{len(earlier)}]")
        if answer.lstrip().startswith(THOUGHT_STARTS[True]):         # replaces the empty thoughts that the template renders
            before = before.removesuffix(thoughts_at_end(before))
        return before + mark_special_names(self.tokenizer, answer)

    def _renumbered_error(self, error: UserError, before: list[JsonObject], tools: Tools) -> ApiError | UserError:
        """Returns the error to raise if the template cannot render `before` and then the request's messages.

        If the template cannot even render `before`, the error blames the state. Otherwise the error numbers the messages as in
        the request.
        """
        try:
            self.template.render(before, False, tools)
        except UserError:
            role = before[-1]["role"]
            return ApiError(400, f"state ends with a {role} message, which the chat template {self.template.name} cannot "
                            "continue. Send the whole conversation as messages, without state", "state")
        return UserError(re.sub(r"^messages\[(\d+)\]", lambda place: f"messages[{int(place[1]) - len(before)}]", str(error)))

    def context_of_ids(self, ids: Sequence[int], tools: Tools, start: SavedState | None) -> SavedState:
        """Returns a SavedState for the conversation with these token ids. Its messages are unknown; the last is an answer."""
        last_ids = tuple(ids[-LAST_IDS:])
        return SavedState("", "", 0, len(ids), 0, last_ids, self.turn_of_answer(tools, start))

    def turn_of_answer(self, tools: Tools, start: SavedState | None) -> Turn:
        """Returns the Turn of a conversation that continued `start` and ends with an answer. The engine adds the tail."""
        return self._turn("assistant", "", tools, start)

    def turn_of_messages(self, messages: Sequence[Message], tools: Tools, start: SavedState | None) -> Turn:
        """Returns the Turn of a conversation that continued `start` and ends with these messages."""
        role = check_messages(messages)[-1]["role"]
        rendered = self.template.render(_placeholder_messages(role, self.template.supports_tools), False, tools)
        return self._turn(role, self._after_placeholder(rendered), tools, start)

    def _turn(self, role: str, tail: str, tools: Tools, start: SavedState | None) -> Turn:
        earlier = start.turn.tools if start and start.turn else ""
        return Turn(role, tail, _digest(tools) if tools else earlier, _digest(self.template.definition))

    def encode_text(self, text: str, start: SavedState | None) -> list[int]:
        """Returns the token ids of a rendered conversation that continues `start`. Raises UserError as the tokenizer does."""
        before = self.tokenizer.decode(start.last_ids) if start else ""
        return encode(self.tokenizer, [text], before)[0]

    def _after_placeholder(self, rendered: str) -> str:
        _, placeholder, after = rendered.rpartition(PLACEHOLDER)
        if not placeholder:
            raise ApiError(400, f"state conflicts with the chat template {self.template.name}, which drops earlier messages. "
                                "Send the whole conversation as messages, without state", "state")
        return after


def _placeholder_messages(role: str, calls: bool) -> list[JsonObject]:
    """Returns messages that end with the placeholder in this role. `calls` says whether the template renders tool calls."""
    before = BEFORE.get(role, ())
    return [*(message for message in before if calls or "tool_calls" not in message), {"role": role, "content": PLACEHOLDER}]


def owner_digest(key: str) -> str:
    """Returns a digest of an API key for use in files, which must not contain the key."""
    return hashlib.sha256(b"timemix state " + key.encode()).hexdigest()[:32]


def describe_state(state: SavedState, model: str) -> JsonObject:
    """Returns the JSON object that describes a state to the client. `model` is the id of the checkpoint's model."""
    return {"id": state.id, "object": "state", "created": state.created,
            "model": None if state.refusal else state.model or model, "tokens": state.tokens, "bytes": state.bytes}


def _digest(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
