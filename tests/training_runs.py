"""Starts training runs in separate processes, kills them at random moments, continues them, and compares them bit for bit."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import ROOT, Forked
from programs import status_of

from rwkv.checkpoint.formats._fsdp_folder import read_whole
from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig

TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(200))
SMALL = ("debug=fast", "data=text", "data.path=text.txt", "data.val_fraction=0.1", "data.cache_dir=cache", "trainer=cpu")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
OWN = ("/timemix/run/out_dir", "/timemix/run/resume")    # metrics in which two identical runs differ
OF_PROBE = (*OWN, "/timemix/run/trainer/probe")
KILLED = -signal.SIGKILL
Process = subprocess.Popen[str] | Forked


def configured(L: int, C: int, B: int, T: int, generation: str = "rwkv4", **trainer: Any) -> TrainConfig:
    """Returns a configuration with L layers of C channels, and batches of B rows of T tokens.

    `trainer` has options of trainer.
    """
    return TrainConfig(model=ModelConfig(generation=generation, n_layer=L, n_embd=C, ctx_len=T), data=DataConfig(batch_size=B),
                       trainer=TrainerConfig(**trainer))


class Done(NamedTuple):
    status: int
    output: str
    error: str


def start(folder: Path, program: str, *arguments: str, apart: bool = False, within: Sequence[str] = (),
          **environment: str) -> subprocess.Popen[str]:
    """Starts a program of the clone in a new process.

    `apart` puts the process into a new process group, to which a signal can be sent. `within` is a command that runs the
    program's command in its own process. `environment` has additional variables.
    """
    return subprocess.Popen([*within, sys.executable, str(ROOT / f"{program}.py"), *arguments], cwd=folder,
                            env=ENVIRONMENT | environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
                            start_new_session=apart)


def fork_run(folder: Path, *arguments: str, largest: int | None = None, **environment: str) -> Process:
    """Runs train.py in a separate process, without the time of imports. `largest` is the maximum size of a file in bytes."""
    return Forked(folder, ("train.py", *arguments), ENVIRONMENT | environment, largest)


def done_here(folder: Path, program: str, *arguments: str) -> Done:
    """Runs a program in the current process, where torch and Lightning are imported already.

    The program has one thread, as in `start`.
    """
    output, error, threads = StringIO(), StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(error):
        patch.chdir(folder)
        status = status_of(patch, program, *arguments)
    torch.set_num_threads(threads)
    return Done(status, output.getvalue(), error.getvalue())


def finish(process: Process, timeout_s: float = 240) -> Done:
    output, error = process.communicate(timeout=timeout_s)
    return Done(process.returncode, output, error)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses(run: Path, name: str = "train/loss") -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows(run) if row[name]}


def steps_done(run: Path) -> int:
    return max(losses(run), default=0) if (run / "metrics.csv").is_file() else 0


def kill_and_continue(folder: Path, arguments: tuple[str, ...], out_dir: str, kills: int, steps: int, seed: int) -> Done:
    """Kills the run with SIGKILL, each time after a random number of steps and a random delay, and continues it.

    No kill happens in the last part of the steps, which must take a third of a second, so that none comes after the run's end.
    """
    chance = random.Random(seed)
    for kill in range(kills):
        aim = round(steps * (kill + chance.random()) / (kills + 1))
        process = start(folder, "train", *arguments, f"out_dir={out_dir}", "resume=auto")
        kill_after(process, folder / out_dir, aim, chance.uniform(0, 0.3))
    return finish(start(folder, "train", *arguments, f"out_dir={out_dir}", "resume=auto"))


def kill_after(process: Process, run: Path, step: int, seconds: float) -> None:
    wait_for(process, run, step)
    time.sleep(seconds)
    process.kill()
    result = finish(process)
    assert result.status == KILLED, result.error


def wait_for(process: Process, run: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while process.poll() is None and steps_done(run) < step and time.monotonic() < deadline:
        time.sleep(0.005)


def assert_same_training(run: Path, other: Path, own: tuple[str, ...] = OWN, except_for: tuple[str, ...] = ()) -> None:
    """Checks that two runs have bit-identical checkpoints and the same curves.

    A checkpoint has the weights, optimiser, schedule, random state and data position. `except_for` names checkpoints that may
    differ.
    """
    for name in sorted({path.name for folder in (run, other) for path in (folder / "checkpoints").iterdir()} - {*except_for}):
        one, two = (content(folder / "checkpoints" / name) for folder in (run, other))
        assert one.keys() == two.keys()
        assert not {key for key in one if key not in own and not same(one[key], two[key])}
    for name in ("train/loss", "val/loss", "val/bpb", "lr", "grad_norm"):
        assert losses(run, name) == losses(other, name)
    samples, expected = (folder / "samples.jsonl" for folder in (run, other))        # trainer=fsdp writes no samples
    assert samples.exists() == expected.exists()
    assert not samples.exists() or samples.read_bytes() == expected.read_bytes()


def content(checkpoint: Path) -> dict[str, Any]:
    return dict(leaves(read_whole(checkpoint) if checkpoint.is_dir() else torch.load(checkpoint, weights_only=True)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, f"{path}/{key}")


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and one == two


def damage(path: Path) -> None:
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
