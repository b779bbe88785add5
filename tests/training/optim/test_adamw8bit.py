"""Tests optim=adamw8bit: moments in bytes, updates like AdamW's, and runs that continue bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Run, one_sentence
from training_runs import SMALL, TEXT, assert_same_training, done_here, fork_run, kill_after, losses

from kernels.select import select
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.pretrained import RWKV
from rwkv.training.memory.estimate import checkpoint_bytes, estimate
from rwkv.training.optim import adamw8bit
from rwkv.training.optim.adamw8bit import BLOCK, LEAST, AdamW8bit, dequantise, quantise
from rwkv.training.task import LanguageModel

ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


@pytest.mark.parametrize("signed", [True, False])
@settings(deadline=None, max_examples=20)
@given(st.floats(-15, 15), st.integers(0, 1000))
def test_a_number_is_rounded_to_a_level_near_it(signed: bool, exponent: float, seed: int) -> None:
    """The error is at most a hundredth of the block's largest number, and at most 15 % of numbers above this hundredth."""
    numbers = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(seed)) * 10 ** exponent
    if not signed:
        numbers = numbers.square()
    stored = dequantise(*quantise(numbers, signed), signed)
    largest = numbers.abs().view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)
    assert ((stored - numbers).abs() <= largest / 100).all()
    clear = numbers.abs() > largest / 100
    torch.testing.assert_close(stored[clear], numbers[clear], rtol=0.15, atol=0)
    assert (stored.sign() * numbers.sign() >= 0).all()


def test_zeros_stay_and_a_second_moment_never_becomes_one() -> None:
    numbers = torch.zeros(2 * BLOCK)
    for signed in (True, False):
        assert dequantise(*quantise(numbers, signed), signed).equal(numbers)
    numbers[:2] = torch.tensor([1.0, 1e-30])
    assert dequantise(*quantise(numbers, False), False)[1] > 0
    assert dequantise(*quantise(numbers, False), False)[2:].equal(numbers[2:])


def test_rounding_again_changes_nothing() -> None:
    numbers = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    for signed in (True, False):
        once = quantise(numbers if signed else numbers.square(), signed)
        again = quantise(dequantise(*once, signed), signed)
        assert all(map(torch.equal, again, once))


FUSED = partial(torch.optim.AdamW, fused=True)


def steps(optimiser: Callable[..., torch.optim.Optimizer], count: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns the parameters after `count` steps with gradients that are the same for every optimiser."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = optimiser([{"params": parameters, "weight_decay": 0.1}], **ADAM)
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_small_and_odd_parameters_equal_adamw_bit_for_bit() -> None:
    shapes = (LEAST - BLOCK,), (LEAST + 1, 1), (3, 5), ()
    assert all(map(torch.equal, steps(AdamW8bit, 5, *shapes), steps(FUSED, 5, *shapes)))


def test_the_first_step_equals_adamw_bit_for_bit_and_later_steps_are_close() -> None:
    shape = LEAST // 32, 64
    assert steps(AdamW8bit, 1, shape)[0].equal(steps(FUSED, 1, shape)[0])
    start, = steps(AdamW8bit, 0, shape)
    ours, theirs = (steps(optimiser, 20, shape)[0] - start for optimiser in (AdamW8bit, FUSED))
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


def test_the_size_of_chunks_changes_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5 * LEAST // 16, 16)
    whole = steps(AdamW8bit, 3, shape)
    monkeypatch.setattr(adamw8bit, "CHUNK", 2 * LEAST)
    assert steps(AdamW8bit, 3, shape)[0].equal(whole[0])


def tiny_task() -> LanguageModel:
    model = RWKV(ModelConfig(n_layer=1, n_embd=64), 256, select("wkv4", "reference")).init_weights()
    return LanguageModel(model, OptimConfig(name="adamw8bit"), 10, 1.0)


def test_the_state_takes_the_memory_in_the_plan() -> None:
    task = tiny_task()
    optimizer = task.configure_optimizers()["optimizer"]
    for parameter in task.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state_bytes = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    config = TrainConfig(model=ModelConfig(n_layer=1, n_embd=64), optim=OptimConfig(name="adamw8bit"),
                         trainer=TrainerConfig(keep_last=1))
    weights = sum(parameter.nbytes for parameter in task.parameters())
    work = adamw8bit.WORK * weights      # the model is smaller than one chunk
    assert estimate(config, 256).optimiser == state_bytes + work
    assert checkpoint_bytes(config, 256) == 3 * (weights + state_bytes)
    assert state_bytes < 0.6 * weights


def test_the_state_loads_without_float_copies_of_the_codes() -> None:
    optimizers = [tiny_task().configure_optimizers()["optimizer"] for _ in range(2)]
    for parameter in optimizers[0].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    before = optimizers[0].state_dict()
    optimizers[1].load_state_dict(before)
    loaded = optimizers[1].state_dict()
    assert loaded["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        for name, value in state.items():
            assert loaded["state"][number][name].dtype == value.dtype
            assert loaded["state"][number][name].equal(value)
    assert torch.uint8 in {value.dtype for state in loaded["state"].values() for value in state.values()}


def test_the_1_5b_shape_trains_in_full_in_12_gb_by_plan() -> None:
    """Weights are in float32, products in bfloat16 and moments in 8 bits."""
    sizes = ModelConfig("rwkv7", n_layer=24, n_embd=2048, ctx_len=1024)
    frugal = TrainConfig(model=sizes, data=DataConfig(batch_size=1), optim=OptimConfig(name="adamw8bit", grad_clip=0.0),
                         trainer=TrainerConfig(optim_in_backward=True, activation_checkpointing=True, precision="bf16-mixed"))
    plain = TrainConfig(model=sizes, data=DataConfig(batch_size=1), trainer=TrainerConfig(precision="bf16-mixed"))
    assert estimate(frugal, 65536).total < 11.5e9          # a GPU's context needs some 0.5 GB, too
    assert estimate(plain, 65536).total > 24e9


def test_blocks_of_a_divided_parameter_are_refused_by_name() -> None:
    with pytest.raises(UserError) as error:
        TrainConfig(optim=OptimConfig(name="adamw8bit"), trainer=TrainerConfig(strategy="fsdp", devices=2))
    assert str(error.value).startswith("optim=adamw8bit ")


# Whole runs

RUN = (*SMALL, "logger=csv", "model=rwkv7_tiny", "model.n_layer=1", "model.n_embd=64", "model.ctx_len=16",
       "optim.grad_clip=0", "trainer.max_steps=30", "trainer.log_every=1", "trainer.val_every=10",
       "trainer.checkpoint_every=10")


@pytest.mark.soak
def test_a_run_continues_bit_for_bit_and_its_checkpoint_is_read_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = (*RUN, "optim=adamw8bit", "trainer.optim_in_backward=true")
    for name, run_options in (("whole", options), ("adamw", RUN)):
        result = done_here(tmp_path, "train", *run_options, f"out_dir={name}")
        assert result.status == 0, result.error
    process = fork_run(tmp_path, *options, "out_dir=killed")
    kill_after(process, tmp_path / "killed", 12, 0.0)
    result = done_here(tmp_path, "train", "resume=auto", "out_dir=killed")
    assert result.status == 0, result.error
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
    assert losses(tmp_path / "whole")[30] == pytest.approx(losses(tmp_path / "adamw")[30], rel=0.05)
    sizes = [(tmp_path / name / "checkpoints/last.ckpt").stat().st_size for name in ("whole", "adamw")]
    assert sizes[0] < 0.6 * sizes[1]
    weights = read_checkpoint(tmp_path / "whole").tensors("float32")
    assert weights["blocks.0.att.key.weight"].shape == (64, 64)


@pytest.mark.programs
def test_another_optimiser_is_another_run(run: Run) -> None:
    Path("text.txt").write_text(TEXT)
    assert run("train", *RUN, "optim=adamw8bit", "trainer.max_steps=1", "out_dir=run")[0] == 0
    one_sentence(run("train", "resume=auto", "out_dir=run", "optim=adamw", "trainer.max_steps=2"), "optim.name=adamw8bit")
