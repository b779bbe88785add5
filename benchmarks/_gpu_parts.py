"""The parts of gpu_check, each in its own process: python -m benchmarks._gpu_parts PART OUT --device cuda --deadline 60.

A failed measurement becomes a row of the results, and the part continues. After a GPU fault the part ends, because all later
CUDA calls of the process fail.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import serving
from benchmarks.generation import write_checkpoint
from benchmarks.gpu_check import PATIENCE, PUBLISHED, SERVER, Rows, not_installed
from kernels.compare import err_ratio, errors, misses, tolerance
from kernels.machine.hardware import ROOT
from kernels.registry import load, why_not
from kernels.select import AUTO, folder, rule, select, selectable
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import ModelConfig, OptimConfig, Sampling, TrainerConfig
from rwkv.generation.decoder import CDecoder, Decoder, GpuDecoder, decoder_of
from rwkv.generation.engine import Engine, generate_batch
from rwkv.generation.prefill import SHORT_PROMPT, Prefill, advance_all
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.row import Row
from rwkv.generation.sampling import draw_function_on, next_tokens
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import generation
from rwkv.model.fused import backend as fused_backend
from rwkv.model.quantized import to_packed
from rwkv.model.weights_watch import tensors_of
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, Tokenizer
from rwkv.training.device import dtype_for, set_product_precision
from rwkv.training.graphs import Replay

if TYPE_CHECKING:
    from rwkv.training.task import LanguageModel

PAUSE = 4_000_000                        # cycles (2 ms) that the GPU waits while the host launches the timed operations
SPARE_S = 3.0                            # seconds between a program's limit and its part's deadline
PROBLEMS = {"wkv7": ((2, 257, 4, 64), (2, 63, 1, 64)), "wkv4": ((3, 257, 96),)}          # shapes of the part `right`
PER_OPERATION = 500                      # number of timed launches; a stream holds 1,024 before the host waits
LOGIT_TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4, "int8": 5e-2, "int4": 5e-2, "float16": 1e-2}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 20, "repetition_penalty": 1.2}, {"top_p": 1.0, "min_p": 0.05},
    {"order": "rwkv", "top_p": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.4, "penalty_decay": 0.99})
DECODERS = (("bfloat16", "0.1b"), ("bfloat16", "1.5b"), ("int8", "1.5b"), ("int4", "1.5b"), ("float16", "0.1b"),
            ("int8", "0.1b"), ("int4", "0.1b"), ("float32", "0.1b"))             # the most common cases first
SIZES = {"0.1b": (12, 768), "1.5b": (24, 2048), "tiny": (2, 64)}                 # layers and width
SHORT = 32                               # tokens of a short answer
PROMPTS = (1, 32), (1, 512), (8, 512), (1, 4096), (8, 8)                         # prompts and their tokens


class Shape(NamedTuple):
    generation: str
    L: int
    C: int
    V: int
    B: int
    T: int

    def __str__(self) -> str:
        return f"{self.generation} {self.L}x{self.C}, {self.B} x {self.T}"


class Way(NamedTuple):
    """A way of computing a training step.

    Attributes:
        options: further fields of TrainerConfig, which must not be modified.
        fused: True for the fused layers, False for PyTorch's operations.
        graphs: True if all blocks are replayed as one CUDA graph.
    """

    name: str
    precision: str
    options: dict[str, Any] = {}         # noqa: RUF012
    fused: bool = True
    graphs: bool = False


TRAINED = (Shape("rwkv7", 12, 768, 65536, 8, 1024), Shape("rwkv7", 4, 192, 2048, 8, 128),
           Shape("rwkv7", 24, 2048, 65536, 4, 1024), Shape("rwkv4", 12, 768, 50277, 8, 1024))
TRIED = (Shape("rwkv7", 2, 64, 256, 2, 16), Shape("rwkv4", 2, 64, 256, 2, 16))           # shapes for --device cpu
WAYS = (Way("bf16", "bf16-mixed"), Way("bf16, graphs", "bf16-mixed", graphs=True), Way("tf32", "tf32"),
        Way("float32", "32-true"), Way("bf16, unfused", "bf16-mixed", fused=False))
COMPILED = (Way("bf16, compiled", "bf16-mixed", {"compile": True}),)
WKV7_SHAPES = (8, 4096, 64, 64), (8, 4096, 12, 64), (8, 1024, 12, 64), (1, 512, 64, 64)
WKV4_SHAPES = (8, 1024, 768), (8, 8192, 768), (32, 768, 768), (8, 4096, 4096)


@dataclass
class Check:
    """The output, device and deadline of a part."""

    part: str
    rows: Rows
    device: str
    deadline: float                      # in seconds of time.monotonic
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gpu-check-")))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def add(self, **row: Any) -> None:
        self.rows.add(part=self.part, **row)

    @contextlib.contextmanager
    def measuring(self, **about: Any) -> Iterator[None]:
        """Turns an exception in the `with` block into a row. A GPU fault ends the part."""
        try:
            yield
        except (Exception, SystemExit) as error:         # functions of other benchmarks exit with a message
            self.add(**about, error=f"{type(error).__name__}: {str(error)[:300]}")
            del error
            self._require_life()

    def _require_life(self) -> None:
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
        except Exception as fault:
            self.add(error=f"the part ends here: {str(fault)[:120]}")
            os._exit(3)
        gc.collect()
        torch.cuda.empty_cache()

    def left(self, most: float) -> float:
        """Returns the time limit of a program in seconds: at most `most`, and not beyond the part's deadline."""
        return max(1.0, min(PATIENCE[self.device] * most, self.deadline - time.monotonic() - SPARE_S))

    def peak_mb(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if self.on_gpu else 0.0


def milliseconds(check: Check, call: Callable[[], Any], seconds: float = 0.6, most: int = 50, alone: bool = False) -> float:
    """Returns the median time of a call in milliseconds.

    On a GPU, the time is measured by events, and includes waiting for the host's launches. With `alone`, the GPU pauses before
    the first event while the host launches everything, so that only the GPU's own time is measured.
    """
    call()
    times: list[float] = []
    end = time.monotonic() + (seconds if check.on_gpu else 0.0)
    while not times or (time.monotonic() < end and len(times) < most):
        if not check.on_gpu:
            start = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - start))
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if alone:
            torch.cuda._sleep(PAUSE)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return median(times)


def machine(check: Check) -> None:
    check.add(gpu=torch.cuda.get_device_name() if check.on_gpu else "none", torch=torch.__version__, cpus=os.cpu_count())
    n = 8192 if check.on_gpu else 256
    for name, dtype in (("32-true", torch.float32), ("tf32", torch.float32), ("bf16-mixed", torch.bfloat16)):
        set_product_precision(name, torch.device(check.device))
        for width, depth in ((n, n), (768, 768), (768, 3072)) if check.on_gpu else ((n, n),):
            with check.measuring(product=name, shape=[n, width, depth]):
                x, w = (torch.randn(rows, depth, device=check.device, dtype=dtype) for rows in (n, width))
                ms = milliseconds(check, lambda x=x, w=w: x @ w.T, 0.3, alone=True)
                check.add(product=name, shape=[n, width, depth], ms=ms, tflops=2 * n * width * depth / ms / 1e9)
    source = torch.ones(2**28 if check.on_gpu else 2**20, device=check.device)
    target = torch.empty_like(source)
    ms = milliseconds(check, lambda: target.copy_(source), 0.3, alone=True)
    check.add(copy_gb_s=2 * source.nbytes / ms / 1e6)
    small = torch.zeros(16, device=check.device)
    small.add_(1)
    start = time.perf_counter()
    for _ in range(PER_OPERATION):
        small.add_(1)
    check.add(host_us_of_an_operation=1e6 * (time.perf_counter() - start) / PER_OPERATION)


def kernels_of(op: str, check: Check) -> list[str]:
    """Returns the operator's kernels that run on this device, in the order of kernel=auto, and then the others.

    The list has no kernels that use torch.compile, which would take a minute each.
    """
    if not check.on_gpu:
        return ["c_v0"]
    order = rule(op, check.device, torch.bfloat16).order
    here = [name for name in selectable(op) if name != "reference" and why_not(folder(op, name), name, check.device) is None
            and not load(folder(op, name), name).REQUIRES.compiled]
    return sorted(here, key=lambda name: (order.index(name) if name in order else len(order), name.startswith("taichi"), name))


def right(check: Check) -> None:
    """Compares the most used code first, because compiling all kernels of this part takes more than a minute on a GPU."""
    for name, (precision, allowed) in product(("rwkv7", "rwkv4"), (("bf16-mixed", 0.1), ("32-true", 2e-3))):
        with check.measuring(fused=name, precision=precision):
            _compare_fused_gradients(check, name, precision, allowed)
    names = {op: kernels_of(op, check) for op in PROBLEMS}
    _compare_kernels(check, {op: kernels[:1] for op, kernels in names.items()})
    for format in LOGIT_TOLERANCES if check.on_gpu else ("bfloat16", "float32"):
        with check.measuring(decoding="rwkv7", dtype=format):
            _compare_decoding(check, "rwkv7", format)
    with check.measuring(texts="rwkv7"):
        _compare_texts(check, "rwkv7")
    _compare_kernels(check, {op: kernels[1:] for op, kernels in names.items()})
    for format in ("bfloat16", "float32"):
        with check.measuring(decoding="rwkv4", dtype=format):
            _compare_decoding(check, "rwkv4", format)
    with check.measuring(texts="rwkv4"):
        _compare_texts(check, "rwkv4")


def _compare_kernels(check: Check, names: dict[str, list[str]]) -> None:
    for op, shapes in PROBLEMS.items():
        for shape, dtype in product(shapes if check.on_gpu else shapes[-1:], (torch.bfloat16, torch.float32)):
            if names[op]:
                _compare_with_reference(check, op, names[op], shape, dtype)


def _compare_with_reference(check: Check, op: str, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compares kernels of an operator with its reference in float64."""
    cases = importlib.import_module(f"kernels.{op}.cases")
    inputs = cases.inputs(*shape, dtype=dtype, device=check.device)
    expected = cases.results(select(op, "reference", check.device), cases.double(inputs))
    for name in names:
        about = {"operator": op, "kernel": name, "shape": list(shape), "dtype": str(dtype)}
        with check.measuring(**about):
            start = time.perf_counter()
            operator = select(op, name, check.device)
            check.add(**about, **compared(operator, cases.results(operator, inputs), expected, dtype),
                      first_call_s=time.perf_counter() - start)


def compared(operator: Any, results: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the errors of a kernel's results for inputs of `dtype`, and those that exceed the kernel's tolerance."""
    ratios = errors(results, expected)
    return {"worst": max(ratios.values()), "errors": ratios, "wrong": misses(ratios, tolerance(operator, dtype))}


@torch.no_grad()
def _compare_decoding(check: Check, name: str, format: str) -> None:
    """Compares decoding steps, and short prompts read in one graph, with the model's formulas for whole sequences."""
    model = _random_model(check.device, name, 2, 128, 256, format)
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = model(tokens.to(check.device))[0]
    decoder = decoder_of(model, model.empty_state(3))
    steps = torch.stack([decoder.step(tokens[:, t]).clone() for t in range(tokens.shape[1])], 1)
    ratios = {"steps": err_ratio(steps, expected)}
    if isinstance(decoder, CDecoder | GpuDecoder):
        prompts = decoder.with_state(model.empty_state(2)).read([tokens[0], tokens[1, :5]])
        ratios["prompts"] = err_ratio(prompts, torch.stack([expected[0, -1], expected[1, 4]]))
    wrong: dict[str, Any] = {key: ratio for key, ratio in ratios.items() if not ratio <= LOGIT_TOLERANCES[format]}
    if check.on_gpu and not (isinstance(decoder, GpuDecoder) and _replays_graphs(decoder)):
        wrong["decoder"] = "launches operations one by one"
    check.add(decoding=name, dtype=format, decoder=type(decoder).__name__, errors=ratios, wrong=wrong)


def _replays_graphs(decoder: GpuDecoder) -> bool:
    """Returns True if the steps and the prompts since the last growth of the slots were replays of CUDA graphs."""
    replays = [*decoder._step._graphs.values(), *decoder._step._prompt_graphs.values()]
    return bool(replays) and all(isinstance(getattr(replay, "__self__", None), torch.cuda.CUDAGraph) for replay in replays)


@torch.no_grad()
def _compare_texts(check: Check, name: str) -> None:
    """Compares generated tokens with those of a CPU: prefill, decoding, sampling and penalties in float32.

    A rounding error may change a token, and then the rest of its sequence, so one sequence in ten may differ.
    """
    on_cpu, model = (_random_model(device, name, 2, 128, 256, "float32") for device in ("cpu", check.device))
    model.load_state_dict(on_cpu.state_dict())
    prompts = ["The ", "A longer prompt ", "x" * (SHORT_PROMPT + 6), "y", "zz"]
    seeds = [*range(len(prompts))]
    texts = [[sample.tokens for options in SAMPLINGS
              for sample in generate_batch(each, ByteTokenizer(), prompts, 24, seeds, **options)] for each in (on_cpu, model)]
    different = sum(tokens != expected for expected, tokens in zip(*texts, strict=True))
    check.add(texts=name, sequences=len(texts[0]), different=different, wrong=10 * different > len(texts[0]))


def _compare_fused_gradients(check: Check, name: str, precision: str, allowed: float) -> None:
    shape = Shape(name, 2, 128, 257, 2, 33)
    expected, actual = (_gradients(check, shape, way) for way in (Way("", "32-true", fused=False), Way("", precision)))
    worst = {key: float((actual[key] - exact).norm() / exact.norm().clamp(min=1e-9)) for key, exact in expected.items()}
    off = {key: error for key, error in worst.items() if not error <= allowed}
    check.add(fused=name, precision=precision, worst=max(worst.values()), median=median(worst.values()), wrong=off)


def _gradients(check: Check, shape: Shape, way: Way) -> dict[str, Tensor]:
    with _use_fused_layers(way.fused):
        task = new_task(check, shape, way)
        x = torch.randint(shape.V, (shape.B, shape.T), generator=torch.Generator().manual_seed(1)).to(check.device)
        with _autocast(check, way):
            loss = task.loss(x, x.roll(-1, 1))
        loss.backward()
    return {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def _use_fused_layers(fused: bool) -> Iterator[None]:
    """Makes models use all fused layers or none in the `with` block."""
    before = dict(fused_backend.SUFFIXES)
    if not fused:
        fused_backend.SUFFIXES.clear()
    try:
        yield
    finally:
        fused_backend.SUFFIXES.update(before)


def _autocast(check: Check, way: Way) -> torch.autocast:
    dtype = dtype_for(way.precision)
    return torch.autocast(check.device, dtype, enabled=dtype != torch.float32)


def new_task(check: Check, shape: Shape, way: Way) -> "LanguageModel":
    """Returns a training task with normally distributed weights.

    The usual initial weights contain many zeros, which are faster to multiply.
    """
    from rwkv.training.task import LanguageModel  # imported here, because other parts do not need Lightning
    from rwkv.training.trainer import prepare_blocks

    set_product_precision(way.precision, torch.device(check.device))
    torch.manual_seed(0)
    config = ModelConfig(generation=shape.generation, n_layer=shape.L, n_embd=shape.C, ctx_len=shape.T)
    operator = select(generation(config).OPERATOR, AUTO, check.device, dtype_for(way.precision))
    with torch.device(check.device):
        model = RWKV(config, shape.V, operator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02).add_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0)
    model = prepare_blocks(model, TrainerConfig(precision=way.precision, **way.options))
    if way.graphs and check.on_gpu:
        model.replay = Replay(model)
    return LanguageModel(model, OptimConfig(), 1000, 1.0)


def train(check: Check) -> None:
    _train(check, WAYS)


def compiled(check: Check) -> None:
    if check.on_gpu:
        _train(check, COMPILED)


def _train(check: Check, ways: Sequence[Way]) -> None:
    for way in ways:
        for shape in TRAINED if check.on_gpu else TRIED:
            if (way.precision == "tf32" or way.graphs) and not check.on_gpu:
                continue
            about = {"model": str(shape), "way": way.name}
            with check.measuring(**about), _use_fused_layers(way.fused):
                _training_steps(check, shape, way, about)        # is a separate function, so that its tensors are freed
            check._require_life()


def _training_steps(check: Check, shape: Shape, way: Way, about: dict[str, Any]) -> None:
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    task = new_task(check, shape, way)
    optimizer = task.configure_optimizers()["optimizer"]
    x = torch.randint(shape.V, (shape.B, shape.T), device=check.device)

    def step(x: Tensor) -> Tensor:
        with _autocast(check, way):
            loss = task.loss(x, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    start = time.perf_counter()
    for _ in range(3):
        loss = step(x)
    value = loss.item()
    first_s = time.perf_counter() - start
    ms = milliseconds(check, lambda: step(x), 1.0, 20)
    about |= {"ms": ms, "ktok_s": shape.B * shape.T / ms, "first_3_steps_s": first_s, "peak_mb": check.peak_mb(), "loss": value}
    kind = torch.profiler.ProfilerActivity.CUDA if check.on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiled:
        step(x)
        if check.on_gpu:
            torch.cuda.synchronize()
    events = [(event.key, event.count, getattr(event, "self_device_time_total", 0) or 0) for event in profiled.key_averages()]
    events = sorted((event for event in events if event[2]), key=lambda event: -event[2])
    about |= {"launches": sum(count for _, count, _ in events), "gpu_ms": sum(us for *_, us in events) / 1000,
              "longest": [[key[:60], count, round(us)] for key, count, us in events[:10]]}
    if not way.options:                  # measures the host with a small batch, unless a graph fixes the shape
        small = x if way.graphs else x[:1, :16]
        host = []
        for _ in range(5):
            if check.on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step(small)
            host.append(1000 * (time.perf_counter() - start))
        about["host_ms"] = median(host)
    check.add(**about)


def wkv7_inputs(check: Check, B: int, T: int, H: int, N: int) -> tuple[list[Tensor], Tensor]:
    """Returns r, log_w, k, v, a and b, with the dtypes of bf16-mixed and requires_grad; and a gradient of y."""
    r, w, k, v, a, b = (torch.randn(B, T, H, N, device=check.device) for _ in range(6))
    kk = torch.nn.functional.normalize(a, dim=-1)
    inputs = [r.bfloat16(), -0.6065306597 * torch.sigmoid(w), k.bfloat16(), v.bfloat16(), (-kk).bfloat16(),
              (kk * torch.sigmoid(b)).bfloat16()]
    return [tensor.requires_grad_() for tensor in inputs], torch.randn_like(inputs[3])


def wkv7(check: Check) -> None:
    for name, shape in product(kernels_of("wkv7", check), WKV7_SHAPES if check.on_gpu else ((1, 32, 2, 64),)):
        with check.measuring(kernel=name, shape=list(shape)):
            operator = select("wkv7", name, check.device)
            inputs, grad = wkv7_inputs(check, *shape)
            _forward_and_backward(check, name, list(shape), lambda op=operator, ins=inputs: op(*ins)[0], inputs, grad)


def wkv4(check: Check) -> None:
    shapes = product(WKV4_SHAPES if check.on_gpu else ((1, 16, 32),), (torch.float32, torch.bfloat16))
    for name, ((B, T, C), dtype) in product(kernels_of("wkv4", check), shapes):
        with check.measuring(kernel=name, shape=[B, T, C], dtype=str(dtype)):
            operator = select("wkv4", name, check.device)
            k, v = (torch.randn(B, T, C, device=check.device, dtype=dtype) for _ in range(2))
            decay = -5 + 8 * torch.rand(C, device=check.device)
            bonus = -1.2 + 0.5 * torch.randn(C, device=check.device)
            leaves = [tensor.requires_grad_() for tensor in (decay, bonus, k, v)]
            _forward_and_backward(check, name, [B, T, C], lambda op=operator, ins=leaves: op(*ins)[0], leaves,
                                  torch.randn_like(v), dtype=str(dtype))


def _forward_and_backward(check: Check, name: str, shape: list[int], forward: Callable[[], Tensor], inputs: list[Tensor],
                          grad: Tensor, **about: Any) -> None:
    before = torch.cuda.memory_allocated() / 2**20 if check.on_gpu else 0.0
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    forward_ms = milliseconds(check, forward, 0.3, alone=True)
    y = forward()
    backward_ms = milliseconds(check, lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True), 0.3, alone=True)
    check.add(kernel=name, shape=shape, forward_ms=forward_ms, backward_ms=backward_ms, peak_mb=check.peak_mb() - before,
              **about)


def decode(check: Check) -> None:
    for format, size in DECODERS if check.on_gpu else (("bfloat16", "tiny"), ("float32", "tiny")):
        about = {"model": size, "dtype": format}
        with check.measuring(**about):
            V = 65536 if check.on_gpu else 256
            _measure_decoder(check, _random_model(check.device, "rwkv7", *SIZES[size], V, format), about)
        check._require_life()


@torch.no_grad()
def _measure_decoder(check: Check, model: RWKV, about: dict[str, Any]) -> None:
    options = Sampling(temperature=1.0, top_p=0.8)
    weights = sum(tensor.nbytes for tensor in tensors_of(model)) - model.emb.weight.nbytes
    for B in (1, 8, 64, 256, 512) if check.on_gpu else (1, 2):
        with check.measuring(**about, rows=B):
            start = time.perf_counter()
            state = model.empty_state(B)
            decoder = decoder_of(model, state)
            draw, _ = draw_function_on(model.emb.weight.device, isinstance(decoder, CDecoder))
            tokens, uniform = torch.zeros(B, dtype=torch.long), torch.rand(B, dtype=torch.float64)

            def sample(logits: Tensor, uniform: Tensor = uniform, draw: Any = draw) -> Tensor:
                return next_tokens(logits, uniform, options, draw=draw)

            logits = decoder.step(sample(decoder.step(tokens)))
            row = {"first_tokens_s": time.perf_counter() - start,
                   "token_ms": milliseconds(check, lambda f=sample, d=decoder, t=tokens: f(d.step(t)), 0.5),
                   "step_ms": milliseconds(check, lambda d=decoder, t=tokens: d.step(t), 0.3),
                   "sampling_ms": milliseconds(check, lambda f=sample, x=logits: f(x), 0.3)}
            check.add(**about, rows=B, decoder=type(decoder).__name__, tok_s=1000 * B / row["token_ms"], **row,
                      least_gb=(weights + 2 * state.nbytes()) / 1e9)         # bytes that a step must read and write
            del decoder, logits          # frees the decoder's slots for the next batch size
    decoder = decoder_of(model, model.empty_state(0))
    for n, T in PROMPTS if check.on_gpu else ((1, 16), (2, 3)):
        with check.measuring(**about, prompts=n, prefill=T):
            ms = milliseconds(check, lambda n=n, T=T: _read_prompts(model, decoder, n, T), 0.5)
            check.add(**about, prompts=n, prefill=T, ms=ms, tok_s=1000 * n * T / ms)


def _read_prompts(model: RWKV, decoder: Any, n: int, T: int) -> None:
    """Reads n prompts of T tokens as the engine does: short prompts together."""
    prompts = [Prefill(model, [1] * T, decoder=None if isinstance(decoder, Decoder) else decoder) for _ in range(n)]
    if n * T <= SHORT_PROMPT and all(prompt.joinable_tokens for prompt in prompts):
        advance_all(prompts)
    for prompt in prompts:
        while prompt.next_cost:
            prompt.advance()


@torch.no_grad()
def _random_model(device: str, name: str, L: int, C: int, V: int, format: str) -> RWKV:
    """Returns a model with random weights, whose logits are of order 1."""
    packed = format.startswith("int")
    dtype = torch.float32 if packed else getattr(torch, format)
    config = ModelConfig(generation=name, n_layer=L, n_embd=C)
    torch.manual_seed(0)
    with torch.device(device):
        model = RWKV(config, V, select(generation(config).OPERATOR, AUTO, device, dtype))
    model.requires_grad_(False).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=max(parameter.shape) ** -0.5)
        else:
            parameter.normal_(std=0.1).add_(1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0)
        if not key.endswith(model.generation.KEPT_FLOAT32):
            parameter.data = parameter.data.to(dtype)
    return to_packed(model.cpu(), format, device) if packed else model


def serve(check: Check) -> None:
    """Measures concurrent sequences after their prompts, in the engine alone and over HTTP with serve.py."""
    shape, clients = ((12, 768, 65472), (1, 16, 64)) if check.on_gpu else ((2, 64, 1024), (1, 2))
    seconds = 5.0 if check.on_gpu else 0.5
    checkpoint = write_checkpoint(check.scratch, "rwkv7", shape)
    vocabulary = checkpoint.with_name(serving.VOCABULARY)
    serving.write_vocabulary(vocabulary, shape[-1])
    with check.measuring(engine="bfloat16"):
        _engine(check, checkpoint, vocabulary, clients, seconds)
    if missing := not_installed(SERVER):
        check.add(server="bfloat16", skipped=f"not installed: {missing}")
        return
    with check.measuring(server="bfloat16"):
        start = time.perf_counter()
        with serving.serving(checkpoint, "bfloat16", f"device={check.device}", f"max_rows={max(clients)}") as server:
            check.add(server="bfloat16", ready_s=time.perf_counter() - start)
            for n in clients:
                tok_s, busy = serving.rate_over_http(server, n, seconds, n)
                check.add(server="bfloat16", clients=n, tok_s=tok_s, client_cpu=busy)


def _engine(check: Check, checkpoint: Path, vocabulary: Path, texts: Sequence[int], seconds: float) -> None:
    model = RWKV.from_pretrained(checkpoint, device=check.device, dtype="bfloat16")
    tokenizer = Tokenizer.named(str(vocabulary))
    start = time.perf_counter()
    Engine(model, tokenizer).warm_up(max(texts))
    check.add(engine="bfloat16", warm_up_s=time.perf_counter() - start)
    for n in texts:
        engine = Engine(model, tokenizer)
        start = time.perf_counter()
        for seed in range(n):
            engine.add(Request(serving.PROMPT, seed, StoppingCriteria(10**9),
                               Sampling(temperature=1, top_p=0.8, banned=(0,))))
        while len(engine.step()) < n:
            pass
        read_s, start, steps = time.perf_counter() - start, time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            engine.step()
            steps += 1
        check.add(engine="bfloat16", texts=n, prompts_s=read_s, tok_s=n * steps / (time.perf_counter() - start))
    check.add(engine="bfloat16", texts=max(texts), answers=SHORT,
              tok_s=_rate_of_short_answers(Engine(model, tokenizer, PrefixCache()), max(texts), seconds))


def _rate_of_short_answers(engine: Engine, n: int, seconds: float) -> float:
    """Returns the tokens/s of n sequences, each replaced at its end. The cache moves their states to host memory."""
    rows: list[Row] = []
    seeds = count()
    tokens = 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        tokens += sum(len(row.sample.tokens) for row in rows if not row.unfinished)
        rows = [row for row in rows if row.unfinished]
        for seed in islice(seeds, n - len(rows)):        # each sequence has its own prompt
            rows.append(engine.add(Request(f"{serving.PROMPT}{seed} ", seed, StoppingCriteria(SHORT),
                                           Sampling(temperature=1, top_p=0.8, banned=(0,)))))
        engine.step()
    return tokens / (time.perf_counter() - start)


# Programs


def run_program(check: Check, name: str, *command: str, most: float = 60, text: str = "") -> bool:
    """Runs a program of the project, and adds a row with the status, time and last lines of output. `text` is its input."""
    start = time.monotonic()
    process = _start(check, *command, stdin=subprocess.PIPE)
    try:
        output, _ = process.communicate(text, timeout=check.left(most))
        status = "ok" if process.returncode == 0 else f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = "stopped at its limit"
    failed = {} if status == "ok" else {"error": status}
    check.add(program=name, status=status, seconds=round(time.monotonic() - start, 1), tail=output[-600:], **failed)
    return status == "ok"


def _start(check: Check, *command: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """Starts a program in the scratch folder, so that runs/latest of the clone does not change."""
    words = [str(ROOT / word) if word.endswith(".py") else word for word in command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *words], cwd=check.scratch, env=environment, stdin=stdin, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)


def training(check: Check, out: str, model: str, *options: str) -> list[str]:
    if not any(option.startswith("trainer=") for option in options):
        options = (f"trainer={'gpu' if check.on_gpu else 'cpu'}", *options)
    return ["train.py", f"model={model}", "data=text", f"data.path={ROOT / 'README.md'}", "data.tokenizer=byte", "logger=csv",
            "data.val_fraction=0.05", "model.ctx_len=64", "trainer.sample_tokens=0", "trainer.sample_every=0",
            f"data.cache_dir={check.scratch}/cache", f"out_dir={check.scratch}/{out}", *options]


def resume(check: Check) -> None:
    """Compares a run of 6 steps with a copy that is resumed from the checkpoint of step 3."""
    for model in ("rwkv7_tiny", "tiny"):
        steps = ["trainer.max_steps=6", "trainer.checkpoint_every=3", "trainer.val_every=6", "optim.warmup_steps=2"]
        if not run_program(check, f"train {model}", *training(check, model, model, *steps)):
            continue
        original, continued = check.scratch / model, check.scratch / f"{model}-continued"
        shutil.copytree(original, continued)
        for checkpoint in (continued / "checkpoints").glob("*.ckpt"):
            if checkpoint.name != "last-1.ckpt":
                checkpoint.unlink()
        (continued / "checkpoints" / "last-1.ckpt").rename(continued / "checkpoints" / "last.ckpt")
        if run_program(check, f"continue {model}", "train.py", "resume=auto", f"out_dir={continued}"):
            with check.measuring(resumed=model):
                resumed, uninterrupted = (read_checkpoint(folder).tensors("float32") for folder in (continued, original))
                off = [name for name in uninterrupted if not torch.equal(resumed[name], uninterrupted[name])]
                check.add(resumed=model, wrong=off[:5], tensors=len(uninterrupted))


def programs(check: Check) -> None:
    run = str(check.scratch / "run")
    saved, device = f"checkpoint={run}", f"device={check.device}"
    if not run_program(check, "train rwkv7_tiny", *training(check, "run", "rwkv7_tiny", "trainer.max_steps=20")):
        return
    run_program(check, "generate", "generate.py", saved, device, "prompt=The ", "max_new_tokens=20")
    run_program(check, "generate 16 in float32", "generate.py", saved, device, "prompt=The ", "num_samples=16",
                "max_new_tokens=20", "dtype=float32")
    run_program(check, "chat", "chat.py", saved, device, "max_new_tokens=10", text="Hello\n")
    run_program(check, "evaluate", "-m", "rwkv.tools.evaluate", saved, device,
                f"data.path={ROOT / 'CONTRIBUTING.md'}")
    if missing := not_installed(SERVER):
        check.add(program="serve", skipped=f"not installed: {missing}")
    else:
        with check.measuring(program="serve"):
            _request_completion(check, saved, device)
    run_program(check, "train tiny with a probe",
                *training(check, "probed", "tiny", "trainer.max_steps=20", "trainer.probe=true"))


def _request_completion(check: Check, saved: str, device: str) -> None:
    start = time.monotonic()
    with _start(check, "serve.py", saved, device, "port=0") as process:
        try:
            url = _server_url(process, check.left(60))
            body = json.dumps({"prompt": "The ", "max_tokens": 8}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=check.left(60)) as answer:
                text = json.load(answer)["choices"][0]["text"]
            process.terminate()
            code = process.wait(timeout=check.left(40))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = {} if code == 0 else {"error": f"status {code}"}
    check.add(program="serve", status="ok" if code == 0 else f"status {code}", seconds=round(time.monotonic() - start, 1),
              answer=text, **failed)


def _server_url(process: subprocess.Popen[str], seconds: float) -> str:
    assert process.stdout is not None
    end, lines = time.monotonic() + seconds, ""
    while time.monotonic() < end and (line := process.stdout.readline()):
        lines += line
        if "http://" in line:
            return "http://" + line.partition("http://")[2].split()[0].rstrip("/.,;")
    raise RuntimeError(f"the server did not start: {lines[-300:]}")


def shards(check: Check) -> None:
    if not check.on_gpu:
        return
    steps = ("trainer.max_steps=15", "trainer.precision=bf16-mixed")
    fsdp = ("trainer=fsdp", "trainer.devices=1")
    for name, options in (("fsdp", fsdp), ("offload", (*fsdp, "trainer.offload=true")),
                          ("ddp", ("trainer=ddp", "trainer.devices=1")),
                          ("recomputed", ("trainer.activation_checkpointing=true",))):
        run_program(check, name, *training(check, name, "rwkv7_tiny", *steps, *options))


def peers(check: Check) -> None:
    for row in PUBLISHED:
        check.add(published=True, **row)
    if not check.on_gpu or importlib.util.find_spec("fla") is None:
        check.add(peer="flash-linear-attention", skipped="not installed" if check.on_gpu else "needs a GPU")
        return
    for shape in WKV7_SHAPES:
        with check.measuring(peer="flash-linear-attention", shape=list(shape)):
            chunk_rwkv7 = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
            (r, log_w, k, v, a, b), grad = wkv7_inputs(check, *shape)
            named = {"r": r, "w": log_w.detach().bfloat16().requires_grad_(), "k": k, "v": v, "a": a, "b": b}

            _forward_and_backward(
                check, "flash-linear-attention", list(shape),
                lambda f=chunk_rwkv7, n=named: f(**n, scale=1.0, output_final_state=False, safe_gate=True)[0],
                list(named.values()), grad)


def tests(check: Check) -> None:
    chosen = ["tests/kernels"] if check.on_gpu else ["tests/kernels/test_wkv7.py", "-m", "not programs and not thorough"]
    marked = ["-m", "not soak or implementation", "-W", "default"] if check.on_gpu else []
    run_program(check, "tests of kernels/", "-m", "pytest", *chosen, *marked, "--device", check.device, most=600)


PARTS = (machine, right, train, decode, wkv7, serve, programs, resume, wkv4, peers, shards, compiled, tests)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds from now")
    args = parser.parse_args()
    check = Check(args.part, Rows(args.out), args.device, time.monotonic() + args.deadline)
    try:
        next(part for part in PARTS if part.__name__ == args.part)(check)
    finally:
        shutil.rmtree(check.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
