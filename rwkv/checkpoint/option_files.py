"""Finds the files that a program's options name. Does not import PyTorch, so that programs can call it first."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath

from rwkv.chat.turn_templates import chat_template
from rwkv.checkpoint.location import locate
from rwkv.config import DRAFT_TOKENS, NGRAM, DraftedConfig, SavedModelConfig, ServeConfig
from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.state_path import state_path
from rwkv.tokenizer.tokenizers import Tokenizer


def require_files(config: SavedModelConfig, template: str | None = None, state: str | None = None) -> None:
    """Raises UserError for the first missing file; downloads files that are named by their path on the Hub.

    `template` and `state` are the values of the options with these names.
    """
    locate(config.checkpoint)
    if config.lora is not None:
        locate(config.lora)
    elif config.lora_alpha is not None and not getattr(config, "adapters", None):
        raise UserError("lora_alpha requires lora=")
    if config.tokenizer is not None:
        Tokenizer.check_named(config.tokenizer)
    if isinstance(config, DraftedConfig):
        _require_draft(config)
    if template is not None:
        chat_template(template)
    layout = getattr(config, "state_layout", None)
    if state is not None:
        state_path(state)
    elif layout is not None and not getattr(config, "adapters", None):
        raise UserError("state_layout requires state=")


def _require_draft(config: DraftedConfig) -> None:
    if config.draft is None and config.draft_tokens != DRAFT_TOKENS:
        raise UserError("draft_tokens requires draft=")
    if config.draft not in (None, NGRAM):
        with errors_of(f"draft={config.draft}"):
            locate(str(config.draft))


def require_adapters(config: ServeConfig) -> None:
    """Raises UserError for the first path in adapters= that does not exist."""
    for name, path in config.adapter_paths.items():
        with errors_of(f"adapters={name}=..."):
            locate(path)


def on_disk(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with each name on the Hub replaced by the path of the downloaded file.

    A different process can then read the files without access to the Hub.
    """
    def path(name: str | None, noun: str) -> str | None:
        return name if name is None or hub.parse(name) is None else str(hub.local(name, noun))

    adapters = [f"{name}={path(file, 'adapter')}" for name, file in config.adapter_paths.items()]
    draft = config.draft if config.draft == NGRAM else path(config.draft, "draft")
    return replace(config, checkpoint=str(path(config.checkpoint, "checkpoint")), lora=path(config.lora, "adapter"),
                   draft=draft, tokenizer=path(config.tokenizer, "tokenizer"),
                   template=path(config.template, "chat template"), adapters=adapters,
                   model_name=config.model_name or _model_id(config.checkpoint))


def _model_id(checkpoint: str) -> str | None:
    """Returns the id that clients use for a model on the Hub: the name of the repository or file. Returns None for a path."""
    pinned = hub.parse(hub.fetch(checkpoint).pinned) if hub.parse(checkpoint) else None
    if pinned is None:
        return None
    path = PurePosixPath(pinned.path or pinned.repository)
    return path.stem if path.suffix in hub.WEIGHTS else path.name


@contextmanager
def errors_of(option: str) -> Iterator[None]:
    """Prefixes the message of a UserError with `option`, such as "draft=FILE"."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
