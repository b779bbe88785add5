"""Compares the outputs of two models in tables whose cells are a difference and its bound.

A difference is the largest absolute one over all rows, positions, channels and forms (whole, chunked, one by one).
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
    """A difference and its bound; a difference of NaN is out of bounds."""

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
        return f"{number:.1e}" if self.bound else f"{number:g}"              # the differences with a bound of 0 are counts


@dataclass
class Row:
    """A line of a table: labels that say what was compared, and the differences."""

    labels: tuple[str, ...]
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(cell.ok for cell in self.cells.values())


def difference(one: ndarray, other: ndarray) -> float:
    """Returns max |one - other|, or infinity if the shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one.astype(np.float64) - other).max())


def logits_apart(actual: Outputs, expected: Outputs) -> float:
    """Returns the largest difference of any form of `actual` from `expected` read whole."""
    return max(difference(actual[f"{form}: logits"], expected["whole: logits"]) for form in FORMS)


def state_apart(actual: Outputs, expected: Outputs) -> float:
    parts = [name.removeprefix("whole: ") for name in expected if name.startswith("whole: ") and name != "whole: logits"]
    return max(difference(actual[f"{form}: {part}"], expected[f"whole: {part}"]) for form in FORMS for part in parts)


def forms_apart(actual: Outputs) -> dict[str, Cell]:
    """Returns the differences within one model: of the forms chunked and one by one from the form whole."""
    return {"forms": Cell(logits_apart(actual, actual), TO_FLOAT64), "forms, state": Cell(state_apart(actual, actual), STATE)}


def files_apart(actual: Outputs, expected: Outputs) -> dict[str, Cell]:
    """Returns the differences, form by form, between the outputs of a program from two files of the same weights."""
    apart = {name: difference(actual[name], expected[name]) for name in expected if name != "greedy"}
    logits = max(value for name, value in apart.items() if name.endswith("logits"))
    return {"logits": Cell(logits, TO_PEER), "state": Cell(max(apart.values()), STATE),
            "greedy": greedy_apart(actual, expected)}


def greedy_apart(actual: Outputs, *others: Outputs) -> Cell:
    """Returns the number of tokens in which a greedy continuation differs from each other one, summed over the others."""
    return Cell(float(sum((actual["greedy"] != other["greedy"]).sum() for other in others)), 0)


def table(heads: tuple[str, ...], rows: list[Row]) -> str:
    """Returns text with a column for each label and each cell; an exceeded bound is marked with !."""
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [[*row.labels, *(str(row.cells.get(name, "-")) for name in columns)] for row in rows]
    return aligned([[*heads, *columns], *body], left=len(heads))


def worst(labels: tuple[str, ...], rows: list[Row]) -> Row:
    """Returns one row with the largest difference of each column of `rows`."""
    columns = dict.fromkeys(name for row in rows for name in row.cells)
    cells = {name: [row.cells[name] for row in rows if name in row.cells] for name in columns}
    return Row(labels, {name: max(column, key=lambda cell: (not cell.ok, cell.value)) for name, column in cells.items()})


def as_data(heads: tuple[str, ...], row: Row) -> dict[str, Any]:
    return {**dict(zip(heads, row.labels, strict=True)),
            **{name: {"difference": cell.value, "allowed": cell.bound} for name, cell in row.cells.items()}}
