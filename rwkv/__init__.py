"""The library's public names: `from rwkv import RWKV, Tokenizer, generate`. Each name is imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rwkv.generation.embedding import embed
    from rwkv.generation.engine import generate, generate_batch
    from rwkv.pretrained import RWKV
    from rwkv.tokenizer.tokenizers import Tokenizer

__all__ = ["RWKV", "Tokenizer", "embed", "generate", "generate_batch"]
_MODULES = {"RWKV": "rwkv.pretrained", "Tokenizer": "rwkv.tokenizer.tokenizers", "embed": "rwkv.generation.embedding",
            "generate": "rwkv.generation.engine", "generate_batch": "rwkv.generation.engine"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rwkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})        # for completion in a notebook, and for help(rwkv)
