"""make soak: runs of both generations killed twenty times, and one of two processes five times, end as if never killed."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import SMALL, assert_same_training, damage, finish, killed_and_continued, start, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STEPS, KILLS = 1000, 20
RUN = (*SMALL, "logger=csv", "model.ctx_len=16", f"trainer.max_steps={STEPS}", "trainer.val_every=35",
       "trainer.checkpoint_every=14")
LEFT = 2 ** 18                           # bytes of a full disk: no checkpoint fits, but some rows of metrics do
TWO = ("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    assert finish(start(folder, "train", *RUN, "out_dir=whole")).status == 0
    return folder / "whole"


def test_twenty_kills_of_one_run(folder: Path, whole: Path) -> None:
    done = killed_and_continued(folder, RUN, "killed", KILLS, STEPS, seed=7)
    assert done.status == 0, done.error
    assert_same_training(folder / "killed", whole)


@pytest.mark.parametrize(("name", "options", "kills", "steps", "seed"), [
    ("loaders", ("data.num_workers=2", "trainer.accumulate=2", "trainer.precision=bf16-mixed"), 5, 400, 8),
    ("rwkv7", ("model.generation=rwkv7", "model.head_size=8", "trainer.tbptt=2", "trainer.precision=bf16-mixed"), KILLS, STEPS,
     11),
    ("two processes", TWO, 5, 400, 9),           # their launcher is killed: they notice
])
def test_kills_of_other_runs(folder: Path, name: str, options: tuple[str, ...], kills: int, steps: int, seed: int) -> None:
    arguments = (*RUN, *options, f"trainer.max_steps={steps}")
    assert finish(start(folder, "train", *arguments, f"out_dir=whole {name}")).status == 0
    done = killed_and_continued(folder, arguments, f"killed {name}", kills, steps, seed)
    assert done.status == 0, done.error
    assert_same_training(folder / f"killed {name}", folder / f"whole {name}")


def test_a_damaged_last_checkpoint_costs_no_more_than_the_steps_after_the_one_before(folder: Path, whole: Path) -> None:
    killed_and_continued(folder, (*RUN, "trainer.max_steps=500"), "damaged", 1, 500, seed=10)
    damage(folder / "damaged" / "checkpoints" / "last.ckpt")
    done = finish(start(folder, "train", "resume=auto", "out_dir=damaged", f"trainer.max_steps={STEPS}"))
    assert done.status == 0, done.error
    assert "is damaged and now called damaged.ckpt; continuing from the one before it" in done.error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for a few checkpoints."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting needs rights: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_stops_the_run_with_a_sentence(folder: Path, whole: Path, small_disk: Path) -> None:
    """Another program fills it while the run goes on: at its beginning there is room, or the plan would refuse it."""
    run = small_disk / "run"
    process = start(folder, "train", *RUN, f"out_dir={run}")
    wait_for(process, run, STEPS // 3)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - LEFT))
    done = finish(process)
    assert done.status == 2
    assert done.error.splitlines()[-1].startswith(f"error: cannot write the checkpoint {run}/checkpoints/last.ckpt: No space")
    moved = folder / "moved"
    shutil.copytree(run, moved)
    done = finish(start(folder, "train", "resume=auto", "out_dir=moved"))
    assert done.status == 0, done.error
    assert_same_training(moved, whole)
