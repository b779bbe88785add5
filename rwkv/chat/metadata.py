"""Reads the chat template, the names and the author's generation options from a checkpoint's metadata.

A template is jinja2 source: the file chat_template.jinja of a Hugging Face directory, `chat_template` in tokenizer_config.json,
or tokenizer.chat_template in the metadata of a GGUF file. If there are several templates, the template named tool_use is for
conversations with tools, and the template named default is for all others. With chat_template.jinja, the tool_use template is
in the file additional_chat_templates/tool_use.jinja. In a GGUF file, the key is tokenizer.chat_template.tool_use.

llama.cpp's converter writes the same template for every RWKV model. This template is recognised as in llama.cpp, and ignored.
Sources: transformers, tokenization_utils_base.py; llama.cpp, conversion/base.py and src/llama-chat.cpp.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.gguf import MAGIC, gguf_header, model_parts
from rwkv.io import hub
from rwkv.io.json_types import JsonObject
from rwkv.io.utf8 import read_text

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
FAKE_THINK_CONFIG = "fake_think_generation_config.json"          # applies to answers that begin with empty thoughts
TOOLS_CONFIG = "tools_generation_config.json"                    # applies to conversations with tools
CONFIG = hub.CONFIG
IN_GGUF = "tokenizer.chat_template"
TOOL_USE = "tool_use"
TOOL_USE_FILE = f"additional_chat_templates/{TOOL_USE}.jinja"
CONVERTER_PARTS = ("rwkv-world", r"{{- 'User: ' + message['content']|trim + '\n\n' -}}")
NAMES_IN_GGUF = ("general.name", "general.basename", "general.base_model.0.name")
NAMES_IN_DIRECTORY = ("_name_or_path", "name_or_path")
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SPECIAL_IN_GGUF = {"eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
                   "cls_token": "cls", "mask_token": "mask"}             # llama.cpp spells it "seperator"
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
DRAWN = {name: name for name in ("temperature", "top_p", "top_k", "min_p")}      # these apply only if do_sample is true
PENALTIES = {name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_decay")}
SAMPLING_IN_GGUF = {"general.sampling.temp": "temperature", "general.sampling.top_p": "top_p",
                    "general.sampling.top_k": "top_k", "general.sampling.min_p": "min_p",
                    "general.sampling.penalty_repeat": "repetition_penalty"}


def template_file(checkpoint: Path) -> Path | None:
    """Returns the file from which template_in can read the checkpoint's template, or None if there is none or it is empty."""
    checkpoint = _metadata_path(checkpoint)
    if checkpoint.is_dir():
        files = [checkpoint / name for name in (JINJA, TOKENIZER_CONFIG)]
        return next((file for file in files if file.is_file() and (template_in(file) or "").strip()), None)
    return checkpoint if _is_gguf(checkpoint) and template_in(checkpoint) is not None else None


def template_in(file: Path) -> str | None:
    """Reads the template from a jinja2 file, a tokenizer_config.json or a GGUF file.

    Returns None if a JSON or GGUF file has no template. Raises UserError if the file cannot be read.
    """
    if _is_gguf(file):
        return _default_template(_gguf_metadata(file).get(IN_GGUF))
    if file.suffix == ".json":
        return _default_template(_read_json(file).get("chat_template"))
    return read_text(file, f"the chat template {file}")


def tool_template_in(file: Path) -> str | None:
    """Reads the template for conversations with tools that belongs to template_in(file), or returns None if there is none."""
    if _is_gguf(file):
        return _default_template(_gguf_metadata(file).get(f"{IN_GGUF}.{TOOL_USE}"))
    if file.suffix == ".json":
        templates = _templates_by_name(_read_json(file).get("chat_template"))
        return _default_template(templates.get(TOOL_USE)) if isinstance(templates, dict) else None
    tool_use = file.parent / TOOL_USE_FILE
    return read_text(tool_use, f"the chat template {tool_use}") if file.name == JINJA and tool_use.is_file() else None


def _metadata_path(checkpoint: Path) -> Path:
    """Returns the directory of a weights file beside config.json, and any other path unchanged."""
    return checkpoint.parent if hub.has_configuration(checkpoint) else checkpoint


def special_tokens_for(file: Path) -> JsonObject:
    """Returns the special tokens that transformers defines as variables of a template, by the variable's name.

    The tokens are in tokenizer_config.json, special_tokens_map.json or the metadata of a GGUF file. Only variables that occur
    in the template in `file` are returned; if there are any, eos_token is returned too, because it may be the same token.
    """
    template = f"{template_in(file)} {tool_template_in(file)}"
    used = {name: text for name, text in _special_tokens(file).items() if re.search(rf"\b{re.escape(name)}\b", template)
            or name == "eos_token"}
    return used if used.keys() - {"eos_token"} else {}


def _special_tokens(file: Path) -> JsonObject:
    if _is_gguf(file):
        metadata = _gguf_metadata(file)
        texts = metadata.get("tokenizer.ggml.tokens")
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_IN_GGUF.items()}
        return {name: texts[id_] for name, id_ in ids.items()
                if isinstance(texts, list) and isinstance(id_, int) and 0 <= id_ < len(texts)}
    stated: JsonObject = {}
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):  # transformers prefers the latter
        stated |= _read_json(file.parent / name) if (file.parent / name).is_file() else {}
    extra = stated.get("extra_special_tokens")
    stated |= extra if isinstance(extra, dict) else {}
    names = (*SPECIAL_IN_GGUF, *SPECIAL_LISTS, *(extra if isinstance(extra, dict) else ()))
    tokens = {name: _token_texts(stated.get(name)) for name in names}
    return {name: text for name, text in tokens.items() if text}


def _token_texts(token: object) -> object:
    """Returns the text of a token (a string, or an object with `content`), the texts of a list of tokens, or else None."""
    if isinstance(token, list):
        return [text for text in map(_token_texts, token) if isinstance(text, str)]
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def names_in(checkpoint: Path) -> list[str]:
    checkpoint = _metadata_path(checkpoint)
    if _is_gguf(checkpoint):
        return _string_values(_gguf_metadata(checkpoint), NAMES_IN_GGUF)
    config = checkpoint / CONFIG
    return _string_values(_read_json(config), NAMES_IN_DIRECTORY) if config.is_file() else []


def texts_of(checkpoint: Path) -> dict[str, str]:
    """Returns the chat templates and generation options of a directory or GGUF file, as the files of a directory: {name: text}.

    tokenizer_config.json has only the special tokens that the templates use. A checkpoint that is converted has the same
    template and options in the new format.
    """
    checkpoint = _metadata_path(checkpoint)
    texts: dict[str, str | None] = {}
    if file := template_file(checkpoint):
        texts = {JINJA: template_in(file), TOOL_USE_FILE: tool_template_in(file)}
        if tokens := special_tokens_for(file):
            texts[TOKENIZER_CONFIG] = json.dumps(tokens, indent=2) + "\n"
    if checkpoint.is_dir():
        options = (checkpoint / name for name in (GENERATION_CONFIG, FAKE_THINK_CONFIG, TOOLS_CONFIG))
        texts |= {file.name: read_text(file, str(file)) for file in options if file.is_file() and _read_json(file)}
    elif generation := generation_in(checkpoint):
        texts[GENERATION_CONFIG] = json.dumps({"do_sample": True, **generation.sampling}, indent=2) + "\n"
    return {name: text for name, text in texts.items() if text is not None}


def gguf_metadata(texts: Mapping[str, str]) -> JsonObject:
    """Returns the metadata of a GGUF file with the templates and options in `texts`, a result of texts_of."""
    templates = {IN_GGUF: texts.get(JINJA), f"{IN_GGUF}.{TOOL_USE}": texts.get(TOOL_USE_FILE)}
    sampling = _sampling(json.loads(texts.get(GENERATION_CONFIG, "{}")))
    return {**{key: text for key, text in templates.items() if text},
            **{key: sampling[name] for key, name in SAMPLING_IN_GGUF.items() if name in sampling}}


def not_in_gguf(texts: Mapping[str, str]) -> list[str]:
    """Returns the names of the files and options in `texts`, a result of texts_of, that GGUF's metadata cannot hold."""
    config = json.loads(texts.get(GENERATION_CONFIG, "{}"))
    options = ("stop_strings", "max_new_tokens", *(name for name in PENALTIES if name not in SAMPLING_IN_GGUF.values()))
    files = [name for name in (FAKE_THINK_CONFIG, TOOLS_CONFIG, TOKENIZER_CONFIG) if name in texts]
    return files + [name for name in options if config.get(name)]


class Generation(NamedTuple):
    """The generation options in a file."""

    file: Path
    sampling: JsonObject                 # the sampling options, with the names in rwkv.config.Sampling
    draws: bool = False                  # True if the file's temperature, top_p, top_k and min_p apply
    stop: tuple[str, ...] = ()           # stop strings
    max_new_tokens: int | None = None    # None if the file has no token limit

    def __bool__(self) -> bool:
        return bool(self.sampling or self.stop or self.max_new_tokens)


def generation_in(checkpoint: Path, fake: bool = False, tools: bool = False) -> Generation:
    """Reads the checkpoint's generation options. Raises UserError if stop_strings or max_new_tokens have the wrong type.

    A Hugging Face directory may have separate files for `fake` and `tools` (rwkv-rs/transformers-rwkv,
    docs/source/en/model_doc/rwkv.md). If such a file is missing or empty, generation_config.json is used. The options
    temperature, top_p, top_k and min_p require do_sample=true, because transformers otherwise chooses the likeliest token. A
    top_k of 0 or less turns the filter off, as in llama.cpp and vLLM.

    Args:
        fake: reads the options for answers that begin with empty thoughts.
        tools: reads the options for conversations with tools.
    """
    checkpoint = _metadata_path(checkpoint)
    if _is_gguf(checkpoint):
        sampling = _number_values(_gguf_metadata(checkpoint), SAMPLING_IN_GGUF)
        return Generation(checkpoint, sampling, bool(sampling))
    names = [TOOLS_CONFIG] * tools + [FAKE_THINK_CONFIG] * (fake and not tools) + [GENERATION_CONFIG]
    options = [_generation(checkpoint / name) for name in names if (checkpoint / name).is_file()]
    return next(filter(None, options), Generation(checkpoint / GENERATION_CONFIG, {}))


def _generation(file: Path) -> Generation:
    config = _read_json(file)
    draws = config.get("do_sample") is True
    stops = config.get("stop_strings") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise UserError(f"{file}: stop_strings must be a list of non-empty strings; got {json.dumps(stops)[:60]}")
    tokens = config.get("max_new_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int | float) or tokens % 1 or tokens < 1):
        raise UserError(f"{file}: max_new_tokens must be a whole number of at least 1; got {json.dumps(tokens)[:60]}")
    return Generation(file, _sampling(config), draws, tuple(stops), None if tokens is None else int(tokens))


def _sampling(config: JsonObject) -> JsonObject:
    return _number_values(config, {**DRAWN, **PENALTIES} if config.get("do_sample") is True else PENALTIES)


def _templates_by_name(templates: object) -> object:
    if isinstance(templates, list):
        return {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    return templates


def _default_template(templates: object) -> str | None:
    template = _templates_by_name(templates)
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str) or not template.strip() or any(part in template for part in CONVERTER_PARTS):
        return None
    return template


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _gguf_metadata(path: Path) -> JsonObject:
    first = model_parts(path, gguf_header(path).metadata)[0]     # the first file of a model has the model's metadata
    return gguf_header(first).metadata


def _read_json(file: Path) -> JsonObject:
    try:
        content = json.loads(read_text(file, str(file)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file} is damaged or incomplete: the content is not JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def _string_values(metadata: JsonObject, keys: tuple[str, ...]) -> list[str]:
    return [metadata[key] for key in keys if isinstance(metadata.get(key), str) and metadata[key]]


def _number_values(metadata: JsonObject, names: dict[str, str]) -> JsonObject:
    """Returns the numbers in the metadata, renamed from the keys to the values of `names`."""
    numbers = {name: metadata[key] for key, name in names.items()
               if isinstance(metadata.get(key), int | float) and not isinstance(metadata[key], bool)}
    if (top_k := numbers.get("top_k", 0.5)) % 1 == 0:    # some files have 20.0, which is accepted; 20.5 is rejected later
        numbers["top_k"] = max(int(top_k), 0)
    return numbers
