"""Runs the recipes of docs/scale.md on two machines of two processes each.

The machines are network namespaces with a link between them, where the system allows them, or else two addresses of the
loopback interface. SLURM is imitated: srun is a script that runs its command once for each machine, with SLURM's variables.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import ROOT, free_port
from programs import Run, one_sentence
from training_runs import ENVIRONMENT, SMALL, TEXT, done_here, losses, steps_done

pytestmark = pytest.mark.programs
SCALE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
DDP = ("trainer=ddp", "trainer.accelerator=cpu", "logger=csv", "model.n_layer=1", "model.ctx_len=16", "trainer.log_every=1",
       "trainer.checkpoint_every=1000", "trainer.val_every=1000")
OPTIONS = (*(option for option in SMALL if option != "trainer=cpu"), *DDP)
SECONDS = 240


class Machine(NamedTuple):
    """A machine, as the recipes see it.

    Attributes:
        within: the words before a command that runs on the machine.
        interface: the network interface with the address.
    """

    within: tuple[str, ...]
    address: str
    interface: str


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Yields two machines that reach each other."""
    token = uuid.uuid4().hex[:6]
    names = [f"tm{token}{number}" for number in range(2)]
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, check=False).returncode:
        yield (Machine((), "127.0.0.1", "lo"), Machine((), "127.0.0.2", "lo"))
        return
    pair = tuple(Machine(("ip", "netns", "exec", name), f"10.77.0.{number + 1}", name) for number, name in enumerate(names))
    try:
        subprocess.run(["ip", "netns", "add", names[1]], check=True)
        subprocess.run(["ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns",
                        names[1]], check=True)
        for machine in pair:
            inside = ["ip", "-n", machine.interface]
            subprocess.run([*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface], check=True)
            for interface in ("lo", machine.interface):
                subprocess.run([*inside, "link", "set", interface, "up"], check=True)
        yield pair
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with text.txt, and with bin/ for the programs that the recipes call."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "bin").mkdir()
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def write_programs(folder: Path, machines: tuple[Machine, Machine]) -> dict[str, str]:
    """Writes the programs torchrun, srun and scontrol, and returns an environment with their folder in PATH."""
    first, second = machines
    write_script(folder / "bin/torchrun", f"""
address={first.address} interface={first.interface}
[ "$SLURM_NODEID" = 0 ] || address={second.address} interface={second.interface}
exec env GLOO_SOCKET_IFNAME=$interface {sys.executable} -m torch.distributed.run --local-addr=$address \\
  --rdzv-conf=is_host=$((1 - ${{SLURM_NODEID:-0}})) "$@"
""")
    starts = "\n".join(f'SLURM_NODEID={number} SLURM_PROCID={number} SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 '
                       f'{" ".join(machine.within)} "$@" & all+=($!)' for number, machine in enumerate(machines))
    write_script(folder / "bin/srun", f"""
all=()
{starts}
trap 'kill -TERM "${{all[@]}}"' TERM
status=0
for each in "${{all[@]}}"; do
  wait $each; code=$?
  while kill -0 $each 2>/dev/null; do wait $each; code=$?; done
  [ $code = 0 ] || status=$code
done
exit $status
""")
    write_script(folder / "bin/scontrol", f"""
[ "$1" = show ] && printf '%s\\n' {first.address} {second.address}
[ "$1" = requeue ] && echo "$2" >> requeued
exit 0
""")
    return ENVIRONMENT | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def recipe(start: str, nproc: int, port: int, options: tuple[str, ...]) -> str:
    """Returns the commands of docs/scale.md from `start` to an empty line or a fence, for `nproc` processes on each machine."""
    text = re.search(rf"^( *{re.escape(start)}.*?)\n(?:```|\n)", SCALE, re.DOTALL | re.MULTILINE)
    assert text
    commands = text[1].replace("--nproc-per-node=8", f"--nproc-per-node={nproc}").replace(":29500", f":{port}")
    commands = commands.replace(" train.py", f" {ROOT / 'train.py'}").replace("trainer=fsdp", " ".join(options))
    return re.sub(r"out_dir=\S+", "out_dir=run", commands)


def losses_of_one(folder: Path, steps: int) -> dict[int, float]:
    """Returns the losses of a single process."""
    result = done_here(folder, "train", *SMALL, *DDP[2:], f"trainer.max_steps={steps}", "out_dir=alone")
    assert result.status == 0, result.error
    return losses(folder / "alone")


@pytest.mark.soak
def test_the_recipe_of_one_machine(folder: Path, machines: tuple[Machine, Machine]) -> None:
    command = recipe("torchrun --standalone", 2, 29500, (*OPTIONS, "trainer.max_steps=6")).strip()
    write_script(folder / "bin/torchrun", f'exec {sys.executable} -m torch.distributed.run --local-addr=127.0.0.1 "$@"\n')
    environment = ENVIRONMENT | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False,
                            timeout=SECONDS)
    assert result.returncode == 0, result.stderr
    assert losses(folder / "run") == pytest.approx(losses_of_one(folder, 6), abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_recipe_of_several_machines(folder: Path, machines: tuple[Machine, Machine]) -> None:
    environment, port = write_programs(folder, machines), free_port()
    command = recipe("torchrun --nnodes=2", 2, port, (*OPTIONS, "trainer.max_steps=6")).replace("HOST", machines[0].address)
    running = [subprocess.Popen([*machine.within, "bash", "-c", command], cwd=folder, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, env=environment | {"SLURM_NODEID": str(number)})
               for number, machine in enumerate(machines)]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    assert "processes 4" in outputs[0]
    assert losses(folder / "run") == pytest.approx(losses_of_one(folder, 6), abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_job_of_slurm_stops_before_its_time_is_over_and_goes_on_when_it_is_queued_again(
        folder: Path, machines: tuple[Machine, Machine]) -> None:
    environment = write_programs(folder, machines) | {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]",
                                                      "SLURM_JOB_NAME": "large"}

    def job(steps: int) -> subprocess.Popen[str]:
        write_script(folder / "job", recipe("first=", 2, free_port(), (*OPTIONS, f"trainer.max_steps={steps}")))
        return subprocess.Popen(["bash", "job"], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    stopped = job(100_000)
    deadline = time.monotonic() + SECONDS
    while stopped.poll() is None and steps_done(folder / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    stopped.send_signal(signal.SIGTERM)
    output = stopped.communicate(timeout=SECONDS)[0]
    assert (folder / "requeued").read_text() == "77\n", output
    assert "stopped at step" in output
    reached = steps_done(folder / "run")
    assert 5 <= reached < 100_000
    again = job(reached + 5)
    output = again.communicate(timeout=SECONDS)[0]
    assert again.returncode == 0, output
    assert max(losses(folder / "run")) == reached + 5, output
    assert (folder / "requeued").read_text() == "77\n", "a job that is finished is not queued again"
    expected = list(losses_of_one(folder, 5).values())
    assert [losses(folder / "run")[step] for step in range(1, 6)] == pytest.approx(expected, abs=1e-4)


def test_a_task_of_srun_for_each_process_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text(TEXT)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    one_sentence(run("train", *OPTIONS, "trainer.devices=2"), "srun", "torchrun", "--ntasks-per-node=1")
    assert not Path("runs").exists()
