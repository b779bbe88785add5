"""trainer=fsdp as Lightning wraps it, on two processes of the CPU: the losses and gradient norms of one process."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import small_model
from torch import Tensor, distributed, multiprocessing
from torch.distributed.fsdp import FullyShardedDataParallel

from rwkv.config import OptimConfig, TrainConfig, TrainerConfig
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
    task, strategy = learner(), strategy_for(TrainerConfig(strategy="fsdp"))["strategy"]
    strategy._lightning_module = task
    strategy.model = FullyShardedDataParallel(task, device_id=torch.device("cpu"), **strategy.kwargs)
    torch.save(trained(task, strategy, slice(rank, None, 2)), folder / f"{rank}.pt")
    distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def test_two_processes_have_the_losses_and_norms_of_one(tmp_path: Path) -> None:
    task = learner()
    alone = trained(task, SimpleNamespace(model=task, training_step=task.training_step), slice(None))
    multiprocessing.spawn(one_of_two, (free_port(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(norm > LARGEST for _, norm in alone)
    assert [(one[0] + two[0]) / 2 for one, two in zip(first, second, strict=True)] == pytest.approx(
        [loss for loss, _ in alone], abs=1e-5)
    assert [norm for _, norm in first] == [norm for _, norm in second] == pytest.approx([norm for _, norm in alone], rel=1e-5)


@pytest.mark.parametrize("optim", [OptimConfig(name="muon"), OptimConfig(weight_decay=0.1)])
def test_what_needs_whole_matrices_is_refused(optim: OptimConfig) -> None:
    with pytest.raises(ValueError, match=r"with trainer=fsdp each process has a share .*use optim\.name=adamw"):
        TrainConfig(optim=optim, trainer=TrainerConfig(strategy="fsdp"))
