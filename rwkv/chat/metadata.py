"""Reads a checkpoint's metadata: its chat template, its name, and its author's generation options.

A template is jinja2 source: the file chat_template.jinja of a Hugging Face directory, `chat_template` in its
tokenizer_config.json, or tokenizer.chat_template in the metadata of a GGUF file. If there are several templates, the one named
tool_use is for conversations with tools, and the one named default for all others. With chat_template.jinja, the former is in
the file additional_chat_templates/tool_use.jinja; in a GGUF file it is tokenizer.chat_template.tool_use.

llama.cpp's converter writes the same template for every RWKV model. It is recognised as in llama.cpp, and ignored.
Sources: transformers, tokenization_utils_base.py; llama.cpp, conversion/base.py and src/llama-chat.cpp.
"""

import json
from pathlib import Path
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.gguf import MAGIC, header_of, parts_of
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import read_text

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
FAKE_THINK_CONFIG = "fake_think_generation_config.json"          # for answers that begin with empty thoughts
TOOLS_CONFIG = "tools_generation_config.json"                    # for conversations with tools
CONFIG = "config.json"
IN_GGUF = "tokenizer.chat_template"
TOOL_USE = "tool_use"
TOOL_USE_FILE = f"additional_chat_templates/{TOOL_USE}.jinja"
CONVERTER_PARTS = ("rwkv-world", r"{{- 'User: ' + message['content']|trim + '\n\n' -}}")
NAMES_IN_GGUF = ("general.name", "general.basename", "general.base_model.0.name")
NAMES_IN_DIRECTORY = ("_name_or_path", "name_or_path")
DRAWN = {name: name for name in ("temperature", "top_p", "top_k", "min_p")}      # apply only if do_sample is true
PENALTIES = {name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_decay")}
SAMPLING_IN_GGUF = {"general.sampling.temp": "temperature", "general.sampling.top_p": "top_p",
                    "general.sampling.top_k": "top_k", "general.sampling.min_p": "min_p",
                    "general.sampling.penalty_repeat": "repetition_penalty"}


def template_file(checkpoint: Path) -> Path | None:
    """The file that has the checkpoint's template, which template_in reads; None if the checkpoint has no template."""
    if checkpoint.is_dir():
        files = [checkpoint / name for name in (JINJA, TOKENIZER_CONFIG)]
        return next((file for file in files if file.is_file() and template_in(file) is not None), None)
    return checkpoint if _is_gguf(checkpoint) and template_in(checkpoint) is not None else None


def template_in(file: Path) -> str | None:
    """The template in a jinja2 file, a tokenizer_config.json or a GGUF file; None if the JSON or GGUF file has no template.

    Raises UserError if the file cannot be read.
    """
    if _is_gguf(file):
        return _default(_gguf_metadata(file).get(IN_GGUF))
    if file.suffix == ".json":
        return _default(_json(file).get("chat_template"))
    return read_text(file, f"the chat template {file}")


def tool_template_in(file: Path) -> str | None:
    """The template for conversations with tools that accompanies template_in(file); None if there is none."""
    if _is_gguf(file):
        return _default(_gguf_metadata(file).get(f"{IN_GGUF}.{TOOL_USE}"))
    if file.suffix == ".json":
        templates = _by_name(_json(file).get("chat_template"))
        return _default(templates.get(TOOL_USE)) if isinstance(templates, dict) else None
    tool_use = file.parent / TOOL_USE_FILE
    return read_text(tool_use, f"the chat template {tool_use}") if file.name == JINJA and tool_use.is_file() else None


def names_in(checkpoint: Path) -> list[str]:
    if _is_gguf(checkpoint):
        return _strings(_gguf_metadata(checkpoint), NAMES_IN_GGUF)
    config = checkpoint / CONFIG
    return _strings(_json(config), NAMES_IN_DIRECTORY) if config.is_file() else []


class Generation(NamedTuple):
    """The generation options in a file. sampling: the options under our names. draws: whether the file's sampling options
    apply. stop: stop strings. max_new_tokens: None if the file does not have it."""

    file: Path
    sampling: JsonObject
    draws: bool = False
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    def __bool__(self) -> bool:
        return bool(self.sampling or self.stop or self.max_new_tokens)


def generation_in(checkpoint: Path, fake: bool = False, tools: bool = False) -> Generation:
    """The checkpoint's generation options. fake: whether answers begin with empty thoughts. tools: whether the conversation has
    tools.

    A Hugging Face directory may have a separate file for each of these cases (rwkv-rs/transformers-rwkv,
    docs/source/en/model_doc/rwkv.md); if that file is missing or empty, generation_config.json is used. temperature, top_p,
    top_k and min_p require do_sample=true: otherwise transformers ignores them and chooses the likeliest token. A top_k of 0 or
    less is off, as in llama.cpp and vLLM. Raises UserError for stop_strings or max_new_tokens of the wrong type.
    """
    if _is_gguf(checkpoint):
        sampling = _numbers(_gguf_metadata(checkpoint), SAMPLING_IN_GGUF)
        return Generation(checkpoint, sampling, bool(sampling))
    names = [TOOLS_CONFIG] * tools + [FAKE_THINK_CONFIG] * (fake and not tools) + [GENERATION_CONFIG]
    options = [_generation(checkpoint / name) for name in names if (checkpoint / name).is_file()]
    return next(filter(None, options), Generation(checkpoint / GENERATION_CONFIG, {}))


def _generation(file: Path) -> Generation:
    config = _json(file)
    draws = config.get("do_sample") is True
    stops = config.get("stop_strings") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise UserError(f"{file}: stop_strings must be a list of non-empty strings; got {json.dumps(stops)[:60]}")
    tokens = config.get("max_new_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int | float) or tokens % 1 or tokens < 1):
        raise UserError(f"{file}: max_new_tokens must be a whole number of at least 1; got {json.dumps(tokens)[:60]}")
    sampling = _numbers(config, {**DRAWN, **PENALTIES} if draws else PENALTIES)
    return Generation(file, sampling, draws, tuple(stops), None if tokens is None else int(tokens))


def _by_name(templates: object) -> object:
    """Turns a list of templates into a dict by name; returns anything else, such as a single template, unchanged."""
    if isinstance(templates, list):
        return {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    return templates


def _default(templates: object) -> str | None:
    template = _by_name(templates)
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str) or any(part in template for part in CONVERTER_PARTS):
        return None
    return template


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _gguf_metadata(path: Path) -> JsonObject:
    """The model's metadata, which are in the first of its files."""
    return header_of(parts_of(path, header_of(path).metadata)[0]).metadata


def _json(file: Path) -> JsonObject:
    try:
        content = json.loads(read_text(file, str(file)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): the file is damaged or incomplete") from None
    return content if isinstance(content, dict) else {}


def _strings(metadata: JsonObject, keys: tuple[str, ...]) -> list[str]:
    return [metadata[key] for key in keys if isinstance(metadata.get(key), str) and metadata[key]]


def _numbers(metadata: JsonObject, names: dict[str, str]) -> JsonObject:
    """The numbers in the metadata that have a key in `names`, by our names. names: our name for each key."""
    numbers = {name: metadata[key] for key, name in names.items()
               if isinstance(metadata.get(key), int | float) and not isinstance(metadata[key], bool)}
    if (top_k := numbers.get("top_k", 0.5)) % 1 == 0:    # some files have 20.0; 20.5 is refused where top_k is used
        numbers["top_k"] = max(int(top_k), 0)
    return numbers
