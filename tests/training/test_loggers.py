"""Tests W&B as the user has set it up: continued runs, modes, settings, sweeps, and a broken installation."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import Logger, WandbLogger
from programs import Run, one_sentence
from training_runs import TEXT

from rwkv.config import LoggerConfig, TrainConfig
from rwkv.errors import UserError
from rwkv.report.run_files import read_metrics
from rwkv.training import loggers
from rwkv.training.run.directory import as_plain
from rwkv.training.trackers import MLflow, without_password

RUN = as_plain(TrainConfig())
CONFIG = LoggerConfig(name="wandb")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Makes W&B read its environment anew for each test, with nobody logged in, because W&B reads it once per process."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.finish()                       # a run that an earlier test left open could not be finished after teardown()
    wandb.teardown()
    yield
    wandb.finish()
    wandb.teardown()


@pytest.mark.programs
@pytest.mark.parametrize("name", ["my-exp-1", "plain"])
def test_a_continued_run_keeps_its_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", name)
    loggers.loggers(CONFIG, tmp_path, RUN)
    _, second = loggers.loggers(CONFIG, tmp_path, RUN, resumed_at=1)
    assert isinstance(second, WandbLogger)
    assert second.experiment.id == name
    error = capsys.readouterr().err
    assert f"wandb sync --id {name} " in error
    assert "WARNING" not in error


def wandb_run(config: LoggerConfig, out_dir: Path, resumed_at: int | None = None) -> Any:
    """Returns a new or continued run of W&B, which reads its environment anew."""
    wandb.finish()
    wandb.teardown()
    out_dir.mkdir(exist_ok=True)
    _, logger = loggers.loggers(config, out_dir, RUN, resumed_at)
    assert isinstance(logger, WandbLogger)
    return logger.experiment


@pytest.mark.programs
def test_an_open_run_is_finished_before_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_run(CONFIG, tmp_path / "earlier")
    loggers.require(CONFIG)
    assert wandb.run is None


VARIABLES = {"WANDB_PROJECT": "theirs", "WANDB_NAME": "a name", "WANDB_RUN_GROUP": "a group", "WANDB_NOTES": "a note",
             "WANDB_TAGS": "one,two", "WANDB_JOB_TYPE": "train", "WANDB_ENTITY": "someone"}


@pytest.mark.programs
def test_the_users_settings_win_over_defaults_and_options_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb_run(CONFIG, tmp_path / "plain")
    assert (run.project, run.group, run.name) == ("timemix", "", f"{RUN['kernel']['name']}-plain")
    assert run.dir.startswith(str(tmp_path / "plain"))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = wandb_run(CONFIG, tmp_path / "out")
    assert (run.project, run.group, run.name) == ("theirs", "a group", "a name")
    assert (run.notes, run.tags, run.job_type, run.entity) == ("a note", ("one", "two"), "train", "someone")
    assert Path(run.dir).parts[len(tmp_path.parts)] == "wandb"
    again = wandb_run(CONFIG, tmp_path / "out", resumed_at=1)
    assert again.id == run.id, "W&B's folder elsewhere must not matter"
    own_config = LoggerConfig(name="wandb", project="timemix", group="ours", run_name="this")
    run = wandb_run(own_config, tmp_path / "given")
    assert (run.project, run.group, run.name) == ("timemix", "ours", "this")


@pytest.mark.parametrize(("name", "value"), [("WANDB_PROJECT", "a/b"), ("WANDB_MODE", "sometimes"), ("WANDB_RUN_ID", "a/b"),
                                             ("WANDB_RESUME", "maybe")])
def test_a_setting_that_wandb_refuses_is_an_error_before_the_data_are_read(name: str, value: str,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="W&B rejected"):
        loggers.require(CONFIG)


def test_a_user_without_a_home_directory_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users whom the system does not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "expanduser", fail(RuntimeError("Could not determine home directory.")))
    with pytest.raises(UserError, match="home directory"):
        loggers.require(CONFIG)


def fail(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_a_login_that_fails_is_an_error_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan needs no login."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", fail(wandb.errors.AuthenticationError("no answer")))
    with pytest.raises(UserError, match=r"log in to W&B .*no answer"):
        loggers.require(CONFIG)
    loggers.require(CONFIG, logs_nothing=True)


def test_a_server_that_refuses_a_run_ends_the_run_but_no_finished_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", fail(wandb.errors.CommError("run x was previously created and deleted")))
    with pytest.raises(UserError, match=r"previously created and deleted.*logger=csv"):
        loggers.loggers(CONFIG, tmp_path, RUN)
    loggers.log_report(CONFIG, tmp_path, [], [])
    assert "previously created and deleted" in capsys.readouterr().err


@pytest.mark.programs
def test_a_copy_of_a_run_is_a_separate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = wandb_run(CONFIG, tmp_path / "one").id
    wandb.finish()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copy_id = wandb_run(CONFIG, tmp_path / "two", resumed_at=1).id
    assert copy_id != first
    assert "is a copy" in capsys.readouterr().err
    assert wandb_run(CONFIG, tmp_path / "two", resumed_at=1).id == copy_id, "the copy must keep its own id"
    assert wandb_run(CONFIG, tmp_path / "one", resumed_at=1).id == first
    wandb.finish()
    (tmp_path / "one").rename(tmp_path / "moved")
    assert wandb_run(CONFIG, tmp_path / "moved", resumed_at=1).id == first, "a run that was moved is the same one"


@pytest.mark.programs
def test_a_sweep_is_uploaded_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """The runs of the sweep print no command. A run in two parts gets a second command. All have ids of their own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "job-7")
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "report.html").write_text("a report")
    for name in ("kernel=conv1d", "kernel=torch_scan"):
        (tmp_path / name).mkdir()
        loggers.loggers(CONFIG, tmp_path / name, RUN)
    wandb.finish()
    assert "wandb sync" not in capsys.readouterr().err
    loggers.log_report(CONFIG, tmp_path, [{"kernel": "conv1d"}], [])
    output = capsys.readouterr().err
    assert output.count("wandb sync") == 1
    command = output.partition("`")[2].partition("`")[0]
    listing = subprocess.run(["bash", "-c", command.replace("wandb sync", "ls -d")], capture_output=True, text=True, check=True)
    assert len(listing.stdout.split()) == 3, "two runs and the report"
    assert len({folder.rpartition("-")[2] for folder in listing.stdout.split()}) == 3
    part = next((tmp_path / "kernel=conv1d" / "wandb").glob("*run-*"))
    shutil.copytree(part, part.with_name(part.name.replace("run-2", "run-3")))
    loggers.log_report(CONFIG, tmp_path, [{"kernel": "conv1d"}], [])
    output = capsys.readouterr().err
    assert output.count("wandb sync") == 2
    assert output.count("--id") == 1


def test_wandb_that_the_user_has_disabled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    file, = loggers.loggers(CONFIG, tmp_path, RUN)
    assert isinstance(file, loggers.MetricsFile)
    (tmp_path / "report.html").write_text("a report")
    loggers.log_report(CONFIG, tmp_path, [{"kernel": "conv1d"}], [])
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "report.html"}
    assert "disabled" in capsys.readouterr().err


def test_a_broken_wandb_is_an_error_before_the_data_are_read(run: Run, tmp_path: Path) -> None:
    """A module whose import fails replaces the installed wandb."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text("raise TypeError('Descriptors cannot be created directly.')\n")
    installed = [name for name in sys.modules if name.partition(".")[0] == "wandb"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "broken"))
        for name in installed:
            patch.delitem(sys.modules, name)
        result = run("train", "debug=fast", "data=text", "data.path=text.txt", "trainer=cpu", "kernel=conv1d", "out_dir=mine",
                     "data.cache_dir=cache")
    one_sentence(result, "logger=wandb", "Descriptors cannot be created directly", "logger=csv")
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "broken"}, "the data must not be read"


def test_unknown_arguments_of_a_user_s_class_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LoggerConfig(name="mine", _target_="lightning.pytorch.loggers.CSVLogger", project="ours", run_name="this",
                          arguments=[f"save_dir={tmp_path}"])
    loggers.require(config)
    error = capsys.readouterr().err
    assert all(word in error for word in ("logger.project", "logger.run_name", "CSVLogger", "logger.arguments"))
    assert "logger.group" not in error
    loggers.require(replace(config, project=None, run_name=None))
    assert not capsys.readouterr().err


@pytest.mark.programs
def test_any_logger_of_lightning_is_named_by_its_class(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("train", "debug=fast", "data=text", "data.path=text.txt", "trainer=cpu", "kernel=conv1d", "logger=mlflow",
               "data.cache_dir=cache")
    status, _, error = run(*options, "logger._target_=lightning.pytorch.loggers.CSVLogger", "logger.arguments=save_dir=own",
                           "out_dir=mine", "trainer.max_steps=2", "trainer.log_every=1")
    assert status == 0, error
    assert "train/loss" in next(tmp_path.glob("own/**/metrics.csv")).read_text().splitlines()[0]
    assert len((tmp_path / "mine" / "metrics.csv").read_text().splitlines()) > 2
    for wrong in ("no_such_package.Logger", "json.JSONDecoder"):
        one_sentence(run(*options, f"logger._target_={wrong}", "out_dir=other"), "logger")
        assert not (tmp_path / "other").exists()
    one_sentence(run(*options, "logger._target_=lightning.pytorch.loggers.CSVLogger", "logger.arguments=save_dir=own",
                     "logger.arguments=prefix", "out_dir=other"), "NAME=VALUE")


class Failing(Logger):
    """A tracker whose server is down when `method` is called."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.attempts = 0
        self._method = method
        if method != "experiment":
            setattr(self, method, self._fail)

    name = version = "failing"

    @property
    def experiment(self) -> None:
        if self._method == "experiment":
            self._fail()

    def log_hyperparams(self, *_: object, **__: object) -> None: ...

    def log_metrics(self, *_: object, **__: object) -> None: ...

    def _fail(self, *_: object, **__: object) -> None:
        self.attempts += 1
        raise RuntimeError("the server\nis down")


class FailingMLflow(MLflow):
    def __init__(self) -> None:
        """Needs no package."""

    def log_hyperparams(self, *_: object, **__: object) -> None:
        raise RuntimeError("the server is down")


@pytest.mark.parametrize("method", ["log_metrics", "finalize"])
def test_a_tracker_that_fails_loses_its_own_metrics_but_not_the_run(method: str, tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    config = LoggerConfig(name="mine", _target_=f"{__name__}.Failing", arguments=[f"method={method}"])
    file, logger = loggers.loggers(config, tmp_path, RUN)
    for step in range(3):
        file.log_metrics({"train/loss": 1.0}, step)
        logger.log_metrics({"train/loss": 1.0}, step)
    logger.finalize("success")
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4
    assert logger.attempts >= 1          # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("the server is down") == 1


@pytest.mark.parametrize("method", ["log_hyperparams", "experiment"])
def test_a_tracker_that_cannot_start_is_a_sentence(method: str, tmp_path: Path) -> None:
    config = LoggerConfig(name="mine", _target_=f"{__name__}.Failing", arguments=[f"method={method}"])
    with pytest.raises(UserError, match=r"logger=mine cannot start.*the server is down"):
        loggers.loggers(config, tmp_path, RUN)
    (tmp_path / "mlflow.json").write_bytes(b"{}")        # belongs to a run with MLflow
    with pytest.raises(UserError) as error:
        loggers.loggers(config, tmp_path, RUN)
    assert "mlflow" not in str(error.value)
    lost = LoggerConfig(name="mlflow", _target_=f"{__name__}.FailingMLflow")
    with pytest.raises(UserError, match=r"delete .*mlflow\.json"):      # MLflow may have lost the run that this file names
        loggers.loggers(lost, tmp_path, RUN)


def test_rows_of_metrics_have_a_header_after_the_file_has_been_moved(tmp_path: Path) -> None:
    """A resumed run would take the first row for the header, and the file for damaged."""
    file, = loggers.loggers(LoggerConfig(name="csv"), tmp_path, RUN)
    file.log_metrics({"train/loss": 1.0}, 1)
    (tmp_path / "metrics.csv").unlink()
    file.log_metrics({"train/loss": 2.0}, 2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == ["2"]


@pytest.mark.parametrize(("uri", "shown"), [("https://me:p@ss@host:5000/a@b", "https://host:5000/a@b"),
                                            ("sqlite:///own.db", "sqlite:///own.db"), ("runs/a@b", "runs/a@b")])
def test_no_password_is_in_the_address_of_a_server(uri: str, shown: str) -> None:
    assert without_password(uri) == shown
