"""Tests backpropagation over segments: the gradients of one sequence, no leak between documents, the memory of one segment."""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from models import assert_same_gradients, assert_same_state, each_form, each_generation, small_model
from token_arrays import token_array_of
from torch import Tensor

from kernels.bench.profiler import extra_bytes
from rwkv.config import OptimConfig, TrainerConfig
from rwkv.data.tbptt_segments import DocumentChunks, SegmentDataset, Segments, SegmentSampler
from rwkv.data.windows import StepLayout
from rwkv.model.loss import IGNORED
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import precision_for, prepare_blocks

B, K, T, VOCABULARY = 3, 4, 8, 50
KERNELS = {"rwkv4": "conv1d", "rwkv7": "reference"}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def batch(B: int = B, K: int = K, T: int = T, seed: int = 0) -> Segments:
    """Returns rows in which only the first segments start documents."""
    ids = tokens(B, K * T + 1, seed=seed)
    opens = torch.zeros(B, K, dtype=torch.bool)
    opens[:, 0] = True
    return Segments(ids[:, :-1].clone().view(B, K, T), ids[:, 1:].clone().view(B, K, T), opens, 0, 1.0, B * K * T)


def make_task(kernel: str | None = None, n_layer: int = 3, generation: str = "rwkv4", **options: Any) -> LanguageModel:
    model = small_model(kernel or KERNELS[generation], generation=generation, n_layer=n_layer)
    return LanguageModel(prepare_blocks(model, TrainerConfig(**options)), OptimConfig(), 10, 1.0)


def gradients(task: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    task.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in task.named_parameters() if parameter.grad is not None}


# Gradients


@pytest.mark.thorough
@each_form
def test_gradients_equal_those_of_each_document_as_one_sequence(generation: str, kernel: str) -> None:
    """The first row has two documents, the first of them with 12 tokens in segments of 8. Other rows have one document each."""
    task, data = make_task(kernel, generation=generation), batch()
    data.starts_document[0, 2] = True
    data.y[0, 1, 4:] = IGNORED
    loss = task.training_step(data, 0)
    rows, targets = ([each[0, :2].flatten()[:12], each[0, 2:].flatten(), *each[1:].flatten(1)] for each in (data.x, data.y))
    count = sum(map(len, rows))
    whole = sum(task.loss(x[None], y[None]) * len(x) / count for x, y in zip(rows, targets, strict=True))
    assert loss.item() == pytest.approx(float(whole.detach()), abs=1e-6)
    assert_same_gradients(gradients(task, loss), gradients(task, whole), 1e-5)


@each_generation
def test_an_earlier_document_does_not_change_a_bit(generation: str) -> None:
    """Neither the tokens of the earlier document nor its final state matter, even if this state is NaN."""
    task, data = make_task(generation=generation), batch()
    data.starts_document[:, 2] = True
    data.y[:, :2] = IGNORED
    expected = gradients(task, task.training_step(data, 0))
    data.x[:, :2] = tokens(B, 2, T, seed=1)
    results = gradients(task, task.training_step(data, 0))
    assert all(torch.equal(results[name], expected[name]) for name in expected)

    data = data._replace(x=data.x[:, 2:], y=data.y[:, 2:], starts_document=data.starts_document[:, 2:])
    task.carried.set_state_after(0, task.model.empty_state(B).each(partial(torch.full_like, fill_value=torch.nan)))
    assert_same_gradients(gradients(task, task.training_step(data, 0)), expected, 1e-6)


@pytest.mark.thorough
def test_in_bf16_many_segments_are_as_exact_as_one_sequence() -> None:
    """The errors cover all parameters of several models and texts, because one alone may be better or worse by chance."""
    errors = torch.tensor([bf16_errors(seed) for seed in range(3)])
    tbptt, whole = errors.square().mean(0).sqrt()
    assert 0.001 < whole < 0.01
    assert tbptt < 1.05 * whole


def bf16_errors(seed: int) -> tuple[float, float]:
    """Returns the errors of bfloat16 gradients relative to float32's: of 32 segments, and of one sequence."""
    task = LanguageModel(small_model("torch_scan", seed=seed, n_layer=1, n_embd=32), OptimConfig(), 10, 1.0)
    data = batch(2, 32, 2, seed)
    x, y = data.x.flatten(1), data.y.flatten(1)
    exact = flat(gradients(task, task.loss(x, y)))
    with torch.autocast("cpu", torch.bfloat16):
        tbptt = flat(gradients(task, task.segments_loss(data)))
    with torch.autocast("cpu", torch.bfloat16):
        whole = flat(gradients(task, task.loss(x, y)))
    return tuple(float((gradient - exact).norm() / exact.norm()) for gradient in (tbptt, whole))


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@each_generation
def test_the_state_is_carried_to_the_next_step_without_gradient(generation: str) -> None:
    task, data = make_task(generation=generation), batch()
    steps = [data._replace(x=data.x[:, k:k + 2], y=data.y[:, k:k + 2], starts_document=data.starts_document[:, k:k + 2])
             for k in (0, 2)]
    results = [task.training_step(step, 0) for step in steps]
    whole, after = task.model.hidden(data.x.flatten(1))
    whole = task.loss(data.x.flatten(1), data.y.flatten(1))
    assert (results[0] + results[1]).item() / 2 == pytest.approx(whole.item(), abs=1e-6)
    carried = task.carried.state_before(0, task.model, B)
    assert_same_state(carried, after.detach(), 1e-5)
    assert not any(part.requires_grad for part in carried)
    _, before = task.model.hidden(data.x[:, :2].flatten(1))
    hidden, _ = task.model.hidden(data.x[:, 2:].flatten(1), before.detach())
    cut = torch.nn.functional.cross_entropy(task.model.head(hidden).flatten(0, 1), steps[1].y.flatten())
    task.optim.l2_wrap = 0.0
    task.carried.set_state_after(0, before)
    assert_same_gradients(gradients(task, task.training_step(steps[1], 0)), gradients(task, cut), 1e-5)


@pytest.mark.parametrize(("generation", "compiled"), [("rwkv4", False), pytest.param("rwkv4", True, marks=pytest.mark.compiles),
                                                       ("rwkv7", False)])
@pytest.mark.filterwarnings("ignore")    # torch.compile warns about its own code
def test_options_that_save_memory_change_no_gradient(generation: str, compiled: bool, without_code_generator: None) -> None:
    plain, other = (make_task(n_layer=1, generation=generation, **options)
                    for options in ({}, {"activation_checkpointing": True, "compile": compiled}))
    data = batch()
    assert_same_gradients(gradients(other, other.training_step(data, 0)), gradients(plain, plain.training_step(data, 0)), 1e-6)


# Memory


@pytest.mark.thorough
def test_only_the_activations_of_one_segment_exist_at_a_time() -> None:
    """Each further segment costs only its state, its output and the gradients of both."""
    def step(K: int) -> int:
        task = LanguageModel(small_model("conv1d", n_layer=4, n_embd=64), OptimConfig(), 10, 1.0)
        data = batch(B, K, 32)
        task.training_step(data, 0).backward()
        task.zero_grad()
        return extra_bytes(lambda: task.training_step(data, 0).backward() or torch.empty(0), "cpu")

    one, two, eight = step(1), step(2), step(8)
    state, hidden = sum(part.nbytes for part in small_model(n_layer=4, n_embd=64).empty_state(B)), B * 32 * 64 * 4
    assert (eight - two) / 6 <= 3 * state + 4 * hidden
    assert eight < 2 * one


# Accumulation and processes


@pytest.fixture
def short(tmp_path: Path) -> Any:
    """Returns a stream of documents of 1 to 30 ids, so that most documents leave a part of a segment empty."""
    random = np.random.default_rng(0)
    parts = [random.integers(1, VOCABULARY, size).astype(np.uint16) for size in random.integers(1, 31, 40)]
    for part in parts:
        part[0] = 0
    return token_array_of(tmp_path, *parts)


def batches_of(stream: Any, share: StepLayout, steps: int) -> Iterator[Segments]:
    dataset = SegmentDataset(stream, T)
    chunks = DocumentChunks(stream, 0, T, share.streams)
    return map(dataset.__getitems__, SegmentSampler(chunks, 3, share, steps * share.parts, 0))


@pytest.mark.thorough
@pytest.mark.parametrize(("generation", "share"), [
    ("rwkv4", StepLayout(2, 3)), ("rwkv7", StepLayout(1, 2, 0, 3)), *(
        pytest.param("rwkv4", share, marks=pytest.mark.soak) for share in (StepLayout(2, 1, 0, 3), StepLayout(1, 2, 0, 3)))])
def test_accumulation_and_processes_equal_the_large_batch(short: Any, generation: str, share: StepLayout) -> None:
    """Loss and gradients agree in three steps with carried states. Each process is a separate task here."""
    large, apart, steps = make_task(generation=generation), [make_task(generation=generation) for _ in range(share.world)], 3
    batches = [batches_of(short, share._replace(rank=rank), steps) for rank in range(share.world)]
    for whole in batches_of(short, StepLayout(share.streams), steps):
        loss = large.training_step(whole, 0)
        parts = [task.training_step(next(own), 0) for _ in range(share.parts) for task, own in zip(apart, batches, strict=True)]
        assert sum(part.item() for part in parts) / len(parts) == pytest.approx(loss.item(), abs=1e-6)
        results = [gradients(task, sum(parts[rank::share.world]) / share.parts) for rank, task in enumerate(apart)]
        mean = {name: sum(each[name] for each in results) / share.world for name in results[0]}
        assert_same_gradients(mean, gradients(large, loss), 4e-6)         # each has an error of 1e-6 in RWKV-7's w0


# Continued runs


class SaveThirdStep(lightning.Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(str(trainer.default_root_dir)) / "third.ckpt")


@pytest.mark.programs
@pytest.mark.parametrize(("generation", "precision"), [
    ("rwkv4", "32-true"), ("rwkv4", "bf16-mixed"), ("rwkv4", "fp16-mixed"), ("rwkv7", "bf16-mixed"),
    ("rwkv7", "fp16-mixed")])
@pytest.mark.filterwarnings("ignore")    # Lightning warns about so small a run
def test_a_run_continues_bit_for_bit(tmp_path: Path, generation: str, precision: str, short: Any) -> None:
    """Weights and states are equal, and so is the scale of fp16, which grows every two steps."""
    batches = list(batches_of(short, StepLayout(2), 6))

    def train(data: list[Segments], resume: Path | None = None) -> tuple[dict[str, Tensor], ...]:
        task = make_task(generation=generation)
        options = precision_for(TrainerConfig(precision=precision), torch.device("cpu"))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
        if "plugins" in options:
            options["plugins"][0].scaler = scaler
        trainer = lightning.Trainer(max_steps=6, accelerator="cpu", callbacks=[SaveThirdStep()], logger=False,
                                    default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
                                    enable_model_summary=False, gradient_clip_val=1.0, **options)
        trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=resume, weights_only=True)
        return copy.deepcopy(task.state_dict()), task.carried.state_dict(), {"scale": torch.tensor(scaler.get_scale())}

    whole = train(batches)
    resumed = train(batches[3:] * 2, tmp_path / "third.ckpt")
    for one, other in zip(whole, resumed, strict=True):
        assert one.keys() == other.keys() != set()
        assert all(torch.equal(one[name], other[name]) for name in one)
