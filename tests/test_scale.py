"""What makes room changes no gradient: accumulation, activations computed anew, compiled blocks; fp16 keeps its scaler."""

from functools import partial
from pathlib import Path

import lightning
import pytest
import torch
from models import small_model
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from rwkv.config import DataConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.precision import with_precision
from rwkv.processes import agreed, gathered, in_turn, rank, summed, world_size
from rwkv.scale import precision_for, prepare_blocks, process_count, share
from rwkv.task import LanguageModel

VOCABULARY, T = 50, 12
Batch = tuple[Tensor, Tensor]


def batches(count: int, B: int) -> list[Batch]:
    tokens = torch.randint(VOCABULARY, (count * B, T + 1), generator=torch.Generator().manual_seed(0))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(B)]


def task(**options: bool) -> LanguageModel:
    return LanguageModel(prepare_blocks(small_model(), TrainerConfig(**options)), OptimConfig(), 10, 1.0)


def gradients(task: LanguageModel, of: list[Batch]) -> dict[str, Tensor]:
    """Of the mean over the batches, L2Wrap included."""
    for batch in of:
        (task.training_step(batch, 0) / len(of)).backward()
    return {name: parameter.grad for name, parameter in task.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm()) <= error * float(expected[name].norm()), name


def test_accumulated_gradients_are_those_of_the_large_batch() -> None:
    assert_equal(gradients(task(), batches(4, 2)), gradients(task(), batches(1, 8)), 1e-6)


def test_activations_computed_anew_give_the_same_gradients_from_less_memory() -> None:
    plain, anew = task(), task(activation_checkpointing=True)
    assert_equal(gradients(anew, batches(1, 8)), gradients(plain, batches(1, 8)), 0)
    assert anew.state_dict().keys() == plain.state_dict().keys()
    assert saved_for_backward(anew) < saved_for_backward(plain) / 3


def saved_for_backward(task: LanguageModel) -> int:
    """Bytes that the forward pass keeps, the parameters' own aside."""
    own = {parameter.data_ptr() for parameter in task.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = task.training_step(batches(1, 8)[0], 0)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.filterwarnings("ignore")    # torch.compile's of its own insides
def test_compiled_blocks_give_the_same_gradients_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of torch.compile but its code generator, which needs a C++ compiler and a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr("shutil.which", lambda name: name)
    compiled, (batch,) = task(compile=True), batches(1, 4)
    assert_equal(gradients(compiled, [batch]), gradients(task(), [batch]), 1e-6)
    assert compiled.state_dict().keys() == task().state_dict().keys()
    with torch.no_grad():
        assert compiled.loss(*batch) == pytest.approx(float(task().loss(*batch).detach()), abs=1e-6)


def test_compiling_without_a_compiler_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"trainer\.compile=true needs a C\+\+ compiler"):
        task(compile=True)


class Steps(lightning.Callback):
    """The scale of the loss after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(str(trainer.default_root_dir)) / "third.ckpt")


@pytest.mark.filterwarnings("ignore")    # Lightning's advice on this small a run
def test_fp16_goes_on_with_the_scale_that_it_had(tmp_path: Path) -> None:
    def trained(resume: Path | None) -> tuple[list[float], dict[str, Tensor]]:
        steps, learner = Steps(), task()
        options = precision_for(TrainerConfig(precision="fp16-mixed"), torch.device("cpu"))
        options["plugins"][0].scaler._init_scale, options["plugins"][0].scaler._growth_interval = 2.0 ** 10, 2
        trainer = lightning.Trainer(max_steps=6, accelerator="cpu", callbacks=[steps], logger=False, default_root_dir=tmp_path,
                                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                    limit_val_batches=0, gradient_clip_val=1.0, **options)
        loader = StatefulDataLoader(batches(6, 4), batch_size=None)
        trainer.fit(learner, loader, ckpt_path=resume, weights_only=True)
        return steps.scales, learner.state_dict()

    whole, weights = trained(None)
    assert len(set(whole)) > 1, "the scale is to move in the test"
    resumed, again = trained(tmp_path / "third.ckpt")
    assert (resumed, len(resumed)) == (whole[3:], 3)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize(("options", "said"), [
    ({"strategy": "fsdp"}, "trainer=fsdp needs CUDA devices"),
    ({"strategy": "ddp", "devices": 0}, r"needs the number of processes: trainer\.devices=2"),
    ({"strategy": "ddp", "devices": 3}, "it must be a multiple of 3"),
    ({"strategy": "ddp", "devices": 2, "num_nodes": 2}, "several machines need torchrun"),
])
def test_processes_that_cannot_be_get_a_sentence(options: dict[str, object], said: str) -> None:
    config = TrainConfig(trainer=TrainerConfig(accelerator="cpu", **options), data=DataConfig(batch_size=8))
    with pytest.raises(ValueError, match=said):
        process_count(config)


def test_devices_without_a_strategy_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="for trainer=ddp and trainer=fsdp"):
        TrainerConfig(devices=2)


def test_a_single_process_agrees_with_itself() -> None:
    assert (rank(), world_size(), gathered(3), summed(1.5, 2), agreed(lambda: 4), in_turn(lambda: 5)) == (
        0, 1, [3], [1.5, 2.0], 4, 5)
    assert share(TrainConfig(data=DataConfig(batch_size=6))).batch_size == 6


@pytest.mark.parametrize(("faster", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_precision_auto_is_what_is_faster_here(faster: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkv.precision.halves_are_faster", lambda device: faster)
    decided = with_precision(TrainConfig(trainer=TrainerConfig(precision="auto")))
    assert decided.trainer.precision == precision
    asked = TrainConfig(trainer=TrainerConfig(precision="fp16-mixed"))
    assert with_precision(asked) is asked
