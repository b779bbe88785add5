"""Tests that a killed run resumes bit-exactly, and that a damaged checkpoint or a full disk costs no earlier checkpoint."""

import contextlib
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from programs import Run, one_sentence
from training_runs import (
    OWN,
    SMALL,
    TEXT,
    assert_same_training,
    content,
    damage,
    done_here,
    finish,
    fork_run,
    kill_after,
    losses,
    same,
)

from kernels.select import select
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import DataConfig, LoggerConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.pretrained import RWKV
from rwkv.report.run_files import is_finished
from rwkv.tools import convert
from rwkv.training.callbacks.checkpoints import RandomState, VerifiedFiles, newest_sound_checkpoint, rotate_checkpoints
from rwkv.training.optim.optimisers import lr_factor, parameter_groups
from rwkv.training.run import directory
from rwkv.training.run.directory import as_plain
from rwkv.training.run.opening import open_run
from rwkv.training.run.resume import require_unfinished
from rwkv.training.task import LanguageModel

STEPS = 70
COUNTED_BY_LIGHTNING = "/loops/fit_loop/epoch_loop.state_dict/_batches_that_stepped"     # timemix gives loggers its own steps
RUN = (*SMALL, "logger=csv", "kernel=auto", "model.n_layer=1", "model.ctx_len=16", "trainer.accumulate=2",
       "data.num_workers=2", f"trainer.max_steps={STEPS}", "trainer.val_every=20", "trainer.checkpoint_every=10")
SHORT = (*SMALL, "logger=csv", "kernel=torch_scan", "model.n_layer=1", "model.ctx_len=16", "trainer.accumulate=2",
         "optim.min_lr=1e-3", "trainer.max_steps=2", "trainer.sample_every=0", "trainer.sample_tokens=0")
@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Returns the directory of an uninterrupted run over two epochs, with two data workers and two batches a step."""
    result = done_here(folder, "train", *RUN, "out_dir=whole")
    assert result.status == 0, result.error
    return folder / "whole"


@pytest.mark.programs
def test_a_killed_run_equals_the_uninterrupted_run(folder: Path, whole: Path) -> None:
    kill_after(fork_run(folder, *RUN, "out_dir=killed"), folder / "killed", STEPS // 3, 0.1)
    result = done_here(folder, "train", "resume=auto", "out_dir=killed")
    assert result.status == 0, result.error
    assert "continued from" in result.error
    assert_same_training(folder / "killed", whole)


@pytest.mark.programs
def test_a_run_killed_before_its_first_checkpoint_begins_again(folder: Path, whole: Path, tmp_path: Path) -> None:
    """The run restarts with its saved configuration and the options of the command line."""
    shutil.copy(whole / "config.yaml", tmp_path)
    run = open_run(TrainConfig(resume="auto", out_dir=str(tmp_path), trainer=TrainerConfig(max_steps=7)), ["trainer.max_steps"])
    assert (run.out_dir, run.resume_from, run.resume_step) == (tmp_path, None, None)
    assert (run.config.trainer.accumulate, run.config.trainer.max_steps, run.config.data.path) == (2, 7, "text.txt")
    assert open_run(TrainConfig(resume="auto", out_dir=str(tmp_path / "none"))).config.trainer.accumulate == 1


@pytest.mark.parametrize("option", ["max_steps", "max_tokens", "epochs"])
def test_a_finished_run_is_extended_by_the_option_that_set_its_length(tmp_path: Path, option: str) -> None:
    trainer = TrainerConfig(**{"max_steps": 2, option: 2})       # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"finished at step 3: .*increase trainer\.{option}="):
        require_unfinished(directory.Run(tmp_path, TrainConfig(trainer=trainer), resume_step=3))


# Options given at a resume


def begin(run: Run, *options: str) -> None:
    """Trains two steps of two accumulated batches each, in ./run."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    status, _, error = run("train", *SHORT, *options, "out_dir=run")
    assert status == 0, error


@pytest.mark.programs
@pytest.mark.parametrize("options", [
    (), ("trainer.accumulate=1", "trainer.val_every=2", "data.num_workers=2"),
    *(pytest.param(options, marks=pytest.mark.soak) for options in (
        ("trainer.tbptt=2",), ("trainer.accumulate=1", "trainer.overfit_batches=3"))),
    ("trainer.val_every=3",)], ids=lambda options: " ".join(options))
def test_an_extended_run_equals_the_longer_run(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Validation comes after each second or third step: where the shorter run ends in some cases, elsewhere in others."""
    arguments = (*SHORT, "optim.schedule=constant", "trainer.val_every=2", *options)
    for name, steps, more in (("long", 4, ()), ("short", 2, ()), ("short", 4, ("resume=auto",))):
        result = done_here(folder, "train", *arguments, f"trainer.max_steps={steps}", f"out_dir={tmp_path / name}", *more)
        assert result.status == 0, result.error
    long, short = (content(tmp_path / name / "checkpoints/last.ckpt") for name in ("long", "short"))
    different = {key for key in long if key not in OWN and not same(long[key], short[key])}
    assert different <= ({COUNTED_BY_LIGHTNING} if options == ("trainer.val_every=3",) else set())
    assert losses(tmp_path / "short") == losses(tmp_path / "long")


@pytest.mark.programs
@pytest.mark.parametrize(("optimiser", "options"), [
    ("adamw", {"lr": 1e-2, "min_lr": 1e-3, "schedule": "linear", "warmup_steps": 1, "betas": (0.5, 0.75), "eps": 1e-3}),
    ("muon", {"lr": 1e-2, "eps": 1e-3, "matrix_lr": 0.1, "matrix_momentum": 0.5}),
])
def test_options_of_the_optimiser_apply_from_the_next_step_on(run: Run, optimiser: str, options: dict[str, Any]) -> None:
    begin(run, f"optim={optimiser}")
    arguments = [f"optim.{name}={list(value) if isinstance(value, tuple) else value}" for name, value in options.items()]
    status, _, error = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=4", *arguments)
    assert status == 0, error
    optim = OptimConfig(optimiser, **options)
    expected = parameter_groups(RWKV(ModelConfig(n_layer=1, n_embd=32, ctx_len=16), 256, select("wkv4", "torch_scan")), optim)
    factor = lr_factor(optim, 4)
    logged = losses(Path("run"), "lr")
    assert [logged[3], logged[4]] == [expected[0]["lr"] * factor(2), expected[0]["lr"] * factor(3)]
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    for group, settings in zip(content["optimizer_states"][0]["param_groups"], expected, strict=True):
        assert group["initial_lr"] == settings["lr"]
        assert group["lr"] == settings["lr"] * factor(4)
        for name in settings.keys() & {"betas", "eps", "weight_decay", "momentum", "iterations"}:
            assert group[name] == pytest.approx(settings[name])


@pytest.fixture(scope="module")
def muon_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a run of two steps by Muon, which no test may change."""
    folder = tmp_path_factory.mktemp("muons")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    result = done_here(folder, "train", *SHORT, "optim=muon", "out_dir=run")
    assert result.status == 0, result.error
    return folder


@pytest.mark.programs
@pytest.mark.parametrize(("argument", "part"), [
    ("optim=adamw", "optim.name"), ("optim.weight_decay=0.1", "optim.weight_decay"),
    ("optim.time_mix_lr_scale=2", "optim.time_mix_lr_scale"), ("trainer.accumulate=1", "trainer.accumulate"),
    ("experiment=rwkv4_original", "optim.name"), ("optim.lr=5e-4", "optim.min_lr"), ("trainer.tbptt=2", "trainer.tbptt=0"),
])
def test_options_that_would_make_another_run_are_refused(run: Run, muon_folder: Path, argument: str, part: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(muon_folder)
    before = {path: path.stat().st_mtime_ns for path in muon_folder.rglob("*")}
    one_sentence(run("train", "resume=auto", "out_dir=run", "trainer.max_steps=4", argument), part)
    assert before == {path: path.stat().st_mtime_ns for path in muon_folder.rglob("*")}


def test_the_number_of_workers_may_change(tmp_path: Path) -> None:
    """The error about a killed worker asks for a smaller number."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(TrainConfig(data=DataConfig(num_workers=2)))))
    config = open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)), ["data.num_workers"]).config
    assert config.data.num_workers == 0


def test_a_group_on_the_command_line_resets_the_run_s_options(tmp_path: Path) -> None:
    before = TrainConfig(logger=LoggerConfig("csv"), trainer=TrainerConfig(accelerator="cpu", max_steps=7))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(before)), encoding="utf-8")
    config = open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)), ["logger", "trainer"],
                      ["logger.name", "trainer.accelerator"]).config
    assert (config.logger.name, config.trainer.accelerator, config.trainer.max_steps) == ("wandb", "auto", 7)


@pytest.mark.parametrize(("given", "chosen"), [(["experiment"], ["trainer.precision"]), (["trainer.precision"], [])])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precision_auto_keeps_the_precision_of_the_run(tmp_path: Path, precision: str, given: list[str],
                                                       chosen: list[str]) -> None:
    before = TrainConfig(trainer=TrainerConfig(precision=precision))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(before)), encoding="utf-8")
    request = TrainConfig(resume="auto", out_dir=str(tmp_path), trainer=TrainerConfig(accelerator="cpu", precision="auto"))
    assert open_run(request, given, chosen).config.trainer.precision == precision


@pytest.mark.parametrize("option", ["trainer.newer_option", "newer_group.option"])
def test_an_option_of_a_newer_version_is_named(tmp_path: Path, option: str) -> None:
    group, name = option.split(".")
    plain = as_plain(TrainConfig())
    plain.setdefault(group, {})[name] = 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    with pytest.raises(UserError):
        open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)), [], [])


@pytest.mark.parametrize("damaged", [b"", b"\0" * 60, b"model: [\n", b"- model\n", b"seed: 3\n", b"model: 3\n", b"\xff\n",
                                     b"seed: 2020-13-45\n",
                                     yaml.safe_dump(as_plain(TrainConfig()) | {"model": "small"}).encode()])
def test_a_damaged_configuration_is_named(tmp_path: Path, damaged: bytes) -> None:
    """The run has no checkpoint, because a checkpoint would also contain the configuration."""
    (tmp_path / "config.yaml").write_bytes(damaged)
    with pytest.raises(UserError, match=r"config\.yaml"):
        open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)), [], [])
    assert (tmp_path / "config.yaml").read_bytes() == damaged


def test_a_configuration_of_an_earlier_version_may_lack_groups(tmp_path: Path) -> None:
    before = {name: value for name, value in as_plain(TrainConfig(seed=3)).items() if name not in ("tune", "sweep")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before), encoding="utf-8")
    assert open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)), [], []).config.seed == 3


def test_the_user_s_steps_replace_an_experiment_s_tokens(tmp_path: Path) -> None:
    before = TrainConfig(trainer=TrainerConfig(max_steps=7))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(before)), encoding="utf-8")
    request = TrainConfig(resume="auto", out_dir=str(tmp_path), trainer=TrainerConfig(max_steps=9, max_tokens=1e5))
    trainer = open_run(request, ["experiment", "trainer.max_steps"], ["trainer.max_tokens"]).config.trainer
    assert (trainer.max_steps, trainer.max_tokens) == (9, None)


@pytest.mark.programs
def test_ctrl_c_in_the_last_validation_leaves_a_run_that_can_be_finished(run: Run, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped twice ends with the val/loss, best.ckpt, sample and report of a run that was not stopped."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = (*SMALL, "logger=csv", "kernel=conv1d", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=5",
               "trainer.val_every=3", "trainer.checkpoint_every=2", "data.num_workers=0")
    whole = run("train", *options, "out_dir=whole")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "validation_step", with_interrupt(LanguageModel.validation_step, step=5))
        stopped = run("train", *options, "out_dir=stopped")
        again = run("train", "resume=auto", "out_dir=stopped")
    assert (whole[0], stopped[0], again[0]) == (0, 130, 130), stopped[2] + again[2]
    assert not is_finished(Path("stopped"))
    resumed = run("train", "resume=auto", "out_dir=stopped")
    assert resumed[0] == 0, resumed[2]
    assert_same_training(Path("stopped"), Path("whole"))
    assert list(losses(Path("stopped"), "val/loss")) == [3, 5]
    assert resumed[1] == whole[1], "the last sample must be the same"
    assert is_finished(Path("stopped"))
    assert Path("stopped/report.html").is_file()
    one_sentence(run("train", "resume=auto", "out_dir=stopped"), "trainer.max_steps")


def with_interrupt(validation_step: Callable[..., None], step: int) -> Callable[..., None]:
    """Returns a validation_step that sends this process a Ctrl-C in the validation after the given step."""
    def interrupting_step(task: LanguageModel, batch: Any, batch_idx: int) -> None:
        if task.trainer.global_step == step and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGINT)
        validation_step(task, batch, batch_idx)

    return interrupting_step


# Damage and full disks


@pytest.mark.programs
def test_a_damaged_last_checkpoint_is_reported_and_the_previous_one_used(whole: Path, tmp_path: Path,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "checkpoints" / "last.ckpt"
    expected = read_checkpoint(last.with_name("last-1.ckpt")).step
    damage(last)
    assert newest_sound_checkpoint(tmp_path).step == expected < STEPS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{last} is damaged (")
    assert line.endswith(") and was renamed to damaged.ckpt. The run continues from an earlier checkpoint")


@pytest.mark.programs
def test_a_run_whose_checkpoints_are_all_damaged_never_begins_again(whole: Path, tmp_path: Path) -> None:
    """A new beginning would overwrite best.ckpt, which may be sound. Repeated attempts to continue are refused, too."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for name in ("last.ckpt", "last-1.ckpt"):
        damage(tmp_path / "checkpoints" / name)
    before = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    for _ in range(3):
        with pytest.raises(UserError, match=r"init_from=.*best\.ckpt"):
            open_run(TrainConfig(resume="auto", out_dir=str(tmp_path)))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == before


@pytest.mark.programs
def test_what_a_resumed_run_continues_is_checked_before_the_model_is_built(whole: Path, tmp_path: Path) -> None:
    """A run without its folder of checkpoints, as on a disk that is not mounted, would begin again and could not save."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    longer = TrainConfig(resume="auto", out_dir=str(tmp_path), trainer=TrainerConfig(max_steps=STEPS + 1))
    for name in ("metrics.csv", "samples.jsonl"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"step\nnan\n" + before)
        with pytest.raises(UserError, match=name):
            open_run(longer, ["trainer.max_steps"])
        (tmp_path / name).write_bytes(before)
    assert open_run(longer, ["trainer.max_steps"]).resume_step == STEPS
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_bytes(b"")
    with pytest.raises(UserError, match="checkpoints"):
        open_run(longer, ["trainer.max_steps"])


@pytest.mark.programs
def test_a_full_disk_stops_the_run_and_keeps_earlier_checkpoints(folder: Path, whole: Path, tmp_path: Path) -> None:
    """A limit on the size of files imitates a full disk: a write fails in the middle of a checkpoint."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    limit = len(before["last.ckpt"]) // 2
    result = finish(fork_run(folder, "resume=auto", f"out_dir={tmp_path}", f"trainer.max_steps={STEPS + 30}", largest=limit))
    assert result.status == 2
    last = result.error.splitlines()[-1]
    assert last.startswith(f"error: the checkpoint {tmp_path}/checkpoints/last.ckpt cannot be written: ")
    assert "then continue with resume=auto" in result.error
    assert "ulimit -f" in last
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}


@pytest.mark.programs
def test_a_disk_that_is_full_at_a_row_of_metrics_says_which_file_and_how_to_continue(folder: Path, tmp_path: Path) -> None:
    options = (*SHORT, "trainer.log_every=1", "trainer.max_steps=300", "trainer.checkpoint_every=300", "trainer.val_every=300",
               f"out_dir={tmp_path / 'full'}")
    assert done_here(folder, "train", *options, "plan=true").status == 0                # the plan tokenises the text
    result = finish(fork_run(folder, *options, largest=12_000))
    assert result.status == 2, result.error
    last = result.error.splitlines()[-1]
    assert last.startswith("error: training stopped at step ")
    assert str(tmp_path / "full" / "metrics.csv") in last
    assert "resume=auto" in last


@pytest.mark.programs
def test_a_run_whose_data_have_moved_continues_with_the_same_data_alone(run: Run) -> None:
    begin(run)
    Path("elsewhere").mkdir()
    Path("text.txt").rename("elsewhere/text.txt")
    again = ("resume=auto", "out_dir=run", "trainer.max_steps=3", "data.path=elsewhere/text.txt")
    Path("elsewhere/other.txt").write_text(TEXT[::-1], encoding="utf-8")
    saved = Path("run/config.yaml").read_bytes()
    one_sentence(run("train", *again[:-1], "data.path=elsewhere/other.txt"), "the data have changed")
    assert Path("run/config.yaml").read_bytes() == saved
    status, _, error = run("train", *again)
    assert status == 0, error
    assert yaml.safe_load(Path("run/config.yaml").read_text())["data"]["path"] == "elsewhere/text.txt"
    assert set(losses(Path("run"))) == {1, 2, 3} or 3 in losses(Path("run"))


def kill_while_renaming(run: Path, keep: int, n_saved: int, cut: int) -> Path:
    """Writes one more checkpoint after `n_saved` others, stops the renaming after `cut` of its steps, and returns `run`."""
    for number in range(n_saved):
        write(run, number)
        rotate_checkpoints(run, keep)
    write(run, n_saved)
    with stop_after(cut, "replace"), contextlib.suppress(KeyboardInterrupt):
        rotate_checkpoints(run, keep)
    return run


@given(keep=st.integers(1, 4), n_saved=st.integers(0, 6), cut=st.integers(0, 9))
def test_a_kill_while_checkpoints_are_renamed_loses_none_of_the_newest(tmp_path_factory: pytest.TempPathFactory, keep: int,
                                                                       n_saved: int, cut: int) -> None:
    run = kill_while_renaming(tmp_path_factory.mktemp("run"), keep, n_saved, cut)
    rotate_checkpoints(run, keep)
    names = ["last.ckpt", *(f"last-{age}.ckpt" for age in range(1, keep))]
    numbers = [int((run / "checkpoints" / name).read_text()) for name in names if (run / "checkpoints" / name).is_file()]
    assert numbers[0] == n_saved
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == min(keep, n_saved + 1)
    assert not (run / "checkpoints" / "next.ckpt").exists()


@given(keep=st.integers(1, 4), n_saved=st.integers(0, 6), cut=st.integers(0, 9))
def test_a_resume_after_a_kill_loses_no_checkpoint_whatever_keep_last_is(tmp_path_factory: pytest.TempPathFactory, keep: int,
                                                                         n_saved: int, cut: int) -> None:
    """The resume does not know keep_last yet. Saving the next checkpoint applies keep_last."""
    run = kill_while_renaming(tmp_path_factory.mktemp("run"), keep, n_saved, cut)
    rotate_checkpoints(run)
    assert set(range(n_saved + 1)[-keep:]) <= {int(path.read_text()) for path in (run / "checkpoints").iterdir()}
    write(run, n_saved + 1)
    rotate_checkpoints(run, keep)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == sorted(["last.ckpt", *(f"last-{age}.ckpt" for age in range(1, keep))][:n_saved + 2])


def test_a_checkpoint_named_by_a_user_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 0)
    rotate_checkpoints(tmp_path, 1)
    (tmp_path / "checkpoints" / "last-good.ckpt").write_text("mine")
    write(tmp_path, 1)
    rotate_checkpoints(tmp_path, 1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"last.ckpt", "last-good.ckpt"}


def test_files_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / "checkpoints" / ".next.ckpt.123").write_text("half of it")
    rotate_checkpoints(tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_objects_that_could_not_be_read_again_are_not_saved(tmp_path: Path) -> None:
    """A checkpoint must contain no other objects, because reading these would execute code."""
    path = tmp_path / "checkpoints" / "next.ckpt"
    VerifiedFiles().save_checkpoint({"weights": torch.zeros(3)}, path)
    before = path.read_bytes()
    with pytest.raises(UserError):
        VerifiedFiles().save_checkpoint({"weights": torch.zeros(3), "path": path}, path)
    assert path.read_bytes() == before


class Huge:
    """An object that cannot be written, because the machine has not enough memory."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[int]]:
        return torch.Tensor, (torch.empty(1 << 56).dim(),)


def test_a_lack_of_memory_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        VerifiedFiles().save_checkpoint({"weights": Huge()}, tmp_path / "checkpoints" / "next.ckpt")
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.programs
def test_a_checkpoint_of_weights_alone_is_neither_resumed_nor_written_over_a_run_s(run: Run, tmp_path: Path) -> None:
    """A run could not be resumed from such a file."""
    begin(run)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        convert.main([str(tmp_path / "run"), str(last)])
    assert last.read_bytes() == before
    convert.main([str(tmp_path / "run"), str(tmp_path / "weights.ckpt")])
    (tmp_path / "weights.ckpt").replace(last)
    status, _, error = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=3")
    assert status == 2
    assert "only weights" in error.splitlines()[-1]
    assert "init_from=" in error.splitlines()[-1]


# Random state


def test_random_numbers_continue_after_a_resume(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), random.gauss(), np.random.randn()]

    draw()
    torch.save(RandomState(0).state_dict(), tmp_path / "state")
    expected = draw()
    callback = RandomState(0)
    callback.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    callback.on_train_start(cast(Any, None))          # the trainer is used only by a process that joins the run
    assert draw() == expected


def write(run: Path, number: int) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "next.ckpt").write_text(str(number))


@contextlib.contextmanager
def stop_after(steps: int, method: str) -> Iterator[None]:
    original, count = getattr(Path, method), itertools.count()

    def count_and_stop(*args: Any) -> Any:
        if next(count) >= steps:
            raise KeyboardInterrupt
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, method, count_and_stop)
        yield
