"""A model's step for one token in one call of C (csrc/): the structs of numbers and addresses that the C reads.

The named tuples here and in rwkvN_c.py mirror the structs of csrc/step.h and csrc/rwkvN.c, field by field; CStep compares their
sizes. A generation's c_model(model, builder) makes its own. A model caches its CStep for all decoders until its weights change.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import native, registry
from kernels.draw import Draw
from kernels.machine.memory import available_memory
from kernels.matvec import BLOCKS, FORMS, KINDS, Int8
from kernels.select import AUTO, resolve
from rwkv.model.decoding.layers import PLAIN
from rwkv.model.hooks import untouched
from rwkv.model.quantized import BlockEmbedding, BlockLinear, Int4Linear, Int8Linear, PackedLinear
from rwkv.model.weights_watch import exact_copies, tensors_of

LANES = 8                                # all widths are multiples
PART = 32                                # offsets in the workspace are multiples; outputs per part of a matrix stored by input
BLOCK = 256                              # of an int4 matrix: prepared inputs are padded to multiples
PREPARED = 3                             # inputs prepared at a time
PACKED = (Int8Linear, Int4Linear, BlockLinear)
LINEAR = (nn.Linear, *PACKED)
NORMS = (nn.LayerNorm, nn.GroupNorm)
EMBEDDINGS = ("float32", "bfloat16", *BLOCKS)            # forms of the embedding
TENSORS = (Tensor, nn.Parameter)         # a subclass may own no memory


class Norm(NamedTuple):                  # a LayerNorm or a GroupNorm
    weight: Tensor
    bias: Tensor
    eps: float


class Matrix(NamedTuple):                # W (N,K) in a form of kernels/matvec
    kind: int
    N: int
    K: int
    w: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    levels: int = 0
    offset: int = 0
    by_input: int = 0


NOTHING = torch.empty(0, device="cpu")
NO_NORM = Norm(NOTHING, NOTHING, 0.0)
NO_MATRIX = Matrix(0, 0, 0, NOTHING)


class Common(NamedTuple):                # the common part of all generations
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


class CStep:
    """The step of a model with its present weights. own: the tensors made for it; all others are the model's."""

    def __init__(self, model: Any) -> None:
        builder = Builder(model)
        structs = model.generation.c_model(model, builder)
        _require_sizes(model.config.generation, structs)
        numbers = list(_numbers(structs))
        model_storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
        self.own = [part for part in _parts(structs) if isinstance(part, Tensor)
                    and part.untyped_storage().data_ptr() not in model_storages]
        self.size, self.reads_copies = structs.common.size, builder.reads_copies
        self._name, self._structs = f"{model.config.generation}_step", torch.tensor(numbers, device="cpu")

    def __call__(self, tokens: Tensor, places: Tensor, states: Tensor, work: Tensor, logits: Tensor) -> None:
        """Reads R tokens, int64, each into the row places[i] of `states`. work: the workspace (R or more,size).

        Consecutive tokens with the same place belong to one sequence, in order. Writes the logits (V) after the last token of
        each sequence.
        """
        native.run(self._name, torch.get_num_threads(), self._structs, tokens.numel(), tokens, places, states, work, logits)


def step_of(model: Any) -> CStep:
    """The step of a model for which why_not is None. The model's weights must live as long as the step is used."""
    step: CStep = model.decoding_step.of(model, CStep)
    return step


@cache
def drawing() -> Draw | None:
    """The function of kernels/draw for this CPU; None, for PyTorch, if no implementation can run."""
    name = resolve("draw", AUTO)
    function: Draw | None = None if registry.why_not("draw", name) else registry.load("draw", name).draw
    return function


def why_not(model: Any) -> str | None:
    """None if the model's step can be C, otherwise the reason.

    C reads addresses and identifies layers by position, so all its assumptions are checked here.
    """
    tensors = tensors_of(model)
    devices = {tensor.device.type for tensor in tensors} - {"cpu"}
    if devices:
        return f"the model is on {devices.pop()}"
    if changed := why_changed(model):
        return changed
    linears = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
    unsupported = ({_form_of(layer) for layer in linears} - set(FORMS)) | ({_form_of(model.emb)} - {*EMBEDDINGS})
    if unsupported:
        return f"weights in {unsupported.pop()}"
    widths = {width for width in (model.config.head_size, *(layer.in_features for layer in linears)) if width % LANES}
    if widths:
        return f"the width {widths.pop()} is not a multiple of {LANES}"
    return native.why_not()


def why_changed(model: Any) -> str | None:
    """None if the model has its generation's structure, which compiled steps assume, otherwise the reason."""
    if model.config.deep_embed_dim:
        return "a compiled step has no DeepEmbed"
    if not is_plain(model):
        return "the model has adapters, hooks or layers of another kind"
    if not are_in_order(model):
        return "the blocks are not in their original order"
    if any(type(tensor) not in TENSORS or tensor.layout != torch.strided for tensor in tensors_of(model)):
        return "the model has tensors of another kind"
    if not _expected_shapes(model).items() <= _shapes(model).items():
        return "the model has tensors of other shapes"
    return None


def _expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    config = replace(model.config, n_layer=len(model.blocks))
    shapes: dict[str, tuple[int, ...]] = model.generation.shapes(config, model.vocab_size)
    return shapes


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers, and of the weights of quantised layers, by name."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    modules = model.named_modules(remove_duplicate=False)
    packed = {f"{name}.weight": (layer.out_features, layer.in_features) for name, layer in modules
              if isinstance(layer, (*PACKED, PackedLinear))}
    if isinstance(model.emb, BlockEmbedding):
        packed["emb.weight"] = (model.emb.num_embeddings, model.emb.embedding_dim)
    return packed | {name: tuple(tensor.shape) for name, tensor in named}


def is_plain(model: Any) -> bool:
    """Whether a step may read the weights without calling the model's modules."""
    return model.is_untouched() and all(_plain(module, model) for module in model.modules() if module is not model)


def are_in_order(model: Any) -> bool:
    """Whether the blocks of a plain model are in the order that a step expects: the first one first, and no other.

    The model itself accepts any order.
    """
    fits = model.generation.Step.fits
    return len(model.blocks) > 0 and all(fits(block, i == 0) for i, block in enumerate(model.blocks))


def _plain(module: nn.Module, model: Any) -> bool:
    """Whether the module computes its class's formula from its weights: linear layers without bias, norms with bias."""
    return (type(module) in (*PLAIN, *model.generation.PLAIN) and untouched(module)
            and not (isinstance(module, nn.Linear) and module.bias is not None)
            and not (isinstance(module, NORMS) and (module.weight is None or module.bias is None))
            and not (isinstance(module, nn.Embedding) and module.max_norm is not None))


def decoding_line(model: Any) -> str:
    """The printed line about what computes a decoding step on a CPU."""
    reason = why_not(model)
    if reason is not None:
        return f"decoding: PyTorch ({reason})"
    copies = ", with bfloat16 copies of its matrices (exact)" if step_of(model).reads_copies else ""
    return f"decoding: C, one call per token{copies}{'; sampling in C' if drawing() else ''}"


def _form_of(layer: nn.Module) -> str:
    """The kernels.matvec form of the layer's weights, or the name of their dtype."""
    if isinstance(layer, PACKED):
        return layer.form
    if isinstance(layer, BlockEmbedding):
        return layer.packed.form
    return str(layer.weight.dtype).removeprefix("torch.")


class Builder:
    """Makes the parts of the structs from layers, and allocates buffers in a row of the workspace.

    If the model is not being trained and bfloat16 holds its float32 matrices exactly, they are copied to bfloat16, so that a
    step reads half as much.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._size = model, 0
        linears = [layer for layer in model.modules() if isinstance(layer, LINEAR)]
        self._widest = max(layer.in_features for layer in linears)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        in_float32 = [cast(Tensor, layer.weight) for layer in linears if _form_of(layer) == "float32"]
        copies = None if trained else exact_copies(in_float32)
        self._copies = dict(zip(map(id, in_float32), copies or (), strict=False))

    @property
    def reads_copies(self) -> bool:
        return bool(self._copies)

    def allocate(self, width: int) -> int:
        """The offset of a new buffer of that many numbers."""
        offset = self._size
        self._size += -(-width // PART) * PART
        return offset

    def common(self) -> Common:
        """To be called after the generation has allocated its own buffers."""
        model = self._model
        embedding = model.emb
        V, C, L = model.vocab_size, model.config.n_embd, len(model.blocks)
        widest = -(-self._widest // BLOCK) * BLOCK
        x, normal, floats = self.allocate(C), self.allocate(C), self.allocate(PREPARED * widest)
        q = self.allocate(PREPARED * widest // 2)
        state = model.zero_state(1, "meta")
        size = self._size + (PART // 2 if self._size // (PART // 2) % 2 == 0 else 0)   # an odd number of cache lines
        return Common(L, V, C, KINDS[_form_of(embedding)], embedding.weight.detach().contiguous(),
                      self.norm(model.ln_out), self.matrix(model.head), sum(part[:, 0].numel() for part in state), size,
                      x, normal, floats, q, widest)

    def norm(self, norm: nn.Module) -> Norm:
        layer_norm = cast(nn.LayerNorm, norm)
        return Norm(self.vector(layer_norm.weight), self.vector(layer_norm.bias), float(layer_norm.eps))

    def vector(self, values: Tensor) -> Tensor:
        """The values, flat, in float32; without a copy if possible."""
        return values.detach().float().flatten().contiguous()

    def vectors(self, *values: Tensor) -> Tensor:
        """Several vectors as one tensor (n,C)."""
        return torch.stack([self.vector(each) for each in values])

    def matrix(self, layer: nn.Module) -> Matrix:
        """The matrix of a linear layer of any form."""
        if isinstance(layer, PACKED):
            packed = layer.packed.map(Tensor.contiguous)
            weight, scale, shift = (*packed, None, None)[:3]
            levels, offset = (packed.rounding.steps, packed.rounding.offset) if isinstance(packed, Int8) else (0, 0)
            return Matrix(KINDS[packed.form], layer.out_features, packed.K, weight, scale, shift, levels, offset)
        linear = cast(nn.Linear, layer)
        copy = self._copies.get(id(linear.weight))
        if copy is not None:
            return _matrix("bfloat16 as float32", copy)
        return _matrix(_form_of(linear), linear.weight.detach())

    def sparse_matrix(self, layer: nn.Module) -> Matrix:
        """The matrix of a layer with sparse inputs, as after a ReLU: in a trained model nine of ten are 0.

        Stored by input, so that weights with a zero input are skipped. This requires memory for a copy, and finite floats,
        since an infinity times 0 is NaN; otherwise the matrix is stored by output.
        """
        if isinstance(layer, PACKED):
            return self.matrix(layer)
        weight = cast(Tensor, layer.weight)
        copy = self._copies.pop(id(weight), None)
        weight = weight.detach() if copy is None else copy
        available = available_memory()
        out_of_memory = available is not None and weight.nbytes > available
        if out_of_memory or not torch.isfinite(weight).all():
            return _matrix("bfloat16 as float32", copy) if copy is not None else self.matrix(layer)
        kind = _form_of(layer) if copy is None else "bfloat16 as float32"
        return _matrix(kind, weight.T)._replace(N=len(weight), K=weight.shape[1], by_input=1)

    def by_output(self, weight: Tensor) -> Matrix:
        """The matrix for x @ weight, with weight (K,N); its outputs are zero-padded to a multiple of LANES."""
        return _small(F.pad(weight.detach().T, (0, 0, 0, -weight.shape[1] % LANES)))

    def by_input(self, weight: Tensor) -> Matrix:
        """The same, stored by input in parts of PART outputs. Only the first K numbers of x are read."""
        K, N = weight.shape
        parts = F.pad(weight.detach(), (0, -N % PART)).view(K, -1, PART).transpose(0, 1)
        return _small(parts)._replace(N=N, K=K)


def _small(weight: Tensor) -> Matrix:
    """A copy of a small matrix, in bfloat16 if that is exact."""
    bfloat16, float32 = weight.bfloat16(), weight.float()
    exact = torch.equal(bfloat16.float(), float32)
    return _matrix("bfloat16 as float32", bfloat16) if exact else _matrix("float32", float32)


def _matrix(kind: str, weight: Tensor) -> Matrix:
    N, K = weight.shape[:2]
    return Matrix(KINDS[kind], N, K, weight.contiguous())


def _require_sizes(generation: str, model: Any) -> None:
    """Raises AssertionError unless each struct has as many fields here as in C."""
    for struct in (model.common.ln_out, model.common.head, model.common, model.layers[0], model):
        native.require_size(f"{generation}_{type(struct).__name__.lower()}", _count(struct))


def _count(struct: Any) -> int:
    """The number of fields in a struct and its nested structs, without the array of layers at its end."""
    return sum(_count(part) if hasattr(part, "_fields") else not isinstance(part, tuple) for part in struct)


def _parts(struct: Any) -> Iterator[Any]:
    """The numbers and tensors of a struct and its nested structs, in order."""
    for part in struct:
        if isinstance(part, tuple):
            yield from _parts(part)
        else:
            yield part


def _numbers(struct: Any) -> Iterator[int]:
    return map(native.number, _parts(struct))
