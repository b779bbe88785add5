"""A model's decoding step on a GPU: Triton kernels (triton_kernels.py, rwkvN/step_triton.py) in one CUDA graph.

A step reads one token of each sequence. Each sequence has a slot, which holds the recurrent state while the sequence runs. Slot
0 is for padding rows. A step of n rows runs in the smallest bucket (1, 2, 4, 8, ...) of at least n rows. The graph of a bucket
is captured once, at its first use or at warm-up. Other graphs prefill several short prompts in one run, and there each row is a
prompt token. Captured kernels contain the addresses of their buffers. So when more slots are needed, new buffers are allocated
and the graphs are captured again.

Weights keep the model's format: float32, bfloat16, float16, or packed int8 and int4 (kernels/matvec), which are unpacked in
registers. Inputs of products are rounded to the dtype of the weights, or to bfloat16 if the weights are packed. All else is
computed in float32.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.backends.graphs import capture
from kernels.backends.transfer import to_device
from kernels.machine import triton
from rwkv.model.base import Model, has_optional_module, optional_module
from rwkv.model.decoding.c_step import why_changed
from rwkv.model.quantized import PackedLinear
from rwkv.model.state import State

ALIGNED = 8                              # widths are multiples of this, so that a thread loads 16 bytes at a time
OFFSET_ALIGNMENT = 16                    # offsets in a row of a buffer are multiples of this
WARP = 32                                # threads
PROMPT_BUCKETS = 16, 64                  # rows of the prefill graphs
MAX_PROMPT_TOKENS = PROMPT_BUCKETS[-1]
SPARE_SLOTS = 8                          # slots for prompts in prefill, besides those of running sequences
MANY_OUTPUTS = 8192                      # from this many outputs of a launch, larger tiles still occupy every multiprocessor
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """A kernel launch of a step.

    Args:
        grid: a function from the number of rows to the launch grid.
        constants: the kernel's constexpr arguments, or a function that returns them for a number of rows.
        takes_rows: whether the kernel's last argument is the number of rows.
        takes_prefill: whether the kernel has a constexpr argument PREFILL.
    """

    kernel: Any                          # a function of triton.jit
    grid: Callable[[int], tuple[int, ...]]
    args: tuple[object, ...]
    constants: Mapping[str, object] | Callable[[int], Mapping[str, object]]
    takes_rows: bool = False
    takes_prefill: bool = False

    def run(self, rows: int, prefill: bool) -> None:
        constants = self.constants(rows) if callable(self.constants) else self.constants
        if self.takes_prefill:
            constants = {**constants, "PREFILL": prefill}
        self.kernel[self.grid(rows)](*self.args, *([rows] if self.takes_rows else ()), **constants,
                                     enable_fp_fusion=True)


def why_not(model: Model) -> str | None:
    """Returns the reason why Triton kernels cannot compute the model's step, or None if they can."""
    device = model.emb.weight.device
    if device.type != "cuda":
        return f"the model is on {device.type}"
    return why_not_on_gpu(model) or triton.why_not(device)


def step_of(model: Model) -> "GpuStep":
    """Returns the cached step of a model for which why_not returns None."""
    return model.decoding_step.of(model, GpuStep)


def why_not_on_gpu(model: Model) -> str | None:
    """Returns the result of why_not without the check of the device."""
    if not has_optional_module(model.config, "step_triton"):
        return f"{model.generation.NAME} has no decoding step on a GPU"
    if changed := why_changed(model):
        return changed
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    widths = {layer.in_features for layer in linears if layer.in_features % ALIGNED}
    if widths:
        return f"the width {widths.pop()} is not a multiple of {ALIGNED}"
    return None


class GpuStep:
    """The GPU step of a model with its current weights, and the slots of all its sequences.

    The attribute `states` (slots,size) has the recurrent states in float32. `capacity` is the initial number of slots; take()
    adds more when needed. Several decoders may share a step.
    """

    def __init__(self, model: Model, capacity: int = 2) -> None:
        self._model = weakref.ref(model)                 # the reference is weak, because the model caches this step
        self._device = model.emb.weight.device
        self._L = len(model.blocks)
        self._shapes = [part.shape[2:] for part in model.zero_state(1, "meta")]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        with torch.inference_mode(False):
            self.states = torch.zeros(1, self._L * sum(self._sizes), device=self._device)
        self._free: list[int] = []
        self.grow(capacity)

    @torch.inference_mode(False)
    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Makes slots for `capacity` sequences, and allocates new buffers. Graphs are captured again at their next use."""
        n = len(self.states)
        model = self._model()
        assert model is not None
        states = self.states.new_zeros(capacity + 1, self.states.shape[1])
        states[:n] = self.states
        self.states = states
        self._free += range(n, capacity + 1)
        self._builder = Builder(model, states, _buffer_rows(capacity))
        self.launches: list[Launch] = optional_module(model.config, "step_triton").launches(model, self._builder)
        self._graphs: dict[int, Callable[[], None]] = {}         # maps a bucket to its graph
        self._prompt_graphs: dict[int, Callable[[], None]] = {}

    def reserve(self, rows: int) -> None:
        """Makes slots for `rows` sequences and SPARE_SLOTS prompts, and captures all graphs that they can need."""
        if rows + SPARE_SLOTS >= len(self.states):
            self.grow(rows + SPARE_SLOTS)
        for bucket in reversed(buckets_to(rows)):                # the largest bucket goes first
            if bucket not in self._graphs:
                self.capture(bucket)
        for bucket in PROMPT_BUCKETS:
            if bucket not in self._prompt_graphs:
                self.capture(bucket, prefill=True)

    def nbytes(self) -> int:
        """Returns the memory of slots and buffers, in bytes."""
        return self.states.nbytes + self._builder.nbytes()

    def nbytes_for(self, rows: int) -> int:
        """Returns the memory of slots and buffers for `rows` sequences, in bytes."""
        buffers = _buffer_rows(rows + SPARE_SLOTS) * self._builder.nbytes() // len(self._builder.tokens)
        return (rows + SPARE_SLOTS + 1) * self.states[0].nbytes + buffers

    def take(self, n: int) -> list[int]:
        """Reserves n free slots, and adds slots if needed."""
        if n > len(self._free):
            in_use = len(self.states) - 1 - len(self._free)
            self.grow(bucket_of(in_use + n))
        new_slots = self._free[:n]
        del self._free[:n]
        return new_slots

    def release(self, slots: Sequence[int]) -> None:
        self._free += slots

    def write(self, slots: Sequence[int], state: State) -> None:
        """Copies row i of `state` into slots[i]."""
        index = self.on_device(slots)
        for part, tensor in zip(self._parts(), state, strict=True):
            part[index] = tensor.transpose(0, 1).flatten(2).to(part)

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        """Returns copies of the state tensors, (L,rows,...), with row i from slots[i]."""
        index = self.on_device(slots)
        return [part[index].transpose(0, 1).contiguous().unflatten(2, shape)
                for part, shape in zip(self._parts(), self._shapes, strict=True)]

    def on_device(self, slots: Sequence[int]) -> Tensor:
        """Copies the slots to the GPU, as (n,) int64."""
        return to_device(torch.tensor([*slots], dtype=torch.int64, device="cpu"), self._device)

    def _parts(self) -> tuple[Tensor, ...]:
        return self.states.view(len(self.states), self._L, -1).split(self._sizes, 2)

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Reads tokens (n,) int64, one for each of the slots (n,) int64. Returns the logits (n,V)."""
        n = len(tokens)
        if n:
            bucket = bucket_of(n)
            self._replay(self._graphs.get(bucket) or self.capture(bucket), bucket, tokens, slots)
        return self._builder.logits[:n].clone()          # the next replay overwrites the logits

    def read_prompts(self, prompts: Sequence[Tensor], slots: Tensor) -> Tensor:
        """Reads n prompts of (t,) int64 tokens each, and returns the logits (n,V) after each prompt's last token.

        The prompts have at most MAX_PROMPT_TOKENS tokens in total, and `slots` (n,) int64 is on the GPU. The results are
        bit-identical to those of reading one token per step.
        """
        lengths = torch.tensor([*map(len, prompts)], device="cpu")
        rows = int(lengths.sum())
        bucket = next(bucket for bucket in PROMPT_BUCKETS if bucket >= rows)
        replay = self._prompt_graphs.get(bucket) or self.capture(bucket, prefill=True)
        self._replay(replay, bucket, torch.cat([*prompts]),
                     slots.repeat_interleave(to_device(lengths, self._device), output_size=rows))
        return self._builder.logits[to_device(lengths.cumsum(0) - 1, self._device)]

    def _replay(self, replay: Callable[[], None], bucket: int, tokens: Tensor, slots: Tensor) -> None:
        n = len(tokens)
        self._builder.tokens[:n].copy_(to_device(tokens, self._device))
        self._builder.slots[:n].copy_(slots)
        self._builder.slots[n:bucket + 1].zero_()        # slots[bucket] is set too, because 0 ends the last prompt
        replay()

    def capture(self, bucket: int, prefill: bool = False) -> Callable[[], None]:
        """Captures the graph of a bucket, for decoding or for prefill. The runs during capture use only slot 0."""
        self._builder.slots.zero_()
        graphs = self._prompt_graphs if prefill else self._graphs
        graphs[bucket] = capture(lambda: self.run(bucket, prefill), self._device)
        return graphs[bucket]

    def run(self, rows: int, prefill: bool = False) -> None:
        """Launches the kernels one by one. `prefill` tells whether a sequence may have several rows."""
        for launch in self.launches:
            launch.run(rows, prefill)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns tl.dot's dtype for inputs of `dtype`: float32 on a CPU, since Triton's interpreter lacks bfloat16 products."""
    return torch.float32 if device.type == "cpu" else dtype


def warps_for(elements: int, most: int = 4) -> int:
    """Returns the number of warps of a program that updates `elements` in place: at most one thread per element.

    Additional threads would hold duplicates of elements, and one might load an element after another thread has stored it.
    """
    return max(1, min(most, elements // WARP))


def bucket_of(rows: int) -> int:
    """Returns the smallest power of 2 that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


def _buffer_rows(capacity: int) -> int:
    return max(bucket_of(capacity), MAX_PROMPT_TOKENS)


def buckets_to(rows: int) -> list[int]:
    """Returns the buckets that steps of up to `rows` rows use."""
    return [2**i for i in range(bucket_of(rows).bit_length())]


class Builder:
    """Builds a generation's launches: assigns offsets in the rows of the buffers, and builds the tables of products.

    All offsets must be assigned before the first launch is built, because building a launch allocates the buffers.
    """

    def __init__(self, model: Model, states: Tensor, rows: int) -> None:
        from rwkv.model.decoding import triton_kernels  # this import is here, because not every machine has Triton

        self._kernels = triton_kernels
        self._embedding = model.emb.weight.detach().contiguous()         # not the model, because the model caches the step
        self._rows = rows
        self._device = states.device
        (self.V, self.C), self.states, self.state_size = self._embedding.shape, states, states.shape[1]
        self._layer_size = self.state_size // len(model.blocks)
        self._wide_width = 0
        self._narrow_width = 0
        self._weights: list[list[Job]] = []                      # kept in memory, because the tables have their addresses
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self.slots = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)       # the last element stays 0
        self.logits = torch.zeros(rows, self.V, device=self._device)
        weight = model.head.weight if isinstance(model.head, nn.Linear) else None
        self._dtype = torch.bfloat16 if weight is None else weight.dtype
        self._dot = triton_kernels.dtype_of(product_dtype(self._dtype, self._device))

    def allocate_wide(self, width: int) -> int:
        """Reserves `width` numbers in each row of the wide buffer, and returns their offset."""
        offset = self._wide_width
        self._wide_width += -(-width // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
        return offset

    def allocate_narrow(self, width: int) -> int:
        """Reserves `width` numbers in each row of the narrow buffer (the products' inputs), and returns their offset."""
        offset = self._narrow_width
        self._narrow_width += -(-width // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
        return offset

    @cached_property
    def wide_buffer(self) -> Tensor:
        return torch.zeros(self._rows, self._wide_width, device=self._device)

    @cached_property
    def narrow_buffer(self) -> Tensor:
        return torch.zeros(self._rows, self._narrow_width, dtype=self._dtype, device=self._device)

    def nbytes(self) -> int:
        """Returns the memory of the buffers of all rows, in bytes."""
        return self.wide_buffer.nbytes + self.narrow_buffer.nbytes + self.logits.nbytes

    @property
    def wide_size(self) -> int:
        return self.wide_buffer.shape[1]

    @property
    def narrow_size(self) -> int:
        return self.narrow_buffer.shape[1]

    def state_offset(self, layer: int) -> int:
        """Returns the offset of a layer's state in a slot."""
        return layer * self._layer_size

    def vectors(self, *values: Tensor) -> Tensor:
        """Returns several vectors as one tensor (n,C) in float32."""
        return torch.stack([value.detach().float().flatten() for value in values])

    def norm_and_mixes(self, norm: nn.Module, x: int, past: Tensor | None, mixed: int, state: int,
                       ln0: nn.Module | None = None) -> Launch:
        """Returns a launch that stores n mixes of LayerNorm(x) and the previous token's LayerNorm(x).

        Args:
            x, mixed, state: offsets in the wide buffer, the narrow buffer and a slot.
            past (n,C): the weights of the previous token. With None, the launch stores LayerNorm(x) instead of mixes.
            ln0: a LayerNorm, only for the first layer, whose x is ln0(embedding[token]).
        """
        layer_norm = cast(nn.LayerNorm, norm)
        first = cast(nn.LayerNorm, ln0 or norm)
        weight, bias, ln0_weight, ln0_bias = self.vectors(layer_norm.weight, layer_norm.bias, first.weight, first.bias)
        mixes = 0 if past is None else len(past)
        block = 1 << (self.C - 1).bit_length()
        warps = warps_for(block, 4 if block <= 2048 else 8)
        constants = {"EMBED": ln0 is not None, "MIXES": mixes, "BLOCK": block, "num_warps": warps}
        args = (self.tokens, self.slots, self._embedding, ln0_weight, ln0_bias, first.eps, weight, bias, layer_norm.eps,
                weight if past is None else past,
                self.wide_buffer, self.narrow_buffer, self.states, self.V, self.C,
                self.wide_size, self.narrow_size, self.state_size, x, mixed, state)
        return Launch(self._kernels.norm_and_mixes, lambda rows: (rows,), args, constants, takes_prefill=True)

    def job(self, layer: nn.Module, source: int, target: int, action: int, gate: int = 0) -> "Job":
        """Returns the job of a linear layer with weights in any format.

        Args:
            source, gate: offsets in the narrow buffer and in the wide buffer.
            target: an offset in the buffer that the action writes.
        """
        if isinstance(layer, PackedLinear):
            packed = layer.packed
            weight, scale, *shift = packed
            return Job(packed.format, weight, scale, shift[0] if shift else scale, len(weight), packed.K, source, target,
                       action, gate)
        return self._float_job(cast(nn.Linear, layer).weight.detach(), source, target, action, gate)

    def matrix_job(self, weight: Tensor, source: int, target: int, action: int) -> "Job":
        """Returns the job for a matrix (N,K), which is zero-padded so that N and K are multiples of ALIGNED."""
        N, K = weight.shape
        padded = nn.functional.pad(weight.detach(), (0, -K % ALIGNED, 0, -N % ALIGNED))
        return self._float_job(padded, source, target, action)

    def _float_job(self, weight: Tensor, source: int, target: int, action: int, gate: int = 0) -> "Job":
        weight = weight.contiguous()
        if weight.data_ptr() % (2 * OFFSET_ALIGNMENT * weight.element_size()):
            weight = weight.clone()
        N, K = weight.shape
        return Job("float", weight, weight, weight, N, K, source, target, action, gate)

    def products(self, *jobs: "Job") -> list[Launch]:
        """Returns the launches of these jobs, one for each weight format and dtype."""
        groups: dict[tuple[str, torch.dtype], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.format, job.weight.dtype), []).append(job)
        return [self._launch(group, self.wide_buffer) for group in groups.values()]

    def head(self, layer: nn.Module, source: int) -> list[Launch]:
        return [self._launch([self.job(layer, source, 0, self._kernels.WIDE)], self.logits)]

    def _launch(self, jobs: list["Job"], target: Tensor) -> Launch:
        first = jobs[0]
        total = sum(job.N for job in jobs)
        block_n = 64 if total >= MANY_OUTPUTS else 16
        table = []
        tiles = 0
        for job in jobs:
            table.append([tiles, job.N, job.K, _offset_from(job.weight, first.weight), _offset_from(job.scale, first.scale),
                          _offset_from(job.shift, first.shift), job.source, job.target, job.action, job.gate])
            tiles += -(-job.N // block_n)
        assert len(jobs) <= self._kernels.MAX_JOBS
        table += [[tiles, *[0] * (self._kernels.FIELDS - 1)]] * (self._kernels.MAX_JOBS - len(jobs))
        wide = first.weight.dtype == torch.float32
        constants = {"FORMAT": first.format, "BLOCK_N": block_n, "BLOCK_K": self._kernels.BLOCK_K,
                     "DOT": self._dot, "num_warps": (8 if first.format == "int4" or wide else 4) if block_n == 64 else 2,
                     "num_stages": 2 if wide else 4}
        args = (torch.tensor(table, device=self._device), first.weight, first.scale, first.shift, self.wide_buffer,
                self.narrow_buffer, target, self.wide_size, self.narrow_size, target.shape[1])
        self._weights.append(jobs)
        return Launch(self._kernels.products, lambda rows: (tiles, -(-rows // _rows_per_tile(rows))), args,
                      lambda rows: {**constants, "BLOCK_M": _rows_per_tile(rows)}, takes_rows=True)


@dataclass(frozen=True)
class Job:
    """A matrix W (N,K) in a launch of products, and the offsets of its inputs and outputs in a row."""

    format: str
    weight: Tensor
    scale: Tensor
    shift: Tensor
    N: int
    K: int
    source: int
    target: int
    action: int
    gate: int


def _rows_per_tile(rows: int) -> int:
    """Returns the rows per tile. Tiles of more than 32 rows would use instructions that sum in a different order."""
    return 16 if rows <= 16 else 32


def _offset_from(tensor: Tensor, base: Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
