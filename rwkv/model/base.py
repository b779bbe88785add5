"""The model class that all generations share: an embedding, the generation's blocks, a LayerNorm and a head.

A model can read a whole sequence (T > 1), chunks with the state carried between them, or one token at a time (T = 1). The
logits are the same in all three cases. The kernel that mixes time, the operator, is `block.att.wkv`. All kernels use the same
weights.

A generation is a package beside this file, such as rwkv4/, and is imported by name. The package implements the interface
`Generation`. Its optional modules are listed in `OPTIONAL_MODULES`, and compute the same formulas faster.
"""

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import rwkv.model.state
from kernels.machine.allocator import give_back_free_blocks
from kernels.machine.threads import one_thread_in_forks
from kernels.matvec import Blocks
from kernels.operator import Operator
from rwkv.config import GENERATIONS, ModelConfig, OptimConfig
from rwkv.errors import UserError
from rwkv.model.hooks import is_unmodified
from rwkv.model.packing import Packing
from rwkv.model.state import State
from rwkv.model.weight_cache import WeightCache
from rwkv.model.weights_watch import CachedFromWeights

MATRICES = ("matrix", "gate", "embedding")       # optimiser groups of linear layers' weights and of embeddings
TIME_STATE = "att.time_state"            # suffix of the name of a layer's learnt initial state
OVERRIDABLE = ("forward", "hidden", "hidden_in_parts")          # is_unmodified checks that these methods are not replaced
SAMPLED = 4096                           # evenly spaced elements of each tensor that the fingerprint reads
# These parts of tensor names are added by torch.compile, activation checkpointing, FSDP, DeepSpeed and data parallelism
WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module", "_forward_module",
                      "module"))
OPTIONAL_MODULES = {                     # optional modules of a generation, for decoding one token at a time
    "step": "Step computes a block without calling its modules, and PLAIN lists the classes of modules that Step can replace",
    "step_c": "c_model(model, builder) returns the structs that the generation's C step reads (decoding/c_step.py)",
    "step_triton": "launches(model, builder) returns the kernel launches of one step on a GPU (decoding/triton_step.py)"}


class Layer(Protocol):
    """A block: an nn.Module with two LayerNorms, ln1 and ln2, time mixing `att` and channel mixing `ffn`.

    The first block has a third LayerNorm, ln0. The operator is `att.wkv`. In generations that can learn the operator's state
    before the first token, `att.time_state` holds that state.
    """

    def __call__(self, x: Tensor, before: State | None, carry: object,
                 packing: Packing | None = None) -> tuple[Tensor, State | None, object]:
        """Returns the new x (B,T,C), this layer's state after x, and the carry for the next block.

        With a packing, a row holds several sequences. Each sequence then starts from the empty state, and the returned state is
        None.

        Args:
            before: this layer's state before x; None stands for the empty state.
            carry: the previous block's carry; None for the first block.
        """


class Generation(Protocol):
    """The interface that a generation's package implements."""

    NAME: str                            # the generation's name in messages
    OPERATOR: str                        # the folder of kernels/ with the operator of time mixing
    KEPT_FLOAT32: tuple[str, ...]        # suffixes of the parameters that stay float32 in half precision
    OPTIONS: tuple[str, ...]             # ModelConfig's options that not every generation has
    LR_SCALES: dict[str, str]            # parameter name prefix -> the option of `optim` that scales its learning rate
    UNUSED: tuple[str, ...]              # tensors that the model ignores and some checkpoints lack
    LEARNS_STATE: bool                   # whether a state before the first token can be trained (tune=state)

    @property
    def Block(self) -> Callable[..., nn.Module]:
        """The class of blocks. Block(config, layer, operator) makes a Layer."""

    @property
    def State(self) -> Callable[..., State]:
        """The generation's subclass of rwkv.model.state.State. The constructor takes the tensors as keyword arguments."""

    def shapes(self, config: ModelConfig, V: int) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every tensor. Parameter counts, checkpoint checks and conversions use these shapes."""

    def with_default_widths(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration with its default widths filled in."""

    def empty_state(self, config: ModelConfig, B: int, device: torch.device | str = "cpu") -> rwkv.model.state.State:
        """Returns the empty state, before the first token, for B rows. If LEARNS_STATE is true, its `wkv` can be trained."""

    def init_weights(self, model: "Model") -> None: ...

    def group(self, name: str) -> str:
        """Returns the optimiser group of a parameter."""

    def non_negative(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the names of linear layers with inputs that are never negative; int8 needs no sign bit for such inputs."""

    def operator_work(self, config: ModelConfig) -> int:
        """Returns the peak number of values per token in the operator's backward pass, for the memory estimate."""

    def saved_activations(self, config: ModelConfig, half: bool) -> float: ...

    def saved_when_recomputing(self, config: ModelConfig, half: bool, layers: Collection[str], vectors: bool) -> float: ...


class DeepEmbedGeneration(Generation, Protocol):
    """A generation that supports DeepEmbed, and thus the option deep_embed_dim of ModelConfig."""

    def add_deep_embed(self, model: "Model") -> None:
        """Adds DeepEmbed's tables to a new model."""

    def merge(self, model: "Model") -> None:
        """Merges the weights that are separate only for training."""

    def first_carry(self, tokens: Tensor) -> object:
        """Returns the carry for the first block."""


def generation(config: ModelConfig) -> Generation:
    """Returns the package of the configuration's generation."""
    return cast(Generation, importlib.import_module(f"rwkv.model.{config.generation}"))


def has_optional_module(config: ModelConfig, name: str) -> bool:
    """Returns True if the generation has the optional module `name`, which must be a key of OPTIONAL_MODULES."""
    return importlib.util.find_spec(f"rwkv.model.{config.generation}.{name}") is not None


def optional_module(config: ModelConfig, name: str) -> ModuleType:
    """Returns the generation's optional module `name`, which must exist (see has_optional_module)."""
    return importlib.import_module(f"rwkv.model.{config.generation}.{name}")


def names_with_learnt_state() -> str:
    """Returns the names of the generations whose initial state can be trained, joined by "or"."""
    modules = [generation(ModelConfig(generation=name)) for name in GENERATIONS]
    return " or ".join(module.NAME for module in modules if module.LEARNS_STATE)


def n_parameters(config: ModelConfig, vocab_size: int) -> int:
    return sum(math.prod(shape) for shape in generation(config).shapes(config, vocab_size).values())


def state_nbytes(config: ModelConfig) -> int:
    """Returns the memory of one row's state, in bytes."""
    return generation(config).empty_state(config, 1, "meta").nbytes()


def without_wrappers(name: str) -> str:
    """Returns a tensor's name without WRAPPERS."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_linear_weight(name: str, group: str) -> bool:
    """Returns True if `name`, of optimiser group `group`, is the weight of a linear layer, not an embedding or a vector."""
    return group in MATRICES and not name.endswith("emb.weight")


def fingerprint(generation: Generation, weights: Mapping[str, Tensor | Blocks]) -> str:
    """Returns a SHA-256 hash that identifies the model.

    The hash covers the tensors' names, their shapes and some evenly spaced elements rounded to bfloat16. The dtype of the
    weights and a learnt initial state do not affect the hash.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        if name in generation.UNUSED or name.endswith(TIME_STATE):
            continue
        tensor = weights[name]
        shape = (len(tensor.weight), tensor.K) if isinstance(tensor, Blocks) else tuple(tensor.shape)
        step = max(1, math.prod(shape) // SAMPLED)
        indices = torch.arange(0, math.prod(shape), step, device="cpu")
        sample = (tensor.elements_at(indices) if isinstance(tensor, Blocks)
                  else tensor.detach().flatten()[::step] if tensor.is_contiguous() or tensor.dim() != 2
                  else tensor.detach()[indices // shape[1], indices % shape[1]])     # flatten() would copy a transposed matrix
        digest.update(f"{name} {shape}".encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _run_blocks(blocks: Iterable[nn.Module], x: Tensor, carry: object, before: Iterable[State | None],
                packing: Packing | None = None, give_back: bool = False) -> tuple[Tensor, object, list[State]]:
    """Returns x, the carry and each block's state after these blocks.

    If `give_back` is true, free memory is returned to the system after each block's forward and backward pass.
    """
    after: list[State] = []
    for block, layer_state in zip(cast(Iterable[Layer], blocks), before, strict=True):
        x, layer_state, carry = block(x, layer_state, carry, packing)
        after.append(cast(State, layer_state))           # with a packing the state is None, and the caller ignores it
        if give_back and x.requires_grad:
            give_back_free_blocks()
            x.register_hook(lambda grad: give_back_free_blocks())        # this hook runs after the next block's backward pass
    return x, carry, after


def run_all_blocks(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Returns the output (B,T,C) of all blocks for the input x, from the empty state. The model must not need a carry."""
    return _run_blocks(blocks, x, None, [None] * len(blocks))[0]


def require_own_options(model: ModelConfig, optim: OptimConfig | None = None) -> None:
    """Raises UserError if `model` or `optim` sets an option that only other generations have."""
    for key, name in foreign_options(model, optim or OptimConfig()).items():
        raise UserError(f"{key} is an option of {name}, but the model is {model.generation}. Omit this "
                        "option, or choose a different model with model=")


def foreign_options(model: ModelConfig, optim: OptimConfig) -> dict[str, str]:
    """Returns the options with other values than the defaults that only other generations have, with such a generation."""
    groups = {"model": model, "optim": optim}
    own = _own_options(generation(model))
    foreign = {}
    for name in GENERATIONS:
        for key in _own_options(generation(replace(model, generation=name))):
            group, _, option = key.partition(".")
            default = type(groups[group])()
            if key not in own and getattr(groups[group], option) != getattr(default, option):
                foreign[key] = name
    return foreign


def _own_options(generation: Generation) -> tuple[str, ...]:
    return (*(f"model.{option}" for option in generation.OPTIONS),
            *(f"optim.{option}" for option in generation.LR_SCALES.values()))


class _NoInitialisation(TorchFunctionMode):
    """Skips the functions of torch.nn.init. On the meta device they have no effect, and their imports take seconds."""

    def __torch_function__(self, function: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
                           kwargs: Mapping[str, object] | None = None) -> object:
        initialises = getattr(function, "__module__", None) == nn.init.__name__
        return None if initialises else function(*args, **(kwargs or {}))


class Model(nn.Module):
    """An RWKV model of any generation: model(tokens, state) returns the logits (B,T,V) and the new state.

    The tokens (B,T) are int64, and `state` defaults to the initial state. A call does not change its arguments.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, operator: Operator) -> None:
        super().__init__()
        require_own_options(config)
        one_thread_in_forks()
        self.config, self.operator = config, operator
        self.fingerprint_before: str | None = None       # the fingerprint before quantising or merging
        self.unrounded: dict[str, str] = {}              # fingerprint of rounded weights -> fingerprint before
        self.decoding_step = CachedFromWeights()         # the cached CStep or GpuStep
        self.returns_free_memory = False                 # true if training returns free memory after each block
        self.weight_cache: WeightCache | None = None     # the rounded weights, for training in half precision
        self.replay: Callable[[Tensor], Tensor] | None = None    # in training, computes run_all_blocks as a CUDA graph
        self.emb = nn.Embedding(vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(self.generation.Block(config, layer, operator) for layer in range(config.n_layer))
        if config.deep_embed_dim:
            cast(DeepEmbedGeneration, self.generation).add_deep_embed(self)
        self.ln_out = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)

    @classmethod
    def with_weights(cls, config: ModelConfig, operator: Operator, weights: dict[str, Tensor]) -> Self:
        """Makes a model that uses these tensors without copying them. Nothing else is allocated or initialised."""
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

    @property
    def vocab_size(self) -> int:
        """The number of tokens: the rows of the embedding, which a user may replace together with the head."""
        return len(self.emb.weight)

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Returns the head's input (B,T,C) and the state after the last token."""
        hidden, layers = self._hidden_and_states(tokens, state)
        return hidden, State.stack(layers)

    def forward_features(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Returns the head's input (B,T,C) without the state, for training. Every row starts from the empty state.

        `starts` (B,T) is a bool tensor for rows that hold several sequences: true at each sequence's first token. Each sequence
        then starts from the empty state.
        """
        if self.replay is not None and starts is None:
            x, _, _ = self._first_block_inputs(tokens, None)
            hidden: Tensor = self.ln_out(self.replay(x))
            return hidden
        return self._hidden_and_states(tokens, None, None if starts is None else Packing(starts))[0]

    def _hidden_and_states(self, tokens: Tensor, state: State | None,
                           packing: Packing | None = None) -> tuple[Tensor, list[State]]:
        x, before, carry = self._first_block_inputs(tokens, state)
        x, _, after = _run_blocks(self.blocks, x, carry, before, packing, self.returns_free_memory)
        return self.ln_out(x), after

    def _first_block_inputs(self, tokens: Tensor, state: State | None) -> tuple[Tensor, Sequence[State | None], object]:
        """Returns the first block's input, each layer's state (None for the empty state), and the first block's carry."""
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a tensor of the shape (B,T); got a {type(tokens).__name__}")
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must have the shape (B,T) with T at least 1; got {tuple(tokens.shape)}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be int64 or int32; got {tokens.dtype}: use tokens.long()")
        if state is not None:
            self.check_state(state, len(tokens))
        before = [None] * len(self.blocks) if state is None else state.layers()
        carry = cast(DeepEmbedGeneration, self.generation).first_carry(tokens) if self.config.deep_embed_dim else None
        try:
            x = self.emb(tokens)
        except IndexError as error:      # torch's message does not name the tokens
            raise ValueError(f"tokens must be ids from 0 to {self.vocab_size - 1}; got {int(tokens.min())} to "
                             f"{int(tokens.max())}. Larger ids come from the tokenizer of a different model; -100 is the "
                             "padding of labels") from error
        return x.to(self.ln_out.weight.dtype), before, carry

    @torch.no_grad()
    def hidden_in_parts(self, tokens: Tensor, state: State | None, n_parts: int) -> Iterator[tuple[Tensor, State] | None]:
        """Computes hidden() in n_parts steps of a few blocks. Yields None after each step but the last, and then the result."""
        x, before, carry = self._first_block_inputs(tokens, state)
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
        """Returns the initial state of B rows. If that state is learnt, gradients flow to its parameters."""
        state = self.zero_state(B, self.emb.weight.device)
        learnt = self.time_states()
        return state.with_wkv(torch.stack(tuple(learnt)).unsqueeze(1).repeat(1, B, 1, 1, 1)) if learnt else state

    def zero_state(self, B: int, device: torch.device | str) -> State:
        """Returns a state of zeros for the blocks that the model has now, since blocks may have been removed or added."""
        return self.generation.empty_state(replace(self.config, n_layer=len(self.blocks)), B, device)

    def time_states(self) -> list[nn.Parameter]:
        """Returns the operator's learnt initial state, (H,N,N) for each layer. The list is empty if there is none."""
        states = [getattr(block.att, "time_state", None) for block in self.blocks]
        return [state for state in states if state is not None]

    def set_time_states(self, states: Sequence[Tensor]) -> None:
        """Sets the operator's initial state. `states` has one tensor (H,N,N) for each layer."""
        for block, state in zip(self.blocks, states, strict=True):
            block.get_submodule("att").register_parameter("time_state", nn.Parameter(state))

    def check_state(self, state: State, B: int) -> None:
        """Raises ValueError unless `state` is a State with the shapes of this model's state for B rows."""
        if not isinstance(state, State):
            raise ValueError(f"state must be a state that this model has returned, or None; got a {type(state).__name__}")
        expected = [tuple(part.shape) for part in self.zero_state(B, "meta")]
        shapes = [tuple(part.shape) for part in state]
        if shapes != expected:
            raise ValueError(f"the state must have the shapes {expected} for this model and {B} rows; got {shapes}")

    def is_unmodified(self) -> bool:
        """Returns True if calling the model equals head(hidden()).

        The result is False if the model has hooks, or if a subclass or an instance attribute replaces a method in OVERRIDABLE.
        """
        return is_unmodified(self) and all(getattr(type(self), name) is getattr(Model, name) and name not in vars(self)
                                           for name in OVERRIDABLE)

    def init_weights(self) -> Self:
        """Initialises the weights by the generation's rule, with torch's global random generator."""
        self.generation.init_weights(self)
        return self

    def merge(self) -> Self:
        """Merges the weights that are separate only for training, those of DeepEmbed. The outputs stay the same."""
        if self.config.deep_embed_dim:
            self.fingerprint_before = self.fingerprint()
            cast(DeepEmbedGeneration, self.generation).merge(self)
        return self

    @torch.no_grad()
    def prefill(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Computes the logits (B,V) after the last of tokens (B,T), T >= 1, and the new state, in one parallel pass."""
        if not self.is_unmodified():     # a hook on the model may read or change the logits of all positions
            logits, state = self(tokens, state)
            return logits[:, -1], state
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden[:, -1]), state

    def fingerprint(self) -> str:
        """Returns the hash that identifies the model (the function `fingerprint`).

        Quantising, merging and rounding to float16 do not change this hash.
        """
        return self.fingerprint_before or self._fingerprint_of_weights()

    def _fingerprint_of_weights(self) -> str:
        """Returns the hash of the current weights, which are packed in a quantised model."""
        blocks = {without_wrappers(f"{name}.weight"): module.packed for name, module in self.named_modules()
                  if isinstance(getattr(module, "packed", None), Blocks)}
        value = fingerprint(self.generation, {**self.official_weights(), **blocks})
        return self.unrounded.get(value, value)

    def official_weights(self) -> dict[str, Tensor]:
        """Returns state_dict() with the names that the tensors have without wrappers, such as blocks that are compiled."""
        return {without_wrappers(name): tensor for name, tensor in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights as nn.Module does. With other weights, a quantised or merged model is another model."""
        before = self.fingerprint_before and self._fingerprint_of_weights()
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:                         # torch also loads what fits before it raises an error
            if before and before != self._fingerprint_of_weights():
                self.fingerprint_before = None

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Changes the weights' device or dtype. Stores the fingerprint first if float16 rounding would change the hash."""
        weight = self.ln_out.weight      # unlike the embedding, the norm is never quantised
        rounds = not weight.is_meta and function(weight.new_empty(0)).dtype == torch.float16 != weight.dtype
        before = self.fingerprint() if rounds else None
        super()._apply(function, recurse)
        if before is not None:
            self.unrounded[self.fingerprint()] = before
        return self
