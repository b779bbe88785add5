"""Checks the data options before any data is read. This module does not import PyTorch."""

from rwkv.config import SOURCES, STREAMED, TOKENS, DataConfig
from rwkv.data.mixture import mixed_sources, prefix_errors
from rwkv.data.sources import check_path
from rwkv.data.sources.chat import template_of
from rwkv.data.token_files import open_files
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import MADE_FROM_DATA, NAMES, Tokenizer


def check_data(config: DataConfig, tokenizer: bool = True, template: bool = True) -> None:
    """Raises UserError if a path or a file is missing, or if options conflict.

    `tokenizer` and `template` say whether to check the configured tokenizer and chat template. The values are False if a
    checkpoint's tokenizer and template will be used instead.
    """
    if config.name == "mix":
        if config.path:
            raise UserError(f"data=mix conflicts with data.path={config.path}, because each entry of data.sources has its own "
                            "path. Omit data.path")
        for source in mixed_sources(config):
            with prefix_errors(source.name):
                check_data(source.config, tokenizer, template)
        return
    if config.streaming and config.name not in STREAMED:
        raise UserError(f"data.streaming requires data={' or data='.join(STREAMED)}; got data={config.name}")
    if config.name in SOURCES:
        check_path(config)
    else:
        open_files(config)
    if tokenizer:
        _check_tokenizer(config)
    if template and config.name == "chat":
        template_of(config)


def _check_tokenizer(config: DataConfig) -> None:
    name = config.tokenizer
    if config.streaming and name in MADE_FROM_DATA:
        raise UserError(f"data.streaming conflicts with data.tokenizer={name}, because that tokenizer is made from the "
                        f"whole text. Set data.tokenizer to {NAMES}")
    if config.name in TOKENS and name in MADE_FROM_DATA:
        raise UserError(f"data={config.name} conflicts with data.tokenizer={name}, because the data already are token ids. "
                        "Pass the tokenizer that made the ids with data.tokenizer=world, FILE.json or FILE.txt")
    if name not in MADE_FROM_DATA:
        names = NAMES if config.name in TOKENS else f"{', '.join(MADE_FROM_DATA)}, {NAMES}"
        Tokenizer.check_named(name, "data.tokenizer", names)
    elif config.end_of_text is not None:
        raise UserError(f"data.end_of_text requires a tokenizer.json file, but data.tokenizer={name} makes a tokenizer from "
                        "the data. Omit data.end_of_text")
