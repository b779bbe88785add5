"""Tests the figures of a report and the formats of its numbers."""

import math
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv.report import svg, units

values = st.floats(-1e30, 1e30, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
points = st.lists(st.tuples(st.integers(0, 10**6), values), max_size=30)


@pytest.mark.thorough
@settings(deadline=None)
@given(st.lists(points, max_size=3), st.booleans())
def test_every_line_stays_inside_its_figure(series: list[list[tuple[int, float]]], logarithmic: bool) -> None:
    figure = svg.lines("a", "x", [svg.Line("b", number, line) for number, line in enumerate(series)], logarithmic)
    finite = [value for line in series for _, value in line if math.isfinite(value)]
    drawable = [value for value in finite if value > svg.SMALLEST or not logarithmic]
    assert bool(figure) == bool(drawable)
    for line in ElementTree.fromstring(figure).iter("polyline") if figure else ():
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert svg.LEFT - 0.1 <= x <= svg.WIDTH - svg.RIGHT + 0.1
            assert svg.TOP - 0.1 <= y <= svg.HEIGHT - svg.BOTTOM + 0.1


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1.1, 6.5), (0.05, 3.0), (0.3, 80.0), (1e-9, 1e-2), (1e-40, 1e30), (2.0, 2.0),
                                         (2.0, 2.0003), (12_345.1, 12_345.4), (1.5e6, 1.50001e6)])
def test_an_axis_has_enough_numbers_and_not_too_many(low: float, high: float, logarithmic: bool) -> None:
    figure = ElementTree.fromstring(svg.lines("a", "x", [svg.Line("b", 0, [(0, low), (1, high)])], logarithmic))
    numbers = [text.text for text in figure.iter("text") if text.get("class") == "end"]
    assert 3 <= len(set(numbers)) == len(numbers) <= 9


@pytest.mark.parametrize("value", [1.0, 1e-12, 123_456.0, 2.00005, -3.25e-7])
@pytest.mark.parametrize("last", [1, 300, 2000, 99_999, 1_234_567])
def test_no_text_is_cut_off(last: int, value: float) -> None:
    """All texts fit the figure in the widest of the page's fonts, in which a digit is 7.64 wide."""
    line = svg.Line("a", 0, [(0, value), (last / 2, value * 1.0001), (last, value * 1.0002)])
    rows = [("taichi_shared_v3_and_a_long_name", [("forward", 1.0), ("backward", 122_000.0)]), ("b", [("forward", 5.0)])]
    lines = svg.lines("a", "step", [line], names=["torch_script_scan, optim.lr=0.001"])
    for figure in (lines, svg.bars("a", units.time, rows)):
        for text in ElementTree.fromstring(figure).iter("text"):
            for part in [*text.iter("tspan")] or [text]:
                width = 7.64 * len(part.text or "")
                end = float(part.get("x", 0)) + {"end": 0.0, "middle": width / 2}.get(text.get("class", ""), width)
                assert -0.1 <= end - width < end <= svg.WIDTH + 0.1 or not part.text


def test_a_figure_shows_step_and_values_under_the_pointer() -> None:
    """The strips fill the plot side by side. Runs of a kernel share a row, which is empty after the runs have ended."""
    full = [(step, step / 4) for step in range(1, 1001)]
    runs = [svg.Line("a", 0, full), svg.Line("b", 0, [(step, 2 * value) for step, value in full]),
            svg.Line("c", 1, full[:300])]
    figure = ElementTree.fromstring(svg.lines("a", "step", runs, names=["conv1d", "<other>"]))
    readings = figure.find("g[@class='readings']")
    assert readings is not None
    assert [label.text for label in readings[0].iter("tspan")] == ["step", "conv1d", "<other>"]
    strips = readings[1:]
    assert 50 <= len(strips) <= svg.MOST_STRIPS + 1
    ends = [(float(one[0].attrib["x"]), float(one[0].attrib["width"])) for one in strips]
    assert ends[0][0] == svg.LEFT
    assert sum(width for _, width in ends) == pytest.approx(svg.WIDTH - svg.RIGHT - svg.LEFT, abs=0.1 * len(strips))
    rows = [[row.text for row in one.iter("tspan")] for one in strips]
    assert rows[-1] == ["1,000", "250 to 500", None]
    assert [each[2] is None for each in rows] == sorted(each[2] is None for each in rows)
    assert next(each[0] for each in rows if each[2] is None) in map(str, range(301, 316))
    assert "readings" not in svg.lines("a", "step", runs)


def test_overlapping_lines_alternate() -> None:
    """The third line covers a part of the others, and the fourth crosses them but does not overlap."""
    curve = [(step, 3.0 + math.exp(-step / 50)) for step in range(300)]
    rounded = [(step, value + 1e-7) for step, value in curve]
    drawn = [svg.Line("a", 0, curve), svg.Line("b", 1, rounded), svg.Line("c", 2, rounded[:100]),
             svg.Line("d", 3, [(0, 3.0), (299, 4.0)])]
    assert [[line.name for line in group] for group in svg.overlapping_lines(drawn)] == [["a", "b", "c"]]
    figure = ElementTree.fromstring(svg.lines("a", "x", drawn))
    dashes = [(group.get("stroke-dasharray"), group.get("stroke-dashoffset")) for group in figure.iter("g")]
    assert len(set(dashes[:3])) == 3
    assert dashes[3] == (None, None)


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_peak() -> None:
    curve = [(step, 1.0 + (step == 777) * 5) for step in range(10_000)]
    figure = ElementTree.fromstring(svg.lines("a", "x", [svg.Line("b", 0, curve)]))
    places = next(figure.iter("polyline")).attrib["points"].split()
    assert len(places) <= svg.MOST_POINTS
    heights = [float(place.split(",")[1]) for place in places]
    assert heights.count(min(heights)) == 1


@pytest.mark.parametrize(("form", "number", "text"), [
    (units.time, 3250, "3.25 s"), (units.time, 812.4, "812 ms"), (units.time, 999.7, "1.00 s"), (units.time, 0.0123, "12.3 µs"),
    (units.time, 250_000, "4.17 min"), (units.memory, 812, "812 MiB"), (units.memory, 1536, "1.50 GiB"),
    (units.count, 12345.6, "12,346"), (units.count, 3.257, "3.26"), (units.count, 300, "300"),
    (units.small_number, 0, "0"), (units.small_number, 1.23e-7, "1.2e-7"), (units.small_number, 0.25, "0.25")])
def test_numbers_are_written_as_people_read_them(form: Callable[[float], str], number: float, text: str) -> None:
    assert form(number) == text


@pytest.mark.parametrize("form", [units.time, units.memory, units.count])
@given(number=st.floats(1e-3, 1e9))
def test_no_number_of_a_table_has_a_power_of_ten(form: Callable[[float], str], number: float) -> None:
    digits = form(number).partition(" ")[0].replace(",", "")
    assert "e+" not in digits
    if form is units.count:
        assert float(digits) == pytest.approx(number, rel=0.006, abs=0.5)
