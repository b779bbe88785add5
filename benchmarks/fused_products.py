"""Compares fused operations of training that contain the matrix products with others that do not.

    python -m benchmarks.fused_products [--shape L,C,V,B,T] [--generation rwkv7] [--precision bf16-mixed] [--steps 8]

The autograd functions of time and channel mixing in rwkv/model/rwkv4/fused.py and rwkv7/fused.py contain the products; the
others contain only the operations between them. Prints the time of a bare training step, and the memory of the activations that
a forward pass saves. The steps of both alternate in one process on the same weights. The last line of standard output is the
result as JSON.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks._main import run_program
from benchmarks._training_job import new_task, training_step
from kernels.arguments import Parser, at_least, sizes_of
from kernels.bench.results import publish
from kernels.machine import hardware
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.model import fused
from rwkv.model.rwkv7.mix import TimeMix
from rwkv.training.task import LanguageModel

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
WARM_UP = 2                              # steps


def main(argv: list[str] | None = None) -> None:
    parser = Parser("benchmarks.fused_products", __doc__)
    parser.add_argument("--shape", type=sizes_of("L,C,V,B,T"), default=(4, 192, 2048, 8, 128), metavar="L,C,V,B,T")
    parser.add_argument("--generation", choices=GENERATIONS, default="rwkv7")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed")
    parser.add_argument("--steps", type=at_least(1), default=8, metavar="N")
    args = parser.parse_args(argv)
    n_layer, n_embd, vocab_size, B, T = args.shape
    dtype = PRECISIONS[args.precision]
    task = new_task(ModelConfig(generation=args.generation, n_layer=n_layer, n_embd=n_embd, ctx_len=T), vocab_size, dtype)
    optimizer = task.configure_optimizers()["optimizer"]
    x = torch.randint(vocab_size, (B, T))
    results: dict[str, dict[str, Any]] = {"with products": {"ms": []}, "between products": {"ms": []}}
    for number in range(WARM_UP + args.steps):
        names = sorted(results, reverse=number % 2 == 0)         # each step reverses the order
        for name in names:
            with _products(name == "with products"):
                start = time.perf_counter()
                training_step(task, optimizer, x, dtype)
                results[name]["ms"].append(1000 * (time.perf_counter() - start))
    for name, result in results.items():
        with _products(name == "with products"):
            result["saved_mb"] = _saved_activation_bytes(task, x, dtype) / 1e6
        result["ms"] = median(result["ms"][WARM_UP:])
        print(f"{name}: {result['ms']:.1f} ms per step, {result['saved_mb']:.0f} MB of saved activations")
    publish({"machine": hardware.describe("cpu"), "shape": args.shape, "generation": args.generation,
             "precision": args.precision, **results}, None)


@contextmanager
def _products(inside: bool) -> Iterator[None]:
    """Makes models use, in the `with` block, functions that contain the products, or functions between the products."""
    if inside:
        yield
        return
    with patch.object(fused, "can_fuse", lambda *layers: False), patch.object(TimeMix, "_recompute_mix", _plain_mix):
        yield


def _plain_mix(self: TimeMix, x: Tensor, last_x: Tensor | None, before: Tensor | None, v_first: Tensor | None, packing: Any,
               recompute_x: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
    m_r, m_w, m_k, m_v, m_a, m_g = fused.token_shift(x, last_x, *(1 - mu for mu in self._mixes()))
    r, k, v = self.receptance(m_r), self.key(m_k), self.value(m_v)
    inputs = {"w1": m_w, "a1": m_a, "g1": m_g} | ({} if v_first is None else {"v1": m_v})
    hidden = [mix @ self._low_rank(mix.dtype, name) for name, mix in inputs.items()]
    mixed, after = self._between_products(before, packing, r, k, v, v_first, *hidden)
    return self.output(mixed), after, v if v_first is None else v_first


def _saved_activation_bytes(task: LanguageModel, x: Tensor, dtype: torch.dtype) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in task.parameters()}
    saved: dict[int, Tensor] = {}        # the keys are addresses, which stay unique while the tensors are referenced

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        _ = task.model.forward_features(x)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in parameters)


if __name__ == "__main__":
    run_program(main)
