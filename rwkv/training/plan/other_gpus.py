"""Plans a run on GPUs that this machine lacks, without building the model.

An option such as plan=h100 names the GPU, and trainer.devices and trainer.num_nodes give the number of GPUs. The plan has these
lines:

    memory      the formulas of memory/estimate.py, and CONTEXT per process
    exchange    the bytes that each of n devices sends in a step of a model with P parameters:
                  ddp     2 (n - 1) / n 4 P             ring all-reduce of the gradients in float32
                  fsdp    (n - 1) / n (2 b (P - E) + 4 E) a      all-gather for each of the a batches of a step: blocks'
                                                        weights of b bytes, the dtype of the products, for forward and
                                                        backward; the E parameters of embedding and head once
                          (n - 1) / n 4 P               reduce-scatter of the gradients in float32, once in a step
    speed       the GPU computes 6 operations per parameter and token, and 2 more with activation checkpointing, at the rate of
                a MEASURED run; the host takes as long per layer as in that run
    checkpoint  weights and moments; with fsdp each machine writes its shards

The exchange overlaps with the computation fully or not at all, so the speed is a range. Assumptions are marked as assumed.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rwkv.config import TrainConfig
from rwkv.data.prepare import Corpus
from rwkv.distributed import fail_together, log
from rwkv.errors import UserError
from rwkv.io.lines import count_of, labelled_line
from rwkv.model.base import generation, n_parameters
from rwkv.training.device import dtype_for
from rwkv.training.memory.estimate import (
    FLOAT,
    Memory,
    estimate,
    format_bytes,
    n_checkpoints,
    n_outside_blocks,
    n_trained,
    one_checkpoint_bytes,
)
from rwkv.training.memory.lines import fitting_remedy_lines
from rwkv.training.memory.remedies import remedies, with_keys
from rwkv.training.plan.duration import format_duration, product_parameters
from rwkv.training.run.directory import Run
from rwkv.training.run.resolve import Context, Stage, resolve
from rwkv.training.setup import data_for

GIB = 2 ** 30
CONTEXT = 6 * 10 ** 8                    # bytes of the CUDA context and library buffers per process
DISK = 10 ** 9                           # a machine writes this many bytes per second
RECOMPUTED = 4 / 3                       # activation checkpointing multiplies the time of a step by this factor
BITS_OF_A_BYTE = 8
NVLINK = "NVLink"


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that determine the plan.

    Args:
        gib: the usable memory in GiB.
        teraflops: the vendor's peak rate for dense bfloat16.
        inside: the Gbit/s in each direction to other GPUs of the same machine.
        between: the Gbit/s in each direction to other machines, as the GPU's share of a typical network.
    """

    name: str
    gib: float
    teraflops: float
    inside: float
    between: float


GPUS = {"a100": Gpu("A100 80 GB", 79, 312, 2400, 200), "h100": Gpu("H100", 79, 989, 3600, 400),
        "h200": Gpu("H200", 139, 989, 3600, 400), "rtx3060": Gpu("RTX 3060", 11.7, 25, 100, 10),
        "rtx4090": Gpu("RTX 4090", 23.5, 165, 200, 10), "rtx5090": Gpu("RTX 5090", 31.3, 209, 400, 10)}
MEASURED_ON = "h200"


class MeasuredStep(NamedTuple):
    """A measured step of B rows of T tokens on one H200 with kernel=auto, from benchmarks/results/training-h200.json."""

    generation: str
    precision: str
    n_layer: int
    n_embd: int
    vocab_size: int
    B: int
    T: int
    ms: float
    host_ms: float

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.B * self.T / self.ms


MEASURED = (
    MeasuredStep("rwkv7", "bf16-mixed", 12, 768, 65536, 8, 1024, 153.3, 132.8),
    MeasuredStep("rwkv7", "bf16-mixed", 24, 2048, 65536, 4, 1024, 288.1, 239.6),
    MeasuredStep("rwkv7", "32-true", 12, 768, 65536, 8, 1024, 252.6, 116.4),
    MeasuredStep("rwkv7", "32-true", 24, 2048, 65536, 4, 1024, 918.2, 216.6),
    MeasuredStep("rwkv7", "tf32", 12, 768, 65536, 8, 1024, 169.0, 91.5),
    MeasuredStep("rwkv7", "tf32", 24, 2048, 65536, 4, 1024, 354.4, 204.2),
    MeasuredStep("rwkv4", "bf16-mixed", 12, 768, 50277, 8, 1024, 115.3, 81.6),
    MeasuredStep("rwkv4", "32-true", 12, 768, 50277, 8, 1024, 173.9, 63.2),
    MeasuredStep("rwkv4", "tf32", 12, 768, 50277, 8, 1024, 82.0, 65.1))


@dataclass(frozen=True)
class Estimate:
    """The estimate of a step. Bytes and seconds are those of one device, and tokens are those of all devices."""

    devices: int
    need: Memory
    exchanged: float
    link_gbps: float
    exchange_s: float
    compute_s: float
    tokens: int
    measured: MeasuredStep

    @property
    def memory(self) -> int:
        """Returns the bytes that a process needs, including the CUDA context."""
        return self.need.total + CONTEXT

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Returns two speeds: without overlap of exchange and computation, and with full overlap."""
        return (self.tokens / (self.compute_s + self.exchange_s), self.tokens / max(self.compute_s, self.exchange_s))


def plan_on(config: TrainConfig, vocab_size: int, gpu: Gpu) -> Estimate:
    """Estimates a step on `gpu`. data.batch_size must be a multiple of the number of devices."""
    trainer = config.trainer
    n = trainer.devices * trainer.num_nodes
    sent = exchanged_bytes(config, vocab_size, n)
    link = trainer.link_gbps or (gpu.between if trainer.num_nodes > 1 else gpu.inside)
    row = nearest_measurement(config)
    return Estimate(n, estimate(config, vocab_size, n, round(gpu.gib * GIB)), sent, link,
                    sent * BITS_OF_A_BYTE / (link * 1e9), _compute_seconds(config, vocab_size, n, gpu, row),
                    config.tokens_per_step, row)


def exchanged_bytes(config: TrainConfig, vocab_size: int, n: int) -> float:
    """Returns the bytes that each of n devices sends in a step."""
    if config.trainer.strategy != "fsdp":
        return 2 * (n - 1) / n * FLOAT * n_trained(config, vocab_size)
    P, outside = n_parameters(config.model, vocab_size), n_outside_blocks(config, vocab_size)
    passes = config.trainer.accumulate * max(1, config.trainer.tbptt)
    gathered = 2 * dtype_for(config.trainer.precision).itemsize * (P - outside) + FLOAT * outside
    return (n - 1) / n * (passes * gathered + FLOAT * n_trained(config, vocab_size))


def nearest_measurement(config: TrainConfig) -> MeasuredStep:
    """Returns the measured step of the model's generation and precision with the nearest width.

    float16 counts as bfloat16. Raises UserError if no step was measured.
    """
    model, precision = config.model, str(config.trainer.precision).replace("fp16", "bf16")
    candidates = [row for row in MEASURED if (row.generation, row.precision) == (model.generation, precision)]
    if not candidates:
        raise UserError(f"plan= requires measured training steps, but timemix has none for {generation(model).NAME} in "
                        f"{precision}: omit plan=")
    return min(candidates, key=lambda row: abs(math.log(row.n_embd / model.n_embd)))


def _compute_seconds(config: TrainConfig, vocab_size: int, n: int, gpu: Gpu, row: MeasuredStep) -> float:
    # The passes of a step take as long as the GPU or the host, whichever is slower
    measured = replace(config.model, n_layer=row.n_layer, n_embd=row.n_embd, **_default_widths(config))
    rate = row.tokens_per_second * product_parameters(measured, row.vocab_size) * gpu.teraflops / GPUS[MEASURED_ON].teraflops
    on_gpu = config.tokens_per_step / n * product_parameters(config.model, vocab_size) / rate
    passes = config.trainer.accumulate * max(1, config.trainer.tbptt)
    on_host = passes * row.host_ms / 1000 * config.model.n_layer / row.n_layer
    return max(on_gpu, on_host) * (RECOMPUTED if config.trainer.activation_checkpointing else 1)


def _default_widths(config: TrainConfig) -> dict[str, Any]:
    # The defaults of these widths follow n_embd, so None lets the measured model's n_embd determine them
    return dict.fromkeys((*(name for name in vars(config.model) if name.endswith("_low_rank_dim")), "n_att", "n_ffn",
                          "deep_embed_dim"))


def announce(run: Run) -> None:
    """Prints the plan on standard error. Raises UserError if the run does not fit into the memory of a device."""
    data = data_for(run, torch.device("cpu"))
    config, _ = resolve(_with_devices(run.config), Stage.DATA, Context(data=data))
    vocab_size = run.vocab_size(data.tokenizer)
    gpu, why = chosen_gpu(config.plan)
    config, warning = with_whole_rows(config)
    result = plan_on(config, vocab_size, gpu)
    lines = [("data", data.describe()), *([("WARNING", warning)] if warning else []),
             *_plan_lines(config, vocab_size, gpu, why, result), *_length_lines(config, result, data)]
    for subject, text in lines:
        log(labelled_line(subject, text, sys.stderr))
    capacity = round(gpu.gib * GIB)
    if result.memory > capacity:
        remedy = next((text for _, text in _remedy_lines(config, vocab_size, result.devices, gpu)), None)
        fail_together(UserError(
            f"training needs {format_bytes(result.memory)} of memory on each GPU, but the {gpu.name} has "
            f"{format_bytes(capacity)}: "
            + (f"training needs only {remedy}" if remedy else "use a smaller model= or model.ctx_len=")))


def _with_devices(config: TrainConfig) -> TrainConfig:
    if config.trainer.devices:
        return config
    if not torch.cuda.is_available():
        raise UserError("a plan for GPUs requires the number of GPUs per machine: set trainer.devices=, such as "
                        "trainer.devices=8")
    return with_keys(config, {"trainer.devices": torch.cuda.device_count()})


def chosen_gpu(plan: str) -> tuple[Gpu, str]:
    """Returns the GPU that plan= names, or else this machine's GPU, or else MEASURED_ON, and the reason for the choice."""
    if plan in GPUS:
        return GPUS[plan], f"plan={plan}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        model = next((gpu for gpu in GPUS.values() if gpu.name.split()[-1] in device.name), GPUS[MEASURED_ON])
        return replace(model, name=device.name, gib=device.total_memory / GIB), "as on this machine"
    return GPUS[MEASURED_ON], f"assumed; plan={', '.join(GPUS)} for others"


def with_whole_rows(config: TrainConfig) -> tuple[TrainConfig, str | None]:
    """Rounds data.batch_size up to a multiple of the number of devices. Returns the configuration, and a warning if changed."""
    n = config.trainer.devices * config.trainer.num_nodes
    rows = config.data.batch_size
    if rows % n == 0:
        return config, None
    rounded = -(-rows // n) * n
    return (replace(config, data=replace(config.data, batch_size=rounded)),
            f"data.batch_size must be a multiple of {n:,}, the number of processes; got {rows}. This plan is for "
            f"data.batch_size={rounded}")


def _plan_lines(config: TrainConfig, vocab_size: int, gpu: Gpu, why: str, result: Estimate) -> Iterator[tuple[str, str]]:
    trainer = config.trainer
    yield "model", (f"{generation(config.model).NAME}, {count_of(config.model.n_layer, 'layer')}, {config.model.n_embd} wide, "
                    f"{n_parameters(config.model, vocab_size):,} parameters, vocabulary {vocab_size}")
    machines = f": {trainer.devices} on each of {count_of(trainer.num_nodes, 'machine')}" if trainer.num_nodes > 1 else ""
    yield "devices", f"{result.devices:,} x {gpu.name} ({why}){machines}, trainer={trainer.strategy}, {trainer.precision}"
    yield from _memory_lines(config, vocab_size, gpu, result)
    source = "trainer.link_gbps" if trainer.link_gbps else "assumed; set trainer.link_gbps to change it"
    if result.devices > 1:
        yield "exchange", (f"{format_bytes(round(result.exchanged))} sent by each device in a step: {result.exchange_s:.3g} s "
                           f"at {result.link_gbps:g} Gbit/s ({source}); {result.compute_s:.3g} s of computation")
    yield "speed", _speed_text(config, vocab_size, gpu, result)
    size = one_checkpoint_bytes(config, vocab_size)
    writers = trainer.num_nodes if trainer.strategy == "fsdp" else 1
    yield "checkpoint", (f"{format_bytes(size)}, written in {format_duration(size / writers / DISK)} at {format_bytes(DISK)}/s "
                         f"{'by each machine' if writers > 1 else 'by one process'} (assumed); "
                         f"{format_bytes(n_checkpoints(trainer.keep_last) * size)} for {n_checkpoints(trainer.keep_last)}")


def _memory_lines(config: TrainConfig, vocab_size: int, gpu: Gpu, result: Estimate) -> Iterator[tuple[str, str]]:
    capacity = round(gpu.gib * GIB)
    need = result.need
    yield "memory", f"about {format_bytes(result.memory)} of the {format_bytes(capacity)} of each device, by formula"
    yield "", (f"weights {format_bytes(need.weights)}, gradients {format_bytes(need.gradients)}, "
               f"optimiser {format_bytes(need.optimiser)}, activations {format_bytes(need.activations)}, "
               f"loss {format_bytes(need.loss)}, CUDA {format_bytes(CONTEXT)} (assumed)")
    if result.memory > capacity:
        yield from _remedy_lines(config, vocab_size, result.devices, gpu)


def _remedy_lines(config: TrainConfig, vocab_size: int, n: int, gpu: Gpu) -> list[tuple[str, str]]:
    capacity = round(gpu.gib * GIB)
    return list(fitting_remedy_lines(remedies(config, vocab_size, n, "cuda", capacity), capacity - CONTEXT, CONTEXT))


def _speed_text(config: TrainConfig, vocab_size: int, gpu: Gpu, result: Estimate) -> str:
    low, high = result.tokens_per_second
    row, measured_on = result.measured, GPUS[MEASURED_ON]
    span = f"{low:,.0f}" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f}"
    used = high / result.devices * 6 * product_parameters(config.model, vocab_size) / gpu.teraflops / 1e12
    scaled = ""
    if config.trainer.activation_checkpointing:
        scaled += ", a third longer with activation checkpointing"
    if gpu.teraflops != measured_on.teraflops:
        scaled += f", times {gpu.teraflops:g} / {measured_on.teraflops:g}, the vendor's peak rates (assumed)"
    return (f"{span} tokens/s{', without or with overlapping exchange' if result.devices > 1 else ''}; at most "
            f"{100 * used:.2g} % of the peak of the {gpu.name}; from a measured step on one H200, "
            f"{row.generation} {row.n_layer} x {row.n_embd}, {row.precision}, {row.B} x {row.T}: "
            f"{row.tokens_per_second:,.0f} tokens/s{scaled}")


def _length_lines(config: TrainConfig, result: Estimate, data: Corpus) -> Iterator[tuple[str, str]]:
    low, high = (format_duration(config.trainer.max_steps * result.tokens / speed) for speed in result.tokens_per_second)
    span = low if low == high else f"{high} to {low.removeprefix('about ')}"
    yield "training", (f"{count_of(config.trainer.max_steps, 'step')} of {count_of(result.tokens, 'token')}: "
                       f"{count_of(config.trainer.max_steps * result.tokens, 'token')}, {span} without validation")
