"""Facts for chat that a checkpoint states beside its weights: its template, its name, and its author's sampling options.

A template is a text in jinja2: the file chat_template.jinja of a Hugging Face directory, `chat_template` in its
tokenizer_config.json, or tokenizer.chat_template in the metadata of a GGUF file. If there are several, the one called default
counts, and the one called tool_use for conversations with tools; beside chat_template.jinja that is the file
additional_chat_templates/tool_use.jinja, and in a GGUF file tokenizer.chat_template.tool_use.

llama.cpp's converter writes one and the same template for every RWKV model. It is ignored, and recognised as llama.cpp
recognises it. Sources: transformers, tokenization_utils_base.py; llama.cpp, conversion/base.py and src/llama-chat.cpp.
"""

import json
from pathlib import Path
from typing import Any

from rwkv.errors import UserError
from rwkv.io.gguf import MAGIC, header_of, parts_of
from rwkv.io.utf8 import read_text

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"
IN_GGUF = "tokenizer.chat_template"
TOOL_USE = "tool_use"
TOOL_USE_FILE = f"additional_chat_templates/{TOOL_USE}.jinja"
OF_CONVERTER = ("rwkv-world", r"{{- 'User: ' + message['content']|trim + '\n\n' -}}")
NAMES_IN_GGUF = ("general.name", "general.basename", "general.base_model.0.name")
NAMES_IN_DIRECTORY = ("_name_or_path", "name_or_path")
SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
SAMPLING_IN_GGUF = {"general.sampling.temp": "temperature", "general.sampling.top_p": "top_p",
                    "general.sampling.top_k": "top_k", "general.sampling.min_p": "min_p",
                    "general.sampling.penalty_repeat": "repetition_penalty"}


def template_file(checkpoint: Path) -> Path | None:
    """The file that holds the checkpoint's own template, for template_in; None where it has none."""
    if checkpoint.is_dir():
        files = [checkpoint / name for name in (JINJA, TOKENIZER_CONFIG)]
        return next((file for file in files if file.is_file() and template_in(file) is not None), None)
    return checkpoint if _is_gguf(checkpoint) and template_in(checkpoint) is not None else None


def template_in(file: Path) -> str | None:
    """The template in a jinja2 file, a tokenizer_config.json or a GGUF file; None if one of the last two has none.

    Raises UserError for a file that cannot be read.
    """
    if _is_gguf(file):
        return _chosen(_of_gguf(file).get(IN_GGUF))
    if file.suffix == ".json":
        return _chosen(_json(file).get("chat_template"))
    return read_text(file, f"the chat template {file}")


def tool_template_in(file: Path) -> str | None:
    """The template for conversations with tools that stands beside the one of template_in; None where there is none."""
    if _is_gguf(file):
        return _chosen(_of_gguf(file).get(f"{IN_GGUF}.{TOOL_USE}"))
    if file.suffix == ".json":
        stated = _named(_json(file).get("chat_template"))
        return _chosen(stated.get(TOOL_USE)) if isinstance(stated, dict) else None
    beside = file.parent / TOOL_USE_FILE
    return read_text(beside, f"the chat template {beside}") if file.name == JINJA and beside.is_file() else None


def names_in(checkpoint: Path) -> list[str]:
    if _is_gguf(checkpoint):
        return _texts(_of_gguf(checkpoint), NAMES_IN_GGUF)
    config = checkpoint / CONFIG
    return _texts(_json(config), NAMES_IN_DIRECTORY) if config.is_file() else []


def sampling_in(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """The file that states sampling options, and these options by our names.

    A Hugging Face directory has none unless its generation_config.json says do_sample=true: otherwise transformers ignores them
    and takes the likeliest token. A top_k of 0 or less is off, as for llama.cpp and vLLM.
    """
    if _is_gguf(checkpoint):
        return checkpoint, _numbers(_of_gguf(checkpoint), SAMPLING_IN_GGUF)
    file = checkpoint / GENERATION_CONFIG
    stated = _json(file) if file.is_file() else {}
    return file, _numbers(stated, SAMPLING) if stated.get("do_sample") is True else {}


def _named(stated: Any) -> Any:
    """Several templates by their names; one template as it is."""
    if isinstance(stated, list):
        return {each.get("name"): each.get("template") for each in stated if isinstance(each, dict)}
    return stated


def _chosen(stated: Any) -> str | None:
    stated = _named(stated)
    if isinstance(stated, dict):
        stated = stated.get("default")
    if not isinstance(stated, str) or any(part in stated for part in OF_CONVERTER):
        return None
    return stated


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _of_gguf(path: Path) -> dict[str, Any]:
    """The metadata of the model; if it has several files, the first one holds them."""
    return header_of(parts_of(path, header_of(path).metadata)[0]).metadata


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file, str(file)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): the file is damaged or incomplete") from None
    return content if isinstance(content, dict) else {}


def _texts(stated: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [stated[key] for key in keys if isinstance(stated.get(key), str) and stated[key]]


def _numbers(stated: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The numbers under these keys, by our names."""
    found = {name: stated[key] for key, name in names.items()
             if isinstance(stated.get(key), int | float) and not isinstance(stated[key], bool)}
    if (top_k := found.get("top_k", 0.5)) % 1 == 0:      # some write 20.0; other fractions are refused where top_k is used
        found["top_k"] = max(int(top_k), 0)
    return found
