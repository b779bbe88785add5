"""The matrix products of a training step alone: a lower bound of its time whatever the kernel, loss or optimiser.

For N = B T tokens a linear layer from I to O features needs three: y = x W^T, and for its gradients g W and g^T x.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rwkv.config import ModelConfig
from rwkv.model.base import generation

Linear = tuple[int, int]                 # from I features to O


def seconds_per_step(config: ModelConfig, vocab_size: int, B: int, T: int, device: torch.device | str = "cpu",
                     dtype: torch.dtype = torch.float32, calls: int = 2) -> float:
    """Seconds of the products of one forward and backward pass over (B,T) tokens: the shortest of `calls`, after a warm-up.

    One layer is timed and counts n_layer times; the head multiplies all B*T rows at once.
    """
    layer = layer_linears(config)
    head = [(config.n_embd, vocab_size)]
    seconds = (_shortest(linears, B * T, torch.device(device), dtype, calls) for linears in (layer, head))
    return config.n_layer * next(seconds) + next(seconds)


def layer_linears(config: ModelConfig) -> list[Linear]:
    """The matrices of one block, the low-rank ones included: of the last, since RWKV-7's first does not use all of its own."""
    model = generation(config)
    last = f"blocks.{config.n_layer - 1}."
    return [(shape[1], shape[0]) for name, shape in model.shapes(config, 1).items()
            if name.startswith(last) and model.group(name) != "vector"]


def _shortest(linears: list[Linear], N: int, device: torch.device, dtype: torch.dtype, calls: int) -> float:
    products = [product for linear in linears for product in _products(*linear, N, device, dtype)]
    return min(list(_seconds(products, device, 1 + calls))[1:])


def _products(inputs: int, outputs: int, N: int, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], Tensor]]:
    """The three products of a layer, into preallocated memory: a fresh result would add its page faults."""
    x, weight, grad = (torch.ones(size, device=device, dtype=dtype) for size in ((N, inputs), (outputs, inputs), (N, outputs)))
    y = torch.empty_like(grad)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty_like(weight)
    yield lambda: torch.mm(x, weight.T, out=y)
    yield lambda: torch.mm(grad, weight, out=grad_x)
    yield lambda: torch.mm(grad.T, x, out=grad_weight)


def _seconds(products: list[Callable[[], Tensor]], device: torch.device, calls: int) -> Iterator[float]:
    for _ in range(calls):
        _wait(device)
        start = time.perf_counter()
        for product in products:
            product()
        _wait(device)
        yield time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
