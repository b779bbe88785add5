"""Tests what follows the last step of a run."""

from pathlib import Path
from types import SimpleNamespace

import torch
from models import small_model

from rwkv.training.finish import trained_model


def test_the_last_sample_is_generated_on_the_device_of_the_run(tmp_path: Path) -> None:
    """Lightning has moved the model to the CPU, on which a kernel for GPUs cannot read a prompt."""
    task = SimpleNamespace(model=small_model())
    model = trained_model(task, "single", tmp_path, torch.device("meta"))         # type: ignore[arg-type]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
