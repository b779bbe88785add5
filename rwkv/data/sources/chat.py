"""Reads conversations from JSON lines or one JSON list (.jsonl, .json), also compressed (.gz, .zst), in the common formats:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."}
    {"prompt": "...", "completion": "..."}                      strings, or lists of messages
    {"instruction": "...", "input": "...", "output": "..."}     also question and answer, query and response, with history

For tune.objective=dpo, an entry is a pair of answers, that is, a question with a chosen and a rejected answer:

    {"prompt": "...", "chosen": "...", "rejected": "..."}       strings, or lists of messages
    {"chosen": [...], "rejected": [...]}                        whole conversations; the messages that both share are the prompt
    {"messages": [...], "chosen": {...}, "rejected": {...}}     also with the other field names above

The list of messages may also be called conversation, items or interactions, and its messages may have either format. A list,
`tools` or the value of the role function_call may be a string of JSON. A null field counts as missing, because `datasets`
writes missing fields as null.

Each conversation is a document, which the chat template data.template renders. The first conversation and one of every
1/val_fraction following conversations are for validation, together with their copies (rwkv/data/documents/copies.py).

An answer is only context, and is not learnt, in three cases:
- The answer or the conversation has "weight": 0 or an equivalent field (rwkv/chat/messages.py).
- The entry has a prompt, a completion and "label": false, as in TRL's KTO format.
- The answer is part of a list `prompt`, as in TRL.
Conversations without learnt answers are omitted and counted, including those without an answer or without messages; likewise
pairs with a null answer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rwkv.chat.interface import END, ChatTemplate, Part
from rwkv.chat.messages import EMPTY
from rwkv.chat.thoughts import parse_think
from rwkv.chat.turn_templates import chat_template
from rwkv.config import DataConfig
from rwkv.data.documents.copies import Placement, Splitter, fingerprint
from rwkv.data.documents.source import Document, Source, chunks_of
from rwkv.data.files import find_files, names_and_hashes
from rwkv.data.sources.jsonl import ENDINGS, entries, files
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.compressed import COMPRESSED
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of

PATH = "a .jsonl or .jsonl.gz file of conversations, a folder of them, or a pattern"
LOCAL = True
JSON_ENDINGS = (".json", *(f".json{ending}" for ending in COMPRESSED))  # are read from a folder without JSON lines
LISTS = ("messages", "conversations", "conversation", "items", "interactions")
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
         ("question", "answer"), ("question", "response"), ("query", "response"))
FIELDS = ('"messages", "conversations", or "prompt" and "completion" (or "instruction" and "output", "question" and "answer", '
          '"query" and "response")')
ANSWERS = ("chosen", "rejected")         # a pair's two answers
ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
         "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant", "system": "system",
         "developer": "system", "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
         "tool_response": "tool", "ipython": "tool", "function_call": "assistant", "tool_call": "assistant"}
CALLS = ("function_call", "tool_call")   # roles whose text is a tool call, or a list of calls, in JSON
# fields of an assistant's message that may replace its content
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        parts: the text in parts, each with True if the part is learnt.
        val: True if the conversation is in the validation split.
        where: the file and the line, for error messages.
        weight: the number of bytes read for the conversation.
        copy, moved: as in copies.Placement. A pair of answers is a copy if either of its conversations is a copy.
    """

    parts: list[Part]
    val: bool
    where: str
    weight: int
    copy: bool = False
    moved: bool = False

    @property
    def learnt(self) -> bool:
        """Returns True if any part is learnt. A conversation of which no part is learnt is in neither split."""
        return any(learnt for _, learnt in self.parts)


def source(config: DataConfig, cache: Path) -> Source:
    named, others = _select_files(str(config.path))
    template = template_of(config)

    def documents() -> Iterator[Document]:
        for conversation in conversations(config):
            text = "".join(text for text, _ in conversation.parts).replace(END, "")
            yield Document(chunks_of(text), conversation.val, conversation.where, conversation.weight, copy=conversation.copy)

    paths = [path for _, path in named]
    about = f"conversations of {paths[0].name if len(paths) == 1 else config.path}, template {template.name}"
    if others:
        about += f" ({others} .json files are ignored, because the folder has .jsonl files)"
    identity = sha256([template.definition, *names_and_hashes(named, cache)])
    return Source(documents, about, identity, sum(path.stat().st_size for path in paths))


def _select_files(path: str) -> tuple[list[tuple[str, Path]], int]:
    if not Path(path).is_dir():
        return files(path), 0
    names = [file.name for _, file in find_files(path, (*ENDINGS, *JSON_ENDINGS))]
    others = sum(name.endswith(JSON_ENDINGS) for name in names)
    return (files(path, JSON_ENDINGS), 0) if others == len(names) else (files(path), others)


def template_of(config: DataConfig) -> ChatTemplate:
    """Returns the chat template that data.template names, for answers that begin as data.think specifies.

    Raises UserError if the template does not support such answers.
    """
    template = chat_template(config.template or "world")
    try:
        return template.for_learning(parse_think(config.think))
    except UserError as error:
        raise UserError(f"data.{error}") from None


def conversations(config: DataConfig, template: ChatTemplate | None = None, pairs: bool = False) -> Iterator[Conversation]:
    """Yields all conversations in the order of the files, with copies in the same split unless all conversations are equal.

    Raises UserError if an entry is invalid, or if fewer than two conversations have an answer to learn.

    Args:
        template: the template to use instead of the one that `config` names.
        pairs: whether each entry is a pair of answers. A pair yields the conversation with the chosen answer and then the one
            with the rejected answer. Both are in the same split, and either both are learnt or neither.
    """
    template = template or template_of(config)
    learnt, others, first_omitted = 0, 0, ""
    splitter = Splitter(config.val_fraction)
    pending: list[Conversation] = []     # the first ones, held back until two of them differ
    for _, path in _select_files(str(config.path))[0]:
        for entry, where, weight in entries(path):
            texts = parts_of_pair(entry, where, template) if pairs else (parts_of(entry, where, template),)
            is_learnt = all(any(flag for _, flag in parts) for parts in texts)
            place = Placement(False, False, False)
            if is_learnt:
                learnt += 1
                place = splitter.place(*(fingerprint(text for text, _ in parts) for parts in texts))
            else:
                others += 1
                first_omitted = first_omitted or where
            for parts in texts:
                marked = parts if is_learnt else [(text, False) for text, _ in parts]
                pending.append(Conversation(marked, where=where, weight=weight, **place._asdict()))
            if splitter.distinct > 1:
                yield from pending
                pending.clear()
    if learnt < 2:
        more = f" with an answer to learn, and {others} without (the first: {first_omitted})" if others else ""
        content = f"{count_of(learnt, 'pair')} of answers" if pairs else count_of(learnt, "conversation")
        raise UserError(f"data.path={config.path} has {content}{more}, but at least two are required: one for training "
                        "and one for validation")
    yield from (conversation._replace(val=conversation.val != conversation.moved, moved=False) for conversation in pending)


def holds_conversations(path: Path) -> bool:
    """Returns True if the first entry of a file has the fields of a conversation and no field `text`.

    Raises UserError if the first entry cannot be read.
    """
    fields = set(next((entry for entry, _, _ in entries(path)), {}))
    return "text" not in fields and (not fields.isdisjoint(LISTS) or any(fields.issuperset(pair) for pair in PAIRS))


def parts_of(entry: JsonObject, where: str, template: ChatTemplate) -> list[Part]:
    """Renders the conversation of an entry. Raises UserError with `where` if the entry is not a conversation."""
    try:
        messages = _entry_messages(entry)
        return template.parts(messages, _entry_tools(entry)) if messages else []
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parts_of_pair(entry: JsonObject, where: str, template: ChatTemplate) -> tuple[list[Part], list[Part]]:
    """Renders the conversation with the chosen answer and the one with the rejected answer. Only these answers are learnt."""
    if all(field in entry for field in ANSWERS) and any(entry[field] is None for field in ANSWERS):
        return [], []
    try:
        chosen, rejected = _pair_messages(entry)
        tools = _entry_tools(entry)
        return template.parts(chosen, tools), template.parts(rejected, tools)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _pair_messages(entry: JsonObject) -> tuple[list[JsonObject], list[JsonObject]]:
    fields = {field: _parse_if_json(value) if field in LISTS else value for field, value in entry.items()
             if value not in EMPTY or field in ANSWERS}
    missing = [field for field in ANSWERS if field not in entry]
    if missing:
        raise UserError('a pair of answers must have the fields "prompt", "chosen" and "rejected", or whole conversations in '
                        f"\"chosen\" and \"rejected\"; got no {' and no '.join(missing)}")
    question = _pair_prompt(fields)
    both = [_conversation_ending_in(fields, field, question) for field in ANSWERS]
    if question and question in (both[0], both[1]):      # ultrafeedback_binarized repeats the chosen conversation as messages
        question = question[:-1]
    most = min(map(len, both)) - 1                       # the last message of each conversation is the answer
    shared = 0
    while shared < most and _are_equal_messages(both[0][shared], both[1][shared]):
        shared += 1
    if not all(any(_are_equal_messages(message, other) for other in both[0][:shared]) for message in question):
        raise UserError('whole conversations in "chosen" and "rejected" must both begin with the messages of the prompt')
    for field, messages in zip(ANSWERS, both, strict=True):
        if not shared:
            raise UserError('"chosen" and "rejected" must answer the same question, but their first messages differ')
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{field} must end with an assistant message, but its last message has the role "
                            f"{messages[-1]['role']}")
    unlearnt = entry.get("weight", 1) == 0
    chosen, rejected = ([*_as_context(messages[:shared]), *(_as_context(messages[shared:]) if unlearnt else messages[shared:])]
                        for messages in both)
    return chosen, rejected


def _are_equal_messages(first: JsonObject, second: JsonObject) -> bool:
    return all(first.get(field) == second.get(field) for field in ("role", "content", "tool_calls"))


def _pair_prompt(fields: JsonObject) -> list[JsonObject]:
    name = next((name for name in LISTS if name in fields), None)
    question_field = next((field for field, _ in PAIRS if field in fields), None)
    if name is not None:
        messages = _parse_messages(fields[name], name)
    elif question_field is not None:
        messages = _prompt_messages(fields, question_field, ANSWERS[0])
    else:
        messages = []
    return _with_system(messages, fields)


def _conversation_ending_in(fields: JsonObject, field: str, question: list[JsonObject]) -> list[JsonObject]:
    answer = fields[field]
    messages = _as_messages("assistant", [answer] if isinstance(answer, dict) else answer, field)
    if messages[0]["role"] == "assistant":
        if not any(message["role"] != "system" for message in question):
            raise UserError(f'{field} contains only the answer, but there is no prompt. Add the field "prompt", or make '
                            '"chosen" and "rejected" lists of all messages')
        return [*question, *messages]
    if question and question[0]["role"] == "system" and messages[0]["role"] != "system":
        return [question[0], *messages]
    return messages


def _entry_messages(entry: JsonObject) -> list[JsonObject]:
    """Returns the messages of an entry, or [] if the entry has a list without messages, or a question whose answer is null."""
    parsed = {field: _parse_if_json(value) if field in LISTS else value for field, value in entry.items()}
    fields = {field: value for field, value in parsed.items() if value not in EMPTY}
    name = next((name for name in LISTS if name in fields), None)
    pair = next((pair for pair in PAIRS if all(entry.get(field) is not None for field in pair)), None)
    if name is not None:
        messages = _parse_messages(fields[name], name)
    elif pair is not None:
        question, answer = pair
        messages = [*_prompt_messages({**fields, question: entry[question]}, question, answer),
                    *_as_messages("assistant", entry[answer], answer)]
    elif all(field in fields for field in ANSWERS):
        raise UserError('a pair of answers, "chosen" and "rejected", requires tune.objective=dpo. Set this option, or rename '
                        '"chosen" to "completion" to learn only the chosen answer')
    elif any(field in entry for field in LISTS) or any(entry.get(question) is not None and answer in entry
                                                       for question, answer in PAIRS):
        return []
    else:
        remedy = "To train on whole texts, pass data=jsonl" if isinstance(entry.get("text"), str) else "Rename the fields"
        raise UserError(f"a conversation must have the fields {FIELDS}; got {', '.join(entry)[:120] or 'nothing'}. {remedy}")
    messages = _with_system(messages, fields, first=name != "messages")
    weight = fields.get("weight", 1)
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise UserError(f"weight must be 0 or 1, because a conversation is either learnt or not; got {json.dumps(weight)[:60]}")
    bad = name is None and fields.get("label") is False
    return messages if weight and not bad else _as_context(messages)


def _with_system(messages: list[JsonObject], fields: JsonObject, first: bool = False) -> list[JsonObject]:
    """Puts the entry's system message before the others, unless they begin with a system message and `first` is false."""
    system = fields.get("system", fields.get("system_prompt"))
    if system is None or (messages and messages[0]["role"] == "system" and not first):
        return messages
    return [*_as_messages("system", system, "system"), *messages]


def _prompt_messages(fields: JsonObject, question_field: str, answer_field: str) -> list[JsonObject]:
    """Returns the messages in `history`, whose answers are learnt, and the question."""
    question = fields[question_field]
    more = next((field for field in ("input", "context") if field in fields), None)
    if more is not None:
        if question_field != "instruction" or not isinstance(question, str) or not isinstance(fields[more], str):
            raise UserError(f'the fields "{question_field}" and "{answer_field}" conflict with "{more}". Put the whole prompt '
                            f'into "{question_field}", or rename the fields to "instruction", "input" and "output"')
        question = f"{question}\n{fields[more]}"
    history = fields.get("history", [])
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise UserError(f"history must be a list of pairs [question, answer]; got {_excerpt(history)}")
    messages = []
    for turn in history:
        messages += [*_as_messages("user", turn[0], "history"), *_as_messages("assistant", turn[1], "history")]
    return [*messages, *_as_context(_as_messages("user", question, question_field))]


def _as_messages(role: str, content: object, name: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise UserError(f"{name} must be a string or a list of messages; got {_excerpt(content)}")
    return _parse_messages(content, name)


def _as_context(messages: list[JsonObject]) -> list[JsonObject]:
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _parse_messages(turns: object, name: str) -> list[JsonObject]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f'{name} must be a list of at least one object with "role" and "content", or with "from" and "value"; '
                        f"got {_excerpt(turns)}")
    return [_parse_message(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]


def _parse_message(turn: object, where: str) -> JsonObject:
    if not isinstance(turn, dict):
        raise UserError(f'{where} must be an object with "role" and "content", or with "from" and "value"; got '
                        f"{_excerpt(turn)}")
    fields = {field: value for field, value in turn.items() if value is not None}
    role_field = "from" if "from" in fields and "role" not in fields else "role"
    content_field = next((field for field in ("content", "value", "text") if field in fields),
                      "value" if role_field == "from" else "content")
    role = fields.get(role_field)
    content = fields.get(content_field)
    role_key = role.strip().lower() if isinstance(role, str) else ""
    if role is None:
        raise UserError(f"{where} must have the field \"role\" or \"from\"; got {', '.join(turn)[:60] or 'nothing'}")
    if role_key not in ROLES:
        raise UserError(f"{where}.{role_field} must be one of {', '.join(ROLES)}; got {_excerpt(role)}")
    names = {role_field: "role", content_field: "content"}
    message = {names.get(field, field): value for field, value in fields.items()} | {"role": ROLES[role_key]}
    if role_key in CALLS:
        return message | {"content": "", "tool_calls": _parse_calls(content, f"{where}.{content_field}")}
    message["tool_calls"] = _parse_if_json(message.get("tool_calls"))
    without_content = any(message.get(field) not in EMPTY for field in INSTEAD_OF_CONTENT)
    answers = message["role"] == "assistant" and content is None and without_content
    if not isinstance(content, (str, list)) and not answers:
        raise UserError(f"{where}.{content_field} must be a string or a list of text parts; got {_excerpt(content)}")
    return message


def _parse_calls(content: object, where: str) -> list[JsonObject]:
    calls = _parse_if_json(content)
    if not isinstance(calls, (list, dict)) or not calls:
        raise UserError(f'{where} must be a tool call, {{"name": "...", "arguments": {{}}}}, or a list of tool calls, in JSON; '
                        f"got {_excerpt(content)}")
    return [call if not isinstance(call, dict) or "function" in call else {"type": "function", "function": call}
            for call in (calls if isinstance(calls, list) else [calls])]


def _entry_tools(entry: JsonObject) -> list[JsonObject] | None:
    tools = _parse_if_json(entry.get("tools"))
    if tools in EMPTY:
        functions = _parse_if_json(entry.get("functions"))       # OpenAI's older name for tools
        if not isinstance(functions, list):
            return None
        tools = [{"type": "function", "function": function} for function in functions]
    tools = [_parse_if_json(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("tools must be a list of objects, or a string that contains such a list as JSON; got "
                        f"{_excerpt(entry['tools'])}")
    return tools or None


def _parse_if_json(value: Any) -> Any:
    """Parses a string of JSON. Any other value is returned unchanged, also a string that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _excerpt(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
