"""Implements truncated back-propagation through time over K segments, with exact gradients through the states in between.

The state carries over from segment to segment and, without gradients, from step to step. The state is reset where a row's
segment is the first segment of a document or of a chunk of a document.

The forward pass saves the K states and outputs, but the activations of only one segment at a time: the backward pass recomputes
all segments except the last. Source: gradient checkpointing over time, arXiv 1606.03401, with K equal segments. With
trainer=fsdp, each block is checkpointed instead of each segment (prepare_blocks in trainer.py), which saves the blocks' inputs
of all segments. The reason is that FSDP gathers weights for a pass through a block, but not for a segment that a backward pass
recomputes.

In half precision each segment converts the weights again. With autocast's cached copy, the gradients of K segments would
accumulate in half precision. Errors in the matrices would be 1.2 times as large for 16 segments and 1.5 times for 64 segments.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rwkv.distributed import all_gather, rank, world_size
from rwkv.io.json_types import StateDict
from rwkv.model.base import Model, State


def forward_segments(model: Model, x: Tensor, opens: Tensor, state: State, by_block: bool = False) -> tuple[Tensor, State]:
    """Computes K segments in sequence. Returns the input of the head (B,K*T,C) and the state after x.

    Args:
        x (B,K,T): the token ids of the segments.
        opens (B,K): True for each segment before which the state is reset.
        state: the state before x.
        by_block: True if each block is checkpointed instead of each segment.
    """
    K = x.shape[1]
    empty = model.empty_state(len(x))
    outputs = []
    device = x.device.type
    uncached_autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device),
                                       cache_enabled=False)
    with uncached_autocast:
        for k in range(K):
            state = state.where(opens[:, k], empty)
            if by_block or k == K - 1:
                hidden, state = model.hidden(x[:, k], state)
            else:
                hidden, state = checkpoint(model.hidden, x[:, k], state, use_reentrant=False, preserve_rng_state=False)
            outputs.append(hidden)
    return torch.cat(outputs, 1), state


class CarriedStates:
    """Carries the states of this process's document streams from step to step: one State for each accumulated batch.

    A checkpoint holds the states of all processes as plain tensors (L,streams,...) on the CPU, in the order of the streams.
    """

    def __init__(self) -> None:
        self._parts: dict[int, State] = {}
        self._loaded: dict[str, Tensor] = {}

    def state_before(self, part: int, model: Model, B: int) -> State:
        """Returns the state of this process's B rows before batch `part` of a step."""
        if part not in self._parts and self._loaded:
            total = B * world_size()     # counts the rows of all processes' batches
            rows = slice(part * total + rank(), (part + 1) * total, world_size())
            state: State = model.generation.State(**self._loaded).rows(rows)
            return state.to(model.emb.weight.device)
        return self._parts.get(part) or model.empty_state(B)

    def set_state_after(self, part: int, state: State) -> None:
        self._parts[part] = state.detach()

    def states(self) -> dict[int, State]:
        """Returns a snapshot of the states, by the number of the accumulated batch."""
        return dict(self._parts)

    def restore(self, states: dict[int, State]) -> None:
        self._parts = dict(states)

    def state_dict(self) -> dict[str, Tensor]:
        """Gathers and returns the states of all processes. This is a collective operation with the same result everywhere."""
        ranks = all_gather([[tensor.cpu() for tensor in self._parts[part]] for part in sorted(self._parts)])
        if not self._parts:
            return {}
        kind = type(next(iter(self._parts.values())))
        parts = [kind(*(torch.stack(tensors, 2).flatten(1, 2) for tensors in zip(*part_states, strict=True)))
                 for part_states in zip(*ranks, strict=True)]       # row i of process r is stream i * world_size + r
        return kind.cat(parts).named()

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._parts = {}
        self._loaded = state_dict
