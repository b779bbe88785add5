"""The blocks of RWKV-4 for one token as instructions of kernels/decoding: rwkv4.py at T = 1."""

from typing import Any

from kernels.decoding import Program, Wkv4
from kernels.wkv4 import decay_exponent
from rwkv.config import ModelConfig
from rwkv.model.decoding.program import Place, add_norm, add_products, shares


class ProgramBlocks:
    """x: the register (C) that the blocks change, one after the other. They share all other registers but the states."""

    def __init__(self, program: Program, config: ModelConfig, x: int) -> None:
        C = config.n_embd
        A, F = config.n_att or C, config.n_ffn or 4 * C
        self._program, self._x, self._widths = program, x, (C, A, F)
        self._normal, self._mixed, self._out = program.register(C), program.register(3 * C), program.register(C)
        self._k, self._v, self._r, self._y = (program.register(A) for _ in range(4))
        self._relu, self._gate = program.register(F), program.register(C)

    def add(self, block: Any) -> list[Place]:
        """Adds the block; where the tensors of its state are, in the order of State."""
        if block.first:
            add_norm(self._program, block.ln0, self._x, self._x)
        places = self._add_time_mix(block)
        return [*places, self._add_channel_mix(block)]

    def _add_time_mix(self, block: Any) -> list[Place]:
        program, att, (C, A, _) = self._program, block.att, self._widths
        last, a, b, p = program.register(C), program.register(A), program.register(A), program.register(A)
        add_norm(program, block.ln1, self._x, self._normal)
        program.mix(self._normal, last, self._mixed, C, shares(att.time_mix_k, att.time_mix_v, att.time_mix_r))
        layers = (att.key, self._k), (att.value, self._v), (att.receptance, self._r)
        add_products(program, *((layer, self._mixed + i * C, y) for i, (layer, y) in enumerate(layers)))
        w, u = program.constant(decay_exponent(att.time_decay.detach().float())), program.constant(att.time_first)
        program.wkv4(Wkv4(self._k, self._v, self._r, a, b, p, self._y, w, u), A)
        add_products(program, (att.output, self._y, self._out))
        return [Place(last, (C,)), Place(a, (A,)), Place(b, (A,)), Place(p, (A,))]

    def _add_channel_mix(self, block: Any) -> Place:
        program, ffn, (C, _, F) = self._program, block.ffn, self._widths
        last = program.register(C)
        add_norm(program, block.ln2, self._x, self._normal, added=self._out)
        program.mix(self._normal, last, self._mixed, C, shares(ffn.time_mix_k, ffn.time_mix_r))
        add_products(program, (ffn.key, self._mixed, self._relu), (ffn.receptance, self._mixed + C, self._gate))
        program.map("relu2", self._relu, F)
        add_products(program, (ffn.value, self._relu, self._out))
        program.add(self._x, self._out, C, gate=self._gate)
        return Place(last, (C,))
