"""trainer=fsdp as Lightning wraps it, on two processes of the CPU: the losses and gradient norms of one process, to the end."""

import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import METHOD, free_port, preloaded
from lightning.pytorch.strategies import FSDPStrategy, fsdp
from models import small_model
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.api import FullOptimStateDictConfig
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training_runs import TEXT, losses

from rwkv import distributed as processes
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import DataConfig, KernelConfig, LoggerConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.model.rwkv4 import Block
from rwkv.training import device, fit, trainer
from rwkv.training.run.opening import open_run
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import strategy_for

STEPS, LARGEST = 4, 0.5                  # a norm that is clipped at each step


def trained(task: LanguageModel, strategy: Any, rows: slice) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step on these rows of the batches."""
    task.trainer, found = SimpleNamespace(strategy=strategy), []
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=1e-2)
    for step in range(STEPS):
        ids = torch.randint(50, (4, 13), generator=torch.Generator().manual_seed(step))[rows]
        loss: Tensor = strategy.training_step((ids[:, :-1], ids[:, 1:]), 0)
        optimizer.zero_grad()
        loss.backward()
        task.configure_gradient_clipping(optimizer, LARGEST)
        optimizer.step()
        found.append((loss.item(), float(task.grad_norm)))
    return found


def learner() -> LanguageModel:
    return LanguageModel(small_model("torch_scan"), OptimConfig(), 10, 1.0)


def one_of_two(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    task, strategy = learner(), strategy_for(TrainerConfig(strategy="fsdp"), Block)["strategy"]
    strategy._lightning_module = task
    strategy.model = FullyShardedDataParallel(task, device_id=torch.device("cpu"), **strategy.kwargs)
    torch.save(trained(task, strategy, slice(rank, None, 2)), folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.programs
def test_two_processes_have_the_losses_and_norms_of_one(tmp_path: Path) -> None:
    task = learner()
    alone = trained(task, SimpleNamespace(model=task, training_step=task.training_step), slice(None))
    preloaded()
    multiprocessing.start_processes(one_of_two, (free_port(), tmp_path), nprocs=2, start_method=METHOD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(norm > LARGEST for _, norm in alone)
    assert [(one[0] + two[0]) / 2 for one, two in zip(first, second, strict=True)] == pytest.approx(
        [loss for loss, _ in alone], abs=1e-5)
    assert [norm for _, norm in first] == [norm for _, norm in second] == pytest.approx([norm for _, norm in alone], rel=1e-5)


# A whole run


class OnCpu(FSDPStrategy):
    """Lightning wraps for a GPU alone, but does not refuse a subclass, which names the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def whole_weights(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
    """As in Lightning, but not moved to the CPU, where they are: torch would copy them from memory that it has freed."""
    weights, optimiser = FullStateDictConfig(rank0_only=rank0_only), FullOptimStateDictConfig(rank0_only=rank0_only)
    return FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, weights, optimiser)


def config(folder: Path, strategy: str) -> TrainConfig:
    return TrainConfig(
        KernelConfig("torch_scan"), ModelConfig(n_layer=2, n_embd=16, ctx_len=16), logger=LoggerConfig("csv"),
        optim=OptimConfig(warmup_steps=0),
        data=DataConfig("text", str(folder / "text.txt"), tokenizer="byte", batch_size=4, cache_dir=str(folder / "cache")),
        trainer=TrainerConfig(strategy=strategy, devices=1 if strategy == "single" else 2, accelerator="cpu", max_steps=6,
                              val_every=3, checkpoint_every=3, log_every=1, sample_tokens=5), out_dir=str(folder / strategy))


def run_of_two(folder: Path) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    trainer.FSDPStrategy, fsdp._get_full_state_dict_context = OnCpu, whole_weights
    device._require_gpus = lambda *_: None
    with processes.connected():
        fit.train(processes.broadcast_from_rank0(lambda: open_run(config(folder, "fsdp"))))


@pytest.mark.soak
def test_a_run_of_two_processes_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capfd: pytest.CaptureFixture[str]) -> None:
    """Through validation, where the last batch is one process's alone, checkpoints, the sample and the report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    fit.train(open_run(config(tmp_path, "single")))
    capfd.readouterr()
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=0, run_id=uuid.uuid4().hex,
                                rdzv_backend="c10d", rdzv_endpoint="localhost:0"), run_of_two)(tmp_path)
    found, expected = tmp_path / "fsdp", tmp_path / "single"
    for name in ("train/loss", "val/loss"):
        assert losses(found, name) == pytest.approx(losses(expected, name), abs=1e-4)
    assert list(losses(found, "val/loss")) == [3, 6]
    assert read_checkpoint(found / "checkpoints" / "last.ckpt").step == 6
    assert (found / "report.html").exists()
    assert capfd.readouterr().out.strip(), "the sample"


@pytest.mark.parametrize("optim", [OptimConfig(name="muon"), OptimConfig(weight_decay=0.1)])
def test_what_needs_whole_matrices_is_refused(optim: OptimConfig) -> None:
    with pytest.raises(UserError):
        TrainConfig(optim=optim, trainer=TrainerConfig(strategy="fsdp"))
