"""Estimates the memory and the disk space that a run needs, from the run's configuration alone.

The table shows the memory of one process, in floats of 4 bytes. The symbols are:

    N, C, V, L    tokens of one batch in one process, n_embd, vocabulary size, layers
    P             parameters of the model
    K             a block's saved activations per token (saved_activations of the model's generation)
    W             the operator's working values per token (operator_work)
    S             values of a state per row

    weights, gradients, Adam's two moments             4 P; with fsdp each process has its shard, but whole gradients when
                                                       accumulating; with tune=lora or state gradients and moments only
                                                       of trained parameters; frozen matrices take BITS of tune.base per
                                                       value, the embedding 2 bytes
      with trainer.optim_in_backward                   gradients of one block; the embedding's gradient replaces the head's,
                                                       which counts below, as part of the loss
      with optim=adamw8bit                             moments in bytes, plus one chunk in float32 during an update
    saved activations                                  N L K; K is smaller if blocks recompute (_recomputes)
      in half precision                                a different K, and a weight cache of P / 2; with optim_in_backward
                                                       the cache of one block at a time, unless blocks recompute
      with fsdp                                        also the gathered embedding and head, two blocks, and one block's
                                                       gradients
      with activation checkpointing                    N L C, and one block's activations during its recomputation
      with tbptt=k                                     activations of one segment, N/k tokens; k states of S for each row;
                                                       the head's input and its gradient, 2 N C
    the loss                                           one chunk of logits (on a GPU mostly all of them, in the dtype of the
                                                       product), and the head's gradient
    the first layer to run backward                    N W, and the head's gradient; the loss is freed by then, and without
                                                       accumulation there are no other gradients yet

The per-token counts match the tensors that rwkv/model/ saves; a test compares the total with the measured peak. A step's
gradients live until the next step's backward pass (Lightning's order).
"""

import math
import sys
from dataclasses import dataclass

import torch

from rwkv.config import BITS, EIGHT_BITS, TrainConfig
from rwkv.model.base import generation, is_linear_weight, n_parameters, state_nbytes
from rwkv.model.lora import layers_to_adapt, linear_layer_names
from rwkv.model.loss import rows_per_chunk, rows_per_chunk_on_gpu
from rwkv.training.device import device_for, dtype_for
from rwkv.training.optim import adamw8bit

FLOAT = 4                                # bytes
NARROW = 2                               # a frozen embedding and head take 2 bytes per value, as in released files
MOMENTS = 2                              # Adam has two moments
RECOMPUTED = 40                          # values per token / n_embd in the backward pass of a block that recomputes the
                                         # operations between its matrix products
HOLES = 1.25                             # a fragmented heap multiplies the memory of activations and loss by this factor
SMALL_RUN = 5 * 10 ** 8                  # bytes in addition to the program; a smaller run does not trade speed for memory
DATA_WORKER = 100 * 2 ** 20              # unshared bytes of a data-loader process
MIN_FRACTION = 0.75                      # a run is refused unless this fraction of activations and loss fits
BEST, BEING_WRITTEN = 1, 1               # the disk holds these checkpoints in addition to the trainer.keep_last newest


@dataclass(frozen=True)
class Memory:
    """The bytes that training needs in one process, in addition to the program and libraries."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    loss: int
    workers: int

    @property
    def fixed(self) -> int:
        """Returns the bytes of weights, gradients and optimiser, which a smaller batch does not reduce."""
        return self.weights + self.gradients + self.optimiser

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.loss + self.workers

    @property
    def least(self) -> int:
        """Returns the bytes that must be free. Only MIN_FRACTION of activations and loss counts, because both are estimates."""
        return self.fixed + round(MIN_FRACTION * (self.total - self.fixed))


def estimate(config: TrainConfig, vocab_size: int, processes: int = 1, gpu_memory: int | None = None) -> Memory:
    """Returns the memory that each process needs.

    Args:
        processes: the number of processes, which share the rows of data.batch_size.
        gpu_memory: the bytes of memory of each process's GPU, in a plan for other machines. None stands for this machine's
            device.
    """
    trainer = config.trainer
    model = generation(config.model)
    half, rounded = dtype_for(trainer.precision) != torch.float32, config.tune.base in ("int8", "int4")
    L, C = config.model.n_layer, config.model.n_embd
    N = config.tokens_per_step // trainer.accumulate // processes
    shares = processes if trainer.strategy == "fsdp" else 1
    trained = FLOAT * n_trained(config, vocab_size) // shares
    weights = trained
    tuned = config.tune.method != "full"
    if tuned:
        weights = frozen_bytes(config, vocab_size) // shares + trained

    moments = MOMENTS * trained
    if config.optim.name == EIGHT_BITS:
        moments = moment_bytes_8bit(config, vocab_size) + FLOAT * adamw8bit.WORK * min(adamw8bit.CHUNK, trained // FLOAT)
    gradients = trained * shares if trainer.accumulate > 1 else trained
    if trainer.optim_in_backward and not tuned:
        gradients = FLOAT * _largest_block(config, vocab_size)
    head = 0 if tuned else FLOAT * vocab_size * C        # gradient
    loss = _loss_bytes(config, vocab_size, N, head, gpu_memory)

    n = N // max(1, trainer.tbptt)       # the tokens of one segment
    block = int(FLOAT * n * _saved_per_token(config))
    backward = FLOAT * n * (RECOMPUTED * C if _recomputes(config) else model.operator_work(config.model)) + head
    if trainer.activation_checkpointing:
        saved = L * FLOAT * n * C
        backward += block
    else:
        saved = L * block
    activations = saved + max(0, backward - loss - (0 if tuned or trainer.accumulate > 1 else gradients))
    if trainer.strategy == "fsdp":
        activations += _fsdp_bytes(config, vocab_size)
    elif half and config.tune.base != "bfloat16":
        activations += FLOAT * vocab_size * C // 2 if rounded else _weight_cache_bytes(config, vocab_size, weights)
    if trainer.tbptt:
        activations += N // config.model.ctx_len * state_nbytes(config.model) + FLOAT * 2 * N * C
    if gpu_memory is None and _fragments_heap(config):
        activations = round(HOLES * activations)
        loss = round(HOLES * loss)
    return Memory(weights, gradients, moments, round(activations), loss, config.data.num_workers * DATA_WORKER)


def _loss_bytes(config: TrainConfig, vocab_size: int, N: int, head: int, gpu_memory: int | None) -> int:
    """Returns the bytes that the loss of N tokens takes. `head` is the bytes of the head's gradient.

    In half precision, several chunks accumulate into a second gradient of the head. A GPU has one copy of a chunk's logits in
    the dtype of the product. A CPU has two copies in half precision.
    """
    half = dtype_for(config.trainer.precision) != torch.float32
    device = torch.device("cuda") if gpu_memory else device_for(config.trainer.accelerator)
    itemsize = NARROW if half and device.type == "cuda" else FLOAT
    if gpu_memory:
        rows = min(N, rows_per_chunk_on_gpu(vocab_size, itemsize, gpu_memory))
    else:
        rows = min(N, rows_per_chunk(vocab_size, config.tune.method != "full", device, itemsize))
    copies = 2 if half and device.type == "cpu" else 1
    summands = 2 if half and (device.type == "cpu" or rows < N) else 1
    return copies * itemsize * vocab_size * rows + summands * head


def _weight_cache_bytes(config: TrainConfig, vocab_size: int, weights: int) -> int:
    """Returns the bytes of the half-precision weight cache. `weights` is the bytes of a process's weights."""
    if not config.trainer.optim_in_backward:
        return weights // 2
    total = FLOAT * n_parameters(config.model, vocab_size) // 2
    return total if _recomputes(config) else total // config.model.n_layer


def _fsdp_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Returns the bytes that a process needs with trainer=fsdp in addition to the shards.

    The embedding and the head are in float32. The current block, the prefetched block and one block's gradients are in the
    dtype of the products. The sum of the gradients is in float32.
    """
    itemsize = FLOAT if dtype_for(config.trainer.precision) == torch.float32 else NARROW
    return (FLOAT * n_outside_blocks(config, vocab_size)
            + (3 * itemsize + FLOAT) * _largest_block(config, vocab_size))


def n_outside_blocks(config: TrainConfig, vocab_size: int) -> int:
    """Returns the number of parameters of the embedding and the head."""
    return 2 * vocab_size * config.model.n_embd


def _largest_block(config: TrainConfig, vocab_size: int) -> int:
    sizes = dict.fromkeys(range(config.model.n_layer), 0)
    for name, shape in generation(config.model).shapes(config.model, vocab_size).items():
        if name.startswith("blocks."):
            sizes[int(name.split(".")[1])] += math.prod(shape)
    return max(sizes.values())


def returns_free_memory(config: TrainConfig, need: Memory) -> bool:
    """Returns True if a run returns memory to the system after each block, as large runs on a CPU do.

    The heap of a large run fragments if freed memory is not returned.
    """
    return _fragments_heap(config) and need.total > SMALL_RUN


def _fragments_heap(config: TrainConfig) -> bool:
    on_cpu = device_for(config.trainer.accelerator).type == "cpu"
    tuned_malloc = config.trainer.malloc == "tuned" and config.trainer.strategy != "fsdp"
    return on_cpu and sys.platform == "linux" and tuned_malloc and _recomputes(config)


def _recomputes(config: TrainConfig) -> bool:
    """Returns True if blocks save only the outputs of large matrix products and recompute the rest in the backward pass."""
    packed = config.data.name == "chat" and not config.trainer.tbptt
    return (config.tune.method != "full" or packed) and not config.trainer.compile


def _saved_per_token(config: TrainConfig) -> float:
    """Returns a block's saved activations per token, as a number of float32 values."""
    model = generation(config.model)
    # int8 products return float32 in half precision too
    half = dtype_for(config.trainer.precision) != torch.float32 and config.tune.base != "int8"
    if not _recomputes(config):
        saved: float = model.saved_activations(config.model, half)
        return saved
    match config.tune.method:
        case "full":
            layers = linear_layer_names(config.model)
        case "lora":
            layers = layers_to_adapt(config.model, config.tune.modules)
        case _:
            layers = []
    return model.saved_when_recomputing(config.model, half, layers, config.tune.method == "full")


def n_trained(config: TrainConfig, vocab_size: int) -> int:
    return sum(_trained_sizes(config, vocab_size))


def _trained_sizes(config: TrainConfig, vocab_size: int) -> list[int]:
    tune = config.tune
    if tune.method == "full":
        return [math.prod(shape) for shape in generation(config.model).shapes(config.model, vocab_size).values()]
    if tune.method == "state":
        state = generation(config.model).empty_state(config.model, 1, "meta")
        return [state.named()["wkv"].numel() // config.model.n_layer] * config.model.n_layer
    return [tune.rank * size for shape in _adapted_shapes(config, vocab_size) for size in shape]


def moment_bytes_8bit(config: TrainConfig, vocab_size: int) -> int:
    return round(sum(map(adamw8bit.moment_bytes, _trained_sizes(config, vocab_size))))


def frozen_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Returns the bytes of the frozen weights. With a float32 file, embedding and head take twice as many as counted."""
    base = config.tune.base
    shapes = generation(config.model).shapes(config.model, vocab_size)
    sizes: dict[str, float] = dict.fromkeys(_linear_shapes(config, vocab_size), BITS[base] / 8)
    sizes |= {name: NARROW for name in shapes if name.endswith("emb.weight") or name == "head.weight"}
    return round(sum(sizes.get(name, FLOAT) * math.prod(shape) for name, shape in shapes.items()))


def _linear_shapes(config: TrainConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    model = generation(config.model)
    return {name: shape for name, shape in model.shapes(config.model, vocab_size).items()
            if name.startswith("blocks.") and is_linear_weight(name, model.group(name))}


def _adapted_shapes(config: TrainConfig, vocab_size: int) -> list[tuple[int, ...]]:
    if config.tune.method != "lora":
        return []
    layers = layers_to_adapt(config.model, config.tune.modules)
    return [shape for name, shape in _linear_shapes(config, vocab_size).items()
            if name.split(".", 2)[2].removesuffix(".weight") in layers]


def n_checkpoints(keep_last: int) -> int:
    return keep_last + BEST + BEING_WRITTEN


def checkpoint_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Returns the peak number of bytes that a run's checkpoints take on the disk."""
    return n_checkpoints(config.trainer.keep_last) * one_checkpoint_bytes(config, vocab_size)


def one_checkpoint_bytes(config: TrainConfig, vocab_size: int) -> int:
    """Returns the bytes of one checkpoint, which holds the trained parameters and the moments."""
    trained = FLOAT * n_trained(config, vocab_size)
    if config.optim.name == EIGHT_BITS:
        return trained + moment_bytes_8bit(config, vocab_size)
    return (1 + MOMENTS) * trained


def format_bytes(size: int | None) -> str:
    """Returns a size in bytes as text, such as 1.2 GB."""
    if size is None:
        return "an unknown amount"
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.{1 if size < 100 * unit else 0}f} {name}"
