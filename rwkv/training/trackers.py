"""Connects the experiment trackers of configs/logger/: TensorBoard, MLflow and Trackio. Runs have the same names as in W&B.

The user's settings, such as MLFLOW_TRACKING_URI or TRACKIO_DIR, determine where a tracker stores runs. A resumed run continues
the tracker's run, except in a copy of a run's directory.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import labelled_line
from rwkv.report.run_files import TENSORBOARD

RECORD = "mlflow.json"                   # this file in a run's directory holds the MLflow run id and the directory's path


class TrackerRun(NamedTuple):
    """The names under which a tracker stores a run, and whether it continues an earlier one.

    Args:
        project: the project. None means the tracker's own setting, or else default_project.
        resumed_at: the step of the checkpoint that the run resumes from; None for a new run.
    """

    project: str | None
    default_project: str
    group: str | None
    name: str
    out_dir: Path
    resumed_at: int | None


class TensorBoard(TensorBoardLogger):
    """A logger that writes TensorBoard's event files to tensorboard/ in the run's directory.

    A resumed run makes TensorBoard drop the events after the checkpoint.
    """

    def __init__(self, tracker_run: TrackerRun, **arguments: Any) -> None:
        resumed_at = tracker_run.resumed_at
        settings = {"save_dir": tracker_run.out_dir, "name": None, "version": TENSORBOARD, "default_hp_metric": False,
                    "purge_step": None if resumed_at is None else resumed_at + 1}
        super().__init__(**settings | arguments)


class MLflow(MLFlowLogger):
    """A logger that writes to MLFLOW_TRACKING_URI, by default ./mlflow.db. MLflow's experiment is the project."""

    def __init__(self, tracker_run: TrackerRun, **arguments: Any) -> None:
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME

        self._record = tracker_run.out_dir / RECORD
        self._continues = _earlier_id(self._record) if tracker_run.resumed_at is not None else None
        project = tracker_run.project or MLFLOW_EXPERIMENT_NAME.get()
        settings = {"experiment_name": project or tracker_run.default_project,
                    "run_name": tracker_run.name, "tracking_uri": mlflow.get_tracking_uri(), "run_id": self._continues,
                    "tags": {"group": tracker_run.group} if tracker_run.group else None}
        super().__init__(**settings | arguments)
        if not project and "experiment_name" not in arguments:
            self._experiment_id = MLFLOW_EXPERIMENT_ID.get() or None     # Lightning has no argument for it

    def log_hyperparams(self, params: JsonObject | Namespace, *more: object, **named: object) -> None:
        """Logs the options of a new run. The options of a resumed run are not logged, because MLflow rejects changes."""
        # MLflow tries for minutes to reach a server that is down
        address = without_password(self._tracking_uri)
        print(labelled_line("logger", f"MLflow at {address}", sys.stderr), file=sys.stderr, flush=True)
        if self._continues is not None:
            self.experiment.set_terminated(self.run_id, "RUNNING")
            return
        super().log_hyperparams(params)
        record = {"id": self.run_id, "out_dir": str(self._record.parent.resolve())}
        write_file(self._record, lambda file: file.write(json.dumps(record).encode()))


def without_password(uri: str) -> str:
    """Returns the URI without a user name and a password, which may contain @."""
    return re.sub(r"//[^/]*@", "//", uri)


class Trackio(Logger):
    """A logger that writes a Trackio run to TRACKIO_DIR, by default ~/.cache/huggingface/trackio."""

    def __init__(self, tracker_run: TrackerRun, **arguments: Any) -> None:
        import trackio

        super().__init__()
        self._trackio = trackio
        self._arguments: JsonObject = {
            "project": tracker_run.project or tracker_run.default_project, "name": tracker_run.name,
            "group": tracker_run.group, "embed": False,
            "resume": "never" if tracker_run.resumed_at is None else "allow"} | arguments
        self._run: Any = None

    @property
    def name(self) -> str:
        return str(self._arguments["project"])

    @property
    def version(self) -> str:
        return str(self._arguments["name"])

    def log_hyperparams(self, params: JsonObject | Namespace, *more: object, **named: object) -> None:
        with redirect_stdout(sys.stderr):                # Trackio prints status messages
            self._run = self._trackio.init(config=params, **self._arguments)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run = None
            with redirect_stdout(sys.stderr):
                self._trackio.finish()


def _earlier_id(path: Path) -> str | None:
    try:
        record = json.loads(path.read_bytes())
        # In a copy of a run's directory, the record names the original directory
        return str(record["id"]) if Path(record["out_dir"]) == path.parent.resolve() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
