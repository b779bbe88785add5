"""Chooses the options of sampling, from the first of these sources that has any:

    the user             sampling=NAME
    the file             generation_config.json of a directory, general.sampling of a GGUF file; options that it lacks are off
    the kind of model    for G1 models, their author's advice on answers that begin with thoughts, or with an empty thought;
                         without thoughts, and for texts without a chat template on a server, the preset for conversations
    the program          its own preset

A single option that the user gives replaces that option of the source.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rwkv import cli
from rwkv.chat.names import Choice, kind_of
from rwkv.chat.stated import sampling_in
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
    """name: a preset, or the file that states the options. why: for people; "" if the user has named the preset."""

    sampling: Sampling
    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.why})' if self.why else ''}: {self.sampling}"


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
        self._asked = {name: getattr(self._own, name) for name in OF_SAMPLING if name in given}
        self._names = (str(path), (run or {}).get("init_from"))
        self._template = template

    def for_answers(self, think: Think = False) -> Chosen:
        """The options for answers that begin as `think` says. Raises UserError for a file's option that Sampling refuses."""
        if self._named:
            return Chosen(self._own, self._preset)
        chosen = self._of_file() or self._of_kind(think) or Chosen(self._own, self._preset, "the program's default")
        if not self._asked:
            return chosen
        why = f"{chosen.why}; as asked for: {', '.join(self._asked)}"
        return Chosen(replace(chosen.sampling, **self._asked), chosen.name, why)

    def _of_file(self) -> Chosen | None:
        for name in filter(None, self._names):
            file, stated = sampling_in(Path(name))
            if not stated:
                continue
            try:
                return Chosen(replace(UNCHANGED, **stated), file.name, "the checkpoint has it")
            except UserError as error:
                raise UserError(f"{file}: {error}: mend it, or name a preset, as sampling={self._preset}") from None
        return None

    def _of_kind(self, think: Think) -> Chosen | None:
        if self._template is None:
            return None
        try:
            start = self._template.answer_start(think)
        except UserError:                # the template has no answers that begin so
            return None
        begun: Think = "fake" if "</think" in start else bool(start)
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
