"""Truncated back-propagation through time: K segments one after the other, with true gradients through the state between them.

The state goes on from segment to segment and, without gradient, from step to step; where a row's segment opens a document (or
its piece) it is emptied. Beside K states and the K outputs, the activations of one segment exist at a time: all but the last
are computed anew in their backward pass. Source: gradient checkpointing over time, arXiv 1606.03401, with K equal segments.

In half precision each segment converts the weights anew: through one copy, as autocast keeps it, the gradients of K segments
would add up in half precision, and in the matrices be 1.2 times as wrong with 16 segments, 1.5 times with 64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rwkv.distributed import all_gather, rank, world_size
from rwkv.model.base import Model, State


def hidden_of_segments(model: Model, x: Tensor, opens: Tensor, state: State) -> tuple[Tensor, State]:
    """x (B,K,T) after `state`, emptied where opens (B,K): what the head reads (B,K*T,C), and the state after the last."""
    hidden, empty, last = [], model.empty_state(len(x)), x.shape[1] - 1
    with _each_converts_weights(x.device.type):
        for k in range(x.shape[1]):
            state = state.where(opens[:, k], empty)
            out, state = model.hidden(x[:, k], state) if k == last else _kept_small(model, x[:, k], state)
            hidden.append(out)
    return torch.cat(hidden, 1), state


def _each_converts_weights(kind: str) -> torch.autocast:
    """Autocast as it is on this kind of device, on or off, without its cache."""
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)


def _kept_small(model: Model, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    result: tuple[Tensor, State] = checkpoint(model.hidden, tokens, state, use_reentrant=False, preserve_rng_state=False)
    return result


class Carried:
    """The states of this process's lanes between two steps: one State for each of the batches that a step accumulates.

    In a checkpoint they are those of all processes' lanes, in order, as plain tensors (L,lanes,.) on the CPU.
    """

    def __init__(self) -> None:
        self._parts: dict[int, State] = {}
        self._loaded: dict[str, Tensor] = {}

    def before(self, part: int, model: Model, B: int) -> State:
        """What batch `part` of a step begins with."""
        if part not in self._parts and self._loaded:
            return _share(model.generation.State(**self._loaded), part, B).to(model.emb.weight.device)
        return self._parts.get(part) or model.empty_state(B)

    def after(self, part: int, state: State) -> None:
        self._parts[part] = state.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """The same in every process; all of them must ask."""
        ranks = all_gather([[tensor.cpu() for tensor in self._parts[part]] for part in sorted(self._parts)])
        parts = [type(state)(*(_interleaved(tensors) for tensors in zip(*of_ranks, strict=True)))
                 for state, of_ranks in zip(self._parts.values(), zip(*ranks, strict=True), strict=True)]
        return State.cat(parts).named() if parts else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._parts, self._loaded = {}, state_dict


def _interleaved(ranks: tuple[Tensor, ...]) -> Tensor:
    """(L,B,C) of each process -> (L,world*B,C): row i of process r is lane i * world + r."""
    return torch.stack(ranks, 2).flatten(1, 2)


def _share(state: State, part: int, B: int) -> State:
    """This process's B rows of batch `part`, of the state of all lanes."""
    common = B * world_size()
    return state.rows(slice(part * common + rank(), (part + 1) * common, world_size()))
