"""Tests that several processes have the losses of one process, and that they stop, fail and continue together."""

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from forked import METHOD, free_port, preloaded_context
from torch import distributed, multiprocessing
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training_runs import SMALL, TEXT, Done, assert_same_training, done_here, finish, losses, start, wait_for

from rwkv import cli
from rwkv import distributed as processes
from rwkv.errors import UserError

pytestmark = pytest.mark.programs
RUN = (*SMALL, "logger=csv", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=20",
       "trainer.val_every=12", "trainer.checkpoint_every=12", "trainer.accumulate=2", "trainer.tbptt=2")
TWO = ("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def one(folder: Path) -> Done:
    return done_here(folder, "train", *RUN, "out_dir=one")


@pytest.fixture(scope="module")
def two(folder: Path) -> Done:
    """Trains with two processes. If possible, the machine's own name has no address, as in many containers."""
    unnamed = ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname no-such-host && exec "$@"', "sh")
    works = shutil.which("unshare") and subprocess.run([*unnamed, "true"], capture_output=True, check=False).returncode == 0
    temporary = folder / "temporary"
    temporary.mkdir()
    return finish(start(folder, "train", *RUN, *TWO, "out_dir=two", within=unnamed if works else (), TMPDIR=str(temporary)))


def test_two_processes_have_the_losses_of_one(folder: Path, one: Done, two: Done) -> None:
    assert (one.status, two.status) == (0, 0), one.error + two.error
    for name, steps in (("train/loss", list(range(1, 21))), ("val/loss", [12, 20])):
        assert list(losses(folder / "two", name)) == steps
        assert losses(folder / "two", name) == pytest.approx(losses(folder / "one", name), abs=1e-5)
    states, expected = (torch.load(folder / name / "checkpoints/last.ckpt", weights_only=True)["carried"]
                        for name in ("two", "one"))
    for name, state in expected.items():
        torch.testing.assert_close(states[name], state, rtol=1e-3, atol=1e-4)


def test_each_process_draws_random_numbers_of_its_own(folder: Path, two: Done) -> None:
    """Each process must draw its own masks for dropout."""
    checkpoint = torch.load(folder / "two/checkpoints/last.ckpt", weights_only=True)
    first, second = checkpoint["callbacks"]["RandomState"]["ranks"]
    assert not torch.equal(first["torch"], second["torch"])
    assert first["python"] != second["python"]
    assert first["numpy"] != second["numpy"]


def test_two_processes_finish_a_run(folder: Path, two: Done) -> None:
    """In validation, one process alone has the last batch. The run must still write the last sample and the report."""
    windows = -(-(len(TEXT.encode()) // 10) // 16)
    assert -(-windows // 2) % 2 == 1
    assert two.status == 0, two.error
    assert two.output.strip()
    assert "report: two/report.html" in two.error
    assert (folder / "two" / "report.html").exists()


def test_two_processes_leave_no_temporary_files(folder: Path, two: Done) -> None:
    names = [path.name for path in (folder / "temporary").iterdir()]
    assert [name for name in names if not name.startswith("torchinductor_")] == []       # the cache of all of a user's runs


def test_two_processes_print_each_line_once(one: Done, two: Done) -> None:
    def first_words(text: str) -> Counter[str]:
        """Counts the first words of lines, except lines of progress bars and lines about loading."""
        lines = [line for line in text.splitlines() if line.strip() and "%|" not in line]
        return Counter(line.split()[0] for line in lines if not line.startswith("loading"))

    assert first_words(one.error) == first_words(two.error)
    assert len(two.output) == len(one.output)


def broadcast_with_short_timeout(rank: int, folder: Path, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with processes.connect_processes():
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        text = processes.broadcast_from_rank0(lambda: time.sleep(3) or "tokenised")
        (folder / f"{rank}.txt").write_text(text)


@pytest.mark.soak
def test_the_other_processes_wait_as_long_as_the_first_needs(tmp_path: Path) -> None:
    """The first process may tokenise a large text for hours. torch's timeout of half an hour is one second here."""
    multiprocessing.spawn(broadcast_with_short_timeout, (tmp_path, free_port()), nprocs=2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["tokenised", "tokenised"]


# Connecting


def end_at_first_start(folder: Path) -> None:
    """Connects as one of two processes. The second one ends at its first start, and connects late at its second start."""
    if (folder / "ended").exists() and os.environ["RANK"] == "1":
        time.sleep(1)
    with processes.connect_processes():
        first_start = not (folder / "ended").exists()
        processes.all_gather(None)
        if first_start and processes.rank() == 1:
            (folder / "ended").touch()
            os._exit(1)
        (folder / f"{processes.rank()}.txt").write_text(str(processes.all_gather(processes.rank())))


@pytest.mark.soak
def test_processes_that_a_launcher_starts_again_find_each_other(tmp_path: Path) -> None:
    preloaded_context()
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, run_id=uuid.uuid4().hex,
                          rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", start_method=METHOD,
                          logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path / "logs")))
    elastic_launch(config, end_at_first_start)(tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[0, 1]", "[0, 1]"]


def connect_alone(address: str, port: int) -> None:
    """Connects as one of two processes; the other never connects. Ctrl-C is ignored, as in the background of a shell."""
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=str(port))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.CONNECT_TIMEOUT = timedelta(seconds=0 if address != "127.0.0.1" else 60)
    with cli.exit_on_user_error(), processes.connect_processes():
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_waits_for_others(number: int) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        process = preloaded_context().Process(target=connect_alone, args=listening.getsockname())
        process.start()
        connection, _ = listening.accept()
        os.kill(process.pid, number)
        process.join(60)
        connection.close()
    assert process.exitcode == 130


def test_an_invalid_address_is_a_user_s_mistake() -> None:
    process = preloaded_context().Process(target=connect_alone, args=("no such host", 1))
    process.start()
    process.join(60)
    assert process.exitcode == cli.USER_ERROR


def test_an_unknown_interface_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(UserError, match=r"nope0.*GLOO_SOCKET_IFNAME"):
        processes.launch(2, [])


@pytest.mark.soak
def test_two_processes_continue_bit_for_bit_after_ctrl_c(folder: Path, two: Done) -> None:
    """The launcher alone gets Ctrl-C, in the background of a shell. The command to continue need not say how many processes."""
    process = start(folder, "train", *RUN, *TWO, "out_dir=stopped", within=("sh", "-c", "trap '' INT; exec \"$@\"", "sh"))
    wait_for(process, folder / "stopped", 5)
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.status == 130, stopped.error
    assert "Traceback" not in stopped.error
    assert "python train.py resume=auto out_dir=stopped" in stopped.error
    result = finish(start(folder, "train", "resume=auto", "out_dir=stopped"))
    assert result.status == 0, result.error
    assert_same_training(folder / "stopped", folder / "two")


@pytest.mark.soak
def test_two_processes_that_diverge_end_together_and_one_says_so(folder: Path) -> None:
    result = finish(start(folder, "train", *RUN, *TWO, "optim.lr=1e30", "out_dir=diverged"))
    assert result.status not in (0, 130)
    (error,) = [line for line in result.error.splitlines() if line.startswith("error: ")]
    assert "optim.lr" in error
    assert "Traceback" not in result.error
    assert (folder / "diverged" / "report.html").is_file()
