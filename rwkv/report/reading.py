"""The files that training leaves in a run's directory, and a sweep's runs. Whatever is missing is empty.

So is what was damaged since, by hand or by a disk; Run.damaged says which, and the report says it too.
"""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rwkv.json_lines import parse

CONFIG, METRICS, MEASURED, SAMPLES, SWEEP = "config.yaml", "metrics.csv", "kernel.json", "samples.jsonl", "sweep.json"
RESULTS = ("y", "grad k", "grad v", "grad time_decay", "grad time_first")
Curve = dict[int, float]                 # by step

# What the report uses of the files: a type, [that of any number of entries], [that of a pair], {key: that of its value} or
# {str: that of each value}.
NUMBER = (int, float)
LAYER = {"errors": {result: {"err_ratio": NUMBER, "max": NUMBER} for result in RESULTS},
         "ranges": {name: [NUMBER, NUMBER] for name in ("k", "v", "time_decay", "time_first")}}
OF_CONFIG = {"kernel": {"name": str}, "seed": int}
OF_MEASURED = {"warm_up": int, "precision": str, "machine": dict,
               "steps": [{"ms": NUMBER, "forward_ms": NUMBER, "backward_ms": NUMBER}],
               "errors": {str: {"layers": [LAYER], "allowed": {str: NUMBER}}}}
OF_SWEEP = [{"name": str, "status": str, "reason": (str, type(None)), "order": (int, type(None)), "kernel": str, "seed": int}]


@dataclass
class Run:
    """config: as nested plain containers. metrics: by column. measured: kernel.json (rwkv/probe.py). order: among a sweep's.

    damaged: a sentence for each thing that could not be read, and is left out.
    """

    name: str
    kernel: str
    seed: int
    status: str = "finished"
    reason: str | None = None
    order: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def curve(self, name: str) -> Curve:
        return self.metrics.get(name, {})

    @property
    def machine(self) -> dict[str, Any]:
        machine: dict[str, Any] = self.measured.get("machine", {})
        return machine


def read(folder: Path) -> list[Run]:
    """A run's directory as one run; a sweep's, or any folder of runs, as all of them. Raises ValueError where there is none."""
    if (folder / CONFIG).is_file():
        return [_run(folder, folder.name)]
    entries = _json(folder / SWEEP, []).get("runs", [])
    if not _fits(entries, OF_SWEEP):
        raise ValueError(f"{folder / SWEEP} is damaged: its runs lack a name, a status or what else a sweep writes of each; "
                         "remove it for a report of all runs in the folder")
    runs = [_of_sweep(folder, entry) for entry in entries] or [
        _run(path.parent, path.parent.name) for path in sorted(folder.glob(f"*/{CONFIG}"))]
    if not runs:
        raise ValueError(f"no run in {folder}: expected the directory of a run (with {CONFIG}) or of a sweep (with {SWEEP})")
    return runs


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` was trained to its last step, and validated after it."""
    return _json(folder / MEASURED, []).get("finished") is True


def _of_sweep(folder: Path, entry: dict[str, Any]) -> Run:
    run = _run(folder / entry["name"], entry["name"])
    run.status, run.reason, run.order = entry["status"], entry["reason"], entry["order"]
    run.kernel = run.kernel or entry["kernel"]
    run.seed = run.seed if run.config else entry["seed"]
    return run


def _run(folder: Path, name: str) -> Run:
    damaged: list[str] = []
    config = _fitting(_yaml(folder / CONFIG, damaged), OF_CONFIG, CONFIG, damaged)
    measured = _fitting(_json(folder / MEASURED, damaged), OF_MEASURED, MEASURED, damaged)
    kernel = config.get("kernel", {}).get("name", "")
    metrics = _metrics(folder / METRICS, damaged)
    return Run(name, kernel, config.get("seed", 0), "finished" if measured.get("finished") else "not finished", config=config,
               metrics=metrics, measured=measured, samples=_lines(folder / SAMPLES), damaged=damaged)


def _metrics(path: Path, damaged: list[str]) -> dict[str, Curve]:
    """Of each column of numbers. A row that a kill cut short counts as far as it goes."""
    columns: dict[str, Curve] = {}
    wrong = 0
    for row in _rows(path, damaged):
        step = _step(row.get("step"))
        wrong += step is None
        for name, text in row.items():
            value = _number(text)
            if name and name != "step" and step is not None and value is not None:
                columns.setdefault(name, {})[step] = value
    if wrong:
        damaged.append(f"{path.name} has {wrong} rows without the number of a step; they are left out")
    return columns


def _rows(path: Path, damaged: list[str]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            try:
                found.extend(csv.DictReader(file))
            except csv.Error as error:
                damaged.append(f"{path.name} cannot be read after its row {len(found)}, and the rest is left out: {error}")
    return found


def _step(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return None if math.isinf(value) else value


def _json(path: Path, damaged: list[str]) -> dict[str, Any]:
    return _mapping(path, json.loads, damaged)


def _yaml(path: Path, damaged: list[str]) -> dict[str, Any]:
    return _mapping(path, yaml.safe_load, damaged)


def _mapping(path: Path, parse_text: Callable[[str], Any], damaged: list[str]) -> dict[str, Any]:
    """The mapping that a file holds, {} where there is none."""
    if not path.is_file():
        return {}
    try:
        found = parse_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        damaged.append(f"{path.name} cannot be read, and is left out: {' '.join(str(error).split())}")
        return {}
    if not isinstance(found, dict):
        damaged.append(f"{path.name} holds no mapping, and is left out")
        return {}
    return found


def _fitting(found: dict[str, Any], shapes: dict[str, Any], name: str, damaged: list[str]) -> dict[str, Any]:
    """Without the values that are not of the shape that the report relies on."""
    wrong = [key for key, shape in shapes.items() if key in found and not _fits(found[key], shape)]
    damaged += [f"{name} has a {key} that training did not write; it is left out" for key in wrong]
    return {key: value for key, value in found.items() if key not in wrong}


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, tuple):
        return any(_fits(value, each) for each in shape)
    if isinstance(shape, list):
        right = isinstance(value, list) and len(shape) in (1, len(value))
        return right and all(_fits(each, shape[0]) for each in value)
    if not isinstance(shape, dict):
        return isinstance(value, shape)
    if str in shape:
        return isinstance(value, dict) and all(_fits(each, shape[str]) for each in value.values())
    return isinstance(value, dict) and all(key in value and _fits(value[key], each) for key, each in shape.items())


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            found.append(parse(line, f"{path}, line {number}"))
        except ValueError:               # the last one, which is empty or was cut short, or one damaged by hand
            continue
    return found
