"""Times the matrix products of a training step alone. Their time is a lower bound of the step's time on a CPU.

For N = B T tokens a linear layer from I to O features needs three products: y = x W^T, and for the gradients g W and g^T x.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.bench.timing import seconds
from rwkv.config import ModelConfig
from rwkv.model.base import generation


def seconds_per_step(config: ModelConfig, vocab_size: int, B: int, T: int, dtype: torch.dtype) -> float:
    """Returns the seconds of the products of one forward and backward pass over (B,T) tokens, after a warm-up.

    One layer is timed, and its time is multiplied by n_layer. The head multiplies all B*T rows at once.
    """
    head = [(config.n_embd, vocab_size)]
    return config.n_layer * _seconds(_layer_linears(config), B * T, dtype) + _seconds(head, B * T, dtype)


def _layer_linears(config: ModelConfig) -> list[tuple[int, int]]:
    """Returns (I, O) of each matrix of the last block, because RWKV-7's first block has fewer matrices."""
    model = generation(config)
    last = f"blocks.{config.n_layer - 1}."
    return [(shape[1], shape[0]) for name, shape in model.shapes(config, 1).items()
            if name.startswith(last) and model.group(name) != "vector"]


def _seconds(linears: list[tuple[int, int]], N: int, dtype: torch.dtype) -> float:
    products = [product for linear in linears for product in _products(*linear, N, dtype)]

    def multiply() -> None:
        for product in products:
            product()

    multiply()
    return seconds(multiply, "cpu")


def _products(inputs: int, outputs: int, N: int, dtype: torch.dtype) -> Iterator[Callable[[], Tensor]]:
    """Yields the three products of a layer. Results are written into preallocated memory, to avoid page faults."""
    x, weight, grad = (torch.ones(size, dtype=dtype) for size in ((N, inputs), (outputs, inputs), (N, outputs)))
    y = torch.empty_like(grad)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty_like(weight)
    yield lambda: torch.mm(x, weight.T, out=y)
    yield lambda: torch.mm(grad, weight, out=grad_x)
    yield lambda: torch.mm(grad.T, x, out=grad_weight)
