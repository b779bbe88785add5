"""Training steps of small models as CUDA graphs: all blocks forward, and all blocks backward, in one launch each.

In a small model's step a GPU waits for the host, which needs some 26 us to launch each of a layer's 80 operations. A graph
replays them from fixed addresses: the block's input is copied in, and each replay overwrites the results of the one before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rwkv.config import TrainConfig
from rwkv.distributed import log, world_size
from rwkv.errors import UserError
from rwkv.model.base import Model, through_blocks

CAPTURED = ("cuda_", "triton_")          # kernels that a graph can capture: others wait for the device
# Tokens of a batch times n_embd^2 up to which the host takes longer to launch a layer (80 operations of 26 us) than a GPU to
# multiply its matrices, 72 n_embd^2 operations a token at 300 TFLOP/s
HOST_BOUND = 2 ** 33


def chosen(config: TrainConfig, device: torch.device, kernel: str) -> bool:
    """Whether the blocks are replayed. Raises UserError where trainer.graphs=true cannot be. kernel: the operator's name."""
    reason = why_not(config, device, kernel)
    if config.trainer.graphs and reason:
        raise UserError(f"trainer.graphs=true is impossible: {reason}; leave it out")
    return reason is None and (bool(config.trainer.graphs) or (config.trainer.graphs is None and is_small(config)))


def why_not(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """The reason why this run's blocks cannot be captured, or None."""
    trainer = config.trainer
    reasons = {
        "the run is on a CPU": device.type != "cuda",
        "trainer=ddp and trainer=fsdp exchange gradients and weights between blocks":
            trainer.strategy == "fsdp" or world_size() > 1,
        "trainer.tbptt carries states from segment to segment": trainer.tbptt > 0,
        "rows of conversations differ in their texts": config.data.name == "chat",
        f"tune={config.tune.method} freezes weights": config.tune.method != "full",
        "a model with DeepEmbed reads the tokens in each block": bool(config.model.deep_embed_dim),
        "trainer.accumulate adds to gradients, and a replay overwrites them": trainer.accumulate > 1,
        "trainer.optim_in_backward updates weights between blocks": trainer.optim_in_backward,
        "trainer.activation_checkpointing computes blocks again": trainer.activation_checkpointing,
        "trainer.compile replaces the blocks": trainer.compile,
        "trainer.probe measures each block": trainer.probe,
        "float16 scales the loss": trainer.precision == "fp16-mixed",
        f"kernel={kernel} cannot be captured": not kernel.startswith(CAPTURED)}
    return next((reason for reason, applies in reasons.items() if applies), None)


def is_small(config: TrainConfig) -> bool:
    """Whether the host would be the limit of a step."""
    tokens = config.data.batch_size * config.model.ctx_len
    return tokens * config.model.n_embd ** 2 <= HOST_BOUND


def describe(config: TrainConfig, device: torch.device, kernel: str) -> str | None:
    """A line for the plan of a run on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    reason = why_not(config, device, kernel)
    if chosen(config, device, kernel):
        return "all blocks are replayed as one, which spares the host their launches; trainer.graphs=false launches each"
    if reason:
        return f"none: {reason}"
    off = "trainer.graphs=false" if config.trainer.graphs is False else "the GPU is busy longer than the host that launches"
    return f"none: {off}"


class _Blocks(nn.Module):
    """All blocks as a function of one tensor, from the empty state."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x: Tensor) -> Tensor:
        return through_blocks(self.blocks, x)


class Replay:
    """A model's blocks, captured at the first call with gradients and replayed where a call has the same shape.

    A call is computed as usual without gradients, in another shape, and while the result of a replay waits for its backward
    pass: another replay would overwrite what that pass reads.
    """

    def __init__(self, model: Model, capture: Callable[..., Any] = torch.cuda.make_graphed_callables) -> None:
        self._model = model
        self._capture = capture
        self._graph: Any = None
        self._expected: tuple[Any, ...] | None = None    # shape, dtype and autocast's dtype of the captured call
        self._waiting = False

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad) or self._waiting:
            return through_blocks(self._model.blocks, x)
        if self._expected is None:
            self._graph = self._captured(x)
            self._expected = _kind(x)
        if self._graph is None or self._expected != _kind(x):
            return through_blocks(self._model.blocks, x)
        if self._model.weight_cache is not None:
            self._model.weight_cache.update()            # a replay reads the copies of the weights, and converts none
        out: Tensor = self._graph(x)
        self._waiting = True
        out.register_hook(self._read)
        return out

    def _read(self, grad: Tensor) -> None:
        self._waiting = False

    def _captured(self, x: Tensor) -> Any:
        """The graph, or None, with a line that says why, where the capture fails."""
        kind = x.device.type
        sample = x.detach().clone().requires_grad_()     # not random: a run that is continued captures once more
        stream = torch.cuda.current_stream() if kind == "cuda" else None
        try:
            with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
                return self._capture(_Blocks(self._model), (sample,), allow_unused_input=True)
        except RuntimeError as error:
            if stream is not None:
                torch.cuda.set_stream(stream)            # a capture that fails may leave its own
            log(f"no CUDA graphs: {str(error).splitlines()[0]}")
            return None


def _kind(x: Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    return x.shape, x.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
