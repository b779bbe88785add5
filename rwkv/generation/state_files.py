"""State files (save_state=FILE, state=FILE) hold prefill results, from which generation can continue.

A state file is a safetensors file with the tensors of the state and the logits. The metadata has the hashes of the model and
the tokenizer, the last token ids, which are needed to decode the following text, and a checksum of the tensors and the
metadata. The server writes further metadata, which other programs ignore.
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

from kernels.arguments import path_of
from rwkv.config import ModelConfig, require_type, whole_numbers
from rwkv.errors import UserError
from rwkv.generation.prefill import prefill
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.io.atomic import write_file
from rwkv.io.state_path import state_path
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
    """Writes a state file atomically. Raises OSError if it cannot be written, and UserError if the context has several rows."""
    require_type("context", context, PrefillResult, "a PrefillResult, such as Engine.context()")
    if len(context.logits) != 1:
        raise UserError(f"a state file has one row, but the context has {len(context.logits)}: save each row in its own file")
    content = StateFormat.of(model, tokenizer).serialize(context)
    write_file(path_of(path), lambda file: file.write(content))


def load_context(path: str | Path, model: Model, tokenizer: Tokenizer) -> PrefillResult:
    """Reads the prefill result, which has one row, from a state file.

    Raises UserError if the file is missing, damaged, or was written with a different model or tokenizer.
    """
    return StateFormat.of(model, tokenizer).load(path)


@torch.no_grad()
def context_of_state(model: Model, tokenizer: Tokenizer, state: State) -> PrefillResult:
    """Returns a context that starts sequences from `state`, which must have one row.

    The context's logits follow an end-of-text token, so that an empty prompt can continue. The context's last_ids are ().
    """
    device = model.emb.weight.device
    start = PrefillResult(torch.empty(1, model.vocab_size, device=device), state.to(device))
    end_of_text = torch.tensor([[tokenizer.end_of_text]], device="cpu")
    return start._replace(logits=prefill(model, end_of_text, start).logits)


class StateFormat:
    """Reads and writes the state files of one model and one tokenizer.

    `fingerprint` is the hash of the model. The model itself need not be loaded.
    """

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

    def serialize(self, context: PrefillResult, more: Mapping[str, str] | None = None) -> bytes:
        """Returns the bytes of a state file with this context. `more` is added to the metadata."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in _named_tensors(context).items()}
        metadata = {**(more or {}), **self.identity, LAST_IDS: json.dumps(context.last_ids)}
        return save(tensors, metadata=metadata | {CHECKSUM: checksum(tensors, metadata)})

    def load(self, path: str | Path) -> PrefillResult:
        """Reads the prefill result from a state file. Raises UserError as load_context does."""
        path = state_path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        return self.read(content, str(path))

    def read(self, content: bytes, name: str) -> PrefillResult:
        """Reads the prefill result from the bytes of the state file `name`. Raises UserError as load_context does."""
        try:
            tensors = load(content)
            metadata = metadata_of(content)
        except (SafetensorError, ValueError) as error:
            is_safetensors = content[8:9] == b"{"
            problem = "the file is truncated or damaged" if is_safetensors else "the file was not written by save_state="
            raise UserError(f"{name} is not a readable state file: {problem}. To load weights, use checkpoint=") from error
        self.require_same(name, metadata)
        module = generation(self._config)
        expected = _named_tensors(PrefillResult(torch.empty(1, self._vocab_size), module.empty_state(self._config, 1, "meta")))
        if {name: part.shape for name, part in tensors.items()} != {name: part.shape for name, part in expected.items()}:
            raise UserError(f"{name} does not contain a state for this model: the names or shapes of the tensors do not match")
        if CHECKSUM not in metadata:
            raise UserError(f"{name} has no checksum. Use a file written by save_state= or by the server, or save the state "
                            "again")
        if metadata[CHECKSUM] != checksum(tensors, metadata):
            raise UserError(f"{name} has changed since it was written (checksum mismatch). Use an unchanged copy, or save the "
                            "state again")
        if not all(tensor.is_floating_point() and tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{name} contains numbers that are not finite: the model had diverged when the state was saved, or "
                            "the file has changed since")
        logits = tensors.pop("logits").to(self._device)
        state = module.State(**{part: tensor.to(self._device, torch.float32) for part, tensor in tensors.items()})
        return PrefillResult(logits, state, self.last_ids(name, metadata))

    def require_same(self, name: str, metadata: Mapping[str, str]) -> None:
        """Raises UserError unless the metadata is that of a state file for this model and this tokenizer."""
        if metadata.get("format") != FORMAT:
            raise UserError(f"{name} must be a state file with the format {FORMAT}; got {metadata.get('format', 'no format')}. "
                            "To load weights, use checkpoint=")
        for part in PARTS:
            if metadata.get(part) != self.identity[part]:
                raise UserError(f"{name} was saved with a different {part}, whose hash is {str(metadata.get(part))[:12]}. The "
                                f"hash of the current {part} is {self.identity[part][:12]}. Use the {part} with which the "
                                "state was saved")

    def last_ids(self, name: str, metadata: Mapping[str, str]) -> tuple[int, ...]:
        text = metadata.get(LAST_IDS, "[]")
        try:
            ids = whole_numbers(LAST_IDS, json.loads(text))
            return tuple(require_id(token, self._tokenizer.vocab_size) for token in ids)
        except (ValueError, RecursionError):
            raise UserError(f"{name} is damaged: {LAST_IDS} must be a list of token ids; got {text[:60]!r}") from None


def is_state_file(path: str | Path) -> bool:
    try:
        with Path(path).open("rb") as file:
            metadata = metadata_of(file.read(LONGEST_HEADER))
    except (OSError, ValueError):
        return False
    return metadata.get("format", "").startswith(FORMAT.rstrip("0123456789"))


def metadata_of(content: bytes) -> dict[str, str]:
    """Reads the metadata of a safetensors file from its first bytes. Raises ValueError for a bad or incomplete header."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        raise ValueError("the header is truncated")
    try:
        header = json.loads(content[8:8 + length])
    except RecursionError:
        header = None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the file does not have a safetensors header")
    return metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Returns the SHA-256, in hexadecimal, of the contiguous tensors and of the metadata without the checksum."""
    headers = [[name, str(tensor.dtype), [*tensor.shape]] for name, tensor in sorted(tensors.items())]
    pairs = sorted(pair for pair in metadata.items() if pair[0] != CHECKSUM)
    digest = hashlib.sha256(json.dumps([headers, pairs]).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _named_tensors(context: PrefillResult) -> dict[str, Tensor]:
    return {"logits": context.logits, **context.state.named()}
