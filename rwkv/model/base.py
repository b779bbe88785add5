"""The model of every generation: an embedding, the generation's blocks, a LayerNorm and a head.

A model reads whole sequences (T > 1), chunks with the state carried between them, or one token at a time (T = 1), with the
same logits. The operator that it is built with, block.att.wkv, is the kernel that mixes time; the weights do not depend on
it. A generation is a module beside this one, imported by its name: rwkv4.py has all of RWKV-4's architecture, as `Generation`
lists it.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kernels.machine.allocator import give_back_free_blocks
from kernels.machine.threads import one_thread_in_forks
from kernels.matvec import Blocks
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.errors import UserError
from rwkv.model.hooks import untouched
from rwkv.model.packing import Packing
from rwkv.model.state import State
from rwkv.model.weight_cache import WeightCache
from rwkv.model.weights_watch import CachedFromWeights

MATRICES = ("matrix", "gate", "embedding")       # groups of the weights of linear layers and of the embedding
TIME_STATE = "att.time_state"            # suffix of the name of a layer's learnt initial state
OVERRIDABLE = ("forward", "hidden", "hidden_in_parts")          # by a subclass
SAMPLED = 4096                           # elements of each tensor, evenly spaced, that the fingerprint reads

class Generation(Protocol):
    """The interface of a generation's module."""

    NAME: str                            # the name in messages
    OPERATOR: str                        # the folder of kernels/ that mixes time
    KEPT_FLOAT32: tuple[str, ...]        # suffixes of the parameters that stay float32 in half precision
    OPTIONS: tuple[str, ...]             # ModelConfig's options that not every generation has
    LR_SCALES: dict[str, str]            # prefix of a parameter's name: the option of optim that scales its rate
    UNUSED: tuple[str, ...]              # unused tensors, which some files lack
    LEARNS_STATE: bool                   # whether a state before the first token can be trained (tune=state)
    PLAIN: Any                           # classes of modules that Step computes without calling
    Block: Any                           # forward: (x, its state or None, carry, packing or None) -> (x, state, carry)
    Step: Any                            # a class: a Block for one token (rwkv/generation/decoder.py)
    State: Any                           # a class of rwkv.model.state

    def shapes(self, config: ModelConfig, V: int) -> dict[str, Any]:
        """Every tensor's name and shape, the source of all counts, checks and translations."""

    def resolved(self, config: ModelConfig) -> ModelConfig:
        """The configuration with its default widths filled in."""

    def empty_state(self, config: ModelConfig, B: int, device: torch.device | str = "cpu") -> Any: ...

    def init_weights(self, model: Any) -> None: ...

    def group(self, name: str) -> str:
        """The optimiser's group of a parameter."""

    def c_model(self, model: Any, builder: Any) -> Any:
        """The structs that the step in C reads (decoding/c_step.py)."""

    def gpu_launches(self, model: Any, builder: Any) -> Any:
        """The launches of the step on a GPU (decoding/triton_step.py)."""

    def non_negative(self, config: ModelConfig) -> tuple[str, ...]:
        """Linear layers whose inputs are never negative, for int8."""

    def operator_work(self, config: ModelConfig) -> int:
        """Peak values per token in the operator's backward pass; for the memory estimate, as the next two."""

    def saved_activations(self, config: ModelConfig, half: bool) -> float: ...

    def saved_when_recomputing(self, config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float: ...


class DeepEmbedGeneration(Generation, Protocol):
    """A generation whose ModelConfig may have a deep_embed_dim."""

    def add_deep_embed(self, model: Any) -> None:
        """Adds the tables of a new model."""

    def merge(self, model: Any) -> None:
        """Merges the weights that are separate only for training."""

    def first_carry(self, tokens: Tensor) -> Any:
        """The carry that the first block receives."""


def generation(config: ModelConfig) -> Generation:
    """The module of the configuration's generation."""
    return cast(Generation, importlib.import_module(f"rwkv.model.{config.generation}"))


def n_parameters(config: ModelConfig, vocab_size: int) -> int:
    return sum(math.prod(shape) for shape in generation(config).shapes(config, vocab_size).values())


def state_nbytes(config: ModelConfig) -> int:
    """The memory of one row's state, in bytes."""
    state: State = generation(config).empty_state(config, 1, "meta")
    return state.nbytes()


def is_linear_weight(name: str, group: str) -> bool:
    """Whether a tensor of this name and optimiser group is a linear layer's weight; such groups also contain embeddings."""
    return group in MATRICES and not name.endswith("emb.weight")


def fingerprint(generation: Generation, weights: Mapping[str, Tensor | Blocks]) -> str:
    """SHA-256 of the tensors' names, shapes and evenly spaced elements rounded to bfloat16: identifies the model.

    It is the same in every dtype of the weights, and with any learnt state before the first token.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        if name in generation.UNUSED or name.endswith(TIME_STATE):
            continue
        tensor = weights[name]
        shape = (len(tensor.weight), tensor.K) if isinstance(tensor, Blocks) else tuple(tensor.shape)
        step = max(1, math.prod(shape) // SAMPLED)
        spaced = (tensor.elements_at(torch.arange(0, math.prod(shape), step, device="cpu")) if isinstance(tensor, Blocks)
                  else tensor.detach().flatten()[::step])
        digest.update(f"{name} {shape}".encode())
        digest.update(spaced.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _run_blocks(blocks: Iterable[nn.Module], x: Tensor, carry: Any, before: Iterable[Any], packing: Packing | None = None,
                give_back: bool = False) -> tuple[Tensor, Any, list[Any]]:
    """x and carry after these blocks, and the states after the last token. give_back: return free memory after each block."""
    after = []
    for block, layer_state in zip(blocks, before, strict=True):
        x, layer_state, carry = block(x, layer_state, carry, packing)
        after.append(layer_state)
        if give_back and x.requires_grad:
            give_back_free_blocks()
            x.register_hook(lambda grad: give_back_free_blocks())        # after the next block's backward pass
    return x, carry, after


def through_blocks(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """The last block's x (B,T,C) from the first block's, from the empty state, for a model whose blocks need nothing else."""
    return _run_blocks(blocks, x, None, [None] * len(blocks))[0]


def _require_own_options(config: ModelConfig) -> None:
    """Raises UserError for an option that only other generations have, unless it is at its default."""
    options = generation(config).OPTIONS
    default = ModelConfig()
    for name in GENERATIONS:
        for option in generation(replace(config, generation=name)).OPTIONS:
            if option not in options and getattr(config, option) != getattr(default, option):
                raise UserError(f"model.{option} requires model.generation={name}; got {config.generation}")


class _NoInitialisation(TorchFunctionMode):
    """Skips random initialisation, which has no effect on the meta device and imports modules for seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = getattr(function, "__module__", None) == nn.init.__name__
        return None if skipped else function(*args, **(kwargs or {}))


class Model(nn.Module):
    """model(tokens (B,T) int64, state=None) -> (logits (B,T,V), state); the argument state is not changed."""

    def __init__(self, config: ModelConfig, vocab_size: int, operator: Any) -> None:
        super().__init__()
        _require_own_options(config)
        one_thread_in_forks()
        self.config, self.vocab_size, self.operator = config, vocab_size, operator
        self.fingerprint_before: str | None = None       # before the weights were quantised or merged
        self.decoding_step = CachedFromWeights()         # its step in C or on a GPU
        self.gives_back = False                          # training: return memory to the system after each block
        self.weight_cache: WeightCache | None = None     # training in half precision: the rounded weights
        self.replay: Callable[[Tensor], Tensor] | None = None    # training: computes through_blocks as a CUDA graph
        self.emb = nn.Embedding(vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(self.generation.Block(config, layer, operator) for layer in range(config.n_layer))
        if config.deep_embed_dim:
            cast(DeepEmbedGeneration, self.generation).add_deep_embed(self)
        self.ln_out = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)

    @classmethod
    def with_weights(cls, config: ModelConfig, operator: Any, weights: dict[str, Tensor]) -> Self:
        """The model of these tensors, which are not copied; no others are allocated or initialised."""
        with torch.device("meta"), _NoInitialisation():
            model = cls(config, len(weights["emb.weight"]), operator)
        model.load_state_dict(weights, assign=True)
        return model

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state

    @property
    def generation(self) -> Generation:
        return generation(self.config)

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The head's input (B,T,C) and the state after the last token."""
        hidden, layers = self._blocks(tokens, state)
        return hidden, State.stack(layers)

    def forward_features(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """The head's input (B,T,C) alone, from the empty state: for training on windows.

        starts (B,T) bool: where a sequence begins in rows with several; each starts from the empty state.
        """
        if self.replay is not None and starts is None:
            x, _, _ = self._embedded(tokens, None)
            hidden: Tensor = self.ln_out(self.replay(x))
            return hidden
        return self._blocks(tokens, None, None if starts is None else Packing(starts))[0]

    def _blocks(self, tokens: Tensor, state: State | None, packing: Packing | None = None) -> tuple[Tensor, list[State]]:
        """The head's input (B,T,C) and the state of each layer after the last token."""
        x, before, carry = self._embedded(tokens, state)
        x, _, after = _run_blocks(self.blocks, x, carry, before, packing, self.gives_back)
        return self.ln_out(x), after

    def _embedded(self, tokens: Tensor, state: State | None) -> tuple[Tensor, Sequence[Any], Any]:
        """The first block's input, the state of each layer (None for an empty one), and the carry for the first block."""
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (B,T) with T at least 1; got {tuple(tokens.shape)}")
        if state is not None:
            self.check_state(state, len(tokens))
        before = [None] * len(self.blocks) if state is None else state.layers()
        carry = cast(DeepEmbedGeneration, self.generation).first_carry(tokens) if self.config.deep_embed_dim else None
        return self.emb(tokens).to(self.ln_out.weight.dtype), before, carry

    @torch.no_grad()
    def hidden_in_parts(self, tokens: Tensor, state: State | None, n_parts: int) -> Iterator[tuple[Tensor, State] | None]:
        """hidden() in n_parts steps of some blocks each: yields None after each step but the last, and then the result."""
        x, before, carry = self._embedded(tokens, state)
        after = []
        L = len(self.blocks)
        for part in range(n_parts):
            layers = slice(L * part // n_parts, L * (part + 1) // n_parts)
            x, carry, states = _run_blocks(self.blocks[layers], x, carry, before[layers])
            after += states
            if part + 1 < n_parts:
                yield None
        yield self.ln_out(x), State.stack(after)

    def empty_state(self, B: int) -> State:
        """The initial state of B rows. A learnt one has gradients."""
        state = self.zero_state(B, self.emb.weight.device)
        learnt = self.time_states()
        return state._replace(wkv=torch.stack(learnt).unsqueeze(1).repeat(1, B, 1, 1, 1)) if learnt else state  # type: ignore

    def zero_state(self, B: int, device: torch.device | str) -> State:
        """A state of zeros for the present blocks, since blocks may have been removed or added."""
        state: State = self.generation.empty_state(replace(self.config, n_layer=len(self.blocks)), B, device)
        return state

    def time_states(self) -> list[nn.Parameter]:
        """The operator's learnt initial state, (H,N,N) for each layer; an empty list if there is none."""
        states = [getattr(block.att, "time_state", None) for block in self.blocks]
        return [state for state in states if state is not None]

    def set_time_states(self, states: Sequence[Tensor]) -> None:
        """Sets each layer's initial state of the operator, (H,N,N)."""
        for block, state in zip(self.blocks, states, strict=True):
            block.get_submodule("att").register_parameter("time_state", nn.Parameter(state))

    def check_state(self, state: State, B: int) -> None:
        """Raises ValueError unless `state` is a state of this model for B rows."""
        expected = [tuple(part.shape) for part in self.zero_state(B, "meta")]
        shapes = [tuple(part.shape) for part in state]
        if shapes != expected:
            raise ValueError(f"the state must have the shapes {expected} for this model and {B} rows; got {shapes}")

    def is_untouched(self) -> bool:
        """Whether the logits are those of head(hidden()): no hook, subclass or assigned function changes them."""
        return untouched(self) and all(getattr(type(self), name) is getattr(Model, name) and name not in vars(self)
                                       for name in OVERRIDABLE)

    def init_weights(self) -> Self:
        """The generation's initialisation, from torch's global random generator."""
        self.generation.init_weights(self)
        return self

    def merge(self) -> Self:
        """Merges the weights that are separate only for training, as DeepEmbed's: the model computes the same."""
        if self.config.deep_embed_dim:
            self.fingerprint_before = self.fingerprint()
            cast(DeepEmbedGeneration, self.generation).merge(self)
        return self

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The logits (B,V) after the last of tokens (B,T), T >= 1, and the state, in one parallel pass."""
        if not self.is_untouched():          # a hook on the model sees and changes the logits of all positions
            logits, state = self(tokens, state)
            return logits[:, -1], state
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden[:, -1]), state

    def fingerprint(self) -> str:
        """Identifies the model: see the function fingerprint. A quantised or merged model has the one from before."""
        if self.fingerprint_before is not None:
            return self.fingerprint_before
        blocks = {f"{name}.weight": module.packed for name, module in self.named_modules()
                  if isinstance(getattr(module, "packed", None), Blocks)}
        return fingerprint(self.generation, {**self.state_dict(), **blocks})
