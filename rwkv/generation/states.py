"""What a model has read, as a file: continued later it gives the text that would have followed without the break.

A safetensors file: the state's five parts and the logits, with the hashes of the model and the tokenizer that they belong to.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rwkv.errors import UserError
from rwkv.generation.prefill import Context
from rwkv.io.atomic import write_file
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer

FORMAT = "timemix-state-1"


def save_context(path: str | Path, context: Context, model: Model, tokenizer: Tokenizer) -> None:
    """Writes `path`, whole or not at all. Raises OSError where that cannot be done."""
    tensors = {name: part.cpu().contiguous() for name, part in _parts(context).items()}
    content = save(tensors, metadata=_identity(model, tokenizer))
    write_file(Path(path), lambda file: file.write(content))


def load_context(path: str | Path, model: Model, tokenizer: Tokenizer) -> Context:
    """The context in a file. Raises ValueError where it is missing, damaged, or of another model or tokenizer."""
    require_file(path)
    try:
        with safe_open(path, framework="pt", device=str(model.emb.weight.device)) as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as a state file: it is damaged, or not one that save_state= wrote") from error
    _require_same(path, metadata, _identity(model, tokenizer))
    return _context(path, tensors, model)


def require_file(path: str | Path) -> None:
    """Raises ValueError where there is no file, which can be said before the model is loaded."""
    if not Path(path).is_file():
        raise UserError(f"no state file at {path}: write one with save_state={path}")


def _identity(model: Model, tokenizer: Tokenizer) -> dict[str, str]:
    return {"format": FORMAT, "model": model.fingerprint(), "tokenizer": tokenizer.hash}


def _require_same(path: str | Path, found: dict[str, str], expected: dict[str, str]) -> None:
    if found.get("format") != FORMAT:
        raise UserError(f"{path} is not a state file of this version: expected the format {FORMAT}, "
                        f"found {found.get('format', 'none')}")
    for what in ("model", "tokenizer"):
        if found.get(what) != expected[what]:
            raise UserError(f"{path} was written with another {what} (its hash is {str(found.get(what))[:12]}, this one's "
                            f"{expected[what][:12]}): a state means nothing to it; use the {what} that it was saved with")


def _parts(context: Context) -> dict[str, Tensor]:
    return {"logits": context.logits, **context.state.named()}


def _context(path: str | Path, tensors: dict[str, Tensor], model: Model) -> Context:
    expected: dict[str, Any] = _parts(Context(torch.empty(1, model.vocab_size), model.empty_state(1)))
    if {name: part.shape for name, part in tensors.items()} != {name: part.shape for name, part in expected.items()}:
        raise UserError(f"{path} does not hold the state of one text for this model: its tensors have other names or shapes")
    return Context(tensors.pop("logits"), model.generation.State(**tensors))
