"""Draws the SVG figures of a report: lines over steps, and bars. STYLE is the style sheet, and page.py defines the colours.

A figure of lines is WIDTH by HEIGHT units, and the page scales each figure. Values that are not finite are not drawn. A figure
of lines shows the step under the mouse pointer and each kernel's value at this step. No script is needed, because the plot
consists of strips, and the style sheet shows a strip's text while the pointer is over the strip.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

STYLE = """
svg.figure { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--quiet); } svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--quiet); fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .line circle { stroke: none; }
.line circle.ring { fill: none; stroke: inherit; stroke-dasharray: none; }
.names, .at > * { visibility: hidden; } .readings:hover > .names, .at:hover > * { visibility: visible; }
.names rect { fill: var(--card); stroke: var(--rule); fill-opacity: 0.85; } .names, .at text { pointer-events: none; }
.at rect { fill: none; pointer-events: all; } svg .names text, svg .at text { fill: var(--text); }
"""
STYLE += "".join(f"rect.b{n} {{ fill: var(--b{n}); }}\n" for n in range(3))
WIDTH = 480
HEIGHT = 300
LEFT = 54                                # margins around the plot; the left margin may be wider
RIGHT = 12
TOP = 10
BOTTOM = 40
SMALLEST = 1e-300                        # values up to this are not drawn on a logarithmic axis
MOST_POINTS = 400                        # maximum number of points in a line; longer lines merge neighbouring points
COLOURS = 10                             # number of colours in the style sheet
DASHES = ("", "6 3", "2 3")
SAME = 1.5                               # lines at most this far apart (about a line's width) look like one line
DASH = 9                                 # length of a dash in overlapping lines
BAR = 18                                 # height of a bar
GAP = 10                                 # space between two bars
NAMES = 142                              # width of the space for the names of bars
DIGIT = 7.7                              # width of a digit in DejaVu Sans, the widest of the page's fonts
MOST_STRIPS = 100                        # maximum number of strips with a reading
MOST_ROWS = 16                           # maximum number of kernels in a reading; others are omitted
ROW = 14                                 # height of a kernel's row in a reading
HOLLOW = ' class="ring"'                 # the class of a dot drawn around another dot

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line in a figure. Overlapping lines get alternating dashes, and rings around each other's dots.

    Attributes:
        colour: the number of the colour; from COLOURS on, colours repeat with dashes.
        merge: computes one value from the values of neighbouring points that are merged.
        marked: whether every point has a dot.
    """

    name: str
    colour: int
    points: Sequence[Point]
    merge: Callable[[Iterable[float]], float] = max
    marked: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis, on which `low` is at position `start` and `high` at position `stop`. A call returns the position of a value."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns the ticks as (position, text), with enough digits to tell the numbers apart."""
        values = _logarithmic_ticks(self.low, self.high) if self.logarithmic else _linear_ticks(self.low, self.high)
        numbers = [_number(value) for value in values]
        for digits in range(5, 16):
            if len({*numbers}) < len(numbers):
                numbers = [_number(value, digits) for value in values]
        return [(self(value), number) for value, number in zip(values, numbers, strict=True)]


def lines(title: str, x_name: str, series: Sequence[Line], logarithmic: bool = False, names: Sequence[str] = ()) -> str:
    """Returns a figure of lines, or "" if there is nothing to draw.

    Args:
        logarithmic: whether the y axis is logarithmic; only values above SMALLEST are then drawn.
        names: the name of each colour, for the readings under the pointer; without names, there are no readings.
    """
    positioned = _lines_with_positions(series, logarithmic)
    if not positioned:
        return ""
    dashes = {id(line): (index, len(group)) for group in _groups(positioned) for index, line in enumerate(group)}
    elements = [_line(line, positions, *dashes[id(line)]) for line, positions in positioned]
    x, y = _axes(series, logarithmic)
    readings = _readings([(line.colour, _points_to_draw(line, logarithmic)) for line, _ in positioned], names, x)
    return _figure(title, HEIGHT, [*_grid(x, y, x_name), *elements, *readings])


def overlapping_lines(series: Sequence[Line], logarithmic: bool = False) -> list[list[Line]]:
    """Returns the groups of two or more lines in `series` that coincide in the figure."""
    return [group for group in _groups(_lines_with_positions(series, logarithmic)) if len(group) > 1]


def bars(title: str, formatter: Callable[[float], str], rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Returns a figure with a stacked bar for each row, or "" if there is nothing to draw.

    A bar consists of the row's parts, each with a name and a value. The sum of the values is at the bar's end. `formatter`
    formats a value with the unit.
    """
    rows = [(name, [(part, value) for part, value in parts if math.isfinite(value) and value >= 0]) for name, parts in rows]
    rows = [(name, parts) for name, parts in rows if parts]
    if not rows:
        return ""
    x = Axis(0, max(sum(value for _, value in parts) for _, parts in rows) * 1.25 or 1.0, NAMES, WIDTH - RIGHT)
    elements = [element for row, (name, parts) in enumerate(rows)
                for element in _bar(name, parts, x, TOP + row * (BAR + GAP), formatter)]
    return _figure(title, TOP + len(rows) * (BAR + GAP), elements)


def swatch(colour: int) -> str:
    """Returns a short line in this colour, with the colour's dashes, for a legend."""
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><path d="M0 5H26" {_stroke(colour)}/></svg>'


def _bar(name: str, parts: Sequence[tuple[str, float]], x: Axis, top: float,
         formatter: Callable[[float], str]) -> list[str]:
    middle = top + BAR / 2 + 4
    begin = 0.0
    short = _shorten(name, 17)
    elements = [f'<text x="{NAMES - 8}" y="{middle:.1f}" class="end">{escape(short)}<title>{escape(name)}</title></text>']
    for n, (part, value) in enumerate(parts):
        width = x(begin + value) - x(begin)
        elements.append(f'<rect x="{x(begin):.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" class="b{n}">'
                        f"<title>{escape(name)}, {escape(part)}: {escape(formatter(value))}</title></rect>")
        begin += value
    return [*elements, f'<text x="{x(begin) + 5:.1f}" y="{middle:.1f}">{escape(formatter(begin))}</text>']


def _figure(title: str, height: float, elements: Iterable[str]) -> str:
    return (f'<svg class="figure" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
            f'{"".join(elements)}</svg>')


def _grid(x: Axis, y: Axis, x_name: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    left = f"{x.start:.0f}"
    across = [f'<path class="grid" d="M{left} {place:.1f}H{WIDTH - RIGHT}"/>'
              f'<text x="{x.start - 6:.0f}" y="{place + 4:.1f}" class="end">{number}</text>' for place, number in y.ticks()]
    along = [f'<path class="grid" d="M{place:.1f} {bottom}v4"/>'
             f'<text x="{min(place, WIDTH - DIGIT * len(number) / 2):.1f}" y="{bottom + 17}" class="middle">{number}</text>'
             for place, number in x.ticks()]
    return [*across, *along, f'<path class="axis" d="M{left} {TOP}V{bottom}H{WIDTH - RIGHT}"/>',
            f'<text x="{(x.start + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" class="middle">{escape(x_name)}</text>']


def _readings(lines: Sequence[tuple[int, Sequence[Point]]], names: Sequence[str], x: Axis) -> list[str]:
    """Returns the readings under the pointer, in at most MOST_STRIPS strips. Lines of the same colour share a row.

    `lines` has the colour and the points of each line.
    """
    if not names:
        return []
    colours = sorted({colour for colour, _ in lines})[:MOST_ROWS]
    all_steps = sorted({step for _, points in lines for step, _ in points})
    width = (x.high - x.low) / MOST_STRIPS
    steps = [*{math.ceil((step - x.low) / width): step for step in all_steps}.values()]          # the last step of each strip
    bounds = [x.low, *((first + second) / 2 for first, second in pairwise(steps)), x.high]
    strips = []
    widest = 0
    for step, (low, high) in zip(steps, pairwise(bounds), strict=True):
        rows = [_number(step)]
        for colour in colours:
            nearest = [_nearest_point(points, step) for other, points in lines if other == colour]
            values = [value for at, value in nearest if low <= at <= high]
            rows.append(" to ".join(dict.fromkeys(map(_number, (min(values), max(values))))) if values else "")
        widest = max(widest, *map(len, rows))
        texts = "".join(f'<tspan x="{WIDTH - RIGHT - 6}" dy="{ROW}">{row}</tspan>' if row else f'<tspan dy="{ROW}"/>'
                        for row in rows)
        strips.append(f'<g class="at"><rect x="{x(low):.1f}" y="{TOP}" width="{x(high) - x(low):.1f}" '
                      f'height="{HEIGHT - BOTTOM - TOP}"/><path class="axis" d="M{x(step):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
                      f'<text y="{TOP}" class="end">{texts}</text></g>')
    labels = ["step", *(_shorten(names[colour], 24) for colour in colours)]
    left = WIDTH - RIGHT - 18 - DIGIT * (widest + max(map(len, labels)))
    box = (f'<rect x="{left:.0f}" y="{TOP}" width="{WIDTH - RIGHT - left:.0f}" height="{ROW * len(labels) + 6}"/>'
           f'<text y="{TOP}">' + "".join(f'<tspan x="{left + 6:.0f}" dy="{ROW}">{escape(label)}</tspan>' for label in labels))
    return [f'<g class="readings"><g class="names">{box}</text></g>{"".join(strips)}</g>']


def _nearest_point(points: Sequence[Point], step: float) -> Point:
    """Returns the point with the step nearest to `step`. `points` must be sorted by step."""
    index = bisect_left(points, step, key=lambda point: point[0])
    return min(points[max(0, index - 1):index + 1], key=lambda point: abs(point[0] - step))


def _axes(series: Sequence[Line], logarithmic: bool) -> tuple[Axis, Axis]:
    points = [point for line in series for point in _points_to_draw(line, logarithmic)]
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    y = Axis(*_bounds(min(ys), max(ys), logarithmic), HEIGHT - BOTTOM, TOP, logarithmic)
    left = max(LEFT, math.ceil(8 + DIGIT * max(len(number) for _, number in y.ticks())))
    return Axis(*_widen(min(xs), max(xs)), left, WIDTH - RIGHT), y


def _lines_with_positions(series: Sequence[Line], logarithmic: bool) -> list[tuple[Line, list[Point]]]:
    """Returns the lines that have anything to draw, with the positions of the points in the figure from left to right."""
    drawable = [(line, points) for line in series if (points := _points_to_draw(line, logarithmic))]
    if not drawable:
        return []
    x, y = _axes(series, logarithmic)
    return [(line, [(x(step), y(value)) for step, value in points]) for line, points in drawable]


def _groups(positioned: Sequence[tuple[Line, list[Point]]]) -> list[list[Line]]:
    """Groups lines that coincide. A line is at most SAME away from the first line of the group, where both are drawn."""
    groups: list[tuple[list[Point], list[Line]]] = []
    for line, positions in positioned:
        group = next((lines for first, lines in groups if _overlap(positions, first)), None)
        if group is None:
            groups.append((positions, [line]))
        else:
            group.append(line)
    return [lines for _, lines in groups]


def _overlap(first: list[Point], second: list[Point]) -> bool:
    """Returns True if the shorter of two lines coincides with the longer line, to within SAME."""
    shorter, longer = sorted((first, second), key=lambda positions: positions[-1][0] - positions[0][0])
    inside = [(x, y) for x, y in shorter if longer[0][0] <= x <= longer[-1][0]]
    heights = np.interp([x for x, _ in inside], [x for x, _ in longer], [y for _, y in longer])
    return bool(inside) and all(abs(y - height) <= SAME for (_, y), height in zip(inside, heights, strict=True))


def _line(line: Line, positions: Sequence[Point], index: int, n_overlapping: int) -> str:
    """Returns the SVG of a line, which is number `index` in a group of n_overlapping lines that coincide."""
    dots = ""
    if line.marked or len(positions) == 1:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + index}"{HOLLOW if index else ""}/>' for x, y in positions)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    stroke = _stroke(line.colour)
    if n_overlapping > 1:
        stroke = (f'class="line c{line.colour % COLOURS}" stroke-dasharray="{DASH} {DASH * (n_overlapping - 1)}" '
                  f'stroke-dashoffset="{-DASH * index}"')
    return f'<g {stroke}><polyline points="{points}"/>{dots}</g>'


def _stroke(colour: int) -> str:
    dashes = DASHES[colour // COLOURS % len(DASHES)]
    return f'class="line c{colour % COLOURS}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _points_to_draw(line: Line, logarithmic: bool) -> list[Point]:
    """Returns the points of a line that can be drawn, sorted by step, and merged into at most MOST_POINTS points."""
    points = sorted(point for point in line.points if math.isfinite(point[1]) and (point[1] > SMALLEST or not logarithmic))
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[begin:begin + size] for begin in range(0, len(points), size)]
    return [(group[-1][0], line.merge(value for _, value in group)) for group in groups]


def _bounds(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    if logarithmic:
        lowest = 10.0 ** math.floor(math.log10(low))
        highest = 10.0 ** math.ceil(math.log10(high))
        return lowest, highest if highest > lowest else 10 * lowest
    low, high = _widen(low, high)
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def _widen(low: float, high: float) -> tuple[float, float]:
    """Returns the range, which is widened if it is too narrow for distinct ticks."""
    size = max(abs(low), abs(high))
    margin = max(0.5, 1e-6 * size)
    return (low, high) if high - low > 1e-9 * size else (low - margin, high + margin)


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    """Returns the ticks of a logarithmic axis: at most about eight powers of ten, or 1, 2 and 5 times each of a few powers."""
    first = round(math.log10(low))
    last = round(math.log10(high))
    if last - first <= 2:
        return [*(float(f"{factor}e{exponent}") for exponent in range(first, last) for factor in (1, 2, 5)), 10.0 ** last]
    return [10.0 ** exponent for exponent in range(first, last + 1, max(1, -(-(last - first) // 7)))]


def _linear_ticks(low: float, high: float) -> list[float]:
    """Returns the ticks of a linear axis: about five multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float, digits: int = 4) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.{digits}g}" if abs(value) < 1e4 else f"{value:,.{digits - 4}f}"


def _shorten(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[:length - 1]}…"
