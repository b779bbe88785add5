"""One token after the other for a batch of rows: the generation's decoding step for each block (model/decoding/rwkvN_step.py).

A Decoder reads the weights and calls no module, so it is for plain models. A ProgramDecoder does the same by a program of
kernels/decoding, which is faster on a CPU. A CallingDecoder calls the model for every token: it is for models with adapters,
hooks or layers of another kind.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.decoding import Run
from rwkv.model.base import Model, State
from rwkv.model.decoding.layers import PLAIN, norm_function, product_function
from rwkv.model.decoding.program import ModelProgram, Runner, decodes_by_program, program_of
from rwkv.model.hooks import untouched


def decoder_of(model: Model, state: State) -> "Decoder | ProgramDecoder | CallingDecoder":
    """The fastest decoder that fits the model."""
    if not (untouched(model) and all(_plain(module, model) for module in model.modules() if module is not model)):
        return CallingDecoder(model, state)
    program = program_of(model) if decodes_by_program(model) else None
    if program is None:
        return Decoder(model, state)
    return ProgramDecoder(model, state, program, Runner(model, program))


def _plain(module: nn.Module, model: Model) -> bool:
    """Whether a call of the module computes what its class does from its weights, without a bias in a linear layer."""
    return (type(module) in (*PLAIN, *model.generation.PLAIN) and untouched(module)
            and not (isinstance(module, nn.Linear) and module.bias is not None))


class CallingDecoder:
    """Reads one token (B,) per step like Decoder, by calling the model."""

    def __init__(self, model: Model, state: State) -> None:
        self._model, self._state = model, state

    def step(self, tokens: Tensor) -> Tensor:
        logits, self._state = self._model.prefill(tokens.to(self._state[0].device).unsqueeze(1), self._state)
        return logits

    def keep(self, rows: list[int]) -> None:
        self._state = self._state.rows(rows)

    def join(self, state: State) -> None:
        self._state = State.cat([self._state, state])

    def state(self, rows: list[int] | None = None) -> State:
        return self._state if rows is None else self._state.rows(rows)


class Decoder:
    """Reads one token (B,) per step into a state of its own, which begins as a copy of `state`."""

    @torch.inference_mode()
    def __init__(self, model: Model, state: State) -> None:
        self._embedding, self._dtype = model.emb.weight, model.ln_out.weight.dtype
        self._steps = [model.generation.Step(block, layer_state)
                       for block, layer_state in zip(model.blocks, state.layers(), strict=True)]
        self._ln_out, self._head = norm_function(model.ln_out), product_function(model.head)
        self._state_type = type(state)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B,V) after tokens (B,)."""
        x, carry = F.embedding(tokens.to(self._embedding.device), self._embedding).to(self._dtype), None
        for block in self._steps:
            x, carry = block.step(x, carry)
        return self._head(self._ln_out(x))

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, in this order."""
        for block in self._steps:
            block.keep(rows)

    @torch.inference_mode()
    def join(self, state: State) -> None:
        """Goes on with the rows of `state` too, after those that are here."""
        for block, layer_state in zip(self._steps, state.layers(), strict=True):
            block.join(layer_state)

    def state(self, rows: list[int] | None = None) -> State:
        """A copy of the state, of these rows or of all."""
        layers = [block.state() for block in self._steps]
        if rows is not None:
            layers = [tuple(tensor[rows] for tensor in layer) for layer in layers]
        return State.stack([self._state_type(*layer) for layer in layers])


class ProgramDecoder:
    """A Decoder whose step is a program of kernels/decoding; its logits are float32.

    A row keeps its place in memory while others join and leave, because its state is large (2.4 MB in RWKV-7 0.1b): of those
    that are left, the last ones move to the places that are free.
    """

    @torch.inference_mode()
    def __init__(self, model: Model, state: State, program: ModelProgram, run: Run) -> None:
        self._embedding, self._program, self._run, self._state_type = model.emb.weight, program, run, type(state)
        self._memory = torch.empty(0, program.program.size)
        self._places: list[int] = []     # in memory, of each row; the first ones, in any order
        self._registers = self._memory
        self.join(state)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B,V) that follow tokens (B,). They may lie in the decoder's memory: use them before it goes on."""
        rows = self._rows()
        if self._places:
            x = F.embedding(tokens, self._embedding).to(self._registers.dtype)
            self._register(self._program.x, x.shape[1])[rows] = x
            self._run(self._registers)
        return self._register(self._program.logits, len(self._embedding))[rows]

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, each of them once, in this order."""
        kept = [self._places[row] for row in rows]
        free = iter(sorted(set(range(len(kept))) - set(kept)))
        for row, place in enumerate(kept):
            if place >= len(kept):
                kept[row] = next(free)
                self._memory[kept[row]] = self._memory[place]
        self._use(kept)

    @torch.inference_mode()
    def join(self, state: State) -> None:
        """Goes on with the rows of `state` too, after those that are here."""
        before, more = len(self._places), state[0].shape[1]
        if before + more > len(self._memory):
            memory = torch.empty(max(before + more, before + before // 2), self._program.program.size)
            memory[:before] = self._registers
            self._memory = memory
        self._use([*self._places, *range(before, before + more)])
        for layer, places in zip(state.layers(), self._program.layers, strict=True):
            for tensor, place in zip(layer, places, strict=True):
                self._register(place.at, math.prod(place.shape))[before:] = tensor.flatten(1)

    @torch.inference_mode()
    def state(self, rows: list[int] | None = None) -> State:
        """A copy of the state, of these rows or of all."""
        places = self._places if rows is None else [self._places[row] for row in rows]
        layers = [self._state_type(*(self._register(place.at, math.prod(place.shape))[places].unflatten(1, place.shape)
                                     for place in layer)) for layer in self._program.layers]
        return State.stack(layers)

    def _rows(self) -> slice | Tensor:
        """The index of the rows, in order: a slice, which makes a view, where it can."""
        in_order = self._places == list(range(len(self._places)))
        return slice(None) if in_order else torch.tensor(self._places, dtype=torch.long)

    def _use(self, places: list[int]) -> None:
        if not places:
            self._memory = torch.empty(0, self._program.program.size)
        self._places, self._registers = places, self._memory[:len(places)]

    def _register(self, at: int, width: int) -> Tensor:
        return self._registers[:, at:at + width]
