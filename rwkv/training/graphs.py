"""Replays the blocks of small models as CUDA graphs: one launch computes all blocks forward, and one launch all backward.

In a training step of a small model, the GPU waits for the host, because the host takes about 26 us to launch each of a layer's
80 operations. A graph launches all operations at once. The graph's tensors have fixed addresses, so the input is copied to such
an address, and each replay overwrites the results of the previous replay.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rwkv.config import TrainConfig
from rwkv.distributed import log, world_size
from rwkv.errors import UserError
from rwkv.model.base import Model, run_all_blocks

CAPTURED = ("cuda_", "triton_")          # a graph can capture kernels with these prefixes; other kernels synchronise
# If (tokens of a batch) * n_embd^2 is at most HOST_BOUND, a layer's 80 launches of 26 us take longer than the layer's matrix
# products, which need 72 n_embd^2 FLOP per token, on a GPU with 300 TFLOP/s
HOST_BOUND = 2 ** 33


def uses_graphs(config: TrainConfig, device: torch.device, kernel: str) -> bool:
    """Returns True if the run uses graphs. Raises UserError if trainer.graphs=true is impossible."""
    reason = why_not(config, device, kernel)
    if config.trainer.graphs and reason:
        raise UserError(f"trainer.graphs=true cannot be used, because {reason}. Omit trainer.graphs=")
    return reason is None and (bool(config.trainer.graphs) or (config.trainer.graphs is None and is_small(config)))


def why_not(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """Returns the reason why a graph cannot capture this run's blocks, or None if a graph can capture the blocks."""
    trainer = config.trainer
    reasons = {
        "the run is on a CPU": device.type != "cuda",
        "trainer=ddp and trainer=fsdp exchange gradients and weights between blocks":
            trainer.strategy == "fsdp" or world_size() > 1,
        "trainer.tbptt carries states from segment to segment": trainer.tbptt > 0,
        "data=chat packs conversations into rows at different positions": config.data.name == "chat",
        f"tune={config.tune.method} freezes weights": config.tune.method != "full",
        "a model with DeepEmbed reads the tokens in each block": bool(config.model.deep_embed_dim),
        "trainer.accumulate adds up gradients, but a CUDA graph overwrites them": trainer.accumulate > 1,
        "trainer.optim_in_backward updates weights between blocks": trainer.optim_in_backward,
        "trainer.activation_checkpointing recomputes blocks": trainer.activation_checkpointing,
        "trainer.compile replaces the blocks": trainer.compile,
        "trainer.probe measures each block": trainer.probe,
        "trainer.precision=fp16-mixed scales the loss": trainer.precision == "fp16-mixed",
        f"kernel={kernel} cannot be captured in a CUDA graph": not kernel.startswith(CAPTURED)}
    return next((reason for reason, applies in reasons.items() if applies), None)


def is_small(config: TrainConfig) -> bool:
    """Returns True if the host needs longer to launch a step's operations than the GPU to compute the operations."""
    tokens = config.data.batch_size * config.model.ctx_len
    return tokens * config.model.n_embd ** 2 <= HOST_BOUND


def describe(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """Returns the plan's line on CUDA graphs for a run on a GPU, or None on a CPU."""
    if device.type != "cuda":
        return None
    reason = why_not(config, device, kernel)
    if uses_graphs(config, device, kernel):
        return "all blocks are replayed in one launch; trainer.graphs=false launches each operation"
    if reason:
        return f"none, because {reason}"
    why_off = "trainer.graphs is false" if config.trainer.graphs is False else "the GPU, not the host, is the bottleneck"
    return f"none, because {why_off}"


class _Blocks(nn.Module):
    """A module that computes all blocks from the empty state, as a function of a single tensor."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x: Tensor) -> Tensor:
        return run_all_blocks(self.blocks, x)


class Replay:
    """Computes a model's blocks. The first call with gradients captures a graph, and later calls of the same shape replay it.

    A call runs eagerly if its input needs no gradient or has a different shape. While a replay waits for its backward pass,
    further calls run eagerly too, because a second replay would overwrite the saved activations of the first.
    """

    def __init__(self, model: Model, capture: Callable[..., Any] = torch.cuda.make_graphed_callables) -> None:
        self._model = model
        self._capture = capture
        self._graph: Callable[[Tensor], Tensor] | None = None
        self._expected: tuple[object, ...] | None = None    # the shape, dtype and autocast dtype of the captured call
        self._waiting = False

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad) or self._waiting:
            return run_all_blocks(self._model.blocks, x)
        if self._expected is None:
            self._graph = self._capture_graph(x)
            self._expected = _call_key(x)
        if self._graph is None or self._expected != _call_key(x):
            return run_all_blocks(self._model.blocks, x)
        if self._model.weight_cache is not None:
            self._model.weight_cache.update()            # a replay reads the cached weights and converts none
        out: Tensor = self._graph(x)
        self._waiting = True
        out.register_hook(self._read)
        return out

    def _read(self, grad: Tensor) -> None:
        self._waiting = False

    def _capture_graph(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        kind = x.device.type
        # The sample is not random: a resumed run captures again, and must not advance the random generators
        sample = x.detach().clone().requires_grad_()
        stream = torch.cuda.current_stream() if kind == "cuda" else None
        try:
            with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
                return self._capture(_Blocks(self._model), (sample,), allow_unused_input=True)
        except RuntimeError as error:
            if stream is not None:
                torch.cuda.set_stream(stream)            # a failed capture may leave its own stream selected
            log(f"CUDA graphs are not used, because the capture failed: {str(error).splitlines()[0]}")
            return None


def _call_key(x: Tensor) -> tuple[object, ...]:
    kind = x.device.type
    return x.shape, x.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
