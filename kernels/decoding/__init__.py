"""One decoding step of a model as a program: instructions on registers, carried out in one launch.

A step of a small model is some 150 operations of 5 to 500 us each, so that what starting an operation costs is a large part
of it. Here the model writes its step down once, as a list of instructions, and the threads of the back end carry it out
together: each instruction is cut into tiles, a thread takes the next tile, and nobody goes on before all tiles of an
instruction are done.

A register is a vector of float32 for each row of the batch. Beside its registers a row has numbers in 16 bits, bfloat16 or
whole ones, which some implementations multiply in place of float32. Constants are shared by the rows. The instructions, for
each row:

    norm      x += added (if any);  y = (x - mean(x)) / sqrt(variance(x) + eps) weight + bias
    mix       y_i = last + (x - last) share_i, for each i;  then last = x
    product   y = W x, with W packed in a form of kernels.matvec
    down, up  y = A x with A of few rows, and y = B x with B of few columns
    halve     before a product in bfloat16: x rounded to it
    round     before a product in int8: x in whole steps, as kernels.matvec rounds its inputs, and the step's size
    arrange   before a product in int4: the same group by group, in the order of the integers of a row of W, with a group's sum
    map       y = f(y), f: tanh, sigmoid, or relu2(y) = max(y, 0)^2
    add       x += y, or x += sigmoid(gate) y
    wkv4      y = sigmoid(r) wkv(k, v), where wkv is kernels.wkv4's step for one token, whose state goes on
    wkv7      all of RWKV-7's time mixing that lies between its products (rwkv/model/rwkv7.py), whose state goes on

A file beside this one has REQUIRES and bind(program, form) -> function(registers), which runs the program once on the registers
(R,size) of R rows, R >= 1. A row's result does not depend, to the bit, on the rows beside it. In the form float32 c_v0 also
takes weights in bfloat16, which it reads as float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.matvec import GROUP, BFloat16, Int8, Packed, groups_of

LANES = 8                                # all widths are multiples of this; but not the number of a product's outputs
PART = 32                                # outputs of `up` that are computed together; registers take multiples of it
NONE = -1                                # in the place of a register or a constant that an instruction lacks
MAPS = ("tanh", "sigmoid", "relu2")
FASTEST_LOG_W = -0.6065306597126334      # of RWKV-7's decay: -e^-0.5
Run = Callable[[Tensor], None]
LEAST_NORM = 1e-12                       # of RWKV-7's kk, as in torch.nn.functional.normalize


class Instruction(NamedTuple):
    """name: one of those above. arguments: registers, constants and sizes, in the order of the method of Program."""

    name: str
    arguments: tuple[int, ...]


class Wkv4(NamedTuple):
    """Registers (A) of k, v, r, the state's a, b, p, and y; constants (A): decay exponent w (p + w decays) and bonus u."""

    k: int
    v: int
    r: int
    a: int
    b: int
    p: int
    y: int
    w: int
    u: int


class Wkv7(NamedTuple):
    """Registers (C) unless another size is given; the constants are the parameters of TimeMix by their names.

    r, k, v; z, rate, g: the low-rank outputs of the gates w, a and g; gate: of v, NONE in the first layer, which sets v_first;
    state (C N): S, rows of the value; kk: for the instruction's own use; y. z, rate, k and v are overwritten.
    """

    r: int
    k: int
    v: int
    z: int
    rate: int
    g: int
    gate: int
    v_first: int
    state: int
    kk: int
    y: int
    w0: int
    a0: int
    v0: int
    k_k: int
    k_a: int
    r_k: int
    weight: int
    bias: int
    eps: int


class Product(NamedTuple):
    """y = W x."""

    x: int
    y: int
    weight: Packed
    K: int


@dataclass
class Program:
    """Instructions in order, and what they work on. Each method adds a register, a constant or an instruction.

    size: the numbers in all registers of one row. whole_size: the whole numbers in 16 bits beside them.
    """

    size: int = 0
    whole_size: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    weights: list[Packed] = field(default_factory=list)
    _constants: list[Tensor] = field(default_factory=list)
    _constants_size: int = 0
    _joined: Tensor | None = None
    _matrices: list[Tensor] = field(default_factory=list)
    _matrices_size: int = 0
    _matrices_joined: Tensor | None = None
    _shared: dict[tuple[str, int], int] = field(default_factory=dict)    # registers that each instruction may overwrite

    def register(self, width: int) -> int:
        """The place of a new register."""
        place = self.size
        self.size += -(-width // PART) * PART
        return place

    def constant(self, values: Tensor) -> int:
        """The place of a new constant: the values, flat, as float32."""
        place = self._constants_size
        flat = values.detach().float().flatten()
        self._constants.append(torch.nn.functional.pad(flat, (0, -len(flat) % LANES)))
        self._constants_size += len(self._constants[-1])
        return place

    def constants(self) -> Tensor:
        """All of them, one after the other; none may be added afterwards."""
        if self._joined is None:
            self._joined = torch.cat([*self._constants, torch.zeros(LANES)])
            self._constants.clear()
        return self._joined

    def matrices(self) -> Tensor:
        """Those of down and up, flat, one after the other: bfloat16 where that loses nothing, as from a file in bfloat16. B is
        stored in parts of PART rows, each column by column."""
        if self._matrices_joined is None:
            joined = torch.cat([*self._matrices, torch.zeros(1)])
            half = joined.bfloat16()
            self._matrices_joined = half if torch.equal(half.float(), joined) else joined
            self._matrices.clear()
        return self._matrices_joined

    def with_weights(self, weights: Sequence[Tensor]) -> "Program":
        """The same program with other matrices in its products, in bfloat16; neither may be added to afterwards."""
        self.constants()
        self.matrices()
        return replace(self, weights=[BFloat16(weight) for weight in weights])

    def norm(self, x: int, y: int, width: int, weight: Tensor, bias: Tensor, eps: float, added: int = NONE) -> None:
        constants = [self.constant(values) for values in (weight, bias, torch.tensor([eps]))]
        self._add("norm", x, y, width, *constants, added)

    def mix(self, x: int, last: int, y: int, width: int, shares: Tensor) -> None:
        """shares (n,C): the outputs are n registers one after the other, which begin at y."""
        self._add("mix", x, last, y, width, len(shares), self.constant(shares))

    def product(self, x: int, y: int, weight: Packed, K: int) -> None:
        self.products([Product(x, y, weight, K)])

    def products(self, products: Sequence[Product]) -> None:
        """Those that do not depend on each other. All inputs are prepared first, so that products follow products."""
        prepared = [self._prepare(i, product) for i, product in enumerate(products)]
        for (x, extra, whole), product in zip(prepared, products, strict=True):
            self.weights.append(product.weight)
            self._add("product", x, product.y, len(product.weight.weight), product.K, extra, whole, len(self.weights) - 1)

    def down(self, x: int, y: int, weight: Tensor) -> None:
        """weight: A (N,K)."""
        self._add("down", x, y, *weight.shape, self._matrix(weight))

    def up(self, x: int, y: int, weight: Tensor) -> None:
        """weight: B (N,K)."""
        N, K = weight.shape
        whole = torch.nn.functional.pad(weight, (0, 0, 0, -N % PART))
        self._add("up", x, y, N, K, self._matrix(whole.view(-1, PART, K).transpose(1, 2)))

    def map(self, function: str, y: int, width: int) -> None:
        self._add("map", y, width, MAPS.index(function))

    def add(self, x: int, y: int, width: int, gate: int = NONE) -> None:
        self._add("add", x, y, width, gate)

    def wkv4(self, places: Wkv4, width: int) -> None:
        self._add("wkv4", *places, width)

    def wkv7(self, places: Wkv7, heads: int, N: int) -> None:
        self._add("wkv7", *places, heads, N)

    def _matrix(self, weight: Tensor) -> int:
        place = self._matrices_size
        self._matrices.append(weight.detach().float().flatten())
        self._matrices_size += weight.numel()
        return place

    def _prepare(self, i: int, product: Product) -> tuple[int, int, int]:
        """What the i-th of several products reads: the register of x or of its whole numbers, that of what belongs to them, and
        their place in 16 bits; NONE for what there is not."""
        if isinstance(product.weight, Int8):             # x in the whole steps that the weight asks for, and a step's size
            rounded, whole = self._scratch(f"rounded {i}", product.K + 1), self._whole(i, product.K)
            step = rounded + product.K
            rounding = product.weight.rounding
            self._add("round", product.x, rounded, product.K, step, rounding.steps, not rounding.non_negative, whole)
            return rounded, step, whole
        if product.weight.form == "bfloat16":
            rounded, whole = self._scratch(f"rounded {i}", product.K), self._whole(i, product.K)
            self._add("halve", product.x, rounded, product.K, whole)
            return rounded, NONE, whole
        if product.weight.form == "int4":                # a step and a sum for each group
            groups = groups_of(product.K)
            sums, whole = self._scratch(f"sums {i}", 2 * groups), self._whole(i, groups * GROUP)
            self._add("arrange", product.x, sums, product.K, whole)
            return product.x, sums, whole
        return product.x, NONE, NONE

    def _whole(self, i: int, width: int) -> int:
        """The place of whole numbers in 16 bits that each instruction may overwrite."""
        what = f"whole {i}"
        if (what, width) not in self._shared:
            self._shared[what, width] = self.whole_size
            self.whole_size += -(-width // PART) * PART
        return self._shared[what, width]

    def _scratch(self, what: str, width: int) -> int:
        """A register that each instruction may overwrite."""
        if (what, width) not in self._shared:
            self._shared[what, width] = self.register(width)
        return self._shared[what, width]

    def _add(self, name: str, *arguments: int) -> None:
        self.instructions.append(Instruction(name, arguments))
