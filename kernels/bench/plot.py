"""python -m kernels.bench.plot FOLDER [FILE ...]: draws the benchmark's JSON files (default: benchmarks/results/*.json).

    OP-DEVICE-time.png      time of every implementation against T (or the operator's last axis), and the machine's limits
    timex-DEVICE-ladder.png the published comparison at B=32 C=768 T=768: Taichi beside CUDA C++, conv1d and v0 to the last rung

A figure whose shapes are not in a file is omitted, with a sentence on standard error. The colour shows the back end (Okabe and
Ito's palette, safe for colour-blind readers), the shade the rung of a ladder.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.arguments import Parser, path_of
from kernels.bench.results import UnusableFile, caption, check_folder, committed, exit_status, measured_at, read
from kernels.timex import cases as timex_cases

Points = dict[int, float]                # milliseconds by the last axis' size, T for timex and wkv4
PASSES = ("forward", "backward")
COLOURS = {"taichi": "#0072B2", "cuda": "#D55E00", "triton": "#009E73", "torch": "#CC79A7", "fft": "#E69F00",
           "formula": "#777777", "reference": "#777777"}
OTHERS, FLOOR = "#222222", "#8C8C8C"
STYLES = {"formula": ":", "reference": ":", "conv1d in one block": "--"}
TITLES = {"timex": "TimeX", "wkv4": "WKV", "wkv7": "WKV-7"}                # for other operators the folder's name
AXES = {"T": "T, time steps"}
CONVOLUTIONS = {"timex": {"forward": 1, "backward": 2}, "wkv4": {"forward": 2, "backward": 4}}   # B*C*T*(T+1) operations each
MISSING = {"time": "fewer than two sizes were measured (--sweep)", "ladder": "B=32 C=768 T=768 was not measured"}
LABEL_GAP = 0.042                        # as a fraction of the axis' height


def main(argv: list[str]) -> int:
    parser = Parser("kernels.bench.plot", __doc__)
    parser.add_argument("folder", type=path_of)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args(argv)
    check(arguments.folder)
    for path in draw(arguments.folder, read(arguments.files or committed())):
        print(path)
    return 0


def check(folder: Path) -> None:
    """Raises UnusableFile where no figure can be written into `folder`; makes the folder."""
    if not available():
        raise UnusableFile("figures need the package matplotlib, which is not installed (pip install matplotlib)")
    check_folder(folder)


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(folder: Path, reports: Iterable[dict[str, Any]]) -> list[Path]:
    """Writes the figures of every report into `folder` and returns their files; prints why a figure is omitted."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for report in reports:
        name = f"{report['op']}-{report['device']}" + ("" if report["dtype"] == "float32" else f"-{report['dtype']}")
        figures = {"time": time_against_size(report)} | ({"ladder": ladder(report)} if report["op"] == "timex" else {})
        for kind, figure in figures.items():
            if figure is not None:
                figure.savefig(folder / f"{name}-{kind}.png", dpi=150)
                written.append(folder / f"{name}-{kind}.png")
            else:
                print(f"{name}: no {kind} figure, because {MISSING[kind]}", file=sys.stderr)
    return written


def time_against_size(report: dict[str, Any]) -> Any | None:
    """A logarithmic panel for each pass; None where fewer than two sizes were measured."""
    measured = _same_width(report)
    if len(measured) < 2:
        return None
    *others, axis = measured[0]["shape"]
    width = " ".join(f"{other}={measured[0]['shape'][other]}" for other in others)
    passes = [part for part in PASSES if any(part == result["pass"] for result in measured[0]["results"])]
    title = f"{TITLES.get(report['op'], report['op'])}: time against {axis}, {width}, {report['dtype']}"
    figure, panels = _figure(report, title, height=6.2, passes=passes)
    sizes = [_size(one) for one in measured]
    curves = {part: _curves(measured, part) for part in passes}
    for panel, part in zip(panels, passes, strict=True):
        _draw_floors(panel, _floors(report["op"], measured, part))
        for name, points in curves[part].items():
            panel.plot(list(points), list(points.values()), color=_colour(name), linestyle=STYLES.get(name, "-"),
                       lw=2.8 if name.endswith("_scan") else 1.6, marker="o", markersize=4)
        panel.set(title=part, xlabel=AXES.get(axis, axis), xscale="log", yscale="log",
                  ylabel="milliseconds" if part == "forward" else None)
        panel.set_xticks(sizes, list(map(str, sizes)))
        panel.minorticks_off()
    panels[0].margins(y=0.1)
    for panel, part in zip(panels, passes, strict=True):     # after all curves: they determine the shared axes
        _name_the_curves(panel, curves[part])
    return figure


def ladder(report: dict[str, Any]) -> Any | None:
    """Bars of conv1d and of each rung, Taichi beside CUDA, at the published shape; None where it was not measured."""
    shape = dict(zip("BCT", timex_cases.PUBLISHED, strict=True))
    measured = measured_at(report, shape)
    if measured is None:
        return None
    times = {(result["name"], result["pass"]): result["ms"] for result in measured["results"]}
    rungs = sorted({match[2] for name, _ in times if (match := re.fullmatch(r"(taichi|cuda)_(v\d+)", name))})
    figure, panels = _figure(report, "TimeX, rung by rung, B=32 C=768 T=768, " + report["dtype"], height=4.6)
    for panel, part in zip(panels, PASSES, strict=True):
        _bars(panel, {name: ms for (name, one), ms in times.items() if one == part}, rungs)
        floor = _fma_ms("timex", shape, measured["limits"]["matmul_gflops"], part)
        panel.axhline(floor, color=FLOOR, linestyle="--", lw=1.2, zorder=0)
        panel.text(1.0, floor, " FMA\n floor", transform=panel.get_yaxis_transform(), color=FLOOR, va="center", fontsize=9)
        panel.set(title=part, ylabel="milliseconds" if part == "forward" else None)
    panels[0].legend(*_ladder_legend(times), frameon=False, loc="upper right", fontsize=9)
    return figure


def _figure(report: dict[str, Any], title: str, height: float,
            passes: Sequence[str] = PASSES) -> tuple[Any, Sequence[Any]]:
    """An empty figure and its panels. Without pyplot, which would keep the figure for the rest of the process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.supxlabel(caption(report), fontsize=8, color="#666666")
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#E6E6E6", lw=0.7)
        panel.set_axisbelow(True)
    return figure, panels


def _curves(measured: list[dict[str, Any]], part: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for one in measured:
        for result in one["results"]:
            if result["pass"] == part:
                found.setdefault(result["name"], {})[_size(one)] = result["ms"]
    return found


def _floors(op: str, measured: list[dict[str, Any]], part: str) -> dict[str, Points]:
    """The least times by the highest rates that the machine reached in this run."""
    gbs, gflops = (max(one["limits"][limit] for one in measured) for limit in ("copy_gbs", "matmul_gflops"))
    least = {_size(one): next(result for result in one["results"] if result["pass"] == part) for one in measured}
    memory = {size: result["ms"] * result["gbs"] / gbs for size, result in least.items()}
    if op not in CONVOLUTIONS:
        operations = {size: result["ms"] * result["gflops"] / gflops for size, result in least.items() if result["gflops"]}
        return {"memory floor": memory} | ({"FMA floor": operations} if operations else {})
    fma = {_size(one): _fma_ms(op, one["shape"], gflops, part) for one in measured}
    return {"memory floor": memory, "FMA floor" if op == "timex" else "FMA floor of convolving all of T": fma}


def _fma_ms(op: str, shape: dict[str, int], gflops: float, part: str) -> float:
    return CONVOLUTIONS[op][part] * timex_cases.flop(*shape.values()) / gflops / 1e6


def _draw_floors(panel: Any, floors: Mapping[str, Points]) -> None:
    for (name, points), style in zip(floors.items(), ("-.", "--"), strict=False):
        panel.plot(list(points), list(points.values()), color=FLOOR, linestyle=style, lw=1.3, label=name, zorder=1)
    panel.legend(frameon=False, loc="upper left", fontsize=9, labelcolor="#666666", handlelength=3)


def _name_the_curves(panel: Any, curves: dict[str, Points]) -> None:
    """Writes each name in its curve's colour in a column on the right, near the curve's end, without overlaps."""
    panel.autoscale_view()
    to_axes = (panel.transScale + panel.transLimits).transform
    ends = {name: (max(points), points[max(points)]) for name, points in curves.items()}
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = [to_axes(ends[name])[1] for name in names]
    for name, height in zip(names, spread(heights, LABEL_GAP), strict=True):
        panel.annotate(name, ends[name], xytext=(1.04, height), xycoords="data", textcoords="axes fraction",
                       color=_colour(name), fontsize=9, va="center", annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "color": _colour(name), "lw": 0.5, "alpha": 0.5, "shrinkB": 3})


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved apart to at least `gap`; a group that would overlap is centred on its mean."""
    groups: list[list[float]] = []                           # original heights, each group laid out around its mean
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-2], gap) + gap * len(groups[-2]) > _bottom(groups[-1], gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + gap * index for group in groups for index in range(len(group))]


def _bottom(group: list[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _bars(panel: Any, times: Mapping[str, float], rungs: Sequence[str]) -> None:
    """conv1d alone, then for each rung a pair: Taichi on the left, CUDA on the right."""
    aside = 0.2 if any(name.startswith("cuda") for name in times) else 0.0
    places = {"conv1d": 0.0} | {f"{end}_{rung}": index + side for index, rung in enumerate(rungs, start=1)
                                for end, side in (("taichi", -aside), ("cuda", aside))}
    for name, place in places.items():
        if name in times:
            panel.bar(place, times[name], width=0.38, color=_family(name))
            text = format(times[name], ".0f" if times[name] >= 100 else ".3g")
            panel.annotate(text, (place, times[name]), (0, 2), textcoords="offset points", ha="center", fontsize=9,
                           color="#333333")
    panel.set_xticks(range(len(rungs) + 1), ["conv1d", *rungs])
    panel.margins(y=0.12)


def _ladder_legend(times: Iterable[tuple[str, str]]) -> tuple[list[Any], list[str]]:
    """A patch and a label for each back end; the label mentions if it was not measured."""
    from matplotlib.patches import Patch

    measured = {name.partition("_")[0] for name, _ in times}
    words = {"conv1d": "F.conv1d", "taichi": "Taichi", "cuda": "CUDA C++"}
    labels = [word + ("" if end in measured else ": not measured here") for end, word in words.items()]
    return [Patch(color=_family(end)) for end in words], labels


def _same_width(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything measured at the first shape's sizes but the last (B and C), sorted by the last (T)."""
    def others(one: dict[str, Any]) -> list[int]:
        return list(one["shape"].values())[:-1]

    measured = report["shapes"] + report["sweep"]
    return sorted((one for one in measured if others(one) == others(measured[0])), key=_size)


def _size(one: dict[str, Any]) -> int:
    """The last axis' size, the x axis of the curves."""
    return list(one["shape"].values())[-1]


def _family(name: str) -> str:
    return COLOURS.get(name.partition("_")[0], OTHERS)


def _colour(name: str) -> str:
    """The back end's colour, paler for lower rungs of a ladder."""
    from matplotlib.colors import to_hex, to_rgb

    rung = re.search(r"_v(\d+)$", name)
    share = min(1.0, 0.45 + 0.19 * int(rung[1])) if rung else 1.0
    red, green, blue = (1 - share * (1 - channel) for channel in to_rgb(_family(name)))
    return to_hex((red, green, blue))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
