"""Tests experiment trackers, where they are installed: the packages' own readers read what a run has logged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Run
from training_runs import SMALL, TEXT, losses

from rwkv.training.trackers import MLflow, TrackerRun

pytestmark = pytest.mark.programs
Read = Callable[[str], dict[int, float]]                 # returns the training losses of the run of that name


def of_tensorboard(name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(name.removeprefix("conv1d-"), "tensorboard"))).Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def of_mlflow(name: str) -> dict[int, float]:
    import mlflow

    client = mlflow.MlflowClient("sqlite:///own.db")
    experiment = client.get_experiment_by_name("timemix")
    run, = (run for run in client.search_runs([experiment.experiment_id]) if run.info.run_name == name)
    assert run.info.status == "FINISHED"
    assert run.data.params["kernel/name"] == "conv1d"
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}


def of_trackio(name: str) -> dict[int, float]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run, = (run for run in trackio.Api().runs("timemix") if run.name == name)
    assert run.config["seed"] == 0
    return {row["step"]: row["train/loss"] for row in SQLiteStorage.get_logs("timemix", name) if "train/loss" in row}


@pytest.mark.filterwarnings("default")   # other packages raise their own warnings
def test_tensorboard_shows_no_events_after_the_checkpoint_that_a_run_resumes_from(run: Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Path("text.txt").write_text(TEXT, encoding="utf-8")
    options = ("trainer.max_steps=6", "trainer.log_every=1", "trainer.checkpoint_every=3", "trainer.sample_tokens=0")
    assert run("train", *SMALL, *options, "kernel=conv1d", "model.n_layer=1", "logger=tensorboard", "out_dir=mine")[0] == 0
    Path("mine/checkpoints/last.ckpt").unlink()          # as after a kill at step 6
    assert run("train", "resume=auto", "out_dir=mine")[0] == 0
    events = EventAccumulator("mine/tensorboard").Reload().Scalars("train/loss")
    assert [event.step for event in events] == [*range(1, 7)]
    shutil.rmtree("mine/checkpoints")
    assert run("train", "resume=auto", "out_dir=mine")[0] == 0
    events = EventAccumulator("mine/tensorboard").Reload().Scalars("train/loss")
    assert [event.step for event in events] == [*range(1, 7)]


@pytest.mark.filterwarnings("default")   # other packages raise their own warnings
@pytest.mark.parametrize(("logger", "read"), [("tensorboard", of_tensorboard), ("mlflow", of_mlflow), ("trackio", of_trackio)])
def test_a_tracker_has_the_run_and_its_continuation(logger: str, read: Read, run: Run, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker has one run, and another one for a copied directory. The user's settings choose the tracker's folder."""
    pytest.importorskip(logger)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///own.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    status, output, error = run("train", *SMALL, "kernel=conv1d", "model.n_layer=1", f"logger={logger}", "out_dir=first",
                                "trainer.sample_tokens=0")
    assert (status, output) == (0, "\n"), error
    assert read("conv1d-first") == pytest.approx(losses(Path("first")))
    shutil.copytree("first", "copy")
    for folder in ("first", "copy"):
        status, _, error = run("train", "resume=auto", f"out_dir={folder}", "trainer.max_steps=8")
        assert status == 0, error
        assert list(read(f"conv1d-{folder}"))[-3:] == [6, 7, 8]
    assert list(read("conv1d-first")) == [*range(1, 9)]
    assert not Path("mlflow.db").exists()
    assert not Path("mlruns").exists()


@pytest.mark.filterwarnings("default")   # other packages raise their own warnings
def test_mlflow_s_own_variable_names_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", mlflow.MlflowClient().create_experiment("mine"))
    for project, name in ((None, "mine"), ("other", "other")):
        logger = MLflow(TrackerRun(project, "timemix", None, "run", tmp_path, None))
        logger.log_hyperparams({"seed": 0})
        assert mlflow.MlflowClient().get_experiment(logger.experiment_id).name == name
