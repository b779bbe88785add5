"""Tests that a run stopped by a batch system or a closing terminal continues bit for bit.

The environment variables of a batch system must not change a run.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import SMALL, assert_same_training, done_here, finish, fork_run, losses, wait_for

from rwkv.checkpoint.files import read_checkpoint

pytestmark = [pytest.mark.programs, pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1 and no SIGHUP")]
STEPS = 60
RUN = (*SMALL, "logger=csv", "kernel=torch_scan", "model.n_layer=1", "model.ctx_len=16", f"trainer.max_steps={STEPS}",
       "trainer.val_every=1000", "trainer.checkpoint_every=1000", "trainer.sample_every=20")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3",
         "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
LSF = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "nowhere", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2",
       "JSM_NAMESPACE_LOCAL_RANK": "1"}
OTHERS = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "NODE_RANK": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1",
          "KUBERNETES_PORT": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    result = done_here(folder, "train", *RUN, "out_dir=whole")
    assert result.status == 0, result.error
    return folder / "whole"


@pytest.mark.parametrize(("name", "times", "environment"), [
    ("SIGINT", 1, {}), ("SIGUSR1", 2, SLURM), pytest.param("SIGHUP", 2, {}, marks=pytest.mark.soak)])
def test_a_run_that_is_asked_to_stop_continues_bit_for_bit(folder: Path, whole: Path, name: str, times: int,
                                                           environment: dict[str, str]) -> None:
    """The signal comes before the first checkpoint. SIGHUP comes twice, from the kernel and the shell of a closing terminal."""
    run = folder / f"{name}, stopped"
    process = fork_run(folder, *RUN, f"out_dir={run.name}", **environment)
    wait_for(process, run, 5)
    for _ in range(times):
        process.send_signal(getattr(signal, name))
    stopped = finish(process)
    assert (stopped.status, stopped.output) == (130, ""), stopped.error
    assert "Traceback" not in stopped.error
    _, command = stopped.error.rstrip().split("continue with: python train.py ")
    assert 5 <= read_checkpoint(run).step < STEPS
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt"}
    result = done_here(folder, "train", *shlex.split(command))
    assert result.status == 0, result.error
    for path in (run / "checkpoints").glob("last-*"):          # the stop wrote these
        path.unlink()
    assert_same_training(run, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_sigterm_to_all_processes_of_a_job_loses_nothing(folder: Path, whole: Path) -> None:
    """systemd and SLURM also send the signal to the workers that load data."""
    process = fork_run(folder, *RUN, "data.num_workers=2", "out_dir=all")
    wait_for(process, folder / "all", 5)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in (*workers, process.pid):
        os.kill(pid, signal.SIGTERM)
    stopped = finish(process)
    assert (len(workers), stopped.status) == (2, 130), stopped.error
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    result = done_here(folder, "train", "resume=auto", "out_dir=all")
    assert result.status == 0, result.error
    assert losses(folder / "all") == losses(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loader_that_is_killed_ends_the_run_with_one_sentence(folder: Path) -> None:
    process = fork_run(folder, *RUN, "data.num_workers=1", "out_dir=killed", "trainer.max_steps=100000")
    wait_for(process, folder / "killed", 5)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    result = finish(process)
    assert result.status == 2, result.error
    assert "Traceback" not in result.error
    assert "data.num_workers" in result.error.splitlines()[-1]


def test_one_process_is_one_process_in_any_batch_system(folder: Path, whole: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above with SIGUSR1 sets SLURM's variables."""
    for name, value in (LSF | OTHERS).items():
        monkeypatch.setenv(name, value)
    result = done_here(folder, "train", *RUN, f"out_dir={tmp_path}/run")
    assert result.status == 0, result.error
    assert losses(tmp_path / "run") == losses(whole)


def test_an_incomplete_environment_of_torchrun_is_reported_in_one_sentence(folder: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "inherited")
    monkeypatch.delenv("RANK", raising=False)
    result = done_here(folder, "train", *RUN, "out_dir=torchelastic")
    first, error = result.error.splitlines()
    assert (result.status, first.split()[0]) == (2, "loading")
    assert "TORCHELASTIC_RUN_ID" in error
    assert not (folder / "torchelastic").exists()


def test_a_run_without_a_checkpoint_restarts_and_keeps_its_earlier_files(folder: Path, whole: Path, tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that Lightning writes in a SLURM job, hpc_ckpt_1.ckpt, is not read."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints")
    (run / "kernel.json").write_text(json.dumps({"finished": False}))
    (run / "hpc_ckpt_1.ckpt").write_bytes(b"not even a checkpoint")
    contents = {name: (run / name).read_bytes() for name in ("metrics.csv", "samples.jsonl", "config.yaml", "report.html")}
    planned = done_here(folder, "train", "resume=auto", f"out_dir={run}", "plan=true")
    assert "restarts at step 0" in planned.error
    assert not (run / "unsaved-1").exists()
    result = done_here(folder, "train", "resume=auto", f"out_dir={run}")
    assert result.status == 0, result.error
    assert f"{run / 'unsaved-1'}" in result.error
    assert {name: (run / "unsaved-1" / name).read_bytes() for name in contents} == contents
    assert_same_training(run, whole)


def test_a_run_without_last_ckpt_resumes_from_best_ckpt(folder: Path, whole: Path, tmp_path: Path) -> None:
    """The run was killed after its first validation, which wrote best.ckpt. If kernel.json is damaged, only times are lost."""
    validating = (*RUN, "trainer.val_every=25", "trainer.max_steps=40")
    assert done_here(folder, "train", *validating, f"out_dir={tmp_path}/whole").status == 0
    process = fork_run(folder, *validating, f"out_dir={tmp_path}/killed")
    wait_for(process, tmp_path / "killed", 27)
    process.kill()
    finish(process)
    assert {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()} == {"best.ckpt"}
    (tmp_path / "killed" / "kernel.json").write_text('{"steps": 3, "errors": [1]}')
    result = done_here(folder, "train", "resume=auto", f"out_dir={tmp_path}/killed")
    assert result.status == 0, result.error
    assert "continued from" in result.error
    assert_same_training(tmp_path / "killed", tmp_path / "whole")


def test_a_failed_save_at_a_stop_is_reported_and_loses_no_earlier_checkpoint(folder: Path, tmp_path: Path) -> None:
    """A file is in the place of the checkpoints' folder, so that not even root can write a checkpoint."""
    run = tmp_path / "run"
    process = fork_run(folder, *RUN, "trainer.max_steps=100000", f"out_dir={run}")
    wait_for(process, run, 5)
    (run / "checkpoints").write_text("in the way")
    process.send_signal(signal.SIGUSR1)
    result = finish(process)
    assert result.status == 2, result.error
    assert "Traceback" not in result.error
    assert result.error.splitlines()[-1].startswith(f"error: the checkpoint {run}/checkpoints/last.ckpt cannot be written: ")
    assert torch.tensor(list(losses(run))).diff().eq(1).all()


@pytest.mark.parametrize("options", [("logger=csv",), ("logger=none", "trainer.checkpoint_every=5")])
def test_a_directory_that_is_moved_ends_the_run_and_no_part_of_it_appears_again(folder: Path, tmp_path: Path,
                                                                                options: tuple[str, ...]) -> None:
    """The first file that the run writes afterwards is metrics.csv, or a checkpoint."""
    run = tmp_path / "run"
    process = fork_run(folder, *RUN, *options, "trainer.max_steps=100000", "trainer.sample_every=0", f"out_dir={run}")
    while process.poll() is None and not any((run / name).is_file() for name in ("metrics.csv", "checkpoints/last.ckpt")):
        time.sleep(0.01)
    run.rename(tmp_path / "moved")
    result = finish(process)
    assert result.status == 2, result.error
    assert "Traceback" not in result.error
    assert str(run) in result.error.splitlines()[-1]
    assert not run.exists()
