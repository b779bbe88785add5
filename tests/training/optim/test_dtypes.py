"""Tests that a CPU without bfloat16 products multiplies in float32, unless the user asks for bfloat16: then a line warns."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens
from programs import Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_runs import SMALL, TEXT

from benchmarks import step_profile
from kernels.machine import cpu
from rwkv.config import OptimConfig
from rwkv.generation.decoder import decoder_of
from rwkv.model.lora import add_adapters
from rwkv.model.quantized import to_bfloat16, to_int4, to_int8
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.training.optim.muon import orthogonal
from rwkv.training.optim.optimisers import OPTIMISERS
from rwkv.training.task import LanguageModel

PRODUCTS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "addbmm", "linear", "matmul", "convolution",
            "convolution_backward", "_addmm_activation")
BASES: dict[str, Callable[[RWKV], Any]] = {"float32": lambda model: model, "bfloat16": to_bfloat16,
                                           "int8": partial(to_int8, head=False), "int4": partial(to_int4, head=False)}


class ProductDtypes(TorchDispatchMode):
    """Records the dtypes of the products inside a with block."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split("::")[-1].split(".")[0] in PRODUCTS:
            self.dtypes |= {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def product_dtypes(model: RWKV, optimiser: str) -> set[torch.dtype]:
    """Returns the dtypes of the products of a training step."""
    task, x = LanguageModel(model, OptimConfig(name=optimiser, weight_decay=0.1), 10, None), tokens(model, B=2, T=8)
    optimizer = task.configure_optimizers()["optimizer"]
    with ProductDtypes() as products:
        task.training_step((x, x), 0).backward()
        optimizer.step()
    return products.dtypes


@each_generation
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_training_step_multiplies_in_float32_alone(generation: str, optimiser: str, without_bfloat16: None) -> None:
    assert product_dtypes(small_model(generation=generation), optimiser) == {torch.float32}


@each_generation
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("optimiser", ["adamw", "normuon"])
def test_a_tuning_step_multiplies_in_float32_alone(generation: str, base: str, optimiser: str, without_bfloat16: None) -> None:
    model = small_model(generation=generation).requires_grad_(False)
    BASES[base](model)
    add_adapters(model, [], rank=2, alpha=4.0)
    assert product_dtypes(model, optimiser) == {torch.float32}


@pytest.mark.parametrize("base", BASES)
def test_a_step_that_tunes_a_state_multiplies_in_float32_alone(base: str, without_bfloat16: None) -> None:
    model = small_model(generation="rwkv7").requires_grad_(False)
    BASES[base](model)
    model.set_time_states([layer.wkv[0].clone() for layer in model.generation.empty_state(model.config, 1).layers()])
    assert product_dtypes(model, "adamw") == {torch.float32}


@each_generation
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@torch.inference_mode()
def test_prompts_and_steps_of_few_and_many_rows_multiply_in_float32_alone(generation: str, dtype: str,
                                                                          without_bfloat16: None) -> None:
    model = small_model(generation=generation).requires_grad_(False).eval()
    model = {"float32": lambda model: model, "int8": to_int8, "int4": to_int4}[dtype](model)
    with ProductDtypes() as products:
        model.prefill(tokens(model, B=1, T=100))
        for rows in (1, 2, 100):
            decoder_of(model, model.empty_state(rows)).step(tokens(model, B=rows, T=1)[:, 0])
    assert products.dtypes <= {torch.float32, torch.uint8, torch.int16}


@pytest.mark.thorough
def test_benchmarks_leave_bfloat16_out_unless_it_is_named(without_bfloat16: None, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--generation", "rwkv4", "--optim", "normuon", "--shape", "1,64,1,8,16", "--steps", "1"]
    step_profile.main(steps)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "bf16-mixed" in first
    assert [step["precision"] for step in json.loads(last)["steps"]] == ["32-true"]
    step_profile.main([*steps, "--precision", "bf16-mixed"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"][0]["precision"] == "bf16-mixed"


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 12, 40), (2, 40, 12)])
def test_muons_directions_are_the_same_within_rounding(shape: tuple[int, ...], without_bfloat16: None,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    exact = orthogonal(matrices)
    with monkeypatch.context() as patched:               # this patch must end before the fixture's
        patched.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
        cpu.multiplies_natively.cache_clear()
        rounded = orthogonal(matrices)
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert (exact - rounded.float()).norm() < 0.05 * exact.norm()


@pytest.mark.programs
@pytest.mark.parametrize(("options", "labels"), [
    (("optim=normuon",), ["optimiser"]), (("trainer.precision=bf16-mixed",), ["WARNING"]),
    (("trainer.precision=fp16-mixed",), ["WARNING"]), (("trainer.precision=auto",), [])])
def test_the_plan_says_which_dtype_is_used_and_which_is_slow(options: tuple[str, ...], labels: list[str], run: Run,
                                                             without_bfloat16: None) -> None:
    Path("text.txt").write_text(TEXT)
    status, _, error = run("train", *SMALL, "plan=true", *options)
    assert status == 0, error
    assert [line.split()[0] for line in error.splitlines() if "float16" in line] == labels


@pytest.mark.programs
@pytest.mark.parametrize(("program", "options"), [("generate", ("prompt=a", "max_new_tokens=2")),
                                                  ("evaluate", ("data.path=text.txt",))])
def test_a_program_says_that_activations_are_not_in_bfloat16(program: str, options: tuple[str, ...], run: Run,
                                                             without_bfloat16: None) -> None:
    Path("text.txt").write_text(TEXT)
    small_model(vocab_size=256).save_pretrained("model.safetensors", ByteTokenizer())
    for dtype, says in (("bfloat16", True), ("float32", False)):
        status, _, error = run(program, "checkpoint=model.safetensors", f"dtype={dtype}", *options)
        assert status == 0, error
        assert ("float32 activations" in error) == says
