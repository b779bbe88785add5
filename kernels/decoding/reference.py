"""Instruction by instruction in PyTorch, in the dtype of the registers. The reference, in float64."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decoding import FASTEST_LOG_W, LANES, LEAST_NORM, MAPS, NONE, PART, Program, Run, Wkv4, Wkv7
from kernels.matvec import SMALLEST, Int8
from kernels.registry import Requires

REQUIRES = Requires(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16, torch.int8, torch.int16, torch.float64))

FUNCTIONS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu2": lambda y: torch.relu(y) ** 2}


def bind(program: Program, form: str) -> Run:
    constants = program.constants()

    def run(registers: Tensor) -> None:
        machine = _Machine(program, constants.to(registers.dtype), registers)
        for name, arguments in program.instructions:
            getattr(machine, name)(*arguments)

    return run


class _Machine:
    """A method for each instruction."""

    def __init__(self, program: Program, constants: Tensor, registers: Tensor) -> None:
        self._program, self._constants, self._registers = program, constants, registers

    def norm(self, x: int, y: int, width: int, weight: int, bias: int, eps: int, added: int) -> None:
        rows = self._register(x, width)
        if added != NONE:
            rows += self._register(added, width)
        normal = F.layer_norm(rows, (width,), self._constant(weight, width), self._constant(bias, width),
                              self._constants[eps].item())
        self._register(y, width).copy_(normal)

    def mix(self, x: int, last: int, y: int, width: int, n: int, shares: int) -> None:
        now, before = self._register(x, width), self._register(last, width)
        for i in range(n):
            share = self._constant(shares + i * width, width)
            self._register(y + i * width, width).copy_(before + (now - before) * share)
        before.copy_(now)

    def halve(self, x: int, y: int, K: int, whole: int) -> None:
        self._register(y, K).copy_(self._register(x, K).bfloat16())

    def round(self, x: int, y: int, width: int, step: int, steps: int, signed: int, whole: int) -> None:
        rows = self._register(x, width)
        largest = (rows.abs() if signed else rows).amax(1, keepdim=True).clamp(min=SMALLEST)
        self._register(y, width).copy_((rows / largest * steps).round())
        self._register(step, LANES).copy_((largest / steps).expand(-1, LANES))

    def arrange(self, x: int, y: int, width: int, whole: int) -> None:
        """Nothing: `product` rounds x."""

    def product(self, x: int, y: int, N: int, K: int, extra: int, whole: int, weight: int) -> None:
        packed = self._program.weights[weight]
        rows, matrix = self._register(x, K), packed.dense(self._constants.dtype)
        if packed.form == "int4":
            rows = packed.rounded(rows)[0].to(matrix.dtype)
        self._register(y, N).copy_(rows @ matrix.T)
        if isinstance(packed, Int8):
            self._register(y, N).mul_(self._register(extra, LANES)[:, :1])

    def down(self, x: int, y: int, N: int, K: int, matrix: int) -> None:
        self._multiply(x, y, self._matrix(matrix, N * K).view(N, K))

    def up(self, x: int, y: int, N: int, K: int, matrix: int) -> None:
        parts = -(-N // PART)
        stored = self._matrix(matrix, parts * PART * K).view(parts, K, PART)
        self._multiply(x, y, stored.transpose(1, 2).reshape(-1, K)[:N])

    def map(self, y: int, width: int, function: int) -> None:
        rows = self._register(y, width)
        rows.copy_(FUNCTIONS[MAPS[function]](rows))

    def add(self, x: int, y: int, width: int, gate: int) -> None:
        added = self._register(y, width)
        if gate != NONE:
            added = added * self._register(gate, width).sigmoid()
        self._register(x, width).add_(added)

    def wkv4(self, *arguments: int) -> None:
        *places, width = arguments
        at = Wkv4(*places)
        k, v, r, a, b, p = (self._register(place, width) for place in (at.k, at.v, at.r, at.a, at.b, at.p))
        w, u = self._constant(at.w, width), self._constant(at.u, width)
        top = torch.maximum(p, u + k)
        past, now = (p - top).exp(), (u + k - top).exp()
        self._register(at.y, width).copy_(r.sigmoid() * (past * a + now * v) / (past * b + now))
        top = torch.maximum(p + w, k)
        past, now = (p + w - top).exp(), (k - top).exp()
        a.copy_(past * a + now * v)
        b.copy_(past * b + now)
        p.copy_(top)

    def wkv7(self, *arguments: int) -> None:
        *places, heads, N = arguments
        at, C = Wkv7(*places), heads * N
        r, k, v, z, rate, g = (self._register(place, C) for place in (at.r, at.k, at.v, at.z, at.rate, at.g))
        w0, a0, v0, k_k, k_a, r_k, weight, bias = (
            self._constant(place, C) for place in (at.w0, at.a0, at.v0, at.k_k, at.k_a, at.r_k, at.weight, at.bias))
        rate = torch.sigmoid(a0 + rate)
        w = torch.exp(FASTEST_LOG_W * torch.sigmoid(w0 + z))
        v_first = self._register(at.v_first, C)
        if at.gate == NONE:
            v_first.copy_(v)
        else:
            v = v + (v_first - v) * torch.sigmoid(v0 + self._register(at.gate, C))
        kk = F.normalize((k * k_k).unflatten(1, (heads, N)), dim=-1, eps=LEAST_NORM)
        k = k * (1 + (rate - 1) * k_a)
        heads_of = partial(torch.unflatten, dim=1, sizes=(heads, N))
        r, w, k, v, b = heads_of(r), heads_of(w), heads_of(k), heads_of(v), kk * heads_of(rate)
        state = self._register(at.state, C * N).unflatten(1, (heads, N, N))
        state.copy_(state * w.unsqueeze(-2) + (state @ -kk.unsqueeze(-1)) * b.unsqueeze(-2)
                    + v.unsqueeze(-1) * k.unsqueeze(-2))
        y = (state @ r.unsqueeze(-1)).flatten(1)
        share = (r * k * heads_of(r_k.unsqueeze(0))).sum(-1, keepdim=True)
        normal = F.group_norm(y, heads, weight, bias, self._constants[at.eps].item())
        self._register(at.y, C).copy_((normal + (share * v).flatten(1)) * g)

    def _register(self, place: int, width: int) -> Tensor:
        """The register (R,width)."""
        return self._registers[:, place:place + width]

    def _constant(self, place: int, width: int) -> Tensor:
        return self._constants[place:place + width]

    def _matrix(self, place: int, numel: int) -> Tensor:
        return self._program.matrices()[place:place + numel].to(self._constants.dtype)

    def _multiply(self, x: int, y: int, weight: Tensor) -> None:
        N, K = weight.shape
        self._register(y, N).copy_(self._register(x, K) @ weight.T)
