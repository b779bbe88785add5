"""Reads the files in the directory of a run or a sweep. A missing file counts as empty.

A report skips damaged parts and lists them in Run.damaged. A resumed run reads metrics.csv and samples.jsonl with the same
functions, which then raise an error for a damaged part.
"""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rwkv.config import LATEST
from rwkv.errors import UserError
from rwkv.io.json_lines import parse
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of

CONFIG = "config.yaml"
METRICS = "metrics.csv"
KERNEL = "kernel.json"
SAMPLES = "samples.jsonl"
SWEEP = "sweep.json"
TUNED = "tuned.json"                     # only runs with init_from= write this file
TENSORBOARD = "tensorboard"              # the folder of logger=tensorboard
Curve = dict[int, float]                 # values by step
Damaged = list[str]                      # one message for each unreadable part of a file

# _fits() compares values with these structures. A structure is a type; a tuple of alternative structures; [structure of every
# item]; [structure, structure] for a pair; {key: structure of the value}; or {str: structure of every value}.
NUMBER = (int, float)
LAYER = {"errors": {str: {"err_ratio": NUMBER, "max": NUMBER}}, "ranges": {str: [NUMBER, NUMBER]}}
CONFIG_STRUCTURE = {"kernel": {"name": str}, "seed": int, "logger": {str: object}}
MEASURED_STRUCTURE = {"warm_up": int, "precision": str, "machine": dict,
                      "steps": [{"step": int, "ms": NUMBER, "forward_ms": NUMBER, "backward_ms": NUMBER}],
                      "errors": {str: {"layers": [LAYER], "allowed": {str: NUMBER}}}}
TUNED_STRUCTURE = {"tuned": {"method": str, "base": str, "dtype": str, "trained": int}, "guard": (str, type(None)),
                   "before": {str: NUMBER}, "after": {str: NUMBER}, "samples": [{"prompt": str, "reference": str}]}
SAMPLE_STRUCTURE = {"step": int, "prompt": str, "text": str}
SWEEP_STRUCTURE = [{"name": str, "status": str, "reason": (str, type(None)), "order": (int, type(None)), "kernel": str,
                    "seed": int}]


@dataclass
class Run:
    """The content of a run's files.

    Attributes:
        order: the run's position in the shuffled order of a sweep, from 1; None outside a sweep.
        metrics: the curves in metrics.csv, by column.
        measured: the content of kernel.json, which rwkv/training/callbacks/kernel_probe.py writes.
        samples: the lines of samples.jsonl.
        tuned: the content of tuned.json, which rwkv/training/callbacks/before_after.py writes.
        damaged: one message for each unreadable part of a file.
    """

    name: str
    kernel: str
    seed: int
    status: str = "finished"
    reason: str | None = None
    order: int | None = None
    config: JsonObject = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    measured: JsonObject = field(default_factory=dict)
    samples: list[JsonObject] = field(default_factory=list)
    tuned: JsonObject = field(default_factory=dict)
    damaged: Damaged = field(default_factory=list)

    def curve(self, name: str) -> Curve:
        return self.metrics.get(name, {})

    @property
    def published_losses(self) -> tuple[list[float], int]:
        """The mean losses of the published run with this run's recipe, and the number of steps in each mean."""
        logger = self.config.get("logger", {})
        losses = logger.get("published_losses")
        steps = logger.get("published_steps")
        return (losses, steps) if losses and _fits(losses, [NUMBER]) and _fits(steps, int) else ([], 0)

    @property
    def machine(self) -> JsonObject:
        """The processor, versions and commit, as described by kernels/machine/hardware.py."""
        return dict(self.measured.get("machine", {}))

    def layers(self, when: str) -> list[JsonObject]:
        """Returns the operator's errors and input ranges in each layer. `when` is "start" or "end"."""
        return list(self.measured.get("errors", {}).get(when, {}).get("layers", []))

    def tolerances(self, when: str) -> dict[str, float]:
        """Returns the largest RMS error / RMS that the tests allow, for each result of the operator."""
        return dict(self.measured.get("errors", {}).get(when, {}).get("allowed", {}))


def read(folder: Path) -> list[Run]:
    """Returns the run in `folder`, or all runs of a sweep, or of the runs and sweeps in it. Raises UserError without a run."""
    if (folder / CONFIG).is_file():
        return [_run(folder, folder.resolve().name)]
    runs = _sweep_runs(folder) or [run for below in sorted(folder.glob("*/")) if below.name != LATEST.name
                                   for run in _runs_below(below)]
    if not runs:
        raise UserError(f"there is no run in {folder}: the folder must have the {CONFIG} of a run or the {SWEEP} of a sweep")
    return runs


def _sweep_runs(folder: Path) -> list[Run]:
    """Returns the runs of a sweep, or [] for another folder. Raises UserError if sweep.json is damaged."""
    entries = read_mapping(folder / SWEEP, json.loads, []).get("runs", [])
    if not _fits(entries, SWEEP_STRUCTURE):
        raise UserError(f"{folder / SWEEP} is damaged: the file must have a list of runs, each with "
                        f"{', '.join(SWEEP_STRUCTURE[0])}. Remove the file for a report of all runs in the folder")
    return [_sweep_run(folder, entry) for entry in entries]


def _runs_below(folder: Path) -> list[Run]:
    if (folder / CONFIG).is_file():
        return [_run(folder, folder.name)]
    return [replace(run, name=f"{folder.name}/{run.name}", order=None) for run in _sweep_runs(folder)]


def is_finished(folder: Path) -> bool:
    """Returns True if the run in `folder` was trained to the last step and then validated."""
    return read_mapping(folder / KERNEL, json.loads, []).get("finished") is True


def read_metrics(path: Path, damaged: Damaged | None = None) -> list[dict[str, str]]:
    """Returns the rows of a metrics.csv that have an integer step. The missing values of a truncated row are None.

    Raises UserError for a damaged file. With `damaged`, the function instead skips damaged parts and lists them there.
    """
    rows: list[dict[str, str]] = []
    if not path.is_file():
        return rows
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:        # spreadsheets write a byte order mark
        try:
            rows.extend(csv.DictReader(file))
        except csv.Error as error:
            _report_damage(path, f"the rows after row {len(rows)} cannot be read: {error}", damaged)
    with_step = [row for row in rows if re.fullmatch(r"\s*-?\d{1,18}\s*", row.get("step") or "")]
    if len(with_step) < len(rows):
        _report_damage(path, f"the file has {count_of(len(rows) - len(with_step), 'row')} without a step number", damaged)
    return with_step


def read_samples(path: Path, damaged: Damaged | None = None) -> list[JsonObject]:
    """Returns the lines of a samples.jsonl, with step, prompt and text. Skips a last line that a killed process truncated.

    Raises UserError for a damaged file. With `damaged`, the function instead skips damaged parts and lists them there.
    """
    if not path.is_file():
        return []
    samples = []
    complete = path.read_bytes().rpartition(b"\n")[0]
    for number, line in enumerate(complete.split(b"\n"), start=1):
        if line:
            try:
                sample = parse(line, f"line {number}")
                if not _fits(sample, SAMPLE_STRUCTURE):
                    raise UserError(f"line {number} must have a step, a prompt and a text")
                samples.append(sample)
            except UserError as error:
                _report_damage(path, str(error), damaged)
    return samples


def _report_damage(path: Path, problem: str, damaged: Damaged | None) -> None:
    if damaged is None:
        raise UserError(f"{path} is damaged: {problem}. Repair or remove the file")
    damaged.append(f"{path.name}: {problem}; the report ignores this part")


def _sweep_run(folder: Path, entry: JsonObject) -> Run:
    run = _run(folder / entry["name"], entry["name"])
    run.status = entry["status"]
    run.reason = entry["reason"]
    run.order = entry["order"]
    run.kernel = run.kernel or entry["kernel"]
    run.seed = run.seed if run.config else entry["seed"]
    return run


def _run(folder: Path, name: str) -> Run:
    damaged: Damaged = []
    config = _valid_values(read_mapping(folder / CONFIG, yaml.safe_load, damaged), CONFIG_STRUCTURE, CONFIG, damaged)
    measured = read_measured(folder / KERNEL, damaged)
    return Run(name, kernel=config.get("kernel", {}).get("name", ""), seed=config.get("seed", 0),
               status="finished" if measured.get("finished") else "not finished",
               config=config, metrics=_curves(read_metrics(folder / METRICS, damaged)), measured=measured,
               samples=read_samples(folder / SAMPLES, damaged),
               tuned=_valid_values(read_mapping(folder / TUNED, json.loads, damaged), TUNED_STRUCTURE, TUNED, damaged),
               damaged=damaged)


def _curves(rows: list[dict[str, str]]) -> dict[str, Curve]:
    """Returns the columns with numbers as curves, including the complete values of a truncated row."""
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, text in row.items():
            value = _number(text)
            if name and name != "step" and value is not None:
                curves.setdefault(name, {})[int(row["step"])] = value
    return curves


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return None if math.isinf(value) else value


def read_mapping(path: Path, parse_text: Callable[[str], object], damaged: Damaged) -> JsonObject:
    """Returns the mapping in a file, or {} for a missing or damaged file. A message on the damage goes to `damaged`."""
    if not path.is_file():
        return {}
    try:
        content = parse_text(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        damaged.append(f"{path.name} cannot be read ({' '.join(str(error).split())}); the report ignores this file")
        return {}
    if not isinstance(content, dict):
        damaged.append(f"{path.name} must be a mapping; got a {type(content).__name__}; the report ignores this file")
        return {}
    return content


def read_measured(path: Path, damaged: Damaged) -> JsonObject:
    """Returns the valid part of a kernel.json, or {}. Messages on damaged parts go to `damaged`."""
    return _valid_values(read_mapping(path, json.loads, damaged), MEASURED_STRUCTURE, KERNEL, damaged)


def _valid_values(content: JsonObject, structure: JsonObject, name: str, damaged: Damaged) -> JsonObject:
    """Returns the mapping without values that have an unexpected structure. A message on each such value goes to `damaged`."""
    invalid = [key for key, expected in structure.items() if key in content and not _fits(content[key], expected)]
    damaged += [f"{name}: the value of {key} has an unexpected format; the report ignores this value" for key in invalid]
    return {key: value for key, value in content.items() if key not in invalid}


def _fits(value: object, structure: Any) -> bool:
    if isinstance(structure, tuple):
        return any(_fits(value, inner) for inner in structure)
    if isinstance(structure, list):
        return (isinstance(value, list) and len(structure) in (1, len(value))
                and all(_fits(item, structure[0]) for item in value))
    if not isinstance(structure, dict):
        return isinstance(value, structure)
    if not isinstance(value, dict):
        return False
    if str in structure:
        return all(_fits(inner, structure[str]) for inner in value.values())
    return all(key in value and _fits(value[key], inner) for key, inner in structure.items())
