"""The part `right`: fused layers, decoding, texts and kernels, compared with slower and more exact code."""

import importlib
import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_parts.check import Check
from benchmarks._gpu_parts.operators import kernels_of
from benchmarks._gpu_parts.random_models import Shape, Way, autocast, new_task, random_model, use_fused_layers
from kernels.compare import err_ratio, errors, misses, tolerance
from kernels.select import select
from rwkv.generation.decoder import CDecoder, GpuDecoder, decoder_of
from rwkv.generation.engine import generate_batch
from rwkv.generation.prefill import SHORT_PROMPT
from rwkv.tokenizer.tokenizers import ByteTokenizer

PROBLEMS = {"wkv7": ((2, 257, 4, 64), (2, 63, 1, 64)), "wkv4": ((3, 257, 96),)}          # shapes of the part `right`
LOGIT_TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4, "int8": 5e-2, "int4": 5e-2, "float16": 1e-2}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 20, "repetition_penalty": 1.2}, {"top_p": 1.0, "min_p": 0.05},
    {"order": "rwkv", "top_p": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.4, "penalty_decay": 0.99})


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
            check.add(**about, **compare_results(operator, cases.results(operator, inputs), expected, dtype),
                      first_call_s=time.perf_counter() - start)


def compare_results(operator: Any, results: dict[str, Tensor], expected: dict[str, Tensor],
                    dtype: torch.dtype) -> dict[str, Any]:
    """Returns the errors of a kernel's results for inputs of `dtype`, and those that exceed the kernel's tolerance."""
    ratios = errors(results, expected)
    return {"worst": max(ratios.values()), "errors": ratios, "wrong": misses(ratios, tolerance(operator, dtype))}


@torch.no_grad()
def _compare_decoding(check: Check, name: str, format: str) -> None:
    """Compares decoding steps, and short prompts read in one graph, with the model's formulas for whole sequences."""
    model = random_model(check.device, name, 2, 128, 256, format)
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
    on_cpu, model = (random_model(device, name, 2, 128, 256, "float32") for device in ("cpu", check.device))
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
    with use_fused_layers(way.fused):
        task = new_task(check, shape, way)
        x = torch.randint(shape.V, (shape.B, shape.T), generator=torch.Generator().manual_seed(1)).to(check.device)
        with autocast(check, way):
            loss = task.loss(x, x.roll(-1, 1))
        loss.backward()
    return {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
