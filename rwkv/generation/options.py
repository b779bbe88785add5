"""Checks the options of generate.py, and reads the grammar and the prompts. This module does not import PyTorch."""

import json
import sys
from pathlib import Path

from rwkv.config import LARGEST_SEED, GenerateConfig, whole_number
from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_lines import parse, text_of
from rwkv.io.output_file import require_writable
from rwkv.io.utf8 import decode, read_bytes, read_text


def check_config(config: GenerateConfig) -> None:
    """Raises UserError for an invalid option or conflicting options, before a model is loaded."""
    if config.prompt is not None and config.prompts is not None:
        raise UserError("prompt= conflicts with prompts=. Use only one of them")
    if config.save_state and (config.prompts is not None or config.num_samples > 1):
        raise UserError("save_state= saves the state of a single sequence, so it conflicts with prompts= and with num_samples "
                        "above 1")
    inputs = (config.checkpoint, config.tokenizer, config.prompts, config.lora, config.draft, config.json_schema,
              config.grammar)
    require_writable("out", config.out, (*inputs, config.state))
    require_writable("save_state", config.save_state, inputs)
    if config.out and config.save_state and Path(config.out).resolve() == Path(config.save_state).resolve():
        raise UserError("out= and save_state= name the same file, so the state would overwrite the texts. Use different files")
    whole_number("seed", config.seed, most=LARGEST_SEED + 1 - config.num_samples)
    StoppingCriteria(config.max_new_tokens, config.stop, config.stop_tokens)
    if grammar := grammar_from(config):
        grammar.check()


def grammar_from(config: GenerateConfig) -> Grammar | None:
    """Returns the grammar that json_schema=, grammar= or regex= defines, or None without these options.

    Raises UserError if several of these options are set, or if the file is missing or invalid.
    """
    names = [name for name in ("json_schema", "grammar", "regex") if getattr(config, name) is not None]
    if len(names) > 1:
        raise UserError(f"{names[0]}= conflicts with {' and '.join(f'{name}=' for name in names[1:])}. Use only one of them")
    if config.regex is not None:
        return Grammar.regex(config.regex)
    if config.grammar is not None:
        return Grammar.lark(read_text(Path(config.grammar), f"grammar={config.grammar}"))
    if config.json_schema is None:
        return None
    source = f"json_schema={config.json_schema}"
    try:
        schema = json.loads(read_text(Path(config.json_schema), source))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{source} is not JSON: {error}") from None
    return Grammar.json_schema(schema)


def prompts_from(config: GenerateConfig) -> list[str]:
    """Returns the prompt of prompt=TEXT, or the prompts in the file that prompts= names.

    With prompt=- or prompts=-, the text is read from standard input: one prompt, or a prompt per line. A prompts file has one
    prompt per line. In a .jsonl, .ndjson or .json file, each line is an object {"prompt": ...}. Raises UserError for a missing
    file, one without prompts, or an invalid line.
    """
    if config.prompts is None:
        if config.prompt == "-":
            return [decode(sys.stdin.buffer.read(), "standard input").replace("\r\n", "\n")]
        return [config.prompt or ""]
    path = Path(config.prompts)
    if config.prompts == "-":
        source, content = "standard input", sys.stdin.buffer.read()
    else:
        source, content = str(path), read_bytes(path, f"prompts={path}")
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(content.split(b"\n"), start=1)]
        prompts = [text_of(parse(line, where), "prompt", where) for where, line in lines if line.strip()]
    else:
        prompts = [prompt for line in decode(content, source).split("\n") if (prompt := line.removesuffix("\r"))]
    if not prompts:
        raise UserError(f"prompts={path} has no prompts: the file must have one prompt per line")
    return prompts
