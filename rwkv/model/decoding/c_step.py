"""A model's decoding step in one C call. This module builds the structs of numbers and addresses that the C function reads.

The named tuples here and in a generation's step_c.py mirror, field by field, the C structs of csrc/step.h and of the
generation's csrc/step.c. CStep checks that the sizes agree. The generation's c_model(model, builder) fills the tuples. A model
caches its CStep, which all decoders share, until the weights change.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from kernels import native, registry
from kernels.draw import Draw
from kernels.machine.memory import available_memory
from kernels.matvec import BLOCKS, KINDS, Int8, exact_copy
from kernels.select import AUTO, resolve
from rwkv.model.base import Model, has_optional_module, optional_module
from rwkv.model.decoding.layers import PLAIN
from rwkv.model.hooks import is_unmodified
from rwkv.model.quantized import BFloat16Linear, BlockEmbedding, BlockLinear, Int4Linear, Int8Linear, PackedLinear
from rwkv.model.weights_watch import exact_copies, is_finite, tensors_of

LANES = 8                                # all widths are multiples of this
PART = 32                                # offsets in the workspace are multiples of this
BLOCK = 256                              # prepared inputs of int4 and of GGUF's blocks are padded to a multiple of this
PREPARED = 3                             # at most this many input vectors are prepared in one phase
COPIED = 2**26                           # copies of all bfloat16 matrices with sparse inputs have at most this many bytes
DENSE_BY_OUTPUT, SPARSE_BY_INPUT, DENSE_BY_INPUT, SPARSE_BY_OUTPUT = range(4)            # step.h has the same numbers
PACKED = (Int8Linear, Int4Linear, BlockLinear)
LINEAR = (nn.Linear, *PACKED)
NORMS = (nn.LayerNorm, nn.GroupNorm)
BFLOAT16_WEIGHT = "bfloat16 as float32"  # in KINDS: a bfloat16 weight, whose inputs are not rounded
EMBEDDINGS = ("float32", "bfloat16", *BLOCKS)            # supported formats of the embedding
TENSORS = (Tensor, nn.Parameter)         # subclasses are excluded, because they may not own memory


class Norm(NamedTuple):                  # a LayerNorm or a GroupNorm
    weight: Tensor
    bias: Tensor
    eps: float


class Matrix(NamedTuple):                # W (N,K) in a format of kernels/matvec
    kind: int
    N: int
    K: int
    w: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    levels: int = 0
    offset: int = 0
    order: int = DENSE_BY_OUTPUT


NOTHING = torch.empty(0, device="cpu")
NO_NORM = Norm(NOTHING, NOTHING, 0.0)
NO_MATRIX = Matrix(0, 0, 0, NOTHING)


class Common(NamedTuple):                # all generations' structs begin with these fields
    L: int
    V: int
    C: int
    embedding_kind: int
    embedding: Tensor
    ln_out: Norm
    head: Matrix
    state_size: int
    size: int
    x: int
    normal: int
    floats: int
    q: int
    widest: int


class Structs(Protocol):
    """A generation's outermost struct, a named tuple."""

    @property
    def common(self) -> Common: ...

    @property
    def layers(self) -> tuple[tuple[object, ...], ...]: ...

    def __iter__(self) -> Iterator[object]: ...


class CStep:
    """The C step of a model with its current weights.

    The attribute `own_tensors` has the tensors that are made for this step. All other tensors belong to the model.
    """

    def __init__(self, model: Model) -> None:
        builder = Builder(model)
        structs: Structs = optional_module(model.config, "step_c").c_model(model, builder)
        _require_sizes(model.config.generation, structs)
        numbers = list(_numbers(structs))
        model_storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
        self.own_tensors = [part for part in _field_values(structs) if isinstance(part, Tensor)
                            and part.untyped_storage().data_ptr() not in model_storages]
        self.size, self.reads_copies = structs.common.size, builder.reads_copies
        self._name, self._structs = f"{model.config.generation}_step", torch.tensor(numbers, device="cpu")

    def __call__(self, tokens: Tensor, places: Tensor, states: Tensor, work: Tensor, logits: Tensor,
                 sources: Tensor | None = None, all_logits: bool = False) -> None:
        """Processes R tokens (int64). Token i reads row sources[i] of `states` and writes its new state to row places[i].

        Writes one row (V) to `logits` for the last token of each sequence or, with all_logits, for every token. A token whose
        source is the previous token's place continues that token's sequence.

        Args:
            sources: the default is `places`. A source row keeps its value unless some token writes to that row.
            work: the workspace, (R,size) or larger.
        """
        native.run(self._name, torch.get_num_threads(), self._structs, tokens.numel(), all_logits, tokens,
                   places if sources is None else sources, places, states, work, logits)


def step_of(model: Model) -> CStep:
    """Returns the cached step of a model for which why_not returns None. The model's weights must outlive the step."""
    return model.decoding_step.of(model, CStep)


@cache
def token_sampler() -> Draw | None:
    """Returns the fastest token sampler of kernels/draw on this CPU, or None if PyTorch must sample instead."""
    name = resolve("draw", AUTO)
    function: Draw | None = None if registry.why_not("draw", name) else registry.load("draw", name).draw
    return function


def why_not(model: Model) -> str | None:
    """Returns the reason why the C step cannot run this model, or None if it can.

    C code reads raw addresses and identifies layers by position, so all its assumptions are checked here.
    """
    if not has_optional_module(model.config, "step_c"):
        return f"{model.generation.NAME} has no decoding step in C"
    tensors = tensors_of(model)
    devices = {tensor.device.type for tensor in tensors} - {"cpu"}
    if devices:
        return f"the model is on {devices.pop()}"
    if changed := why_changed(model):
        return changed
    if any(isinstance(layer, PackedLinear) for layer in model.modules()):
        return "the weights are packed for a GPU"
    linears = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
    unsupported = ({_format_of(layer) for layer in linears} - set(KINDS)) | ({_format_of(model.emb)} - {*EMBEDDINGS})
    if unsupported:
        return f"the decoding step in C does not support {unsupported.pop()} weights"
    widths = {width for width in (model.config.head_size, *(layer.in_features for layer in linears)) if width % LANES}
    if widths:
        return f"the width {widths.pop()} is not a multiple of {LANES}"
    return native.why_not()


def why_changed(model: Model) -> str | None:
    """Returns the reason why compiled steps cannot assume the generation's usual structure, or None if they can."""
    if model.config.deep_embed_dim:
        return "compiled decoding steps do not support DeepEmbed"
    if not is_plain(model):
        return "the model has adapters, hooks or unsupported layers"
    if not are_in_order(model):
        return "the blocks are not in their original order"
    if any(type(tensor) not in TENSORS or tensor.layout != torch.strided for tensor in tensors_of(model)):
        return "the model has unsupported kinds of tensors"
    if not _expected_shapes(model).items() <= _shapes(model).items():
        return "the model has tensors of unexpected shapes"
    return None


def _expected_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return model.generation.shapes(replace(model.config, n_layer=len(model.blocks)), model.vocab_size)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    modules = model.named_modules(remove_duplicate=False)
    packed = {f"{name}.weight": (layer.out_features, layer.in_features) for name, layer in modules
              if isinstance(layer, (*PACKED, PackedLinear))}
    if isinstance(model.emb, BlockEmbedding):
        packed["emb.weight"] = (model.emb.num_embeddings, model.emb.embedding_dim)
    return packed | {name: tuple(tensor.shape) for name, tensor in named}


def is_plain(model: Model) -> bool:
    """Returns True if a step may read weights instead of calling modules, because all modules are unmodified and supported."""
    if not has_optional_module(model.config, "step"):
        return False
    kinds = (*PLAIN, *optional_module(model.config, "step").PLAIN)
    return model.is_unmodified() and all(_is_plain_module(module, kinds) for module in model.modules() if module is not model)


def are_in_order(model: Model) -> bool:
    """Returns True if the blocks of a plain model are in the order that a step expects: only the first was made for layer 0.

    The model itself accepts any order.
    """
    fits = optional_module(model.config, "step").Step.fits
    return len(model.blocks) > 0 and all(fits(block, i == 0) for i, block in enumerate(model.blocks))


def _is_plain_module(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Returns True if a step may compute the module from its weights: no hooks, no bias in a linear layer, a bias in a norm."""
    return (type(module) in kinds and is_unmodified(module)
            and not (isinstance(module, nn.Linear) and module.bias is not None)
            and not (isinstance(module, NORMS) and (module.weight is None or module.bias is None))
            and not (isinstance(module, nn.Embedding) and module.max_norm is not None))


def decoding_line(model: Model) -> str:
    """Returns the line of the plan that says whether C or PyTorch computes decoding steps on a CPU."""
    reason = why_not(model)
    if reason is not None:
        return f"decoding: PyTorch ({reason})"
    copies = ", with bfloat16 copies of its matrices (exact)" if step_of(model).reads_copies else ""
    return f"decoding: C, one call per token{copies}{'; sampling in C' if token_sampler() else ''}"


def _format_of(layer: nn.Module) -> str:
    if isinstance(layer, PACKED):
        return layer.format
    if isinstance(layer, BFloat16Linear):
        return BFLOAT16_WEIGHT
    if isinstance(layer, BlockEmbedding):
        return layer.packed.format
    return str(layer.weight.dtype).removeprefix("torch.")


class Builder:
    """Converts layers to structs for C, and allocates buffers in a row of the workspace.

    A builder copies float32 matrices to bfloat16 if the model is not being trained and the copies are exact, so that a step
    reads half as many bytes.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._size = model, 0
        linears = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
        self._widest = max(layer.in_features for layer in linears)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        in_float32 = [cast(Tensor, layer.weight) for layer in linears if _format_of(layer) == "float32"]
        copies = None if trained else exact_copies(in_float32)
        self._copies = {} if copies is None else dict(zip(map(id, in_float32), copies, strict=True))

    @property
    def reads_copies(self) -> bool:
        return bool(self._copies)

    def allocate(self, width: int) -> int:
        """Reserves `width` numbers in a row of the workspace, and returns their offset."""
        offset = self._size
        self._size += -(-width // PART) * PART
        return offset

    def common(self) -> Common:
        """Returns the common part of the structs. The generation must have allocated all its own buffers before this call."""
        model = self._model
        embedding = model.emb
        V, C, L = model.vocab_size, model.config.n_embd, len(model.blocks)
        widest = -(-self._widest // BLOCK) * BLOCK
        x, normal, floats = self.allocate(C), self.allocate(C), self.allocate(PREPARED * widest)
        q = self.allocate(PREPARED * widest // 2)
        state = model.zero_state(1, "meta")
        size = self._size + (PART // 2 if self._size // (PART // 2) % 2 == 0 else 0)   # size is an odd number of cache lines
        return Common(L, V, C, KINDS[_format_of(embedding)], embedding.weight.detach().contiguous(),
                      self.norm(model.ln_out), self.matrix(model.head), sum(part[:, 0].numel() for part in state), size,
                      x, normal, floats, q, widest)

    def norm(self, norm: nn.Module) -> Norm:
        layer_norm = cast(nn.LayerNorm, norm)
        return Norm(self.vector(layer_norm.weight), self.vector(layer_norm.bias), float(layer_norm.eps))

    def vector(self, values: Tensor) -> Tensor:
        """Returns the values as a flat float32 tensor, without a copy if they already have this form."""
        return values.detach().float().flatten().contiguous()

    def vectors(self, *values: Tensor) -> Tensor:
        """Returns several vectors as one tensor (n,C)."""
        return torch.stack([self.vector(each) for each in values])

    def matrix(self, layer: nn.Module) -> Matrix:
        """Returns the struct of a linear layer with weights in any format."""
        if isinstance(layer, PACKED):
            packed = layer.packed
            scale, shift = (*(part.contiguous() for part in [*packed][1:]), None, None)[:2]
            levels, offset = (packed.rounding.steps, packed.rounding.offset) if isinstance(packed, Int8) else (0, 0)
            order = SPARSE_BY_INPUT if packed.by_input else DENSE_BY_OUTPUT
            return Matrix(KINDS[packed.format], layer.out_features, packed.K, packed.stored, scale, shift, levels, offset,
                          order)
        linear = cast(nn.Linear, layer)
        copy = self._copies.get(id(linear.weight))
        if copy is not None:
            return _matrix(BFLOAT16_WEIGHT, copy)
        return _matrix(_format_of(linear), linear.weight.detach())

    def sparse_matrix(self, layer: nn.Module) -> Matrix:
        """Returns the struct of a linear layer with sparse inputs, as after a ReLU: in a trained model nine in ten are 0.

        In a weight stored by input, (K,N), the step skips the rows of zero inputs. A weight stored by output is transposed into
        a copy if it is finite (infinity times 0 is NaN) and memory allows. For a bfloat16 weight, the copies of all such
        weights must also have at most COPIED bytes. Otherwise the step reads the whole weight in place. For a bfloat16 weight
        the results are bit-identical.
        """
        if isinstance(layer, PACKED):
            return self.matrix(layer)
        weight = cast(Tensor, layer.weight).detach()
        copy = self._copies.pop(id(layer.weight), None)
        by_input = self._may_store_by_input(weight, copy) and is_finite(weight)
        kind = _format_of(layer)
        if copy is not None:
            kind, weight = BFLOAT16_WEIGHT, copy
        if by_input:
            return _matrix(kind, weight.T)._replace(N=len(weight), K=weight.shape[1], order=SPARSE_BY_INPUT)
        return _matrix(kind, weight)._replace(order=DENSE_BY_OUTPUT if kind == "float32" else SPARSE_BY_OUTPUT)

    def _may_store_by_input(self, weight: Tensor, copy: Tensor | None) -> bool:
        """Returns True if the weight (N,K) is stored by input or may be copied. `copy` is a float32 weight's bfloat16 copy."""
        if weight.T.is_contiguous():
            return True
        available = available_memory()
        if available is not None and (weight if copy is None else copy).nbytes > available:
            return False
        return copy is not None or weight.dtype != torch.bfloat16 or weight.nbytes * len(self._model.blocks) <= COPIED

    def low_rank(self, weight: Tensor, order: int) -> Matrix:
        """Returns the struct for x @ weight (K,N), in bfloat16 if exact. `order` is DENSE_BY_INPUT or SPARSE_BY_INPUT."""
        weight = weight.detach()
        copy = exact_copy(weight) if weight.dtype == torch.float32 else weight
        kind, weight = ("float32", weight) if copy is None else (BFLOAT16_WEIGHT, copy)
        return _matrix(kind, weight)._replace(N=weight.shape[1], K=len(weight), order=order)


def _matrix(kind: str, weight: Tensor) -> Matrix:
    N, K = weight.shape[:2]
    return Matrix(KINDS[kind], N, K, weight.contiguous())


def _require_sizes(generation: str, model: Structs) -> None:
    for struct in (model.common.ln_out, model.common.head, model.common, model.layers[0], model):
        native.require_size(f"{generation}_{type(struct).__name__.lower()}", _n_fields(struct))


def _n_fields(struct: Iterable[object]) -> int:
    """Returns the number of scalar fields in a struct and its nested structs, without the array of layers at its end."""
    return sum((_n_fields(part) if hasattr(part, "_fields") else 0) if isinstance(part, tuple) else 1 for part in struct)


def _field_values(struct: Iterable[object]) -> Iterator[int | float | Tensor | None]:
    for part in struct:
        if isinstance(part, tuple):
            yield from _field_values(part)
        else:
            yield cast(int | float | Tensor | None, part)


def _numbers(struct: Iterable[object]) -> Iterator[int]:
    return map(native.number, _field_values(struct))
