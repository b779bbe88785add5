"""Chats with a checkpoint in the terminal.

  python chat.py                                        the latest run
  python chat.py checkpoint=rwkv7-g1k-1.5b-20260930-ctx25600.pth dtype=int8
  python chat.py checkpoint=FILE state=state.safetensors think=true
  python chat.py < turns.txt                            a turn per line

Commands:
  /reset              new conversation; keeps the system message
  /system TEXT        new conversation with this system message, or none
  /undo               removes the last turn
  /retry              answers again
  /stats              tokens and times of the last answer
  /save FILE, /load FILE                 the conversation, as a line of JSON
  /think HOW          true, false or fake: how the next answers begin; without
                      HOW, toggles between true and false
  /set NAME=VALUE     max_new_tokens, think, seed, sampling (a preset), or an
                      option of sampling, as on the command line
  /help               lists the commands
  /quit               ends the program; so does Ctrl-D

A turn whose first word has another slash, such as a path, is no command.
Ctrl-C stops the answer, not the program. Esc, then Enter starts a new line. The
state is carried over: each turn prefills only its new tokens. The first lines
show the chat template and the sampling options, and why they were chosen.
Reasoning is dim in a terminal, and between <think> and </think> elsewhere.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kernels.arguments import from_home
from kernels.machine import allocator, threads
from rwkv import cli
from rwkv.chat.thoughts import Think, ThoughtParser, parse_think
from rwkv.cli.garbage import without_garbage_collection
from rwkv.config import ChatConfig, Sampling
from rwkv.errors import UserError
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of, escape_controls, wrap_text
from rwkv.io.signals import Signalled, StopRequest
from rwkv.io.utf8 import decode
from rwkv.programs.sampling import SAMPLING_OPTIONS, SamplingChoice, preset

if TYPE_CHECKING:
    from rwkv.chat.interface import ChatTemplate
    from rwkv.generation.conversation import Chat

DIM = "\033[2m"                          # escape codes of a terminal
NORMAL = "\033[0m"
SAVED = b'{"messages": ['                # a saved conversation begins with this
SETTINGS = (*SAMPLING_OPTIONS, "sampling", "max_new_tokens", "think", "seed")     # the names that /set accepts


def chat(config: ChatConfig, line: cli.CommandLine) -> None:
    allocator.keep_large_blocks()
    from rwkv.checkpoint.option_files import require_files

    require_files(config, config.template, config.state)
    _say(f"loading {config.checkpoint}")
    session = Terminal(*_open(config, line))
    interactive = sys.stdin.isatty()
    if interactive:
        _say("/help lists the commands; Ctrl-D ends the chat")
    turns = _typed_turns() if interactive else (decode(row, "standard input").strip() for row in sys.stdin.buffer)
    failed = False
    for text in turns:
        if text in ("/quit", "/exit"):
            break
        if text and not session.turn(text):
            failed = True
    if failed and not interactive:       # a script sees the failure in the exit status
        sys.exit(cli.USER_ERROR)


@without_garbage_collection()
def _open(config: ChatConfig, line: cli.CommandLine) -> tuple["Chat", SamplingChoice]:
    from rwkv.chat.turn_templates import chat_template
    from rwkv.generation.conversation import Chat
    from rwkv.generation.decoder import decoding_line
    from rwkv.pretrained import open_checkpoint, template_choice, template_line
    from rwkv.programs.draft import load_draft, open_draft

    opened = open_checkpoint(config)
    draft = open_draft(config, opened)
    choice = template_choice(opened.checkpoint, config.template)
    template = chat_template(choice.template)
    think = parse_think(config.think)
    opened.print_notes()
    template.answer_start(think)          # an unsupported think= raises UserError before the model is loaded
    sampling = SamplingChoice(config, line.keys, opened.checkpoint.path, opened.checkpoint.run, template)
    chosen = sampling.for_answers(think)
    _say(f"chat template: {template_line(opened.checkpoint, choice)}")
    _say(f"sampling: {chosen}")
    model, context = opened.model_and_context(config.state, config.state_layout)
    _say(decoding_line(model))
    conversation = Chat(model, opened.tokenizer, template, chosen.sampling, chosen.max_new_tokens or config.max_new_tokens,
                        config.seed, think, context, stop=chosen.stop, draft=load_draft(draft, model))
    if config.system:
        conversation.reset(config.system)
    return conversation, sampling


class Terminal:
    """A conversation in the terminal. Answers go to standard output, and everything else goes to standard error.

    `sampling` chooses the sampling options again after /think. If it is None, the options never change.
    """

    def __init__(self, conversation: "Chat", sampling: SamplingChoice | None = None) -> None:
        self.chat = conversation
        self._sampling = sampling
        self._overrides: JsonObject = {}             # the sampling options that /set has changed
        self._max_new_tokens_is_set = False              # whether /set has set max_new_tokens
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": lambda _: self.chat.reset(), "undo": lambda _: self.chat.undo(), "system": self.chat.reset,
            "retry": lambda _: self._stream_answer(self.chat.retry()), "save": self._save, "load": self._load,
            "think": self._think, "set": self._set, "stats": self._stats, "help": lambda _: _say(self.commands())}

    def commands(self) -> str:
        return f"commands: /{', /'.join(self._commands)}, /quit"

    def turn(self, text: str) -> bool:
        """Handles a command or a turn of the user. Prints an error on standard error, and then returns False."""
        try:
            name, _, rest = text[1:].partition(" ")
            if text.startswith("/") and "/" not in name:       # a path or a comment has another slash, a command does not
                if name not in self._commands:
                    raise UserError(f"the command /{name} is unknown; {self.commands()}")
                self._commands[name](rest.strip())
            else:
                self._stream_answer(self.chat.say(text))
            return True
        except UserError as error:
            _say(f"error: {error}")
        except Signalled:                # only Ctrl-C ends just the turn; other signals end the program
            raise
        except KeyboardInterrupt:        # Ctrl-C during prefill
            _say("the turn was stopped and discarded")
        return False

    def _stream_answer(self, pieces: Iterator[str]) -> None:
        with StopRequest((signal.SIGINT,), every_signal=True) as stop:
            answer = _Answer(self.chat.template, self.chat.think)
            is_empty = True
            for piece in pieces:
                is_empty = is_empty and not piece.strip()
                answer.show(piece)
                if stop.requested:
                    break
            pieces.close()               # type: ignore[attr-defined]
            answer.show("", last=True)
        print(flush=True)
        if is_empty and not stop.requested:
            _say("the answer is empty")
        if answer.in_thoughts and self.chat.stats.written == self.chat.max_new_tokens:
            _say(f"max_new_tokens={self.chat.max_new_tokens} cut the reasoning short: raise this limit with "
                 "/set max_new_tokens=NUMBER")

    def _think(self, text: str) -> None:
        self._set(f"think={text or str(self.chat.think is not True).lower()}")
        _say(f"think={str(self.chat.think).lower()}")

    def _save(self, path: str) -> None:
        if not path:
            raise UserError("/save requires a file name")
        file = Path(from_home(path))
        text = json.dumps({"messages": self.chat.messages}, ensure_ascii=False) + "\n"
        try:
            if not file.parent.is_dir():
                raise UserError(f"cannot write {path}: the folder {file.parent} does not exist")
            if not _may_replace(file):   # such as the checkpoint, which the process has mapped into memory
                raise UserError(f"cannot write {path}: the file exists and is not a saved conversation. Choose another name")
            write_file(file, lambda stream: stream.write(text.encode()))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def _load(self, path: str) -> None:
        from rwkv.io.json_lines import parse

        path = from_home(path)
        if not Path(path).is_file():
            raise UserError(f"/load requires an existing file that /save has written; got {path or 'no name'}")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        self.chat.load(parse(content.split(b"\n")[0], path).get("messages"))

    def _set(self, text: str) -> None:
        name, equals, value = text.partition("=")
        if not equals or name not in SETTINGS:
            raise UserError(f"/set requires NAME=VALUE, where NAME must be one of {', '.join(SETTINGS)}")
        if name == "sampling":
            self.chat.sampling = preset(value)
            self._sampling = None
            _say(f"sampling: {value}: {self.chat.sampling}")
        elif name in SAMPLING_OPTIONS:
            metadata = next(item.metadata for item in fields(Sampling) if item.name == name)
            is_texts = metadata["typed"] == list[str]    # /set gives a single string for an option that takes a list
            option = {name: metadata["read"]([value] if value else []) if is_texts else _from_yaml(name, value)}
            sampling = replace(self.chat.sampling, **option)
            sampling.check_ids(self.chat.tokenizer.vocab_size)
            self.chat.sampling = sampling
            self._overrides |= option
        elif name == "think":
            think = parse_think(ChatConfig(think=_from_yaml(name, value)).think)         # ChatConfig checks the value
            self.chat.template.answer_start(think)
            self.chat.think = think
            self._choose_sampling()
        else:
            number = _from_yaml(name, value)
            if type(number) is not type(getattr(self.chat, name)):
                raise UserError(f"{name} must be a whole number; got {value!r}")
            ChatConfig(**{name: number})                 # raises UserError for a value out of range
            setattr(self.chat, name, number)
            self._max_new_tokens_is_set |= name == "max_new_tokens"

    def _choose_sampling(self) -> None:
        """Chooses the sampling options of the next answers, except the options that /set has changed."""
        if self._sampling is None:
            return
        chosen = self._sampling.for_answers(self.chat.think)
        before = self.chat.sampling, self.chat.stop, self.chat.max_new_tokens
        self.chat.sampling, self.chat.stop = replace(chosen.sampling, **self._overrides), chosen.stop
        if not self._max_new_tokens_is_set:
            self.chat.max_new_tokens = chosen.max_new_tokens or self._sampling.max_new_tokens
        if (self.chat.sampling, self.chat.stop, self.chat.max_new_tokens) != before:
            _say(f"sampling: {chosen._replace(sampling=self.chat.sampling)}")

    def _stats(self, _: str) -> None:
        stats = self.chat.stats
        rate = stats.written / max(stats.all_s - stats.first_s, 1e-9)
        _say(f"prefill {count_of(stats.read, 'token')}; first token after {stats.first_s:.2f} s; "
             f"wrote {count_of(stats.written, 'token')}, {rate:.0f} tokens/s"
             + (f"; {stats.accepted} of {count_of(stats.proposed, 'proposed token')} accepted" if self.chat.draft else ""))


class _Answer:
    """Prints an answer while it is generated. `in_thoughts` is True while the text is only thoughts."""

    def __init__(self, template: "ChatTemplate", think: Think) -> None:
        self._parser = ThoughtParser(template.answer_start(think), template.thinks)
        terminal = _shows_styles()
        self._marks = (DIM, f"{NORMAL}\n") if terminal else ("<think>\n", "\n</think>\n")
        self._cut = NORMAL if terminal else ""           # the text to print after thoughts that are cut short
        self.in_thoughts = False

    def show(self, piece: str, last: bool = False) -> None:
        thoughts, text = self._parser.push(escape_controls(piece, sys.stdout), last)
        before = self._marks[0] if thoughts and not self.in_thoughts else ""
        self.in_thoughts = self.in_thoughts or bool(thoughts)
        after = self._marks[1] if self.in_thoughts and text else ""
        if text:
            self.in_thoughts = False
        if last and self.in_thoughts:
            after = self._cut if self._parser.thinking else self._marks[1].rstrip("\n")
        print(f"{before}{thoughts}{after}{text}", end="", flush=True)


def _shows_styles() -> bool:
    """Returns True if standard output is a terminal that shows dim text, and not TERM=dumb, which shows escape codes."""
    if not sys.stdout.isatty():
        return False
    try:
        from prompt_toolkit.utils import is_dumb_terminal
    except ImportError:
        return True
    return not is_dumb_terminal()


def _may_replace(file: Path) -> bool:
    """Returns True if the file is missing, empty, a saved conversation, or no regular file."""
    if not file.is_file() or not file.stat().st_size:
        return True
    with file.open("rb") as stream:
        return stream.read(len(SAVED)) == SAVED


def _from_yaml(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):                 # a date such as 2026-02-30 causes a ValueError
        raise UserError(f"{name} must be a number, a name, true or false; got {text!r}") from None


def _say(text: str) -> None:
    print(wrap_text(text, sys.stderr), file=sys.stderr, flush=True)


def _typed_turns() -> Iterator[str]:
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import create_app_session
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.plain_text import PlainTextOutput
        from prompt_toolkit.utils import is_dumb_terminal
    except ImportError:
        raise UserError("a chat in a terminal requires prompt_toolkit: run pip install prompt_toolkit, or send the turns "
                        "through standard input") from None
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    output: Any = create_output(always_prefer_tty=True)          # standard error if answers go to a file or a pipe
    if is_dumb_terminal():               # TERM=dumb, as in Emacs: escape codes would be shown
        output = PlainTextOutput(output.stdout)
    with create_app_session(output=output):              # as an argument of PromptSession, output would override TERM=dumb
        session: Any = PromptSession(key_bindings=keys, enable_suspend=True)
    while True:
        try:
            yield session.prompt("> ").strip()
        except Signalled:
            raise
        except KeyboardInterrupt:        # Ctrl-C only clears the line
            continue
        except EOFError:
            return


def main() -> None:
    threads.wait_briefly()               # this call and the next must precede the import of torch
    allocator.use_large_pages()
    cli.run(chat, ChatConfig, "chat", __doc__)


if __name__ == "__main__":
    main()
