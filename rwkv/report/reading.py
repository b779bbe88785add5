"""The files that training leaves in a run's directory, and a sweep's runs. Whatever is missing is empty."""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rwkv.json_lines import parse

CONFIG, METRICS, MEASURED, SAMPLES, SWEEP = "config.yaml", "metrics.csv", "kernel.json", "samples.jsonl", "sweep.json"
Curve = dict[int, float]                 # by step


@dataclass
class Run:
    """config: as nested plain containers. metrics: by column. measured: kernel.json (rwkv/probe.py). order: among a sweep's."""

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
    entries = _json(folder / SWEEP).get("runs", [])
    runs = [_of_sweep(folder, entry) for entry in entries] or [
        _run(path.parent, path.parent.name) for path in sorted(folder.glob(f"*/{CONFIG}"))]
    if not runs:
        raise ValueError(f"no run in {folder}: expected the directory of a run (with {CONFIG}) or of a sweep (with {SWEEP})")
    return runs


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` was trained to its last step."""
    return _json(folder / MEASURED).get("finished") is True


def _of_sweep(folder: Path, entry: dict[str, Any]) -> Run:
    run = _run(folder / entry["name"], entry["name"])
    run.status, run.reason, run.order = entry["status"], entry["reason"], entry["order"]
    run.kernel = run.kernel or entry["kernel"]
    run.seed = run.seed if run.config else entry["seed"]
    return run


def _run(folder: Path, name: str) -> Run:
    config, measured = _yaml(folder / CONFIG), _json(folder / MEASURED)
    kernel = config.get("kernel", {}).get("name", "")
    return Run(name, kernel, config.get("seed", 0), "finished" if measured.get("finished") else "not finished", config=config,
               metrics=_metrics(folder / METRICS), measured=measured, samples=_lines(folder / SAMPLES))


def _metrics(path: Path) -> dict[str, Curve]:
    """Of each column of numbers. A row that a kill cut short counts as far as it goes."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, Curve] = {}
    for row in rows:
        step = _number(row.get("step"))
        for name, text in row.items():
            value = _number(text)
            if name and name != "step" and step is not None and value is not None:
                columns.setdefault(name, {})[int(step)] = value
    return columns


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return None if math.isinf(value) else value


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


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
