"""Tests that runs which are killed up to twenty times end as if they were never killed (make soak)."""

from pathlib import Path

import pytest
from training_runs import SMALL, assert_same_training, finish, kill_and_continue, start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STEPS, KILLS = 1000, 20
RUN = (*SMALL, "logger=csv", "model.ctx_len=16", f"trainer.max_steps={STEPS}", "trainer.val_every=35",
       "trainer.checkpoint_every=14")
TWO = ("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")


@pytest.mark.parametrize(("name", "options", "kills", "steps", "seed"), [
    ("plain", (), KILLS, STEPS, 7),
    ("loaders", ("data.num_workers=2", "trainer.accumulate=2", "trainer.precision=bf16-mixed"), 5, 400, 8),
    ("rwkv7", ("model.generation=rwkv7", "model.head_size=8", "trainer.tbptt=2", "trainer.precision=bf16-mixed"), KILLS, STEPS,
     11),
    ("two processes", TWO, 5, 400, 9),           # if the launcher is killed, both must end
])
def test_kills_of_a_run(folder: Path, name: str, options: tuple[str, ...], kills: int, steps: int, seed: int) -> None:
    arguments = (*RUN, *options, f"trainer.max_steps={steps}")
    assert finish(start(folder, "train", *arguments, f"out_dir=whole {name}")).status == 0
    result = kill_and_continue(folder, arguments, f"killed {name}", kills, steps, seed)
    assert result.status == 0, result.error
    assert_same_training(folder / f"killed {name}", folder / f"whole {name}")
