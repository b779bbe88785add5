"""One token after the other for a batch of rows: the generation's decoding step for each block (Step of rwkv/model/rwkvN.py).

A Decoder reads the weights and calls no module, so it is for plain models. A ProgramDecoder does the same in one launch of
kernels/decoding, which is faster for few rows on a CPU; a SwitchingDecoder takes the faster of the two. A CallingDecoder calls
the model for every token: it is for models with adapters, hooks or layers of another kind.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.decoding import of_register
from kernels.registry import KernelUnavailable
from rwkv.model.base import Model, State
from rwkv.model.hooks import untouched
from rwkv.model.operators import decoding_for
from rwkv.model.program import ModelProgram, most_rows, program_of
from rwkv.model.step import PLAIN, norm_function, product_function


def decoder_of(model: Model, state: State) -> "Decoder | SwitchingDecoder | CallingDecoder":
    """The fastest decoder that fits the model."""
    if not (untouched(model) and all(_plain(module, model) for module in model.modules() if module is not model)):
        return CallingDecoder(model, state)
    most = most_rows(model)
    program = program_of(model) if most else None
    return Decoder(model, state) if program is None else SwitchingDecoder(model, state, program, most)


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
    """A Decoder whose step is a program of kernels/decoding; its logits are float32."""

    @torch.inference_mode()
    def __init__(self, model: Model, state: State, program: ModelProgram, run: Callable[[Tensor, int], None]) -> None:
        self._embedding, self._program, self._run = model.emb.weight, program, run
        self._load(state)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B,V) after tokens (B,)."""
        if self._rows:
            self._register(self._program.x, self._embedding.shape[1]).copy_(F.embedding(tokens, self._embedding))
            self._run(self._registers, self._rows)
        return self._register(self._program.logits, len(self._embedding)).clone()

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, in this order."""
        self._load(self.state(rows))

    @torch.inference_mode()
    def join(self, state: State) -> None:
        """Goes on with the rows of `state` too, after those that are here."""
        self._load(State.cat([self.state(), state]))

    def state(self, rows: list[int] | None = None) -> State:
        """A copy of the state, of these rows or of all."""
        layers = [self._state_type(*(self._tensor(place.at, place.shape) for place in layer)) for layer in self._program.layers]
        state = State.stack(layers)
        return state if rows is None else state.rows(rows)

    def _load(self, state: State) -> None:
        self._state_type, self._rows = type(state), state[0].shape[1]
        self._registers = torch.zeros(self._program.program.size * self._rows)
        for layer, places in zip(state.layers(), self._program.layers, strict=True):
            for tensor, place in zip(layer, places, strict=True):
                self._tensor(place.at, place.shape).copy_(tensor)

    def _tensor(self, at: int, shape: tuple[int, ...]) -> Tensor:
        return self._register(at, math.prod(shape)).view(self._rows, *shape)

    def _register(self, at: int, width: int) -> Tensor:
        return of_register(self._registers, at, width, self._rows)


class SwitchingDecoder:
    """A ProgramDecoder while it has `most` rows or fewer, a Decoder while it has more, or where the program cannot run."""

    def __init__(self, model: Model, state: State, program: ModelProgram, most: int) -> None:
        self._model, self._program, self._most = model, program, most
        self._run: Callable[[Tensor, int], None] | None = decoding_for(program.form)(program.program, program.form)
        self._use(state)

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B,V) after tokens (B,)."""
        try:
            return self._decoder.step(tokens)
        except KernelUnavailable:        # as after Taichi was started for a GPU: it has computed nothing yet
            if self._run is None:
                raise
            self._run = None
            self._use(self._decoder.state())
            return self._decoder.step(tokens)

    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows alone, in this order."""
        if isinstance(self._decoder, self._kind(len(rows))):
            self._decoder.keep(rows)
            self._rows = len(rows)
        else:
            self._use(self._decoder.state(rows))

    def join(self, state: State) -> None:
        """Goes on with the rows of `state` too, after those that are here."""
        rows = self._rows + state[0].shape[1]
        if isinstance(self._decoder, self._kind(rows)):
            self._decoder.join(state)
            self._rows = rows
        else:
            self._use(State.cat([self._decoder.state(), state]))

    def state(self, rows: list[int] | None = None) -> State:
        """A copy of the state, of these rows or of all."""
        return self._decoder.state(rows)

    def _kind(self, rows: int) -> type:
        return ProgramDecoder if self._run is not None and rows <= self._most else Decoder

    def _use(self, state: State) -> None:
        self._decoder: ProgramDecoder | Decoder
        self._rows = state[0].shape[1]
        if self._run is not None and self._rows <= self._most:
            self._decoder = ProgramDecoder(self._model, state, self._program, self._run)
        else:
            self._decoder = Decoder(self._model, state)
