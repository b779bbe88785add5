"""Saved states (save_state=FILE, state=FILE): the result of reading a text, from which generation can continue.

A safetensors file: the parts of the state and the logits, with the hashes of the model and the tokenizer they belong to, and
the last ids of the text, with which the text that follows is decoded.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rwkv.config import whole_numbers
from rwkv.errors import UserError
from rwkv.generation.prefill import PrefillResult
from rwkv.io.atomic import write_file
from rwkv.model.base import Model
from rwkv.tokenizer.decoders import require_id
from rwkv.tokenizer.tokenizers import Tokenizer

FORMAT = "timemix-state-1"
LAST_IDS = "last_ids"                    # in the metadata


def save_context(path: str | Path, context: PrefillResult, model: Model, tokenizer: Tokenizer) -> None:
    """Writes the file, whole or not at all. Raises OSError where it cannot be written."""
    tensors = {name: part.cpu().contiguous() for name, part in _parts(context).items()}
    content = save(tensors, metadata={**_identity(model, tokenizer), LAST_IDS: json.dumps(context.last_ids)})
    write_file(Path(path), lambda file: file.write(content))


def load_context(path: str | Path, model: Model, tokenizer: Tokenizer) -> PrefillResult:
    """The result in a file, one row. Raises UserError where it is missing, damaged, or of another model or tokenizer."""
    require_file(path)
    try:
        with safe_open(path, framework="pt", device=str(model.emb.weight.device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as a state file: it is damaged, or not one that save_state= wrote") from error
    _require_same(path, metadata, _identity(model, tokenizer))
    expected = _parts(PrefillResult(torch.empty(1, model.vocab_size), model.empty_state(1)))
    if {name: part.shape for name, part in tensors.items()} != {name: part.shape for name, part in expected.items()}:
        raise UserError(f"{path} does not hold the state of one text for this model: its tensors have other names or shapes")
    last_ids = _last_ids(path, metadata.get(LAST_IDS, "[]"), tokenizer)
    return PrefillResult(tensors.pop("logits"), model.generation.State(**tensors), last_ids)


def require_file(path: str | Path) -> None:
    """Raises UserError where there is no file: a check that needs no model."""
    if not Path(path).is_file():
        raise UserError(f"no state file at {path}: write one with save_state={path}")


def _last_ids(path: str | Path, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(require_id(token, tokenizer.vocab_size) for token in whole_numbers(LAST_IDS, json.loads(text)))
    except ValueError:
        raise UserError(f"{path} holds {text[:60]!r} as the last ids of its text: the file is damaged") from None


def _parts(context: PrefillResult) -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    return {"logits": context.logits, **context.state.named()}


def _identity(model: Model, tokenizer: Tokenizer) -> dict[str, str]:
    """The metadata of a file."""
    return {"format": FORMAT, "model": model.fingerprint(), "tokenizer": tokenizer.hash}


def _require_same(path: str | Path, found: dict[str, str], expected: dict[str, str]) -> None:
    if found.get("format") != FORMAT:
        raise UserError(f"{path} is not a state file of this version: expected the format {FORMAT}, "
                        f"found {found.get('format', 'none')}")
    for part in ("model", "tokenizer"):
        if found.get(part) != expected[part]:
            raise UserError(f"{path} was written with another {part} (its hash is {str(found.get(part))[:12]}, this one's "
                            f"{expected[part][:12]}): use the {part} that the state was saved with")
