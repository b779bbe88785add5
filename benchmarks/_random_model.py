"""Writes checkpoints of random weights in the shapes of released RWKV-7 models, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv.checkpoint.files import Checkpoint, Weights
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import ModelConfig
from rwkv.model.base import generation

VOCAB_SIZE = 65536
SHAPES: Mapping[str, tuple[int, int]] = {            # layers, width
    "0.1b": (12, 768), "0.4b": (24, 1024), "1.5b": (24, 2048), "2.9b": (32, 2560), "7.2b": (32, 4096), "13.3b": (61, 4096)}
BLOCK = 2**20                            # number of random numbers; a larger matrix repeats them, rotated each time


@dataclass(frozen=True)
class _Random:
    """Generates a tensor of random numbers from a seed."""

    name: str
    shape: tuple[int, ...]
    seed: int

    def __call__(self) -> Tensor:
        if self.name.endswith("weight") and len(self.shape) == 1:
            return torch.ones(self.shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(self.seed)
        tensor = torch.empty(self.shape, dtype=torch.bfloat16)
        scale = self.shape[-1] ** -0.5 if len(self.shape) == 2 else 0.1
        block = torch.randn(min(BLOCK, tensor.numel()), generator=generator).mul_(scale).bfloat16()
        for part in tensor.view(-1).split(len(block)):
            part.copy_(block.roll(int(torch.randint(len(block), (), generator=generator)))[:len(part)])
        return tensor


def random_checkpoint(shape: str) -> Checkpoint:
    """Returns a random bfloat16 checkpoint in one of SHAPES. Each access to a tensor generates the tensor again."""
    n_layer, n_embd = SHAPES[shape]
    config = ModelConfig(generation="rwkv7", n_layer=n_layer, n_embd=n_embd)
    module = generation(config)
    tensors = {name: Stored(name, "random weights", size, torch.bfloat16, _Random(name, size, seed))
               for seed, (name, size) in enumerate(module.shapes(config, VOCAB_SIZE).items())}
    return Checkpoint(Path("random weights"), module.with_default_widths(config), VOCAB_SIZE, Weights(tensors))
