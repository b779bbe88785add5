"""python -m kernels.bench.plot FOLDER [FILE ...]: draws the benchmark's JSON files (default: benchmarks/results/*.json).

OP-DEVICE-time.png shows the time of every implementation against T (or the operator's last axis), and the machine's limits. A
file with fewer than two sizes has no figure, and a message says so. The colour shows the back end, in Okabe and Ito's palette,
which is safe for colour-blind readers. The shade shows the version, the number in a name such as cuda_v2.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels.arguments import Parser, path_of
from kernels.bench.results import UnusableFile, caption, check_folder, committed_reports, exit_status, read
from kernels.timex import cases as timex_cases

Points = dict[int, float]                # size of the last axis (T for timex and wkv4) -> milliseconds
PASSES = ("forward", "backward")
COLOURS = {"taichi": "#0072B2", "cuda": "#D55E00", "triton": "#009E73", "torch": "#CC79A7", "fft": "#E69F00",
           "formula": "#777777", "reference": "#777777"}
OTHERS = "#222222"
FLOOR = "#8C8C8C"
STYLES = {"formula": ":", "reference": ":", "conv1d in one block": "--"}
AXES = {"T": "T, time steps"}
CONVOLUTIONS = {"forward": 2, "backward": 4}         # number of wkv4's convolutions, each of B*C*T*(T+1) operations
LABEL_GAP = 0.042                        # least distance of labels, as a fraction of the axis' height


def main(argv: list[str]) -> int:
    parser = Parser("kernels.bench.plot", __doc__)
    parser.add_argument("folder", type=path_of)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args(argv)
    check(arguments.folder)
    for path in draw(arguments.folder, read(arguments.files or committed_reports())):
        print(path)
    return 0


def check(folder: Path) -> None:
    """Creates the folder. Raises UnusableFile if no figure can be drawn or written into the folder."""
    if not available():
        raise UnusableFile("figures require the package matplotlib, which is not installed (pip install matplotlib)")
    check_folder(folder)


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(folder: Path, reports: Iterable[dict[str, Any]]) -> list[Path]:
    """Writes a figure of every report into `folder`, and returns the files. Prints the reason if a report has no figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for report in reports:
        name = f"{report['op']}-{report['device']}" + ("" if report["dtype"] == "float32" else f"-{report['dtype']}")
        figure = time_against_size(report)
        if figure is None:
            print(f"{name}: no figure, because fewer than two sizes were measured (use --sweep)", file=sys.stderr)
        else:
            paths.append(folder / f"{name}-time.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


def time_against_size(report: dict[str, Any]) -> Any | None:
    """Returns a figure with a log-log panel for each pass, or None if fewer than two sizes were measured."""
    measured = _same_width(report)
    if len(measured) < 2:
        return None
    *width_axes, axis = measured[0]["shape"]
    width = " ".join(f"{name}={measured[0]['shape'][name]}" for name in width_axes)
    passes = [part for part in PASSES if any(part == result["pass"] for result in measured[0]["results"])]
    title = f"{report['op']}: time against {axis}, {width}, {report['dtype']}"
    figure, panels = _figure(title, caption(report), len(passes))
    sizes = [_size(shape) for shape in measured]
    curves = {part: _curves(measured, part) for part in passes}
    for panel, part in zip(panels, passes, strict=True):
        for (name, points), style in zip(_lower_bounds(report["op"], measured, part).items(), ("-.", "--"), strict=False):
            panel.plot(list(points), list(points.values()), color=FLOOR, linestyle=style, lw=1.3, label=name, zorder=1)
        panel.legend(frameon=False, loc="upper left", fontsize=9, labelcolor="#666666", handlelength=3)
        for name, points in curves[part].items():
            panel.plot(list(points), list(points.values()), color=_colour(name), linestyle=STYLES.get(name, "-"),
                       lw=2.8 if name.endswith("_scan") else 1.6, marker="o", markersize=4)
        panel.set(title=part, xlabel=AXES.get(axis, axis), xscale="log", yscale="log",
                  ylabel="milliseconds" if part == "forward" else None)
        panel.set_xticks(sizes, list(map(str, sizes)))
        panel.minorticks_off()
    panels[0].margins(y=0.1)
    for panel, part in zip(panels, passes, strict=True):     # labels come last, because all curves determine the shared axes
        _label_curves(panel, curves[part])
    return figure


def _figure(title: str, foot: str, n: int) -> tuple[Any, Sequence[Any]]:
    """Returns an empty figure and its n panels. pyplot is not used, because it would keep the figure in memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.supxlabel(foot, fontsize=8, color="#666666")
    panels = figure.subplots(1, n, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#E6E6E6", lw=0.7)
        panel.set_axisbelow(True)
    return figure, panels


def _curves(measured: list[dict[str, Any]], part: str) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for shape in measured:
        for result in shape["results"]:
            if result["pass"] == part:
                curves.setdefault(result["name"], {})[_size(shape)] = result["ms"]
    return curves


def _lower_bounds(op: str, measured: list[dict[str, Any]], part: str) -> dict[str, Points]:
    """Returns lower bounds of the time for each size, at the highest speeds measured in this run."""
    if not all(shape["limits"] for shape in measured):
        return {}
    gbs = max(shape["limits"]["copy_gbs"] for shape in measured)
    gflops = max(shape["limits"]["matmul_gflops"] for shape in measured)
    results = {_size(shape): next(result for result in shape["results"] if result["pass"] == part) for shape in measured}
    floors = {"memory floor": {size: result["ms"] * result["gbs"] / gbs for size, result in results.items()}}
    if op == "wkv4":
        floors["FMA floor of convolving all of T"] = {
            _size(shape): CONVOLUTIONS[part] * timex_cases.flop(*shape["shape"].values()) / gflops / 1e6 for shape in measured}
    elif all(result["gflops"] for result in results.values()):
        floors["FMA floor"] = {size: result["ms"] * result["gflops"] / gflops for size, result in results.items()}
    return floors


def _label_curves(panel: Any, curves: dict[str, Points]) -> None:
    """Writes the names of the curves in a column on the right, near the ends of the curves, without overlaps."""
    panel.autoscale_view()
    to_axes = (panel.transScale + panel.transLimits).transform
    ends = {name: (max(points), points[max(points)]) for name, points in curves.items()}
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = [to_axes(ends[name])[1] for name in names]
    for name, height in zip(names, spread_apart(heights, LABEL_GAP), strict=True):
        panel.annotate(name, ends[name], xytext=(1.04, height), xycoords="data", textcoords="axes fraction",
                       color=_colour(name), fontsize=9, va="center", annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "color": _colour(name), "lw": 0.5, "alpha": 0.5, "shrinkB": 3})


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights apart by at least `gap`. Groups that would overlap stay centred on their mean."""
    groups: list[list[float]] = []                           # groups of original heights
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _lowest_label(groups[-2], gap) + gap * len(groups[-2]) > _lowest_label(groups[-1], gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_lowest_label(group, gap) + gap * index for group in groups for index in range(len(group))]


def _lowest_label(group: list[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _same_width(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the results whose sizes, except the last (T), equal those of the first shape, sorted by the last size."""
    def width_of(shape: dict[str, Any]) -> list[int]:
        return list(shape["shape"].values())[:-1]

    measured = report["shapes"] + report["sweep"]
    return sorted((shape for shape in measured if width_of(shape) == width_of(measured[0])), key=_size)


def _size(shape: dict[str, Any]) -> int:
    return list(shape["shape"].values())[-1]


def _colour(name: str) -> str:
    """Returns the back end's colour. Earlier versions, such as v0, are paler."""
    from matplotlib.colors import to_hex, to_rgb

    version = re.search(r"_v(\d+)$", name)
    share = min(1.0, 0.45 + 0.19 * int(version[1])) if version else 1.0
    red, green, blue = (1 - share * (1 - channel) for channel in to_rgb(COLOURS.get(name.partition("_")[0], OTHERS)))
    return to_hex((red, green, blue))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
