"""The differences between two models' outputs, as a table of cells, each with its bound.

A difference is the largest |difference| over all rows, positions, channels and forms (whole, chunked, one by one).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray
from parity.cases import STATE, TO_FLOAT64, TO_PEER
from parity.peers import FORMS

from kernels.bench.text import aligned

Outputs = Mapping[str, ndarray]


@dataclass
class Cell:
    """A difference and its bound; NaN is out of bounds."""

    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        if self.ok:
            return self.show(self.value)
        return f"{self.show(self.value)} > {self.show(self.bound)} !"

    def show(self, number: float) -> str:
        return f"{number:.1e}" if self.bound else f"{number:g}"              # a bound of 0 is on a count


@dataclass
class Row:
    """One line of the table: what was compared, and the differences."""

    labels: tuple[str, ...]
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(cell.ok for cell in self.cells.values())


def difference(one: ndarray, other: ndarray) -> float:
    """max |one - other|; infinite where the shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one.astype(np.float64) - other).max())


def logits_apart(found: Outputs, expected: Outputs) -> float:
    """Every form of `found` against `expected` read whole."""
    return max(difference(found[f"{form}: logits"], expected["whole: logits"]) for form in FORMS)


def state_apart(found: Outputs, expected: Outputs) -> float:
    parts = [name.removeprefix("whole: ") for name in expected if name.startswith("whole: ") and name != "whole: logits"]
    return max(difference(found[f"{form}: {part}"], expected[f"whole: {part}"]) for form in FORMS for part in parts)


def forms_apart(found: Outputs) -> dict[str, Cell]:
    """A model against itself: chunked and one by one against whole."""
    return {"forms": Cell(logits_apart(found, found), TO_FLOAT64), "forms, state": Cell(state_apart(found, found), STATE)}


def files_apart(found: Outputs, expected: Outputs) -> dict[str, Cell]:
    """The differences, form by form, between a program's outputs from two files of the same weights."""
    apart = {name: difference(found[name], expected[name]) for name in expected if name != "greedy"}
    logits = max(value for name, value in apart.items() if name.endswith("logits"))
    return {"logits": Cell(logits, TO_PEER), "state": Cell(max(apart.values()), STATE), "greedy": greedy_apart(found, expected)}


def greedy_apart(found: Outputs, *others: Outputs) -> Cell:
    """The number of tokens of the continuation in which `found` differs from the others, summed over them."""
    return Cell(float(sum((found["greedy"] != other["greedy"]).sum() for other in others)), 0)


def table(heads: tuple[str, ...], rows: list[Row]) -> str:
    """Text with a column for each label and each cell; a broken bound is marked with !."""
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [[*row.labels, *(str(row.cells.get(name, "-")) for name in columns)] for row in rows]
    return aligned([[*heads, *columns], *body], left=len(heads))


def worst(labels: tuple[str, ...], rows: list[Row]) -> Row:
    """One row for `rows`: the largest difference of each column."""
    columns = dict.fromkeys(name for row in rows for name in row.cells)
    cells = {name: [row.cells[name] for row in rows if name in row.cells] for name in columns}
    return Row(labels, {name: max(found, key=lambda cell: (not cell.ok, cell.value)) for name, found in cells.items()})


def as_data(heads: tuple[str, ...], row: Row) -> dict[str, Any]:
    return {**dict(zip(heads, row.labels, strict=True)),
            **{name: {"difference": cell.value, "allowed": cell.bound} for name, cell in row.cells.items()}}
