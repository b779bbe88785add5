"""Saved states (save_state=FILE, state=FILE): prefill results from which generation can continue.

A state file is a safetensors file with the tensors of the state and the logits. Its metadata has the hashes of the model and
the tokenizer, the last ids, which are needed to decode the text that follows, and a checksum of all of these. The server's
files have further metadata, which other programs ignore.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rwkv.config import ModelConfig, whole_numbers
from rwkv.errors import UserError
from rwkv.generation.prefill import PrefillResult, prefill
from rwkv.io.atomic import write_file
from rwkv.io.state_file import state_file
from rwkv.model.base import Model, generation
from rwkv.model.state import State
from rwkv.tokenizer.decoders import require_id
from rwkv.tokenizer.tokenizers import Tokenizer

FORMAT = "timemix-state-1"
LAST_IDS = "last_ids"                    # metadata keys
CHECKSUM = "sha256"
LONGEST_HEADER = 2**20                   # bytes read from the start of a file to find its metadata
PARTS = ("model", "tokenizer")           # metadata keys: hashes of the model and the tokenizer that wrote the state


def save_context(path: str | Path, context: PrefillResult, model: Model, tokenizer: Tokenizer) -> None:
    """Writes a state file atomically. Raises OSError if it cannot be written."""
    content = StateFormat.of(model, tokenizer).content(context)
    write_file(Path(path), lambda file: file.write(content))


def load_context(path: str | Path, model: Model, tokenizer: Tokenizer) -> PrefillResult:
    """The prefill result in a state file, with one row. Raises UserError if the file is missing, damaged, or was written with a
    different model or tokenizer."""
    return StateFormat.of(model, tokenizer).load(path)


@torch.no_grad()
def beginning(model: Model, tokenizer: Tokenizer, state: State) -> PrefillResult:
    """A context that starts sequences from `state`, which must have one row. last_ids is (); the logits are those after an
    end-of-text token, from which an empty prompt continues."""
    device = model.emb.weight.device
    start = PrefillResult(torch.empty(1, model.vocab_size, device=device), state.to(device))
    end_of_text = torch.tensor([[tokenizer.end_of_text]], device="cpu")
    return start._replace(logits=prefill(model, end_of_text, start).logits)


class StateFormat:
    """Reads and writes the state files of one model and tokenizer. fingerprint: the hash of the model, which need not be
    loaded."""

    def __init__(self, config: ModelConfig, vocab_size: int, fingerprint: str, tokenizer: Tokenizer,
                 device: torch.device | str = "cpu") -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._device = device
        self.identity = {"format": FORMAT, "model": fingerprint, "tokenizer": tokenizer.hash}

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer) -> Self:
        return cls(model.config, model.vocab_size, model.fingerprint(), tokenizer, model.emb.weight.device)

    def content(self, context: PrefillResult, more: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a state file with this context. more: further metadata."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in _named_tensors(context).items()}
        metadata = {**(more or {}), **self.identity, LAST_IDS: json.dumps(context.last_ids)}
        return save(tensors, metadata=metadata | {CHECKSUM: checksum(tensors, metadata)})

    def load(self, path: str | Path) -> PrefillResult:
        """The prefill result in a state file. Raises UserError as load_context does."""
        path = state_file(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        return self.read(content, str(path))

    def read(self, content: bytes, name: str) -> PrefillResult:
        """The prefill result in a state file's bytes. name: how errors name the file. Raises UserError as load_context does."""
        try:
            tensors = load(content)
            metadata = metadata_of(content)
        except (SafetensorError, ValueError) as error:
            is_safetensors = content[8:9] == b"{"
            problem = "it is truncated or damaged" if is_safetensors else "save_state= did not write it"
            raise UserError(f"{name} cannot be read as a state file: {problem}; name weights as checkpoint=") from error
        self.require_same(name, metadata)
        module = generation(self._config)
        expected = _named_tensors(PrefillResult(torch.empty(1, self._vocab_size), module.empty_state(self._config, 1, "meta")))
        if {name: part.shape for name, part in tensors.items()} != {name: part.shape for name, part in expected.items()}:
            raise UserError(f"{name} must hold one row's state for this model; its tensors have different names or shapes")
        if CHECKSUM not in metadata:
            raise UserError(f"{name} lacks its checksum: use a file that save_state= or the server wrote, or save the state "
                            "again")
        if metadata[CHECKSUM] != checksum(tensors, metadata):
            raise UserError(f"{name} has changed since it was written (checksum mismatch): use an intact copy, or save the "
                            "state again")
        if not all(tensor.is_floating_point() and tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{name} must contain only finite numbers; the model had diverged, or the file has changed")
        logits = tensors.pop("logits").to(self._device)
        state = module.State(**{part: tensor.to(self._device, torch.float32) for part, tensor in tensors.items()})
        return PrefillResult(logits, state, self.last_ids(name, metadata))

    def require_same(self, name: str, metadata: Mapping[str, str]) -> None:
        """Raises UserError if a file with this metadata was written with a different model or tokenizer."""
        if metadata.get("format") != FORMAT:
            raise UserError(f"{name} must be a state file of format {FORMAT}; got {metadata.get('format', 'none')}; name "
                            "weights as checkpoint=")
        for part in PARTS:
            if metadata.get(part) != self.identity[part]:
                raise UserError(f"{name} was written with a different {part} (hash {str(metadata.get(part))[:12]}; got "
                                f"{self.identity[part][:12]}): use the {part} that the state was saved with")

    def last_ids(self, name: str, metadata: Mapping[str, str]) -> tuple[int, ...]:
        text = metadata.get(LAST_IDS, "[]")
        try:
            ids = whole_numbers(LAST_IDS, json.loads(text))
            return tuple(require_id(token, self._tokenizer.vocab_size) for token in ids)
        except (ValueError, RecursionError):
            raise UserError(f"{name} is damaged: its {LAST_IDS} must be a list of token ids; got {text[:60]!r}") from None


def is_state_file(path: str | Path) -> bool:
    try:
        with Path(path).open("rb") as file:
            metadata = metadata_of(file.read(LONGEST_HEADER))
    except (OSError, ValueError):
        return False
    return metadata.get("format", "").startswith(FORMAT.rstrip("0123456789"))


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, from its first bytes. Raises ValueError unless they contain the whole header."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        raise ValueError("its header is truncated")
    try:
        header = json.loads(content[8:8 + length])
    except RecursionError:
        header = None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header is not that of a safetensors file")
    return metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The SHA-256, in hexadecimal, of the tensors and of the metadata except the checksum. The tensors must be contiguous."""
    headers = [[name, str(tensor.dtype), [*tensor.shape]] for name, tensor in sorted(tensors.items())]
    pairs = sorted(pair for pair in metadata.items() if pair[0] != CHECKSUM)
    digest = hashlib.sha256(json.dumps([headers, pairs]).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _named_tensors(context: PrefillResult) -> dict[str, Tensor]:
    return {"logits": context.logits, **context.state.named()}
