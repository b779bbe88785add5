"""How much memory training takes, from sizes alone: known before anything is built.

N = tokens of one batch of one process, C = n_embd, A = n_att, F = n_ffn, V vocabulary, L layers, P parameters.

    weights, gradients, and Adam's two moments         4 P floats, exactly
    activations that wait for the backward pass        N L (10 C + 5 A + 2 F), in half precision N L (7 C + 2.5 A + F)
      with activation checkpointing                    N L C, and those of one block at a time
  with tbptt=K                                     those of one segment, N/K tokens, K states of L (2 C + 3 A) a row,
                                                   and what the head reads and its gradient, 2 N C
    the loss                                           its chunk of logits three times, and the head's gradient

The counts per token are of the tensors that rwkv/{model,time_mix,channel_mix,fused,loss}.py keep; a test compares the sum with
the measured peak. Gradients of the step before live until the backward pass begins (Lightning's order).
"""

from dataclasses import dataclass

from kernels.registry import names
from rwkv.config import ModelConfig, TrainConfig
from rwkv.loss import rows_at_once

FLOAT = 4                                # bytes
MOMENTS = 2                              # of Adam
LOGITS = 3                               # of a chunk of the loss at a time: logits, their gradient, and that of the one before
SCAN_WORK, CONVOLUTION_WORK = 8, 16      # tensors (B,T,n_att) within one layer's WKV at its peak: kernels/wkv/README.md
WORKER = 100 * 2 ** 20                   # a process that loads data, without what it shares with this one


@dataclass(frozen=True)
class Memory:
    """Bytes that a process of a run takes while it trains, beside what its programs take."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    loss: int
    workers: int

    @property
    def certain(self) -> int:
        """What no option makes smaller but fsdp."""
        return self.weights + self.gradients + self.optimiser

    @property
    def total(self) -> int:
        return self.certain + self.activations + self.loss + self.workers


def n_parameters(config: ModelConfig, vocab_size: int) -> int:
    """2VC + L (9C + C^2 + 2A + 4AC + 2FC) + 4C, which with A = C and F = 4C is 2VC + L (13C^2 + 11C) + 4C."""
    C, A, F, V = *_widths(config), vocab_size
    return 2 * V * C + config.n_layer * (9 * C + C * C + 2 * A + 4 * A * C + 2 * F * C) + 4 * C


def memory(config: TrainConfig, vocab_size: int, kernel: str, processes: int = 1) -> Memory:
    """Of one of `processes` that together read data.batch_size; with fsdp each has a share of the weights."""
    trainer, half = config.trainer, config.trainer.precision != "32-true"
    shards = processes if trainer.strategy == "fsdp" else 1
    weights = FLOAT * n_parameters(config.model, vocab_size) // shards
    N = config.tokens_per_step // trainer.accumulate // processes
    head, logits = FLOAT * vocab_size * config.model.n_embd, FLOAT * vocab_size * min(N, rows_at_once(vocab_size))
    loss = LOGITS * logits + (2 if half else 1) * head
    forward, backward = _activations(config, kernel, N // max(1, trainer.tbptt), half)
    activations = max(forward, backward + 2 * head - loss - weights) + (weights // 2 if half else 0) + _between(config, N)
    return Memory(weights, weights, MOMENTS * weights, activations, loss, config.data.num_workers * WORKER)


def _activations(config: TrainConfig, kernel: str, N: int, half: bool) -> tuple[int, int]:
    """When the forward pass ends, and when the backward pass is in its first layer, whose inner ones are there again."""
    C, A, F = _widths(config.model)
    block = int(FLOAT * N * (7 * C + 2.5 * A + F if half else 10 * C + 5 * A + 2 * F))
    work = FLOAT * N * A * (CONVOLUTION_WORK if kernel in names("timex") else SCAN_WORK)
    if not config.trainer.activation_checkpointing:
        return config.model.n_layer * block, config.model.n_layer * block + work
    inputs = config.model.n_layer * FLOAT * N * C
    return inputs, inputs + block + work


def _between(config: TrainConfig, N: int) -> int:
    """What there is of all segments at a time: the states between them, and the head's input with its gradient."""
    C, A, _ = _widths(config.model)
    states = N // config.model.ctx_len * config.model.n_layer * (2 * C + 3 * A)
    return FLOAT * (states + 2 * N * C) if config.trainer.tbptt else 0


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    return config.n_embd, config.n_att or config.n_embd, config.n_ffn or 4 * config.n_embd
