"""adapters=NAME=PATH: tuned states and LoRA adapters, served beside the checkpoint that they belong to.

A text for a tuned state begins from that state, in one batch with the checkpoint's texts. A LoRA adapter is merged into a copy
of the weights when the server starts, and its texts are a batch of their own.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.arguments import from_home
from kernels.machine.memory import available_memory
from rwkv.checkpoint import time_states
from rwkv.checkpoint.files import Checkpoint, read_tuned, require_tokenizer
from rwkv.checkpoint.named import errors_of_adapter
from rwkv.config import BITS, MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.states import StateForm, beginning, is_state_file
from rwkv.io import hub
from rwkv.model.base import Model, fingerprint, generation, n_parameters
from rwkv.model.state import State
from rwkv.pretrained import RWKV, OpenCheckpoint, rounded_adapters


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been read and checked; no weights are loaded yet. digest: of the trained values.

    One of three is set. context: the content of a state file. state: a tuned state, one row. merged: the checkpoint with a LoRA
    adapter merged into it. notes: lines for people: which way round a tuned state is read, what the server's dtype loses.
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
        """The number of tokens that its state has read; None for a state file, which does not state it."""
        return 0 if self.context is None else None

    @property
    def about(self) -> str:
        if self.merged is not None:
            kind = self.merged.about or "LoRA"
            return f"{kind} of {self.path}, merged into weights of its own; its texts are a batch of their own"
        return f"state of {self.path}, before each text; in one batch with the checkpoint's texts"

    def load(self, opened: OpenCheckpoint, base: Model) -> tuple[Model, PrefillResult | None]:
        """The model that generates its texts, and the context that they begin with; None for the empty one."""
        if self.merged is not None:
            return RWKV.from_checkpoint(self.merged, opened.wkv, opened.device, opened.dtype), None
        if self.context is not None:
            return base, self.context
        assert self.state is not None
        return base, beginning(base, opened.tokenizer, self.state)


def read_adapters(config: ServeConfig, opened: OpenCheckpoint) -> list[Adapter]:
    """Raises UserError if one is missing, damaged or for other weights, and if merged weights do not fit into memory."""
    if not config.adapter_paths:
        return []
    base = opened.checkpoint
    identity = base.fingerprint or fingerprint(generation(base.config), base.weights)
    form = StateForm(generation(base.config).resolved(base.config), base.vocab_size, identity, opened.tokenizer, opened.device)
    found = [_read(name, from_home(path), opened, form, config) for name, path in config.adapter_paths.items()]
    n_merged = sum(adapter.merged is not None for adapter in found)
    if n_merged:
        require_room(n_parameters(base.config, base.vocab_size) * BITS[opened.dtype] // 8, n_merged, available_memory())
    return found


def require_room(weights: int, n_merged: int, available: int | None) -> None:
    """Raises UserError if the checkpoint and n_merged copies of it do not fit. weights: bytes of one of them."""
    needed = weights * (1 + n_merged)
    if available is not None and needed > available:
        raise UserError(f"adapters has {n_merged} of tune=lora, each merged into weights of its own: with the checkpoint's "
                        f"they take about {needed / MIB:,.0f} MiB, and {available / MIB:,.0f} MiB are free; leave one out, or "
                        "take a smaller dtype=")


def _read(name: str, path: str, opened: OpenCheckpoint, form: StateForm, config: ServeConfig) -> Adapter:
    with errors_of_adapter(name):
        path = str(hub.local(path, "adapter"))
        if Path(path).is_file() and is_state_file(path):
            context = form.load(path)
            return Adapter(name, path, _digest(context), context=context)
        if Path(path).is_file() and time_states.is_file(Path(path)):
            tuned = time_states.read(Path(path), opened.checkpoint.config, config.state_layout)
            return Adapter(name, path, tuned.digest(), state=tuned.state(opened.checkpoint.config), notes=(tuned.line,))
        checkpoint, digest = read_tuned(path, opened.checkpoint, config.lora_alpha)
        require_tokenizer(checkpoint, opened.tokenizer, "the server's tokenizer")
        if checkpoint.time_states is None:
            return Adapter(name, path, digest, merged=checkpoint, notes=tuple(rounded_adapters(checkpoint, opened.dtype)))
        state = generation(checkpoint.config).empty_state(checkpoint.config, 1)
        learnt = torch.stack([layer.get().float() for layer in checkpoint.time_states])
        return Adapter(name, path, digest, state=state._replace(wkv=learnt.unsqueeze(1)))


def _digest(context: PrefillResult) -> str:
    found = hashlib.sha256()
    for tensor in (context.logits, *context.state):
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
