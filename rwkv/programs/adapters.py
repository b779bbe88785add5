"""Reads the initial states and LoRA adapters that the server serves besides the base checkpoint (adapters=NAME=PATH).

Sequences that use an initial state form one batch with the base checkpoint's sequences. A LoRA adapter is merged into a copy of
the weights when the server starts, and sequences that use the adapter form a separate batch.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.machine.hardware import free_bytes
from rwkv.checkpoint import time_states
from rwkv.checkpoint.files import Checkpoint, read_tuned, require_tokenizer
from rwkv.checkpoint.option_files import errors_of
from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.state_files import StateFormat, context_of_state, is_state_file
from rwkv.io import hub
from rwkv.io.lines import count_of
from rwkv.model.base import Model, fingerprint, generation
from rwkv.model.state import State
from rwkv.pretrained import RWKV, OpenCheckpoint, adapter_rounding_lines


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been read and checked, but not loaded. Exactly one of context, state and merged is set.

    Attributes:
        digest: the hash of the trained values.
        context: the content of a state file.
        state: a trained initial state with one row.
        merged: the checkpoint with the LoRA adapter merged into the weights.
        notes: lines to print, on the layout of an initial state and on what rounding to the server's dtype loses.
    """

    name: str
    path: str
    digest: str
    context: PrefillResult | None = None
    state: State | None = None
    merged: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int | None:
        """The number of tokens that precede each sequence. None for a state file, which does not have this number."""
        return 0 if self.context is None else None

    @property
    def about(self) -> str:
        if self.merged is not None:
            kind = self.merged.adapter_kind or "LoRA"
            return f"{kind} {self.path}, merged into a copy of the weights, which runs in a separate batch"
        return f"state {self.path}, from which its sequences start; they share a batch with the checkpoint's sequences"

    def load(self, opened: OpenCheckpoint, base: Model) -> tuple[Model, PrefillResult | None]:
        """Returns the model for sequences that use the adapter, and the context before these sequences, or None."""
        if self.merged is not None:
            return RWKV.from_checkpoint(self.merged, opened.wkv, opened.device, opened.dtype), None
        if self.context is not None:
            return base, self.context
        assert self.state is not None
        return base, context_of_state(base, opened.tokenizer, self.state)


def read_adapters(config: ServeConfig, opened: OpenCheckpoint) -> list[Adapter]:
    """Returns the adapters that adapters= names.

    Raises UserError if an adapter is missing, damaged or made for other weights, or if merged weights do not fit into memory.
    """
    if not config.adapter_paths:
        return []
    base = opened.checkpoint
    identity = base.fingerprint or fingerprint(generation(base.config), base.weights)
    state_format = StateFormat(generation(base.config).with_default_widths(base.config), base.vocab_size, identity,
                               opened.tokenizer, opened.device)
    adapters = [_read(name, path, opened, state_format, config) for name, path in config.adapter_paths.items()]
    n_merged = sum(adapter.merged is not None for adapter in adapters)
    if n_merged:
        require_room(opened.nbytes(), n_merged, free_bytes(opened.device))
    return adapters


def require_room(weights: int, n_merged: int, available: int | None) -> None:
    """Raises UserError if the checkpoint and n_merged copies do not fit into memory. `weights` is the bytes of one copy."""
    needed = weights * (1 + n_merged)
    if available is not None and needed > available:
        raise UserError(f"adapters= with {count_of(n_merged, 'LoRA adapter')} requires about {needed / MIB:,.0f} MiB, because "
                        f"each adapter needs its own copy of the weights, but only {available / MIB:,.0f} MiB are free: serve "
                        "fewer adapters, or set a smaller dtype=")


def _read(name: str, path: str, opened: OpenCheckpoint, state_format: StateFormat, config: ServeConfig) -> Adapter:
    with errors_of(f"adapters={name}=..."):
        path = str(hub.local(path, "adapter"))
        if Path(path).is_file() and is_state_file(path):
            context = state_format.load(path)
            return Adapter(name, path, _digest(context), context=context)
        if Path(path).is_file() and time_states.is_file(Path(path)):
            tuned = time_states.read(Path(path), opened.checkpoint.config, config.state_layout)
            return Adapter(name, path, tuned.digest(), state=tuned.state(opened.checkpoint.config), notes=(tuned.line,))
        checkpoint, digest = read_tuned(path, opened.checkpoint, config.lora_alpha)
        require_tokenizer(checkpoint, opened.tokenizer, "the server's tokenizer")
        if checkpoint.time_states is None:
            return Adapter(name, path, digest, merged=checkpoint, notes=tuple(adapter_rounding_lines(checkpoint, opened.dtype)))
        state = generation(checkpoint.config).empty_state(checkpoint.config, 1)
        states = torch.stack([layer.get().float() for layer in checkpoint.time_states])
        return Adapter(name, path, digest, state=state.with_wkv(states.unsqueeze(1)))


def _digest(context: PrefillResult) -> str:
    digest = hashlib.sha256()
    for tensor in (context.logits, *context.state):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
