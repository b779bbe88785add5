"""Writes and reads model cards, the README.md of a directory: the base weights, the training data, and how to load the model.

The front matter follows the Hugging Face Hub (license, base_model, library_name, tags). The licence is copied from the base
model's card. If that card has no licence, neither has the new card.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import yaml

from rwkv.io import hub
from rwkv.io.json_types import JsonObject

FILE = hub.CARD
MARK = "<!-- written by timemix -->"     # this program overwrites a card only if it contains this line
LOADING = "## How to load it"
FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
COMMANDS = re.compile(r"## Command\n\n((?:    .*\n)+)")


@dataclass(frozen=True)
class Card:
    """The content of a model card; str() returns its text.

    Attributes:
        base: the name of the base weights.
        data: lines with the name and the hash of a data file.
        losses: lines of text about losses.
        commands: the commands that produced the model.
        loads: commands and code that load the model.
    """

    title: str
    base: str | None = None
    licence: str | None = None
    data: Sequence[str] = ()
    losses: Sequence[str] = ()
    commands: Sequence[str] = ()
    loads: Sequence[str] = ()
    tags: Sequence[str] = field(default=("rwkv",))

    def __str__(self) -> str:
        on_hub = hub.parse(self.base) if self.base else None
        front: JsonObject = {"license": self.licence} if self.licence else {}
        if on_hub:
            front["base_model"] = on_hub.repository
        front |= {"library_name": "timemix", "tags": [*self.tags]}
        parts = [f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n{MARK}\n", f"# {self.title}\n"]
        licence = f"; its licence is {self.licence}" if self.licence else "; no card states its licence"
        if self.base:
            parts.append(f"## Base\n\n`{self.base}`{licence}\n")
        for heading, lines in (("## Data", self.data), ("## Losses", self.losses)):
            if lines:
                parts.append(f"{heading}\n\n" + "".join(f"- {line}\n" for line in lines))
        for heading, lines in (("## Command", self.commands), (LOADING, self.loads)):
            if lines:
                parts.append(f"{heading}\n\n" + "".join(f"    {line}\n" for line in lines))
        return "\n".join(parts)


def is_ours(file: Path) -> bool:
    """Returns True if this program wrote the card, which then still contains MARK."""
    return file.name == FILE and file.is_file() and MARK in file.read_text(encoding="utf-8", errors="replace")


def licence_of(path: str | Path) -> str | None:
    """Returns the licence in the model card of a directory, or of a file's folder; None if no card states one."""
    path = Path(path)
    folders = [path if path.is_dir() else path.parent]
    folders += [folder for folder in path.parents if folder.parent.name == "snapshots"]          # in the Hub's cache
    folders += [path.parent.parent] * (path.parent.name == "checkpoints")                        # in a run's directory
    for folder in folders:
        front = _front(folder / FILE)
        if isinstance(value := front.get("license"), str):
            return value
    return None


def commands_in(file: Path) -> list[str]:
    """Returns the commands in a card that this program wrote; [] for any other file."""
    match = COMMANDS.search(file.read_text(encoding="utf-8", errors="replace")) if is_ours(file) else None
    return [line.removeprefix("    ") for line in match[1].splitlines()] if match else []


def loading_commands(name: str) -> list[str]:
    """Returns a command and a line of Python that load the checkpoint `name`."""
    return [f"timemix generate {quote(f'checkpoint={name}')} prompt=...",
            f"RWKV.from_pretrained({json.dumps(name, ensure_ascii=False)})           # from rwkv import RWKV"]


def directory_card(name: str, path: Path, source: str | None = None, command: str | None = None) -> str:
    """Returns the card of a Hugging Face directory. If the weights are from a run's directory, the card extends the run's card.

    Args:
        name: the name of the directory.
        path: the file or directory with the weights.
        source: the name of the weights, as the user typed it.
        command: the command that writes the directory.
    """
    loads = loading_commands(name)
    run_card = path.parent.parent / FILE
    if path.parent.name == "checkpoints" and is_ours(run_card):
        text = run_card.read_text(encoding="utf-8", errors="replace").partition(LOADING)[0]
        if command and (match := COMMANDS.search(text)):
            text = f"{text[:match.end()]}    {command}\n{text[match.end():]}"
        return text + f"{LOADING}\n\n" + "".join(f"    {line}\n" for line in loads)
    if not path.exists():                # the base of a model in memory is unknown
        return str(Card(name, loads=loads))
    base = source or path.name
    pinned = hub.fetch(base).pinned if hub.parse(base) else base
    return str(Card(name, pinned, licence_of(path), commands=[command] if command else [], loads=loads))


def _front(file: Path) -> JsonObject:
    if not file.is_file():
        return {}
    match = FRONT.match(file.read_text(encoding="utf-8", errors="replace"))
    try:
        content = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
