"""Figures as SVG for a page: lines over steps, and bars. Their colours are classes of the page's style sheet (page.py).

A figure is WIDTH by HEIGHT in its own units, and the page scales it. Values that are not finite are not drawn.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH = 480
HEIGHT = 300
LEFT = 54                                # margins around the axes
RIGHT = 12
TOP = 10
BOTTOM = 40
SMALLEST = 1e-300                        # smaller values are not drawn on a logarithmic axis
MOST_POINTS = 400                        # points of a line; longer lines merge neighbours into one point
COLOURS = 10                             # number of colours in the style sheet
DASHES = ("", "6 3", "2 3")
SAME = 1.5                               # lines within this distance, a line's width, look like one line
DASH = 9                                 # length of the dashes of overlapping lines
BAR = 18                                 # height of a bar
GAP = 10                                 # space between two bars
NAMES = 110                              # width for the names of bars
HOLLOW = ' class="ring"'                 # for a dot drawn around another dot

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """colour: a number; from COLOURS on, the colours repeat with dashes. merge: computes the value of neighbours that are
    merged into one point. marked: every point has a dot. Overlapping lines alternate their dashes and have rings
    around dots.
    """

    name: str
    colour: int
    points: Sequence[Point]
    merge: Callable[[Iterable[float]], float] = max
    marked: bool = False


@dataclass(frozen=True)
class Axis:
    """axis(value) is the value's position: `low` is at `start`, `high` at `stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        return _decades(self.low, self.high) if self.logarithmic else _round_steps(self.low, self.high)


def lines(title: str, x_name: str, y_name: str, series: Sequence[Line], logarithmic: bool = False) -> str:
    """A figure of lines; "" with nothing to draw. logarithmic: of the y axis, for values above SMALLEST."""
    positioned = _positioned(series, logarithmic)
    if not positioned:
        return ""
    dashes = {id(line): (index, len(group)) for group in _groups(positioned) for index, line in enumerate(group)}
    elements = [_line(line, positions, *dashes[id(line)]) for line, positions in positioned]
    return _figure(title, HEIGHT, [*_grid(*_axes(series, logarithmic), x_name, y_name), *elements])


def overlapping(series: Sequence[Line], logarithmic: bool = False) -> list[list[Line]]:
    """Groups of at least two lines that look the same in the figure of `series`."""
    return [group for group in _groups(_positioned(series, logarithmic)) if len(group) > 1]


def bars(title: str, form: Callable[[float], str], rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One bar for each row, stacked from its parts (name, value), with their sum beside it; "" with nothing to draw.

    form: formats a value with its unit.
    """
    rows = [(name, [(part, value) for part, value in parts if math.isfinite(value) and value >= 0]) for name, parts in rows]
    rows = [(name, parts) for name, parts in rows if parts]
    if not rows:
        return ""
    x = Axis(0, max(sum(value for _, value in parts) for _, parts in rows) * 1.25 or 1.0, NAMES, WIDTH - RIGHT)
    elements = [element for row, (name, parts) in enumerate(rows)
                for element in _bar(name, parts, x, TOP + row * (BAR + GAP), form)]
    return _figure(title, TOP + len(rows) * (BAR + GAP), elements)


def swatch(colour: int) -> str:
    """A short line in this colour and its dashes, for a legend."""
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><path d="M0 5H26" {_stroke(colour)}/></svg>'


def _bar(name: str, parts: Sequence[tuple[str, float]], x: Axis, top: float,
         form: Callable[[float], str]) -> list[str]:
    middle = top + BAR / 2 + 4
    begin = 0.0
    short = name if len(name) <= 16 else f"{name[:15]}…"
    elements = [f'<text x="{NAMES - 8}" y="{middle:.1f}" class="end">{escape(short)}<title>{escape(name)}</title></text>']
    for n, (part, value) in enumerate(parts):
        width = x(begin + value) - x(begin)
        elements.append(f'<rect x="{x(begin):.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" class="b{n}">'
                        f"<title>{escape(name)}, {escape(part)}: {escape(form(value))}</title></rect>")
        begin += value
    return [*elements, f'<text x="{x(begin) + 5:.1f}" y="{middle:.1f}">{escape(form(begin))}</text>']


def _figure(title: str, height: float, elements: Iterable[str]) -> str:
    return (f'<svg class="figure" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
            f'{"".join(elements)}</svg>')


def _grid(x: Axis, y: Axis, x_name: str, y_name: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    middle = (TOP + bottom) / 2
    across = [f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
              f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" class="end">{_number(value)}</text>' for value in y.ticks()]
    along = [f'<path class="grid" d="M{x(value):.1f} {bottom}v4"/>'
             f'<text x="{x(value):.1f}" y="{bottom + 17}" class="middle">{_number(value)}</text>' for value in x.ticks()]
    return [*across, *along, f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>',
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" class="middle">{escape(x_name)}</text>',
            f'<text transform="translate(12 {middle:.0f}) rotate(-90)" class="middle">{escape(y_name)}</text>']


def _axes(series: Sequence[Line], logarithmic: bool) -> tuple[Axis, Axis]:
    points = [point for line in series for point in _drawable(line, logarithmic)]
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    return (Axis(*_widened(min(xs), max(xs)), LEFT, WIDTH - RIGHT),
            Axis(*_bounds(min(ys), max(ys), logarithmic), HEIGHT - BOTTOM, TOP, logarithmic))


def _positioned(series: Sequence[Line], logarithmic: bool) -> list[tuple[Line, list[Point]]]:
    """The lines with something to draw, and the positions of their points in the figure from left to right."""
    drawable = [(line, points) for line in series if (points := _drawable(line, logarithmic))]
    if not drawable:
        return []
    x, y = _axes(series, logarithmic)
    return [(line, [(x(step), y(value)) for step, value in points]) for line, points in drawable]


def _groups(positioned: Sequence[tuple[Line, list[Point]]]) -> list[list[Line]]:
    """The lines in groups. Wherever both are drawn, a line is at most SAME away from the first line of its group."""
    groups: list[tuple[list[Point], list[Line]]] = []
    for line, positions in positioned:
        group = next((lines for first, lines in groups if _overlap(positions, first)), None)
        if group is None:
            groups.append((positions, [line]))
        else:
            group.append(line)
    return [lines for _, lines in groups]


def _overlap(first: list[Point], second: list[Point]) -> bool:
    """Whether the shorter of two lines lies on the longer."""
    shorter, longer = sorted((first, second), key=lambda positions: positions[-1][0] - positions[0][0])
    inside = [(x, y) for x, y in shorter if longer[0][0] <= x <= longer[-1][0]]
    heights = np.interp([x for x, _ in inside], [x for x, _ in longer], [y for _, y in longer])
    return bool(inside) and all(abs(y - height) <= SAME for (_, y), height in zip(inside, heights, strict=True))


def _line(line: Line, positions: Sequence[Point], index: int, n_overlapping: int) -> str:
    """n_overlapping: the number of lines that overlap. index: of this line among them."""
    dots = ""
    if line.marked or len(positions) == 1:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + index}"{HOLLOW if index else ""}/>' for x, y in positions)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    stroke = _stroke(line.colour)
    if n_overlapping > 1:
        stroke = (f'class="line c{line.colour % COLOURS}" stroke-dasharray="{DASH} {DASH * (n_overlapping - 1)}" '
                  f'stroke-dashoffset="{-DASH * index}"')
    return f'<g {stroke}><polyline points="{points}"/>{dots}<title>{escape(line.name)}</title></g>'


def _stroke(colour: int) -> str:
    dashes = DASHES[colour // COLOURS % len(DASHES)]
    return f'class="line c{colour % COLOURS}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _drawable(line: Line, logarithmic: bool) -> list[Point]:
    """The points of a line that can be drawn, by step, merged to at most MOST_POINTS."""
    points = sorted(point for point in line.points if math.isfinite(point[1]) and (point[1] > SMALLEST or not logarithmic))
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[begin:begin + size] for begin in range(0, len(points), size)]
    return [(group[-1][0], line.merge(value for _, value in group)) for group in groups]


def _bounds(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    if logarithmic:
        lowest = 10.0 ** math.floor(math.log10(low))
        highest = 10.0 ** math.ceil(math.log10(high))
        return lowest, highest if highest > lowest else 10 * lowest
    low, high = _widened(low, high)
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def _widened(low: float, high: float) -> tuple[float, float]:
    """The range, widened if it is too narrow for distinct ticks."""
    size = max(abs(low), abs(high))
    margin = max(0.5, 1e-6 * size)
    return (low, high) if high - low > 1e-9 * size else (low - margin, high + margin)


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten, at most eight or so; with few of them, also 2 and 5 times each."""
    first = round(math.log10(low))
    last = round(math.log10(high))
    if last - first <= 2:
        return [*(float(f"{factor}e{exponent}") for exponent in range(first, last) for factor in (1, 2, 5)), 10.0 ** last]
    return [10.0 ** exponent for exponent in range(first, last + 1, max(1, -(-(last - first) // 7)))]


def _round_steps(low: float, high: float) -> list[float]:
    """About five ticks, multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
