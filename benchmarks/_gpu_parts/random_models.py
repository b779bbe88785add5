"""Models and training tasks with random weights."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks._gpu_parts.check import Check
from kernels.select import AUTO, select
from rwkv.config import ModelConfig, OptimConfig, TrainerConfig
from rwkv.model.base import generation
from rwkv.model.fused import backend as fused_backend
from rwkv.model.quantized import to_packed
from rwkv.pretrained import RWKV
from rwkv.training.device import dtype_for, set_product_precision
from rwkv.training.graphs import Replay

if TYPE_CHECKING:
    from rwkv.training.task import LanguageModel


class Shape(NamedTuple):
    generation: str
    L: int
    C: int
    V: int
    B: int
    T: int

    def __str__(self) -> str:
        return f"{self.generation} {self.L}x{self.C}, {self.B} x {self.T}"


class Way(NamedTuple):
    """A variant of the computation of a training step.

    Attributes:
        options: further fields of TrainerConfig, which must not be modified.
        fused: True for the fused layers, False for PyTorch's operations.
        graphs: True if all blocks are replayed as one CUDA graph.
    """

    name: str
    precision: str
    options: dict[str, Any] = {}         # noqa: RUF012
    fused: bool = True
    graphs: bool = False


def new_task(check: Check, shape: Shape, way: Way) -> "LanguageModel":
    """Returns a training task with normally distributed weights.

    The usual initial weights contain many zeros, which are faster to multiply.
    """
    from rwkv.training.task import LanguageModel  # imported here, because other parts do not need Lightning
    from rwkv.training.trainer import prepare_blocks

    set_product_precision(way.precision, torch.device(check.device))
    torch.manual_seed(0)
    config = ModelConfig(generation=shape.generation, n_layer=shape.L, n_embd=shape.C, ctx_len=shape.T)
    operator = select(generation(config).OPERATOR, AUTO, check.device, dtype_for(way.precision))
    with torch.device(check.device):
        model = RWKV(config, shape.V, operator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02).add_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0)
    model = prepare_blocks(model, TrainerConfig(precision=way.precision, **way.options))
    if way.graphs and check.on_gpu:
        model.replay = Replay(model)
    return LanguageModel(model, OptimConfig(), 1000, 1.0)


def autocast(check: Check, way: Way) -> torch.autocast:
    dtype = dtype_for(way.precision)
    return torch.autocast(check.device, dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def use_fused_layers(fused: bool) -> Iterator[None]:
    """Makes models use all fused layers or none in the `with` block."""
    before = dict(fused_backend.SUFFIXES)
    if not fused:
        fused_backend.SUFFIXES.clear()
    try:
        yield
    finally:
        fused_backend.SUFFIXES.update(before)


@torch.no_grad()
def random_model(device: str, name: str, L: int, C: int, V: int, format: str) -> RWKV:
    """Returns a model with random weights, whose logits are of order 1."""
    packed = format.startswith("int")
    dtype = torch.float32 if packed else getattr(torch, format)
    config = ModelConfig(generation=name, n_layer=L, n_embd=C)
    torch.manual_seed(0)
    with torch.device(device):
        model = RWKV(config, V, select(generation(config).OPERATOR, AUTO, device, dtype))
    model.requires_grad_(False).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=max(parameter.shape) ** -0.5)
        else:
            parameter.normal_(std=0.1).add_(1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0)
        if not key.endswith(model.generation.KEPT_FLOAT32):
            parameter.data = parameter.data.to(dtype)
    return to_packed(model.cpu(), format, device) if packed else model
