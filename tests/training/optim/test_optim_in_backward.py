"""Tests trainer.optim_in_backward=true: results equal those of a step after the backward pass, with fewer gradients at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, small_model
from programs import Run, one_sentence
from training_runs import OWN, SMALL, TEXT, assert_same_training, done_here, fork_run, kill_after

from kernels.bench.profiler import extra_bytes
from kernels.select import select
from rwkv.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.data.tbptt_segments import Segments
from rwkv.errors import UserError
from rwkv.model.lora import add_adapters
from rwkv.pretrained import RWKV
from rwkv.training.memory.estimate import estimate
from rwkv.training.run.options import check_new_run
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

VOCABULARY, T, STEPS = 50, 6, 2
UNCLIPPED = {"grad_clip": 0.0, "warmup_steps": 0}


def make_task(in_backward: bool, generation: str, options: dict[str, Any], adapters: bool = False) -> LanguageModel:
    model = small_model(generation=generation)
    if adapters:
        add_adapters(model.requires_grad_(False), [], 2, 4.0, 0.0)
    trainer = TrainerConfig(optim_in_backward=in_backward, **options)
    task = LanguageModel(prepare_blocks(model, trainer), OptimConfig(weight_decay=0.1, **UNCLIPPED), 10, 1.0)
    task.optim_in_backward = in_backward
    return task


def batch_of(step: int, K: int) -> tuple[torch.Tensor, torch.Tensor] | Segments:
    tokens = torch.randint(VOCABULARY, (4, T + 1), generator=torch.Generator().manual_seed(step))
    x, y = tokens[:, :-1], tokens[:, 1:]
    return Segments(x[:, None], y[:, None], torch.full((4, 1), step == 0), 0, 1.0, x.numel()) if K else (x, y)


def train(task: LanguageModel, options: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights, the optimiser's state and the rates after `STEPS` calls of step(closure), as in Lightning."""
    optimisation = task.configure_optimizers()
    optimizer, schedule = optimisation["optimizer"], optimisation["lr_scheduler"]["scheduler"]
    half = options.get("precision") == "bf16-mixed"
    for step in range(STEPS):
        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = task.training_step(batch_of(step, options.get("tbptt", 0)), 0)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        schedule.step()
    states = [value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()]
    return [*task.parameters(), *states, torch.tensor([group["lr"] for group in optimizer.param_groups])]


@each_generation
@pytest.mark.parametrize(("options", "adapters"), [
    ({}, False), ({"precision": "bf16-mixed", "activation_checkpointing": True}, False),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in (
        ({}, True), ({"activation_checkpointing": True}, False), ({"precision": "bf16-mixed"}, False), ({"tbptt": 1}, False)))],
    ids=str)
def test_the_results_equal_those_of_a_step_after_the_backward_pass(generation: str, options: dict[str, Any],
                                                                   adapters: bool) -> None:
    after, during = (train(make_task(in_backward, generation, options, adapters), options) for in_backward in (False, True))
    assert len(after) == len(during)
    assert all(map(torch.equal, after, during))


def peak_gradient_bytes(task: LanguageModel) -> int:
    """Returns the most bytes of gradients that exist at once, measured whenever a weight gets its gradient."""
    peak = 0

    def record(gradient: torch.Tensor) -> None:
        nonlocal peak
        others = sum(parameter.grad.nbytes for parameter in task.parameters() if parameter.grad is not None)
        peak = max(peak, gradient.nbytes + others)

    for parameter in task.parameters():
        parameter.register_hook(record)
    train(task, {})
    return peak


@each_generation
def test_the_gradients_of_all_weights_never_exist_at_once(generation: str) -> None:
    after, during = (peak_gradient_bytes(make_task(in_backward, generation, {})) for in_backward in (False, True))
    sizes = [parameter.nbytes for parameter in small_model(generation=generation).parameters()]
    assert (after, during) == (sum(sizes), max(sizes))


@pytest.mark.thorough
@pytest.mark.parametrize(("precision", "checkpointing"), [("32-true", False), ("bf16-mixed", True)])
def test_the_estimate_is_near_the_measured_peak(precision: str, checkpointing: bool) -> None:
    config = TrainConfig(model=ModelConfig(generation="rwkv7", n_layer=8, n_embd=256, ctx_len=64),
                         data=DataConfig(batch_size=2), optim=OptimConfig(**UNCLIPPED),
                         trainer=TrainerConfig(optim_in_backward=True, precision=precision,
                                               activation_checkpointing=checkpointing))
    x = torch.randint(256, (2, 64))

    def train() -> tuple[()]:
        task = LanguageModel(prepare_blocks(RWKV(config.model, 256, select("wkv7", "torch_chunk")), config.trainer),
                             config.optim, 10, 1.0)
        task.optim_in_backward = True
        optimizer = task.configure_optimizers()["optimizer"]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = task.training_step((x, x), 0)
            loss.backward()
            optimizer.step()
        return ()

    peak = extra_bytes(train, "cpu")
    need = estimate(config, 256)
    assert need.total == pytest.approx(peak, rel=0.25)
    assert need.gradients < need.weights / 7


# Whole runs

RUN = (*SMALL, "logger=csv", "model=rwkv7_tiny", "model.n_layer=2", "model.n_embd=64", "model.ctx_len=16",
       "optim.grad_clip=0", "trainer.max_steps=30", "trainer.log_every=1", "trainer.val_every=10",
       "trainer.checkpoint_every=10")
IN_BACKWARD = "trainer.optim_in_backward=true"


@pytest.mark.programs
def test_a_run_is_the_same_with_and_without_and_after_a_kill(tmp_path: Path) -> None:
    """Runs with and without the option have the same weights, and a killed run continues bit for bit."""
    (tmp_path / "text.txt").write_text(TEXT)
    for name, options in (("after", ()), ("during", (IN_BACKWARD,))):
        result = done_here(tmp_path, "train", *RUN, *options, f"out_dir={name}")
        assert result.status == 0, result.error
    own = (*OWN, "/timemix/run/trainer/optim_in_backward")
    assert_same_training(tmp_path / "during", tmp_path / "after", own)
    process = fork_run(tmp_path, *RUN, IN_BACKWARD, "out_dir=killed")
    kill_after(process, tmp_path / "killed", 12, 0.0)
    result = done_here(tmp_path, "train", "resume=auto", "out_dir=killed", IN_BACKWARD)
    assert result.status == 0, result.error
    assert_same_training(tmp_path / "killed", tmp_path / "during")


@pytest.mark.parametrize(("options", "part"), [
    ({"optim": {"grad_clip": 1.0}}, "optim.grad_clip=0"),
    ({"optim": {"name": "muon"}}, "optim=muon"),
    ({"optim": {"name": "normuon"}}, "optim=adamw"),
    ({"trainer": {"accumulate": 2}}, "trainer.accumulate=2"),
    ({"trainer": {"tbptt": 2}}, "trainer.tbptt=2"),
    ({"trainer": {"strategy": "ddp", "devices": 2}}, "trainer=ddp"),
    ({"trainer": {"strategy": "fsdp", "devices": 2}}, "trainer=fsdp"),
    ({"trainer": {"precision": "fp16-mixed"}}, "fp16-mixed"),
    ({"trainer": {"grad_norms": True}}, "trainer.grad_norms"),
    ({"trainer": {"graphs": True}}, "trainer.graphs"),
], ids=str)
def test_options_that_need_all_gradients_are_refused_by_name(options: dict[str, dict[str, Any]], part: str) -> None:
    config = TrainConfig(optim=OptimConfig(**UNCLIPPED | options.get("optim", {})),
                         trainer=TrainerConfig(optim_in_backward=True, **options.get("trainer", {})))
    with pytest.raises(UserError) as error:
        check_new_run(config, [])
    assert part in str(error.value)
    assert str(error.value).startswith("trainer.optim_in_backward=true ")


@pytest.mark.programs
def test_the_default_clipping_is_refused_in_one_sentence(run: Run) -> None:
    Path("text.txt").write_text(TEXT)
    one_sentence(run("train", *SMALL, IN_BACKWARD), "trainer.optim_in_backward", "optim.grad_clip=0")
