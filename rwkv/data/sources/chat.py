"""Conversations, JSON lines, also in .gz, in the forms that the field uses:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."}
    {"prompt": "...", "completion": "..."}                      texts, or lists of messages

A conversation is a document, rendered by the chat template data.template. The first one and one of every 1/val_fraction are for
validation.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rwkv.config import DataConfig
from rwkv.data.sources.files import contents
from rwkv.data.sources.jsonl import files, lines
from rwkv.data.sources.source import Document, Source, chunks_of, in_validation, sha256
from rwkv.errors import UserError
from rwkv.io.json_lines import parse
from rwkv.tokenizer.chat import ChatTemplate, Part, chat_template

FORMS = ("messages, conversations, or prompt and completion")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bot": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool"}        # of "from"


class Conversation(NamedTuple):
    """The pieces of a conversation and whether each is learnt. where: its file and line. weight: the bytes read for it."""

    parts: list[Part]
    val: bool
    where: str
    weight: int


def source(config: DataConfig, cache: Path) -> Source:
    """Raises UserError if there is no file; reading raises it, with the file and the line, for what is no conversation."""
    named = files(str(config.path))
    template = template_of(config)

    def documents() -> Iterator[Document]:
        for parts, val, where, weight in conversations(config):
            yield Document(chunks_of("".join(text for text, _ in parts)), val, where, weight)

    paths = [path for _, path in named]
    names = (part for (name, _), content in zip(named, contents(paths, cache), strict=True) for part in (name, content.sha256))
    about = f"conversations of {paths[0].name if len(paths) == 1 else config.path}, template {template.name}"
    return Source(documents, about, sha256([template.definition, *names]), sum(path.stat().st_size for path in paths))


def template_of(config: DataConfig) -> ChatTemplate:
    return chat_template(config.template or "world")


def conversations(config: DataConfig, template: ChatTemplate | None = None) -> Iterator[Conversation]:
    """All conversations in the order of the files. Raises UserError as `source` says, and where there are fewer than two.

    template: replaces the one that `config` names.
    """
    template, count = template or template_of(config), 0
    found = (line for _, path in files(str(config.path)) for line in lines(path))
    for val, (line, where, weight) in zip(in_validation(config.val_fraction), found, strict=False):
        yield Conversation(parts_of(line, where, template), val, where, weight)
        count += 1
    if count < 2:
        raise UserError(f"data.path={config.path} has {count} conversations: training needs at least two, one of them for "
                        "validation")


def parts_of(line: bytes, where: str, template: ChatTemplate) -> list[Part]:
    """The rendered conversation of a line. Raises UserError with `where` if it is none, or has no answer to learn."""
    entry = parse(line, where)
    try:
        parts = template.parts(_messages(entry), entry.get("tools"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not any(learnt for _, learnt in parts):
        raise UserError(f"{where}: the conversation has no answer of the assistant, so there is nothing to learn")
    return parts


def _messages(entry: dict[str, Any]) -> Any:
    if "messages" in entry:
        return entry["messages"]
    if "conversations" in entry:
        return [*_one("system", entry.get("system") or []), *_translated(entry["conversations"])]
    if "prompt" in entry and "completion" in entry:
        return [*_one("user", entry["prompt"]), *_one("assistant", entry["completion"])]
    raise UserError(f"a conversation has {FORMS}; there is {', '.join(entry)[:60] or 'nothing'}")


def _one(role: str, said: Any) -> list[Any]:
    """A message, or the list of messages that `said` is already."""
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _translated(turns: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(turns, list):
        raise UserError("conversations is a list of objects with from and value")
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or turn.get("from") not in ROLES:
            raise UserError(f"conversations[{i}].from is one of {', '.join(ROLES)}")
        yield {"role": ROLES[turn["from"]], "content": turn.get("value")}
