"""Tests trainer=fsdp: losses are those of one process, and any number of processes continues from a checkpoint."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from files import byte_model, same_tensors
from forked import METHOD, ROOT, preloaded_context
from programs import compose
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training_runs import (
    ENVIRONMENT,
    OWN,
    assert_same_training,
    content,
    damage,
    done_here,
    finish,
    losses,
    steps_done,
    wait_for,
)

from rwkv import cli
from rwkv import distributed as processes
from rwkv.checkpoint.files import read_checkpoint
from rwkv.checkpoint.formats import _fsdp_folder
from rwkv.checkpoint.location import COMPLETE
from rwkv.config import TrainConfig, TrainerConfig, TuneConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import remove
from rwkv.tools.convert import convert
from rwkv.training import fit
from rwkv.training.callbacks.checkpoints import newest_sound_checkpoint, rotate_checkpoints
from rwkv.training.run.opening import open_run
from rwkv.training.task import LanguageModel
from rwkv.training.tuning.exports import tuned_files

COMMON = ("debug=fast", "data.cache_dir=cache", "data.batch_size=4", "trainer.max_steps=8", "trainer.val_every=4",
          "trainer.checkpoint_every=4", "trainer.log_every=1", "trainer.sample_tokens=3", "logger=csv", "optim.warmup_steps=0",
          "model.ctx_len=32")
HALF = 4                                 # the step of a run's first checkpoint
LONGER = ("trainer.max_steps=20", "trainer.val_every=10", "trainer.checkpoint_every=10")
TEXT = (*COMMON, "data=text", "data.path=text.txt", "data.val_fraction=0.1", "model.n_layer=2", "model.n_embd=32")
CHAT = (*COMMON, "data=chat", "data.path=pairs.jsonl", "init_from=base7.safetensors", "optim.lr=1e-3", "tune.guard=null",
        "tune.objective=dpo", "model.ctx_len=128")
NORMUON = ("optim.name=normuon", "optim.weight_decay=0.1")
RWKV7 = ("model=rwkv7_tiny", "model.n_layer=2", "model.n_embd=64")
CASES = {
    "rwkv4": (*TEXT, "optim.weight_decay=0.1", "trainer.tbptt=2"),
    "rwkv7": (*TEXT, *RWKV7, *NORMUON, "trainer.accumulate=2", "trainer.activation_checkpointing=true",
              "trainer.grad_norms=true"),
    "lora": (*CHAT, "tune=lora", "tune.rank=2"),
}
SOAK_CASES = {"half": (*TEXT, *RWKV7, "trainer.precision=bf16-mixed"), "state": (*CHAT, "tune=state")}
CPU = ("trainer.accelerator=cpu",)
TWO = ("trainer=fsdp", "trainer.devices=2", *CPU)
Case = tuple[str, ...]


def train_cases(folder: Path, cases: list[Case]) -> None:
    """Trains these runs in sequence, as one of several processes."""
    os.chdir(folder)
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    with processes.connect_processes():
        for case in cases:
            line = cli.split(list(case), TrainConfig)
            config = compose("train", *case)
            fit.train(processes.broadcast_from_rank0(lambda: open_run(config, line.keys, line.chosen_keys)))      # noqa: B023


def run_in_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    preloaded_context()
    with TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=0, run_id=uuid.uuid4().hex,
                              rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", start_method=METHOD,
                              logs_specs=DefaultLogsSpecs(log_dir=logs))
        elastic_launch(config, function)(*arguments)


def write_tuning_files(folder: Path) -> None:
    for generation in ("rwkv4", "rwkv7"):
        byte_model(folder / f"base{generation[-1]}.safetensors", generation, n_layer=2, n_embd=64)
    pairs = [{"prompt": f"{n} and one?", "chosen": f"{n + 1}", "rejected": f"it is {n + 1}" + "!" * (n % 5)} for n in range(24)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    conversations = [{"prompt": f"{n} and one?", "completion": f"{n + 1}"} for n in range(24)]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)))


def train_one_and_two(folder: Path, cases: dict[str, Case]) -> Path:
    """Makes two runs of each case: NAME-one by one process, and NAME-two by two. Returns the folder."""
    for name, case in cases.items():
        result = done_here(folder, "train", *case, *CPU, f"out_dir={name}-one")
        assert result.status == 0, result.error
    run_in_processes(2, train_cases, folder, [(*case, *TWO, f"out_dir={name}-two") for name, case in cases.items()])
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    write_tuning_files(folder)
    return train_one_and_two(folder, CASES)


@pytest.fixture(scope="module")
def soak_runs(runs: Path) -> Path:
    return train_one_and_two(runs, SOAK_CASES)


def compare_losses_and_norms(runs: Path, name: str) -> None:
    """Compares the run of two processes with that of one.

    The order of sums changes the rounding of products in half precision, which Muon uses, too.
    """
    tolerance = 2e-2 if name == "half" else 5e-3 if name == "rwkv7" else 1e-4
    for metric in ("train/loss", "val/loss"):
        one, two = losses(runs / f"{name}-one", metric), losses(runs / f"{name}-two", metric)
        assert len(one) >= 2
        assert two == pytest.approx(one, abs=tolerance)
    assert losses(runs / f"{name}-two", "grad_norm") == pytest.approx(losses(runs / f"{name}-one", "grad_norm"), rel=0.1)


@pytest.mark.programs
@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_losses_and_norms_of_one(runs: Path, name: str) -> None:
    compare_losses_and_norms(runs, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK_CASES)
def test_half_precision_and_states_have_the_losses_and_norms_of_one(soak_runs: Path, name: str) -> None:
    compare_losses_and_norms(soak_runs, name)


# Checkpoints


def copy_halfway(runs: Path, run: str, name: str, step: int = HALF) -> None:
    """Copies a run as it was when only the checkpoint of the given step was complete."""
    shutil.copytree(runs / run, runs / name)
    checkpoints = runs / name / "checkpoints"
    remove(checkpoints / "last.ckpt")
    (checkpoints / "last-1.ckpt").rename(checkpoints / "last.ckpt")
    assert read_checkpoint(checkpoints / "last.ckpt").step == step


def continue_with_two_processes(runs: Path, name: str) -> Path:
    """Continues a run of the case rwkv7. A name such as one-two gives the number of processes before and after."""
    copy_halfway(runs, f"rwkv7-{name.partition('-')[0]}", name)
    run_in_processes(2, train_cases, runs, [(f"out_dir={name}", "resume=auto", "trainer=fsdp", "trainer.devices=2")])
    return runs / name


def same_but_for_rounding(run: Path, expected: Path, same_processes: Path) -> None:
    """The order of sums changes the losses a little. The checkpoint is like that of a run with as many processes."""
    for metric in ("train/loss", "val/loss"):
        assert losses(run, metric) == pytest.approx(losses(expected, metric), abs=5e-3)
    actual, like = (content(each / "checkpoints/last.ckpt") for each in (run, same_processes))
    assert {key: getattr(value, "shape", None) for key, value in actual.items()} == {
        key: getattr(value, "shape", None) for key, value in like.items()}


@pytest.mark.programs
def test_the_same_number_of_processes_continues_bit_for_bit(runs: Path) -> None:
    assert_same_training(continue_with_two_processes(runs, "two-two"), runs / "rwkv7-two")


@pytest.mark.programs
def test_one_process_continues_the_run_of_two(runs: Path) -> None:
    copy_halfway(runs, "rwkv7-two", "two-one")
    result = done_here(runs, "train", "out_dir=two-one", "resume=auto", "trainer.strategy=single", "trainer.devices=1")
    assert result.status == 0, result.error
    same_but_for_rounding(runs / "two-one", runs / "rwkv7-two", runs / "rwkv7-one")


@pytest.mark.soak
def test_two_processes_continue_the_run_of_one(runs: Path) -> None:
    same_but_for_rounding(continue_with_two_processes(runs, "one-two"), runs / "rwkv7-two", runs / "rwkv7-two")


@pytest.mark.programs
def test_shards_are_a_checkpoint_like_any_other(runs: Path) -> None:
    """generate.py, timemix convert and read_checkpoint read the shards."""
    path = runs / "rwkv4-two" / "checkpoints" / "best.ckpt"
    sharded, whole = (read_checkpoint(runs / f"rwkv4-{name}" / "checkpoints" / "best.ckpt") for name in ("two", "one"))
    assert (sharded.step, sharded.vocab_size, sharded.tokenizer) == (whole.step, whole.vocab_size, whole.tokenizer)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(sharded.weights[name], tensor, rtol=1e-2, atol=1e-4)
    convert(path, runs / "best.safetensors")
    assert same_tensors(read_checkpoint(runs / "best.safetensors").weights, sharded.weights)
    for name in (path, runs / "rwkv4-two"):
        result = done_here(runs, "generate", f"checkpoint={name}", "prompt=line", "max_new_tokens=3")
        assert result.status == 0, result.error
        assert result.output.strip()


@pytest.mark.programs
@pytest.mark.parametrize(("method", "trained"), [("lora", "runs"), pytest.param("state", "soak_runs", marks=pytest.mark.soak)])
def test_tuned_weights_are_saved_as_files(method: str, trained: str, request: pytest.FixtureRequest) -> None:
    runs: Path = request.getfixturevalue(trained)
    one, two = (read_checkpoint(runs / f"{method}-{name}") for name in ("one", "two"))
    for name, tensor in one.weights.items():
        torch.testing.assert_close(two.weights[name], tensor, rtol=1e-3, atol=1e-4)
    for path in tuned_files(compose("train", f"tune={method}"), Path()):
        first, second = ((runs / f"{method}-{name}" / path) for name in ("one", "two"))
        assert abs(first.stat().st_size - second.stat().st_size) < 100


@pytest.mark.programs
def test_a_damaged_shard_is_noticed_and_the_checkpoint_before_it_taken(runs: Path, tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "rwkv4-two", tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    shard = next(last.glob("*.safetensors"))
    damage(shard)
    with pytest.raises(CheckpointError, match=shard.name):
        read_checkpoint(last)
    checkpoint = newest_sound_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.step == HALF
    assert "damaged.ckpt" in capsys.readouterr().err
    shard = next((last.parent / "last-1.ckpt").glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        read_checkpoint(last.parent / "last-1.ckpt")
    (last.parent / "best.ckpt" / COMPLETE).unlink()
    with pytest.raises(CheckpointError):
        read_checkpoint(last.parent / "best.ckpt")


def write_shard_folder(path: Path, text: str, complete: bool = True) -> None:
    path.mkdir(parents=True)
    (path / "shard.safetensors").write_text(text)
    if complete:
        (path / COMPLETE).write_text("{}")


@pytest.mark.parametrize(("left", "expected"), [
    ({".next.ckpt.20": False, "last.ckpt": True}, {"last.ckpt": "last.ckpt"}),           # killed during the write
    ({".next.ckpt.20": True, "last.ckpt": True}, {"last.ckpt": ".next.ckpt.20", "last-1.ckpt": "last.ckpt"}),
    ({"next.ckpt": True, "last.ckpt": True}, {"last.ckpt": "next.ckpt", "last-1.ckpt": "last.ckpt"}),
    ({".best.ckpt.20": True, ".best.ckpt.old": True}, {"best.ckpt": ".best.ckpt.20"}),   # killed between two renamings
    ({".best.ckpt.old": True}, {"best.ckpt": ".best.ckpt.old"}),
    ({"best.ckpt": True, ".best.ckpt.old": True}, {"best.ckpt": "best.ckpt"}),
    ({".last-2.ckpt.deleted": True, "last.ckpt": True}, {"last.ckpt": "last.ckpt"}),
])
def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path, left: dict[str, bool],
                                                                  expected: dict[str, str]) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name, complete in left.items():
        write_shard_folder(checkpoints / name, name, complete)
    rotate_checkpoints(tmp_path)
    assert {path.name: (path / "shard.safetensors").read_text() for path in checkpoints.iterdir()} == expected


def test_options_that_cannot_be_sharded_are_refused() -> None:
    for wrong in ({"trainer": TrainerConfig(strategy="fsdp"), "tune": TuneConfig(method="lora", base="int8")},):
        with pytest.raises(UserError, match=r"tune\.base"):
            TrainConfig(**wrong)
    with pytest.raises(UserError, match="sample_every"):
        TrainerConfig(strategy="fsdp", sample_every=3)


# Everything, with four processes


CONVERSATION = (*COMMON, "data=chat", "optim.lr=1e-3", "tune.guard=null", "model.ctx_len=128")
CONVERSATIONS, PAIRS = ("data.path=conversations.jsonl",), ("data.path=pairs.jsonl", "tune.objective=dpo")
TUNED = {"lora": (*CONVERSATIONS, "tune=lora", "tune.rank=2"), "state": (*CONVERSATIONS, "tune=state"),
         "dpo": (*PAIRS, "tune=lora", "tune.rank=2"), "dpo-full": (*PAIRS, "optim.lr=1e-4")}
OPTIMISERS = {"adamw": ("optim.name=adamw",), "normuon": NORMUON}        # states have no weight decay, NORMUON's second option
MATRIX = {f"{generation}-{optim}": (*TEXT, *(RWKV7 if generation == "rwkv7" else ()), *options)
          for generation in ("rwkv4", "rwkv7") for optim, options in OPTIMISERS.items()}
MATRIX |= {f"{generation}-{optim}-{method}": (*CONVERSATION, *tuned, *(options[:1] if method == "state" else options),
                                             f"init_from=base{generation[-1]}.safetensors")
           for generation in ("rwkv4", "rwkv7") for optim, options in OPTIMISERS.items() for method, tuned in TUNED.items()
           if (generation, method) != ("rwkv4", "state")}
MATRIX["fp16"] = (*TEXT, *RWKV7, "trainer.precision=fp16-mixed")
MATRIX = {name: (*case, *LONGER) for name, case in MATRIX.items()}
FOUR = ("trainer.devices=4", *CPU)


@pytest.fixture(scope="module")
def matrix(folder: Path) -> Path:
    """Returns a folder with runs of each case: NAME-single by one process, NAME-ddp and NAME-fsdp by four."""
    write_tuning_files(folder)
    for name, case in MATRIX.items():
        result = done_here(folder, "train", *case, *CPU, f"out_dir={name}-single")
        assert result.status == 0, result.error
    run_in_processes(4, train_cases, folder, [(*case, *FOUR, f"trainer={strategy}", f"out_dir={name}-{strategy}")
                                              for name, case in MATRIX.items() for strategy in ("ddp", "fsdp")])
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MATRIX)
def test_four_processes_have_the_losses_of_one(matrix: Path, name: str) -> None:
    """Directions of NorMuon are computed in half precision, where the order of sums affects the result."""
    tolerance = 2e-2 if name == "fp16" else 1e-2 if "normuon" in name else 1e-4
    one, ddp, fsdp = (losses(matrix / f"{name}-{strategy}") for strategy in ("single", "ddp", "fsdp"))
    assert len(one) == 20
    assert ddp == pytest.approx(one, abs=tolerance)
    assert fsdp == pytest.approx(one, abs=tolerance)


@pytest.mark.soak
def test_fewer_processes_continue_a_run_of_four(folder: Path) -> None:
    run_in_processes(4, train_cases, folder, [(*MATRIX["rwkv7-normuon"], "trainer=fsdp", *FOUR, "out_dir=four")])
    for name in ("four-four", "four-two", "four-one"):
        copy_halfway(folder, "four", name, step=10)
    run_in_processes(4, train_cases, folder, [("out_dir=four-four", "resume=auto", "trainer=fsdp", "trainer.devices=4")])
    run_in_processes(2, train_cases, folder, [("out_dir=four-two", "resume=auto", "trainer=fsdp", "trainer.devices=2")])
    result = done_here(folder, "train", "out_dir=four-one", "resume=auto", "trainer.strategy=single", "trainer.devices=1")
    assert result.status == 0, result.error
    assert_same_training(folder / "four-four", folder / "four")
    for name in ("four-two", "four-one"):
        assert losses(folder / name) == pytest.approx(losses(folder / "four"), abs=1e-2)


# Errors and kills


def write_errors(folder: Path) -> None:
    """Redirects standard error to a file, because a forked process shares the standard error of its fork server."""
    os.dup2(os.open(folder / f"error-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)


def errors_of(folder: Path, rank: int) -> list[str]:
    text = (folder / f"error-{rank}").read_text(encoding="utf-8")
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("error: ")]


def train_until_the_second_fails(folder: Path) -> None:
    """Trains as one of two processes. The second one fails after 5 steps, while a checkpoint is being written."""
    def fail(task: LanguageModel, *_: Any) -> None:
        if processes.rank() == 1 and task.trainer.global_step == 5:
            raise UserError("the second process met an error")

    LanguageModel.on_train_batch_start = fail            # type: ignore[method-assign]
    write_errors(folder)
    with cli.exit_on_user_error():
        train_cases(folder, [(*TEXT, *TWO, "trainer.checkpoint_every=5", "out_dir=failed")])


@pytest.mark.programs
def test_an_error_of_one_process_ends_all_with_its_sentence(folder: Path) -> None:
    with pytest.raises(ChildFailedError) as failure:
        run_in_processes(2, train_until_the_second_fails, folder)
    assert failure.value.get_first_failure()[1].exitcode == cli.USER_ERROR
    assert errors_of(folder, 1) == ["error: the second process met an error"]
    assert all("another process" in line for line in errors_of(folder, 0))
    checkpoint = newest_sound_checkpoint(folder / "failed")
    assert checkpoint is not None
    assert checkpoint.step == 5


def train_with_a_full_disk(folder: Path) -> None:
    """Trains as one of two processes, which may write files of at most 100 kB."""
    import resource

    write_errors(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with cli.exit_on_user_error():
        train_cases(folder, [(*TEXT, *TWO, *RWKV7, "out_dir=full")])


@pytest.mark.soak
def test_only_one_process_reports_a_full_disk(folder: Path) -> None:
    with pytest.raises(ChildFailedError):
        run_in_processes(2, train_with_a_full_disk, folder)
    (error,) = errors_of(folder, 0)
    assert "the checkpoint full/checkpoints/last.ckpt cannot be written: File too large" in error
    assert errors_of(folder, 1) == []
    assert newest_sound_checkpoint(folder / "full") is None


@pytest.mark.soak
def test_torchrun_starts_a_run_again_after_a_kill(folder: Path) -> None:
    """torchrun continues bit for bit from the last complete checkpoint."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--local-addr=127.0.0.1",
                "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--log-dir={folder / 'torchrun'}")
    case = (*CASES["rwkv4"], *LONGER, "trainer.checkpoint_every=2", "trainer=fsdp", *CPU, "resume=auto")
    run_in_processes(2, train_cases, folder, [(*case, "trainer.devices=2", "out_dir=uninterrupted")])
    process = subprocess.Popen([sys.executable, *torchrun, str(ROOT / "train.py"), *case, "out_dir=restarted"], cwd=folder,
                               env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    wait_for(process, folder / "restarted", 8)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    result = finish(process)
    assert result.status == 0, result.error
    assert "continued from" in result.error
    assert_same_training(folder / "restarted", folder / "uninterrupted", (*OWN, "/timemix/run/trainer/devices"))


LONG = (*TEXT, *RWKV7, "trainer.max_steps=120", "trainer.checkpoint_every=2", "trainer.val_every=60", "trainer=fsdp",
        "trainer.devices=4", *CPU)


def train_until_killed(folder: Path, name: str, step: int, ranks: list[int], while_writing: bool, seconds: float) -> int:
    """Continues the run with four processes, and kills `ranks` after the run has done `step`.

    Returns the step of the last complete checkpoint before the kill.

    Args:
        while_writing: if True, the kill waits until a checkpoint is being written.
        seconds: the time between the step and the kill.
    """
    complete = 0
    for path in folder.glob("pid-*"):
        path.unlink()

    def kill() -> None:
        nonlocal complete
        run = folder / name
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (steps_done(run) < step or len(list(folder.glob("pid-*"))) < 4):
            time.sleep(0.01)
        time.sleep(seconds)
        while while_writing and time.monotonic() < deadline and not list(run.glob("checkpoints/.next.ckpt.*")):
            pass
        complete = max((read_step(path) for path in run.glob("checkpoints/[ln]*.ckpt")), default=0)
        for rank in ranks:
            with suppress(ProcessLookupError):           # the launcher may have ended this process
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(ChildFailedError):
        run_in_processes(4, train_cases, folder, [(*LONG, f"out_dir={name}", "resume=auto")])
    thread.join()
    return complete


def read_step(checkpoint: Path) -> int:
    """Returns the step of the checkpoint, or 0 if the checkpoint is renamed or deleted meanwhile."""
    with suppress(CheckpointError, OSError):
        return int(_fsdp_folder.read_rest(checkpoint)["global_step"])
    return 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "all_ranks"), [(30, False), (10, True)])
def test_kills_cost_only_the_steps_since_the_last_checkpoint(folder: Path, kills: int, all_ranks: bool) -> None:
    """Kills one of four processes at random moments, or all four while a checkpoint is being written."""
    chance = random.Random(kills)
    if not (folder / "whole").exists():
        run_in_processes(4, train_cases, folder, [(*LONG, "out_dir=whole")])
    name = f"killed-{kills}"
    for kill in range(kills):
        aim = round(110 * (kill + chance.random()) / kills)
        ranks = list(range(4)) if all_ranks else [chance.randrange(4)]
        complete = train_until_killed(folder, name, aim, ranks, all_ranks, chance.uniform(0, 0.3))
        rotate_checkpoints(folder / name)
        checkpoint = newest_sound_checkpoint(folder / name)
        assert (checkpoint.step if checkpoint else 0) >= complete
    run_in_processes(4, train_cases, folder, [(*LONG, f"out_dir={name}", "resume=auto")])
    assert_same_training(folder / name, folder / "whole")
