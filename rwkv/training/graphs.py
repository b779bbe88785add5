"""Training steps of small models as CUDA graphs: all blocks forward, and all blocks backward, in one launch each.

In a small model's step a GPU waits for the host, which takes some 26 us to launch each of a layer's 80 operations. A graph
launches all of them at once, at fixed addresses: the input is copied in, and each replay overwrites the results of the previous
replay.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rwkv.config import TrainConfig
from rwkv.distributed import log, world_size
from rwkv.errors import UserError
from rwkv.model.base import Model, through_blocks

CAPTURED = ("cuda_", "triton_")          # kernels that a graph can capture; others synchronise
# Up to this (tokens of a batch) * n_embd^2, a layer's 80 launches, 26 us each, take longer than its matrix products on a GPU:
# 72 n_embd^2 FLOP per token at 300 TFLOP/s
HOST_BOUND = 2 ** 33


def chosen(config: TrainConfig, device: torch.device, kernel: str) -> bool:
    """Whether to use graphs. Raises UserError if trainer.graphs=true is impossible. kernel: the operator's name."""
    reason = why_not(config, device, kernel)
    if config.trainer.graphs and reason:
        raise UserError(f"trainer.graphs=true is impossible: {reason}; omit this option")
    return reason is None and (bool(config.trainer.graphs) or (config.trainer.graphs is None and is_small(config)))


def why_not(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """The reason why this run's blocks cannot be captured; None if they can."""
    trainer = config.trainer
    reasons = {
        "the run is on a CPU": device.type != "cuda",
        "trainer=ddp and trainer=fsdp exchange gradients and weights between blocks":
            trainer.strategy == "fsdp" or world_size() > 1,
        "trainer.tbptt carries states from segment to segment": trainer.tbptt > 0,
        "packed rows of conversations start sequences at different positions": config.data.name == "chat",
        f"tune={config.tune.method} freezes weights": config.tune.method != "full",
        "a model with DeepEmbed reads the tokens in each block": bool(config.model.deep_embed_dim),
        "trainer.accumulate adds to gradients, and a replay overwrites them": trainer.accumulate > 1,
        "trainer.optim_in_backward updates weights between blocks": trainer.optim_in_backward,
        "trainer.activation_checkpointing recomputes blocks": trainer.activation_checkpointing,
        "trainer.compile replaces the blocks": trainer.compile,
        "trainer.probe measures each block": trainer.probe,
        "trainer.precision=fp16-mixed scales the loss": trainer.precision == "fp16-mixed",
        f"kernel={kernel} cannot be captured": not kernel.startswith(CAPTURED)}
    return next((reason for reason, applies in reasons.items() if applies), None)


def is_small(config: TrainConfig) -> bool:
    """Whether a step would spend longer launching operations from the host than computing them on the GPU."""
    tokens = config.data.batch_size * config.model.ctx_len
    return tokens * config.model.n_embd ** 2 <= HOST_BOUND


def describe(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """A line for the plan of a run on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    reason = why_not(config, device, kernel)
    if chosen(config, device, kernel):
        return "all blocks are replayed in one launch; trainer.graphs=false launches each operation"
    if reason:
        return f"none: {reason}"
    why_off = "trainer.graphs=false" if config.trainer.graphs is False else "the GPU, not the host, is the bottleneck"
    return f"none: {why_off}"


class _Blocks(nn.Module):
    """A module that computes all blocks, from the empty state, as a function of one tensor."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x: Tensor) -> Tensor:
        return through_blocks(self.blocks, x)


class Replay:
    """A model's blocks, captured at the first call with gradients and replayed for calls of the same shape.

    Calls run eagerly if they have no gradients or a different shape, or while a replay waits for its backward pass, because a
    second replay would overwrite its saved activations.
    """

    def __init__(self, model: Model, capture: Callable[..., Any] = torch.cuda.make_graphed_callables) -> None:
        self._model = model
        self._capture = capture
        self._graph: Callable[[Tensor], Tensor] | None = None
        self._expected: tuple[object, ...] | None = None    # shape, dtype and autocast's dtype of the captured call
        self._waiting = False

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad) or self._waiting:
            return through_blocks(self._model.blocks, x)
        if self._expected is None:
            self._graph = self._capture_graph(x)
            self._expected = _call_key(x)
        if self._graph is None or self._expected != _call_key(x):
            return through_blocks(self._model.blocks, x)
        if self._model.weight_cache is not None:
            self._model.weight_cache.update()            # a replay reads the cached half-precision weights and converts none
        out: Tensor = self._graph(x)
        self._waiting = True
        out.register_hook(self._read)
        return out

    def _read(self, grad: Tensor) -> None:
        self._waiting = False

    def _capture_graph(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The graph; None, with a printed reason, if the capture fails."""
        kind = x.device.type
        sample = x.detach().clone().requires_grad_()     # not random: a resumed run captures again, and must draw no numbers
        stream = torch.cuda.current_stream() if kind == "cuda" else None
        try:
            with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
                return self._capture(_Blocks(self._model), (sample,), allow_unused_input=True)
        except RuntimeError as error:
            if stream is not None:
                torch.cuda.set_stream(stream)            # a failed capture may leave its own stream selected
            log(f"no CUDA graphs: {str(error).splitlines()[0]}")
            return None


def _call_key(x: Tensor) -> tuple[object, ...]:
    kind = x.device.type
    return x.shape, x.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
