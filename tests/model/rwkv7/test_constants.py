"""Tests that csrc/rwkv7.h has the constants and the order of mixes of architecture.py; otherwise C would be silently wrong."""

import re
from pathlib import Path

from rwkv.model.rwkv7 import architecture

HEADER = (Path(architecture.__file__).parent / "csrc" / "rwkv7.h").read_text(encoding="utf-8")


def test_the_constants_in_c_are_those_in_python() -> None:
    in_c = {name: float(value) for name, value in re.findall(r"^#define (\w+) \(?(-?[\d.e-]+)f\)?", HEADER, re.MULTILINE)}
    assert in_c == {name: getattr(architecture, name) for name in ("FASTEST_LOG_W", "LEAST_NORM", "EPS")}


def test_the_mixes_of_a_step_are_in_the_order_of_python() -> None:
    (names,) = re.findall(r"^enum \{ (.*), MIXES \};", HEADER, re.MULTILINE)
    assert names.split(", ") == [f"MIX_{name.upper()}" for name in architecture.STEP_MIXES]


def test_every_order_has_the_same_names() -> None:
    assert sorted(architecture.MIXES) == sorted(architecture.STEP_MIXES)
    assert sorted(architecture.LOW_RANK) == sorted(architecture.GATES)
