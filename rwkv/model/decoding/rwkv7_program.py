"""The blocks of RWKV-7 for one token as instructions of kernels/decoding: rwkv7.py at T = 1."""

from typing import Any

import torch

from kernels.decoding import LANES, NONE, Program, Wkv7
from rwkv.config import ModelConfig
from rwkv.model.decoding.program import Place, add_norm, add_products, shares

MIXES = "rkvwag"
VECTORS = ("w0", "a0", "v0", "k_k", "k_a", "r_k")        # of TimeMix, in the order of Wkv7


class ProgramBlocks:
    """x: the register (C) that the blocks change, one after the other. They share all other registers but the states."""

    def __init__(self, program: Program, config: ModelConfig, x: int) -> None:
        C = config.n_embd
        self._program, self._x, self._C, self._N, self._F = program, x, C, config.head_size, config.n_ffn or 4 * C
        self._normal, self._mixed, self._out = program.register(C), program.register(len(MIXES) * C), program.register(C)
        self._r, self._k, self._v, self._z, self._rate, self._g, self._of_v, self._v_first, self._kk, self._y = (
            program.register(C) for _ in range(10))
        self._relu = program.register(self._F)
        self._hidden: dict[int, int] = {}                # inside the gates, by their ranks

    def add(self, block: Any) -> list[Place]:
        """Adds the block; where the tensors of its state are, in the order of State."""
        if block.first:
            add_norm(self._program, block.ln0, self._x, self._x)
        places = self._add_time_mix(block)
        return [*places, self._add_channel_mix(block)]

    def _add_time_mix(self, block: Any) -> list[Place]:
        program, att, C, N = self._program, block.att, self._C, self._N
        last, state = program.register(C), program.register(C * N)
        add_norm(program, block.ln1, self._x, self._normal)
        mixes = [1 - getattr(att, f"x_{name}").detach().float() for name in MIXES]
        program.mix(self._normal, last, self._mixed, C, shares(*mixes))
        self._add_gate(att, "w", self._z, "tanh")
        self._add_gate(att, "a", self._rate)
        self._add_gate(att, "g", self._g, "sigmoid")
        if not block.first:
            self._add_gate(att, "v", self._of_v)
        layers = (att.receptance, self._r), (att.key, self._k), (att.value, self._v)
        add_products(program, *((layer, self._mixed + i * C, y) for i, (layer, y) in enumerate(layers)))
        constants = [program.constant(getattr(att, name)) for name in VECTORS]
        norm = [program.constant(values) for values in (att.ln_x.weight, att.ln_x.bias, torch.tensor([att.ln_x.eps]))]
        gate = NONE if block.first else self._of_v
        registers = (self._r, self._k, self._v, self._z, self._rate, self._g, gate, self._v_first, state, self._kk, self._y)
        program.wkv7(Wkv7(*registers, *constants, *norm), C // N, N)
        add_products(program, (att.output, self._y, self._out))
        return [Place(last, (C,)), Place(state, (C // N, N, N))]

    def _add_gate(self, att: Any, name: str, y: int, function: str = "") -> None:
        """y = f(m A) B for the mix m of that name."""
        down, up = getattr(att, f"{name}1").detach().T, getattr(att, f"{name}2").detach().T              # (D,C), (C,D)
        missing = -len(down) % LANES
        down, up = torch.nn.functional.pad(down, (0, 0, 0, missing)), torch.nn.functional.pad(up, (0, missing))
        if len(down) not in self._hidden:
            self._hidden[len(down)] = self._program.register(len(down))
        hidden = self._hidden[len(down)]
        self._program.down(self._mixed + MIXES.index(name) * self._C, hidden, down)
        if function:
            self._program.map(function, hidden, len(down))
        self._program.up(hidden, y, up)

    def _add_channel_mix(self, block: Any) -> Place:
        program, ffn, C = self._program, block.ffn, self._C
        last = program.register(C)
        add_norm(program, block.ln2, self._x, self._normal, added=self._out)
        program.mix(self._normal, last, self._mixed, C, shares(1 - ffn.x_k.detach().float()))
        add_products(program, (ffn.key, self._mixed, self._relu))
        program.map("relu2", self._relu, self._F)
        add_products(program, (ffn.value, self._relu, self._out))
        program.add(self._x, self._out, C)
        return Place(last, (C,))
