"""Finds the files that the options of a program name. Needs no PyTorch: programs call it before they import that."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.arguments import from_home
from rwkv.chat.templates import chat_template
from rwkv.checkpoint.location import locate
from rwkv.config import SavedModelConfig, ServeConfig
from rwkv.errors import UserError
from rwkv.io.state_file import require_state_file
from rwkv.tokenizer.tokenizers import Tokenizer


def require_files(config: SavedModelConfig, template: str | None = None, state: str | None = None) -> None:
    """Raises UserError for the first file that is missing. template, state: the values of the options with these names."""
    locate(config.checkpoint)
    if config.tokenizer is not None:
        Tokenizer.check_named(config.tokenizer)
    if template is not None:
        chat_template(template)
    if state is not None:
        require_state_file(state)


def require_adapters(config: ServeConfig) -> None:
    """Raises UserError for the first path of adapters= at which there is nothing to serve."""
    for name, path in config.adapter_paths.items():
        with errors_of_adapter(name):
            locate(from_home(path))


@contextmanager
def errors_of_adapter(name: str) -> Iterator[None]:
    """A UserError inside begins with the name of the adapter that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"adapters={name}=...: {error}") from None
