"""One token after the other for a batch of rows: the generation's decoding step for each block (Step of rwkv/model/rwkvN.py).

A Decoder reads the weights and calls no module, so it is for plain models. A CallingDecoder calls the model for every token:
it is for models with adapters, hooks or layers of another kind.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rwkv.model.base import Model, State
from rwkv.model.hooks import untouched
from rwkv.model.step import PLAIN, norm_function, product_function


def decoder_of(model: Model, state: State) -> "Decoder | CallingDecoder":
    """A Decoder where the model is plain, else a CallingDecoder."""
    plain = untouched(model) and all(_plain(module, model) for module in model.modules() if module is not model)
    return Decoder(model, state) if plain else CallingDecoder(model, state)


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
