"""Chooses the sampling options. The first of these sources that exists has precedence:

    the user             sampling=NAME
    the checkpoint       generation_config.json of a directory, with variants for empty thoughts and for tools, or
                         general.sampling of a GGUF file; missing options come from the model family, or are off
    the model family     the presets in G1_PRESETS for G1 models, by whether answers begin with thoughts, with an empty
                         thought, or without thoughts, as a server's completions do
    the program          the default preset of the program

A single option of the user overrides the same option of the chosen source. Stop strings and the maximum number of tokens come
from the checkpoint, unless the user sets them.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rwkv import cli
from rwkv.chat.interface import ChatTemplate
from rwkv.chat.metadata import Generation, generation_in
from rwkv.chat.names import Choice, template_of_series
from rwkv.chat.thoughts import Think
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping

SAMPLING_OPTIONS = tuple(item.name for item in fields(Sampling))
UNCHANGED = Sampling(temperature=1.0, top_p=1.0)         # samples from the model's own distribution
G1_PRESETS: dict[Think, tuple[str, str]] = {     # the preset and its purpose, by the value of `think`
    True: ("g1_think", "the author's advice for G1 models if answers begin with reasoning"),
    "fake": ("g1_fake", "the author's advice for G1 models if answers begin with empty reasoning"),
    False: ("chat", "for G1 models if answers begin without reasoning")}
G1_TEMPLATES = ("g1", "flower")          # chat templates of G1 models


class ChosenSampling(NamedTuple):
    """The chosen sampling options.

    Attributes:
        name: the name of a preset, or of the file with the options.
        why: the reason to print; "" if the user chose the preset.
        stop: the stop strings in the file `source`; () if the file has none or the user sets this option.
        max_new_tokens: the limit in the file `source`; None if the file has none or the user sets this option.
        source: the name of the checkpoint's file with generation options; "" without such a file.
        overrides: the user's options, as NAME=VALUE.
    """

    sampling: Sampling
    name: str
    why: str = ""
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    source: str = ""
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        limits = [f"stop [{','.join(map(repr, self.stop))}]"] if self.stop else []
        limits += [f"max_new_tokens {self.max_new_tokens}"] if self.max_new_tokens else []
        source = f"; from {self.source}: {', '.join(limits)}" if limits else ""
        overrides = "".join(f", your {option}" for option in self.overrides)
        return f"{self.name}{f' ({self.why})' if self.why else ''}{overrides}: {self.sampling}{source}"


class SamplingChoice:
    """Chooses the sampling options for one checkpoint.

    Args:
        config: the configuration of a program with sampling options.
        user_keys: the options that the user has set.
        path: the checkpoint's path.
        run: the configuration of the run that wrote the checkpoint.
        template: the checkpoint's chat template; None for a program without chat templates.
    """

    def __init__(self, config: Any, user_keys: Collection[str], path: Path, run: JsonMapping | None = None,
                 template: ChatTemplate | None = None) -> None:
        self._configured = Sampling.from_config(config)
        self._preset: str = config.sampling
        self._preset_is_set = "sampling" in user_keys
        self._user_keys = user_keys
        self.max_new_tokens: int = getattr(config, "max_new_tokens", 0)          # a checkpoint's file may override this
        self._overrides = {name: getattr(self._configured, name) for name in SAMPLING_OPTIONS if name in user_keys}
        self._names = (str(path), (run or {}).get("init_from"))
        self._template = template

    def for_answers(self, think: Think = False, tools: bool = False) -> ChosenSampling:
        """Returns the options for answers that begin as `think` says. Raises UserError for a wrong option in a file.

        `tools` says whether the conversation has tools.
        """
        start = self._answer_start(think)
        settings = self._file_options(start == "fake", tools)
        chosen = self._sampling(start, settings)
        if self._overrides and not self._preset_is_set:
            overrides = tuple(f"{name}={value}" for name, value in self._overrides.items())
            chosen = chosen._replace(sampling=replace(chosen.sampling, **self._overrides), overrides=overrides)
        if settings is None:
            return chosen
        return chosen._replace(stop=() if "stop" in self._user_keys else settings.stop, source=settings.file.name,
                               max_new_tokens=None if "max_new_tokens" in self._user_keys else settings.max_new_tokens)

    def _sampling(self, start: Think | None, settings: Generation | None) -> ChosenSampling:
        if self._preset_is_set:
            return ChosenSampling(self._configured, self._preset)
        family = self._family_preset(start)
        default = family or ChosenSampling(self._configured, self._preset, "preset")
        if settings is None or not settings.sampling:
            return default
        base = UNCHANGED if family is None and settings.draws else default.sampling
        rest = "" if base is UNCHANGED else f"; the rest from {default.name}, {default.why}"
        try:
            sampling = replace(base, **settings.sampling)
        except UserError as error:
            raise UserError(f"{settings.file}: {error}. Correct this file, or set a preset such as "
                            f"sampling={self._preset}") from None
        return ChosenSampling(sampling, settings.file.name, f"sets {', '.join(settings.sampling)}{rest}")

    def _file_options(self, fake: bool, tools: bool) -> Generation | None:
        """Returns the options in the checkpoint's file or in the base model's file, or None if neither file has options."""
        files = (generation_in(Path(name), fake, tools) for name in self._names if name)
        return next(filter(None, files), None)

    def _answer_start(self, think: Think) -> Think | None:
        """Returns how answers begin in the chat template, or None if there is no template or `think` is not supported."""
        if self._template is None:
            return None
        try:
            start = self._template.answer_start(think)
        except UserError:
            return None
        return "fake" if "</think" in start else bool(start)

    def _family_preset(self, start: Think | None) -> ChosenSampling | None:
        if self._template is None or start is None:
            return None
        family = template_of_series(*self._names)
        if self._template.name in G1_TEMPLATES and family.template != "g1":
            family = Choice("g1", f"the chat template is {self._template.name}")
        if family.template != "g1":
            return None
        name, purpose = G1_PRESETS[start]
        return ChosenSampling(preset(name), name, f"{purpose}; {family.why}")


def preset(name: str) -> Sampling:
    """Returns a preset of configs/sampling. Raises UserError for an unknown name."""
    values = cli.preset("sampling", name)
    return Sampling(**{option: values[option] for option in SAMPLING_OPTIONS if option in values})
