"""The benchmark's reports, as python -m kernels.bench --json writes them: reading them back, and what one was measured on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels.bench.hardware import ROOT

Report = dict[str, Any]
FOLDER = ROOT / "benchmarks" / "results"


def read(files: Iterable[str | Path]) -> list[Report]:
    """The reports in `files`; what else is kept in a folder of results is passed over."""
    contents = [json.loads(Path(name).read_text(encoding="utf-8")) for name in files]
    return [content for content in contents if isinstance(content, dict) and "op" in content]


def committed() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def caption(report: Report) -> str:
    """One line that says what a report was measured on."""
    machine = report["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    where = machine["gpu"] if "gpu" in machine else f"{machine['cpu']}, {threads}, malloc {report['malloc']}"
    names = ("torch", "taichi", *(("triton", "cuda-core", "cuda") if "gpu" in machine else ()))
    versions = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    return f"{where}; {versions}; {report['dtype']}; commit {machine['commit']}, {machine['date'][:10]}."


def measured_at(report: Report, shape: dict[str, int]) -> dict[str, Any] | None:
    """What was measured at one shape, {"B": ..., "C": ..., "T": ...}; None where it was not."""
    return next((one for one in report["shapes"] + report["sweep"] if one["shape"] == shape), None)
