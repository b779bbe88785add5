"""Chooses the options of sampling, from the first of these sources that has any:

    the user             sampling=NAME
    the file             generation_config.json of a directory and its variants for empty thoughts and for tools, and
                         general.sampling of a GGUF file; options that it lacks are those of the kind of model, or else off
    the kind of model    for G1 models, their author's advice on answers that begin with thoughts, or with an empty thought;
                         without thoughts, and for texts without a chat template on a server, the preset for conversations
    the program          its own preset

A single option that the user gives replaces that option of the source. Strings that end a text and the largest number of tokens
come from the file, where the user gives none.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rwkv import cli
from rwkv.chat.names import Choice, kind_of
from rwkv.chat.stated import Generation, generation_in
from rwkv.chat.template import ChatTemplate
from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.errors import UserError

OF_SAMPLING = tuple(item.name for item in fields(Sampling))
UNCHANGED = Sampling(temperature=1.0, top_p=1.0)         # the model's own distribution
OF_G1: dict[Think, tuple[str, str]] = {       # the preset, and what it is for
    True: ("g1_think", "the author's for G1 models whose answers begin with thoughts"),
    "fake": ("g1_fake", "the author's for G1 models whose answers begin with an empty thought"),
    False: ("chat", "for G1 models whose answers begin without thoughts")}
OF_G1_FORM = ("g1", "flower")            # chat templates


class Chosen(NamedTuple):
    """name: a preset, or the file that states the options. why: for people; "" if the user named the preset. own: the options
    that the user gave, as NAME=VALUE. stop, max_new_tokens: those of the file `source`; () and None where it has none or the
    user gives them."""

    sampling: Sampling
    name: str
    why: str = ""
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    source: str = ""
    own: tuple[str, ...] = ()

    def __str__(self) -> str:
        stated = [f"stop [{','.join(map(repr, self.stop))}]"] if self.stop else []
        stated += [f"max_new_tokens {self.max_new_tokens}"] if self.max_new_tokens else []
        source = f"; from {self.source}: {', '.join(stated)}" if stated else ""
        yours = "".join(f", your {option}" for option in self.own)
        return f"{self.name}{f' ({self.why})' if self.why else ''}{yours}: {self.sampling}{source}"


class SamplingChoice:
    """Chooses the options for one checkpoint.

    config: of a program with options of sampling. given: the keys that the user has set. path: of the checkpoint. run: the
    configuration of the run that made it. template: its chat template; None for a program without chat templates.
    """

    def __init__(self, config: Any, given: Collection[str], path: Path, run: Mapping[str, Any] | None = None,
                 template: ChatTemplate | None = None) -> None:
        self._own = Sampling.of(config)
        self._preset: str = config.sampling
        self._named = "sampling" in given
        self._given = given
        self.max_new_tokens: int = getattr(config, "max_new_tokens", 0)          # where the file states none
        self._asked = {name: getattr(self._own, name) for name in OF_SAMPLING if name in given}
        self._names = (str(path), (run or {}).get("init_from"))
        self._template = template

    def for_answers(self, think: Think = False, tools: bool = False) -> Chosen:
        """The options for answers that begin as `think` says; tools: in a conversation with tools.

        Raises UserError for a file's option that Sampling refuses.
        """
        begun = self._begun(think)
        stated = self._of_file(begun == "fake", tools)
        chosen = self._sampling(begun, stated)
        if self._asked and not self._named:
            own = tuple(f"{name}={value}" for name, value in self._asked.items())
            chosen = chosen._replace(sampling=replace(chosen.sampling, **self._asked), own=own)
        if stated is None:
            return chosen
        return chosen._replace(stop=() if "stop" in self._given else stated.stop, source=stated.file.name,
                               max_new_tokens=None if "max_new_tokens" in self._given else stated.max_new_tokens)

    def _sampling(self, begun: Think | None, stated: Generation | None) -> Chosen:
        if self._named:
            return Chosen(self._own, self._preset)
        of_kind = self._of_kind(begun)
        own = of_kind or Chosen(self._own, self._preset, "preset")
        if stated is None or not stated.sampling:
            return own
        base = UNCHANGED if of_kind is None and stated.draws else own.sampling
        rest = "" if base is UNCHANGED else f"; the rest is {own.name}, {own.why}"
        try:
            sampling = replace(base, **stated.sampling)
        except UserError as error:
            raise UserError(f"{stated.file}: {error}: mend it, or name a preset, as sampling={self._preset}") from None
        return Chosen(sampling, stated.file.name, f"states {', '.join(stated.sampling)}{rest}")

    def _of_file(self, fake: bool, tools: bool) -> Generation | None:
        """What the file of the checkpoint, or of the one that it began with, states; None where neither states anything."""
        return next((stated for name in filter(None, self._names) if (stated := generation_in(Path(name), fake, tools))), None)

    def _begun(self, think: Think) -> Think | None:
        """How answers begin in the chat template; None without one, and where it has no answers that begin so."""
        if self._template is None:
            return None
        try:
            start = self._template.answer_start(think)
        except UserError:
            return None
        return "fake" if "</think" in start else bool(start)

    def _of_kind(self, begun: Think | None) -> Chosen | None:
        if self._template is None or begun is None:
            return None
        kind = kind_of(*self._names)
        if self._template.name in OF_G1_FORM and kind.template != "g1":
            kind = Choice("g1", f"the chat template is {self._template.name}")
        if kind.template != "g1":
            return None
        name, purpose = OF_G1[begun]
        return Chosen(preset(name), name, f"{purpose}; {kind.why}")


def preset(name: str) -> Sampling:
    """A preset of configs/sampling. Raises UserError for an unknown name."""
    stated = cli.preset("sampling", name)
    return Sampling(**{option: stated[option] for option in OF_SAMPLING if option in stated})
