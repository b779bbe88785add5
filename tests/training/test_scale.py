"""Tests that accumulation, activation checkpointing and compiled blocks change no gradient, and tests numbers of processes."""

from functools import partial

import pytest
import torch
from models import assert_same_gradients, each_generation, saved_activations, small_model
from torch import Tensor

from rwkv.config import OptimConfig, TrainerConfig
from rwkv.distributed import all_gather, all_sum, broadcast_from_rank0, rank, rank0_first, world_size
from rwkv.errors import UserError
from rwkv.training.device import process_count, rows_per_process
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

VOCABULARY, T = 50, 12
Batch = tuple[Tensor, Tensor]


def batches(count: int, B: int) -> list[Batch]:
    tokens = torch.randint(VOCABULARY, (count * B, T + 1), generator=torch.Generator().manual_seed(0))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(B)]


def task(generation: str = "rwkv4", **options: bool) -> LanguageModel:
    return LanguageModel(prepare_blocks(small_model(generation=generation), TrainerConfig(**options)), OptimConfig(), 10, 1.0)


def gradients(task: LanguageModel, batch_list: list[Batch]) -> dict[str, Tensor]:
    """Returns the gradients of the mean loss over the batches, including L2Wrap."""
    for batch in batch_list:
        (task.training_step(batch, 0) / len(batch_list)).backward()
    return {name: parameter.grad for name, parameter in task.named_parameters()}


@each_generation
def test_accumulated_gradients_equal_those_of_the_large_batch(generation: str) -> None:
    assert_same_gradients(gradients(task(generation), batches(4, 2)), gradients(task(generation), batches(1, 8)), 2e-6)


@each_generation
def test_recomputed_activations_give_the_same_gradients_with_less_memory(generation: str) -> None:
    plain, recomputed = task(generation), task(generation, activation_checkpointing=True)
    assert_same_gradients(gradients(recomputed, batches(1, 8)), gradients(plain, batches(1, 8)), 0)
    assert recomputed.state_dict().keys() == plain.state_dict().keys()
    batch, = batches(1, 8)
    few, many = (saved_activations(each, partial(each.training_step, batch, 0)) for each in (recomputed, plain))
    assert few < many / 3


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore")    # torch.compile warns about its own code
@each_generation
def test_compiled_blocks_give_the_same_gradients_and_loss(generation: str, without_code_generator: None) -> None:
    compiled, plain, (batch,) = task(generation, compile=True), task(generation), batches(1, 4)
    assert_same_gradients(gradients(compiled, [batch]), gradients(plain, [batch]), 1e-5)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert compiled.loss(*batch) == pytest.approx(float(plain.loss(*batch).detach()), abs=1e-6)


def test_compiling_without_a_compiler_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError):
        task(compile=True)


@pytest.mark.parametrize(("options", "part"), [
    ({"strategy": "ddp", "devices": 0}, "trainer.devices"), ({"strategy": "fsdp", "devices": 0}, "trainer.devices"),
    ({"strategy": "ddp", "devices": 3}, "data.batch_size"),
    ({"strategy": "ddp", "devices": 2, "num_nodes": 2}, "torchrun"),
])
def test_impossible_numbers_of_processes_are_reported_in_one_sentence(options: dict[str, object], part: str) -> None:
    with pytest.raises(UserError) as error:
        process_count(TrainerConfig(accelerator="cpu", **options), batch_size=8)
    assert part in str(error.value)
    with pytest.raises(UserError):
        TrainerConfig(devices=2)


def test_a_single_process_agrees_with_itself() -> None:
    assert (rank(), world_size(), all_gather(3), all_sum(1.5, 2), broadcast_from_rank0(lambda: 4), rank0_first(lambda: 5)) == (
        0, 1, [3], [1.5, 2.0], 4, 5)
    assert rows_per_process(6, "single", 1) == 6
