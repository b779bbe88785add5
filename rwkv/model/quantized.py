"""Linear layers with quantised weights (int8, int4, GGUF's blocks), and functions that quantise a model's layers.

On a CPU, int8 and int4 layers round inputs as well as weights. On a GPU, PackedLinear rounds only the weights. BlockLinear
keeps GGUF's blocks in the file's own format, and rounds inputs.

int8 rounds the weights once, with a scale for each output channel, and the inputs at each call. int4 rounds the weights in
groups of 32, and also the inputs of a product with few rows (kernels/matvec).

int8 scales each input row by the row's own largest magnitude, and the products of integers are exact. So a row's result has the
same bits in any batch. The C kernel of kernels/matvec computes the products. In training on CPUs without AMX, and without the C
library, FBGEMM computes them where torch has FBGEMM, from a copy of the weights in its own layout. Without VNNI, FBGEMM
rounds inputs to 7 bits, and the C kernel rounds inputs with a sign to 8; otherwise both round alike. All else is computed in
float32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backends import fbgemm
from kernels.backends.torch_private import dispatch_mode_active
from kernels.machine.cpu import multiplies_natively
from kernels.matvec import FORMATS, MOST_ROWS, Blocks, Int4, Int8, MatVec, Packed
from kernels.operator import PLAIN
from kernels.registry import load, why_not
from kernels.select import AUTO, select
from rwkv.errors import UserError
from rwkv.model.base import Model
from rwkv.model.first_derivative import Context, first_derivative
from rwkv.model.fused import can_use_functions, product_dtype

IN_C = "c_v0"                            # the C kernel of kernels/matvec, for int8, bfloat16 and GGUF's blocks
UNPACKED, UNPACKED_ON_GPU = 2**22, 2**24         # elements of a matrix that are converted to floating point at a time
M = TypeVar("M", bound=Model)


@cache
def matvec_for(format: str) -> MatVec:
    """Returns the CPU operator that multiplies a few rows by weights in the format `format`."""
    matvec: MatVec = select("matvec", AUTO, "cpu", format)
    return matvec


class _WithPackedWeight(nn.Module):
    """Base class of modules with a packed weight. state_dict() names its tensors as in a .safetensors file.

    The names are NAME, NAME.scale and NAME.shift (rwkv/checkpoint/formats/_packed.py).
    """

    packed: Any                          # a Packed

    def _get_packed(self) -> Packed:
        return self.packed

    def _set_packed(self, packed: Packed) -> None:
        self.packed = packed

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(_named_tensors(self._get_packed(), prefix))

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, local_metadata: Mapping[str, object],
                              strict: bool, missing_keys: list[str], unexpected_keys: list[str],
                              error_msgs: list[str]) -> None:
        packed = self._get_packed()
        own = _named_tensors(packed, prefix)
        missing_keys += [name for name in own if name not in state_dict]
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in own]
        loaded = {name: state_dict[name] for name in own if name in state_dict}
        wrong = [name for name, tensor in loaded.items() if (tensor.shape, tensor.dtype) != (own[name].shape, own[name].dtype)]
        error_msgs += [f"{name} must be {own[name].dtype} {tuple(own[name].shape)}, as in a model in {packed.format}; got "
                       f"{loaded[name].dtype} {tuple(loaded[name].shape)}" for name in wrong]
        if len(loaded) == len(own) and not wrong:        # new tensors, because the old ones may be a file mapped into memory
            tensors = iter(loaded.values())
            self._set_packed(packed.map(lambda tensor: torch.empty_like(tensor).copy_(next(tensors))))


def _named_tensors(packed: Packed, prefix: str) -> dict[str, Tensor]:
    names = (f"{prefix}weight" if field.name == "weight" else f"{prefix}weight.{field.name}" for field in fields(packed))
    return dict(zip(names, packed, strict=False))        # the first fields are the tensors


class Int8Linear(_WithPackedWeight):
    """A linear layer without a bias, with an int8 weight: x (...,K) -> (...,N) in the dtype of x, or float32 under autocast.

    Products are in float32. The C kernel reads the weight in place, row-major, or by input if no input is negative. With many
    rows, on CPUs without AMX, FBGEMM is up to a tenth faster, but needs a copy in its own layout.

    Args:
        weight (N,K): a floating-point or packed weight.
        non_negative: True if inputs are never negative, as after a ReLU, so that no bit is needed for a sign.
        bits: the size of a rounded input. The default is 8, but 7 on CPUs without VNNI if no input is negative, or if FBGEMM
            multiplies: it adds two products in 16 bits and could saturate.
        in_c: False to multiply with FBGEMM, not with the C kernel, where torch has FBGEMM.
    """

    format = "int8"

    def __init__(self, weight: Tensor | Int8, non_negative: bool = False, bits: int | None = None, in_c: bool = True) -> None:
        super().__init__()
        self._matvec = matvec_for("int8")
        self._by_fbgemm = self._matvec.name == "fbgemm"
        self._in_c = (in_c or not self._by_fbgemm) and why_not("matvec", IN_C) is None
        bits = bits or (8 if multiplies_natively(torch.int8) or (self._in_c and not non_negative) else 7)
        if isinstance(weight, Int8):
            packed = replace(weight, bits=bits, non_negative=non_negative)
        else:
            packed = Int8.of(weight, bits, non_negative)
            if self._in_c:
                packed = packed.stored_by_input()
        self.out_features, self.in_features = packed.weight.shape
        self.rounding = packed.rounding
        self._for_c = [packed]           # the list is empty while only FBGEMM's copy is in memory
        if isinstance(weight, Int8):
            self.packed = packed

    def __getstate__(self) -> dict[str, object]:
        """Returns the attributes without _c_product, a function of this layer's own weight, which cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_c_product"}

    def forward(self, x: Tensor) -> Tensor:
        product = _product(self, x.float())
        return product if torch.is_autocast_enabled("cpu") else product.to(x.dtype)

    def forward_rows(self, rows: Tensor) -> Tensor:
        """Computes `forward` for rows (B,K), without gradients."""
        return self._product_of_floats(rows.float()).to(rows.dtype)

    def _product_of_floats(self, rows: Tensor) -> Tensor:
        if self._in_c:
            return self._c_product(rows.contiguous())
        if not self._by_fbgemm:
            return self._matvec.bind(self.packed)(rows.unsqueeze(0))[0]
        largest = self.rounding.largest(rows)
        return fbgemm.product(rows / largest, 1 / self.rounding.steps, self.rounding.offset, self._fbgemm_weight).mul_(largest)

    @cached_property
    def packed(self) -> Int8:
        """The weight that kernels/matvec reads."""
        return self.weight_for_c()

    @cached_property
    def _fbgemm_weight(self) -> torch.ScriptObject:
        """The weight in FBGEMM's layout. The original is freed if `packed` has not been read, as in training."""
        ordered = fbgemm.pack_weight(self._for_c[0].weight, self._for_c[0].scale)
        if "packed" not in vars(self):
            self._for_c.clear()
        return ordered

    @cached_property
    def _c_product(self) -> Callable[[Tensor], Tensor]:
        product: Callable[[Tensor], Tensor] = load("matvec", IN_C).int8_product(self.packed)
        return product

    def _get_packed(self) -> Packed:
        return self.weight_for_c()

    def _set_packed(self, packed: Packed) -> None:
        self.packed = cast(Int8, packed)
        self._for_c = [self.packed]
        for name in ("_fbgemm_weight", "_c_product"):
            vars(self).pop(name, None)

    def weight_for_c(self) -> Int8:
        """Returns the weight that kernels/matvec reads, as a new copy if only FBGEMM's copy is in memory."""
        return self._for_c[0] if self._for_c else Int8(*fbgemm.unpack_weight(self._fbgemm_weight), *self.rounding)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight_for_c().dense().to(dtype)

    def row_blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the whole rounded weight (N,K) in `dtype`, as a single block."""
        yield self.dense(dtype)


class _RoundedLayer(Protocol):
    """A linear layer with a weight W (N,K) that is quantised or has a different dtype from the inputs."""

    out_features: int

    def forward_rows(self, rows: Tensor) -> Tensor:
        """Computes `forward` for rows (n,K), without gradients."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns W in `dtype`, computed by PyTorch."""

    def row_blocks(self, dtype: torch.dtype) -> Iterable[Tensor]:
        """Returns W in `dtype`, in blocks of rows."""


def _can_use_c(x: Tensor) -> bool:
    """Returns True unless x may have no memory, or torch.compile, torch.export, a trace or vmap must see the formulas."""
    return can_use_functions() and type(x) in PLAIN and not dispatch_mode_active()


class _ForwardRows(torch.autograd.Function):
    """Computes layer.forward_rows, with the gradient of the product of the unrounded input and the rounded weight.

    Nothing is saved for backward, which reads the layer's weight W (N,K) in blocks of rows, or as a whole without C.
    """

    @staticmethod
    def forward(ctx: Context, rows: Tensor, layer: _RoundedLayer) -> Tensor:
        ctx.layer, ctx.dtype = layer, rows.dtype
        return _product_of_rows(layer, rows)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        total, first = None, 0
        blocks = ctx.layer.row_blocks(grad.dtype) if _can_use_c(grad) else [ctx.layer.dense(grad.dtype)]
        for block in blocks:
            columns = grad[:, first:first + len(block)]
            total = columns @ block if total is None else total.addmm_(columns, block)
            first += len(block)
        assert total is not None
        return total.to(ctx.dtype), None


def _product(layer: _RoundedLayer, x: Tensor) -> Tensor:
    """Computes layer.forward_rows for x (...,K), differentiable in x. Without C, inputs are not rounded."""
    if not can_use_functions():
        return F.linear(x, layer.dense(x.dtype))
    rows = x.reshape(-1, x.shape[-1])
    trained = torch.is_grad_enabled() and rows.requires_grad
    product: Tensor = _ForwardRows.apply(rows, layer) if trained else _product_of_rows(layer, rows)
    return product.view(*x.shape[:-1], layer.out_features)


def _product_of_rows(layer: _RoundedLayer, rows: Tensor) -> Tensor:
    """Computes layer.forward_rows, or the product of unrounded inputs (n,K) if C cannot read them."""
    return layer.forward_rows(rows) if _can_use_c(rows) else F.linear(rows, layer.dense(rows.dtype))


def _rows_per_block(weight: Tensor, K: int) -> int:
    """Returns the number of rows of length K that are converted at a time: more on a GPU, for fewer launches."""
    return max(1, (UNPACKED_ON_GPU if weight.is_cuda else UNPACKED) // K)


class _PackedWeight(_WithPackedWeight):
    """Base class of linear layers without a bias, with a packed weight W (N,K). Subclasses add forward_rows and row_blocks."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.out_features, self.in_features = len(packed.weight), packed.K
        self.packed = packed

    @property
    def format(self) -> str:
        return self.packed.format

    def forward(self, x: Tensor) -> Tensor:
        return _product(cast(_RoundedLayer, self), x)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.packed.dense(dtype)

    def _packed_blocks(self) -> Iterator[Packed]:
        step = _rows_per_block(self.packed.weight, self.in_features)
        for start in range(0, self.out_features, step):
            yield self.packed.map(itemgetter(slice(start, start + step)))


class PackedLinear(_PackedWeight):
    """A linear layer without a bias on a GPU, with W (N,K) packed in int8 or int4: x (...,K) -> (...,N) in the dtype of x.

    Only weights are rounded to integers. Products are in bfloat16, and unpack a block of rows of W at a time.
    """

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Moves the packed weight to the device to which `function`, an argument of nn.Module's methods, moves tensors."""
        device = function(torch.empty(0, device=self.packed.weight.device)).device
        if device != self.packed.weight.device:
            self.packed = self.packed.map(lambda tensor: tensor.to(device))
        return super()._apply(function, recurse)

    def forward_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([F.linear(rows.bfloat16(), part) for part in self.row_blocks(torch.bfloat16)], dim=1).to(rows.dtype)

    def row_blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        return (part.dense(dtype) for part in self._packed_blocks())


class BFloat16Linear(nn.Linear):
    """A linear layer without a bias, with a frozen weight (N,K) in bfloat16: x (...,K) -> (...,N) in the dtype of x.

    Products are in the dtype of x, or in autocast's dtype. The weight is converted to that dtype a part at a time, so that
    float32 products need no bfloat16 instructions and no second copy of the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x.to(product_dtype(x)))

    def forward_rows(self, rows: Tensor) -> Tensor:
        on_cpu = type(self.weight) in PLAIN and rows.is_cpu and rows.dtype == torch.float32
        if on_cpu and why_not("matvec", IN_C) is None:
            y: Tensor = load("matvec", IN_C).bfloat16_product(self.weight.detach(), rows)
            return y
        return torch.cat([F.linear(rows, part) for part in self.row_blocks(rows.dtype)], 1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def row_blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        return (part.to(dtype) for part in self.weight.split(_rows_per_block(self.weight, self.in_features)))


@torch.no_grad()
def to_bfloat16(model: M, later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
                replaced: Callable[[str], object] = lambda name: None) -> M:
    """Converts the linear layers' weights and the embedding of a frozen model to bfloat16. Products keep the inputs' dtype.

    `later` and `replaced` are arguments of to_int8.
    """
    return _replace_linear_layers(model, lambda name, read: BFloat16Linear(read()), later, True, replaced)


@torch.no_grad()
def to_int8(model: M, head: bool = True, replaced: Callable[[str], object] = lambda name: None,
            later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}), in_c: bool = True,
            packed: Mapping[str, Packed] = MappingProxyType({})) -> M:
    """Converts the linear layers of a model on a CPU to int8, one at a time, and its embeddings to bfloat16.

    The model can then generate, but can be neither trained nor saved. Raises UserError if neither FBGEMM nor C can compute int8
    products on this machine.

    Args:
        head: whether to convert the head too.
        replaced: a function that is called with each layer's name after the layer is converted.
        later: weight names and functions that read these weights; requires model.fingerprint_before to be set.
        in_c: the argument of Int8Linear.
        packed: weight names and weights that are already in int8. The model has placeholders for the weights in `later` and
            in `packed`.
    """
    reasons = [why_not("matvec", name) for name in ("fbgemm", IN_C)]
    if None not in reasons:
        raise UserError(f"dtype=int8 requires FBGEMM or the C library, but neither can run here "
                        f"({'; '.join(filter(None, reasons))}). Use dtype=bfloat16 or dtype=float32")
    non_negative = model.generation.non_negative(model.config)

    def make_layer(name: str, read: Callable[[], Tensor]) -> nn.Module:
        weight = cast(Int8 | None, packed.get(f"{name}.weight"))
        return Int8Linear(read() if weight is None else weight, name.endswith(non_negative), in_c=in_c)

    return _replace_linear_layers(model, make_layer, later, head, replaced)


class Int4Linear(_PackedWeight):
    """A linear layer without a bias on a CPU, with W (N,K) packed in int4: x (...,K) -> (...,N) in the dtype of x.

    For many rows W is unpacked a block at a time, to bfloat16 if the CPU has bfloat16 product instructions, otherwise to
    float32.
    """

    def __init__(self, packed: Int4) -> None:
        super().__init__(packed)
        self._matvec = matvec_for("int4")

    def forward_rows(self, rows: Tensor) -> Tensor:
        if 0 < len(rows) <= MOST_ROWS:
            return self._matvec.bind(self.packed)(rows.unsqueeze(0))[0]
        x = rows.bfloat16() if multiplies_natively(torch.bfloat16) else rows
        return torch.cat([F.linear(x, part) for part in self.row_blocks(x.dtype)], dim=1).to(rows.dtype)

    def row_blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        unpacked = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return (self._matvec.dense(part, unpacked).to(dtype) for part in self._packed_blocks())


@torch.no_grad()
def to_int4(model: M, packed: Mapping[str, Packed] = MappingProxyType({}),
            later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}), head: bool = True,
            replaced: Callable[[str], object] = lambda name: None) -> M:
    """Converts a model to int4 as to_int8 does to int8. Everything but the matrix products is computed in float32."""
    def make_layer(name: str, read: Callable[[], Tensor]) -> nn.Module:
        return Int4Linear(cast(Int4 | None, packed.get(f"{name}.weight")) or Int4.of(read()))

    return _replace_linear_layers(model, make_layer, later, head, replaced)


class BlockLinear(_PackedWeight):
    """A linear layer without a bias on a CPU, with W (N,K) in GGUF's blocks: x (...,K) -> (...,N) in the dtype of x.

    The C kernel reads the blocks directly for any number of rows, so a row's result has the same bits in prefill and decoding.
    """

    def forward_rows(self, rows: Tensor) -> Tensor:
        y: Tensor = load("matvec", IN_C).bind([self.packed])(rows.float().contiguous().unsqueeze(0))[0]
        return y.to(rows.dtype)

    def row_blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        matvec = matvec_for(self.format)
        return (matvec.dense(part, torch.float32).to(dtype) for part in self._packed_blocks())


class BlockEmbedding(_WithPackedWeight):
    """An embedding (V,C) in GGUF's blocks: tokens (...) int64 -> (...,C) float32. Only the tokens' rows are unpacked."""

    def __init__(self, packed: Blocks) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = len(packed.weight), packed.K
        self.packed = packed

    @property
    def weight(self) -> Tensor:
        """The blocks as bytes (V, bytes per row)."""
        return self.packed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.packed.map(lambda weight: F.embedding(tokens.flatten(), weight))
        values = matvec_for(self.packed.format).dense(rows, torch.float32) if _can_use_c(tokens) else rows.dense()
        return values.view(*tokens.shape, self.embedding_dim)


def to_blocks(model: M, blocks: Mapping[str, Blocks]) -> M:
    """Replaces the placeholders of linear layers and of the embedding by layers with weights in GGUF's blocks.

    `blocks` maps the name of each weight to its blocks.
    """
    for name, packed in blocks.items():
        module = name.removesuffix(".weight")
        layer = model.get_submodule(module)
        model.set_submodule(module, BlockEmbedding(packed) if isinstance(layer, nn.Embedding) else BlockLinear(packed))
    return model


@torch.no_grad()
def to_packed(model: M, format: str, device: torch.device | str, packed: Mapping[str, Packed] = MappingProxyType({}),
              later: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}), head: bool = True,
              replaced: Callable[[str], object] = lambda name: None) -> M:
    """Converts the linear layers of a model on a CPU to int8 or int4, one at a time, and moves the model to a GPU.

    `format` is "int8" or "int4"; the other arguments are those of to_int8.
    """
    def make_layer(name: str, read: Callable[[], Tensor]) -> nn.Module:
        matrix = packed.get(f"{name}.weight") or FORMATS[format].of(read())
        return PackedLinear(cast(Int8 | Int4, matrix.map(lambda tensor: tensor.contiguous().to(device))))

    return _replace_linear_layers(model, make_layer, later, head, replaced).to(device)


def _replace_linear_layers(model: M, make_layer: Callable[[str, Callable[[], Tensor]], nn.Module],
                           later: Mapping[str, Callable[[], Tensor]], head: bool, replaced: Callable[[str], object]) -> M:
    """Replaces linear layers by make_layer(name, read), where read() returns the weight. Other arguments: see to_int8."""
    model.fingerprint_before = model.fingerprint()
    for name in _linear_names(model):
        layer = cast(nn.Linear, model.get_submodule(name))
        if head or layer is not model.head:
            read = later.get(f"{name}.weight", lambda layer=layer: layer.weight)
            model.set_submodule(name, make_layer(name, read))
            del layer, read              # both refer to the old weight
            replaced(name)
    for name, embedding in model.named_modules():
        if isinstance(embedding, nn.Embedding):
            embedding.weight = nn.Parameter(embedding.weight.to(torch.bfloat16), requires_grad=False)
            replaced(name)
    return model


def _linear_names(model: Model) -> list[str]:
    """Returns the linear layers' names, because a list of the layers would keep their weights in memory."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
