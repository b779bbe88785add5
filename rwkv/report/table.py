"""A table of a report: each column has a header and a function that makes a cell for a row."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple


class Column(NamedTuple):
    """cell: returns the HTML of a row's cell, or "" for an empty one. words: the cells have words, not numbers."""

    header: str
    cell: Callable[[Any], str]
    words: bool = False


def table(columns: Sequence[Column], rows: Sequence[Any], style: str = "",
          instead: Callable[[Any], str | None] = lambda row: None) -> str:
    """A table without columns that are empty in all rows. instead: returns words that replace a row's later cells, or None."""
    words = [instead(row) for row in rows]
    cells = [[column.cell(row) for column in columns] if said is None else [columns[0].cell(row)]
             for row, said in zip(rows, words, strict=True)]
    whole = [of_row for of_row, said in zip(cells, words, strict=True) if said is None]
    shown = [place for place in range(len(columns)) if any(of_row[place] for of_row in whole)] or [*range(len(columns))][:2]
    head = "".join(f"<th{' class=text' if column.words else ''}>{escape(column.header)}</th>"
                   for column in (columns[place] for place in shown))
    body = ""
    for of_row, said in zip(cells, words, strict=True):
        if said is None:
            of_row = [of_row[place] for place in shown]
        else:
            of_row.append(f'<td class="text" colspan="{max(1, len(shown) - 1)}">{escape(said)}</td>')
        body += f"<tr>{''.join(cell or '<td></td>' for cell in of_row)}</tr>"
    return f'<div class="scroll {style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def text(said: object) -> str:
    return "" if said is None else f'<td class="text">{escape(str(said))}</td>'


def cell(value: object, form: Callable[[Any], str] = str, bad: bool = False) -> str:
    """A cell with a value; "" for None."""
    return "" if value is None else f"<td{' class=bad' if bad else ''}>{escape(form(value))}</td>"
