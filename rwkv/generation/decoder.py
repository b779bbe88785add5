"""Decoders read one token per row of a batch in each step, and compute the logits that follow.

A CDecoder makes one C call per step, on a CPU (model/decoding/c_step.py). A GpuDecoder replays one CUDA graph per step
(model/decoding/triton_step.py). A Decoder uses PyTorch. For each block, Decoder calls the step function of the RWKV generation
(model/rwkvN/step.py), which reads the weights and calls no module. If the model has adapters, hooks, replaced layers or
reordered blocks, Decoder calls the model itself.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from rwkv.model.base import Model, State, optional_module
from rwkv.model.decoding import c_step, triton_step
from rwkv.model.decoding.c_step import CStep, are_in_order, is_plain, step_of, why_not
from rwkv.model.decoding.layers import embedding_function, norm_function, product_function
from rwkv.model.weights_watch import tensors_of


def decoder_of(model: Model, state: State) -> "Decoder | CDecoder | GpuDecoder":
    """Returns the fastest decoder that can run the model, starting from `state`."""
    if why_not(model) is None:
        return CDecoder(model, state)
    if triton_step.why_not(model) is None:
        return GpuDecoder(model, state)
    return Decoder(model, state)


def decoding_line(model: Model) -> str:
    """Returns a line for the user that says which implementation computes a decoding step."""
    if model.emb.weight.device.type == "cpu":
        return c_step.decoding_line(model)
    reason = triton_step.why_not(model)
    if reason is None:
        return "decoding: Triton, one CUDA graph per token; sampling on the GPU"
    return f"decoding: PyTorch ({reason})"


class Decoder:
    """Decodes with PyTorch, starting from `state`, which stays unchanged."""

    def __init__(self, model: Model, state: State) -> None:
        self._state = state
        self._forward = (_block_steps(model) if is_plain(model) and are_in_order(model)
                         else lambda tokens, state: model.prefill(tokens.unsqueeze(1), state))

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token per row, tokens (B,), and returns the logits (B,V) that follow."""
        logits, self._state = self._forward(tokens.to(self._state[0].device), self._state)
        return logits

    def keep(self, rows: list[int]) -> None:
        """Keeps only these rows, in this order."""
        self._state = self._state.rows(rows)

    def join(self, state: State) -> None:
        self._state = State.cat([self._state, state])

    def state(self, rows: list[int] | None = None) -> State:
        """Returns the state of these rows, or of all rows if `rows` is None."""
        return self._state if rows is None else self._state.rows(rows)


@torch.inference_mode()
def _block_steps(model: Model) -> Callable[[Tensor, State], tuple[Tensor, State]]:
    """Returns a function that runs one token per row through the model's current weights, without calling modules."""
    embedding = embedding_function(model.emb)
    dtype = model.ln_out.weight.dtype
    step = optional_module(model.config, "step").Step
    blocks = [step(block) for block in model.blocks]
    ln_out = norm_function(model.ln_out)
    head = product_function(model.head)

    @torch.inference_mode()
    def forward(tokens: Tensor, state: State) -> tuple[Tensor, State]:
        x = embedding(tokens).to(dtype)
        carry = None
        layers = []
        for block, before in zip(blocks, state.layers(), strict=True):
            x, after, carry = block(x, before, carry)
            layers.append(after)
        return head(ln_out(x)), State.stack(layers)

    return forward


class CDecoder:
    """Decodes with one C call per step. The logits are float32.

    A row's state is large (2.4 MB in RWKV-7 0.1b), so states are not copied when other rows join or leave.
    """

    def __init__(self, model: Model, state: State) -> None:
        self._model = model
        self._state_type = type(state)
        self._shapes = [part.shape[2:] for part in state]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._c_step: CStep | None = None
        self._state_rows: list[int] = []                 # each row's index in self._states
        self._ahead: list[list[int]] = []                # the indices of each row's states after the tokens read ahead
        self._states = torch.empty(0, len(model.blocks), sum(self._sizes), dtype=torch.float32, device="cpu")
        self.join(state)

    def step(self, tokens: Tensor) -> Tensor:
        """Reads tokens (B,) and returns the logits (B,V) that follow. The next step overwrites the returned tensor."""
        if self._state_rows:
            c = self._shared_step()
            c(tokens.long().contiguous(), self._state_index, self._states, self._workspace(len(self._state_rows)), self._logits)
        return self._logits

    def with_state(self, state: State) -> "CDecoder":
        """Returns a new decoder that shares this decoder's weights. Its rows start from `state`."""
        other = CDecoder(self._model, state)
        other._c_step = self._shared_step()
        other._weights = self._weights
        return other

    @torch.inference_mode()
    def read(self, prompts: Sequence[Tensor]) -> Tensor:
        """Reads B prompts in one C call, and returns the logits (B,V) after the last token of each prompt.

        The logits are bit for bit those of single steps. The next call overwrites the returned tensor.
        """
        c = self._shared_step()
        lengths = torch.tensor([*map(len, prompts)], device="cpu")
        work = self._workspace(int(lengths.sum()))
        c(torch.cat([*prompts]).long(), self._state_index.repeat_interleave(lengths), self._states, work, self._logits)
        return self._logits

    @torch.inference_mode()
    def read_ahead(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Reads one sequence per row in one C call, and returns the logits (n,V) after each of the n tokens of all sequences.

        The logits are bit for bit those of single steps. The states of the rows do not change. The state after each token is
        saved until advance() or drop_ahead() is called. A further call continues from the last saved state.
        """
        tokens = [*chain.from_iterable(sequences)]
        free = iter(self._free_places(len(tokens)))
        sources, places = [], []
        for row, sequence in enumerate(sequences):
            ahead = self._ahead[row]
            for _ in sequence:
                sources.append(ahead[-1] if ahead else self._state_rows[row])
                ahead.append(next(free))
                places.append(ahead[-1])
        logits = torch.empty(len(tokens), self._model.vocab_size, dtype=torch.float32, device="cpu")
        step = self._shared_step()
        step(_on_cpu(tokens), _on_cpu(places), self._states, self._workspace(len(tokens)), logits, _on_cpu(sources),
             all_logits=True)
        return logits

    def advance(self, row: int, n: int = 1) -> None:
        """Moves the row to its state after the first n tokens read ahead."""
        if n:
            self._state_rows[row] = self._ahead[row][n - 1]
            del self._ahead[row][:n]
            self._state_index = _on_cpu(self._state_rows)

    def drop_ahead(self) -> None:
        """Discards all states that read_ahead() saved."""
        self._ahead = [[] for _ in self._state_rows]

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Keeps only these rows, in this order. No row may be listed twice."""
        self._set_rows([self._state_rows[row] for row in rows], [self._ahead[row] for row in rows])

    @torch.inference_mode()
    def join(self, state: State) -> None:
        free = self._free_places(state[0].shape[1])
        for tensor, part in zip(state, self._states.split(self._sizes, 2), strict=True):
            part[free] = tensor.transpose(0, 1).flatten(2).to(part)
        self._set_rows([*self._state_rows, *free], [*self._ahead, *([] for _ in free)])

    @torch.no_grad()                     # autograd cannot save tensors that are made in inference mode
    def state(self, rows: list[int] | None = None) -> State:
        """Returns a copy of the state of these rows, or of all rows if `rows` is None."""
        state_rows = self._state_rows if rows is None else [self._state_rows[row] for row in rows]
        parts = self._states.transpose(0, 1).split(self._sizes, 2)
        return self._state_type(*(part[:, state_rows].contiguous().unflatten(2, shape)
                                  for part, shape in zip(parts, self._shapes, strict=True)))

    def _set_rows(self, state_rows: list[int], ahead: list[list[int]]) -> None:
        if not state_rows:
            self._states = self._states[:0].clone()
        self._state_rows = state_rows
        self._ahead = ahead
        self._state_index = _on_cpu(state_rows)
        self._logits = torch.empty(len(state_rows), self._model.vocab_size, dtype=torch.float32, device="cpu")
        self._work = self._states.new_empty(0)

    def _free_places(self, n: int) -> list[int]:
        """Returns n unused indices of self._states, which grows if necessary."""
        used = {*self._state_rows, *chain.from_iterable(self._ahead)}
        capacity = len(self._states)
        if len(used) + n > capacity:
            states = self._states.new_empty(max(len(used) + n, capacity + capacity // 2), *self._states.shape[1:])
            states[:capacity] = self._states
            self._states = states
        return sorted(set(range(len(self._states))) - used)[:n]

    def _workspace(self, rows: int) -> Tensor:
        if len(self._work) < rows:
            self._work = self._states.new_empty(rows, self._shared_step().size)
        return self._work

    def _shared_step(self) -> CStep:
        if self._c_step is None:
            self._c_step = step_of(self._model)
            self._weights = [tensor.detach() for tensor in tensors_of(self._model)]      # keeps the memory alive for C
        return self._c_step


def _on_cpu(numbers: Sequence[int]) -> Tensor:
    return torch.tensor([*numbers], dtype=torch.int64, device="cpu")


class GpuDecoder:
    """Decodes by replaying one CUDA graph per step. The logits are float32, on the GPU.

    All decoders of a model share one GpuStep, which owns the graphs and the memory slots of the states.
    """

    def __init__(self, model: Model, state: State, step: triton_step.GpuStep | None = None) -> None:
        self._model = model
        self._step = step or triton_step.step_of(model)
        self._state_type = type(state)
        self._slots: list[int] = []                      # each row's state slot
        weakref.finalize(self, self._step.release, self._slots)
        self.join(state)

    def step(self, tokens: Tensor) -> Tensor:
        """Reads tokens (B,) and returns the logits (B,V) that follow."""
        return self._step(tokens, self._slot_index)

    def with_state(self, state: State) -> "GpuDecoder":
        """Returns a new decoder that shares this decoder's weights. Its rows start from `state`."""
        return GpuDecoder(self._model, state, self._step)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Tensor]) -> Tensor:
        """Reads B prompts in one replay, and returns the logits (B,V) after the last token of each prompt.

        The logits are bit for bit those of single steps.
        """
        return self._step.read_prompts(prompts, self._slot_index)

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Keeps only these rows, in this order. No row may be listed twice."""
        slots = [self._slots[row] for row in rows]
        self._step.release([slot for slot in self._slots if slot not in {*slots}])
        self._set_rows(slots)

    @torch.inference_mode()
    def join(self, state: State) -> None:
        slots = self._step.take(state[0].shape[1])
        self._step.write(slots, state)
        self._set_rows([*self._slots, *slots])

    @torch.no_grad()                     # autograd cannot save tensors that are made in inference mode
    def state(self, rows: list[int] | None = None) -> State:
        """Returns a copy of the state of these rows, or of all rows if `rows` is None."""
        slots = self._slots if rows is None else [self._slots[row] for row in rows]
        return self._state_type(*self._step.read(slots))

    def warm_up(self, rows: int) -> None:
        """Allocates state slots for this many rows, and captures a CUDA graph for each bucket of row counts up to `rows`."""
        self._step.reserve(rows)

    def _set_rows(self, slots: list[int]) -> None:
        self._slots[:] = slots           # changes the list in place, because the finalizer holds this list
        self._slot_index = self._step.on_device(slots)
