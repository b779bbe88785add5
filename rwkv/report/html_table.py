"""Makes the HTML tables of a report. Each column has a header and a function that formats a row's cell."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        cell: returns the HTML of a row's cell, or "" for an empty cell.
        words: whether the cells contain words instead of numbers.
    """

    header: str
    cell: Callable[[Any], str]
    words: bool = False


def table(columns: Sequence[Column], rows: Sequence[Any], style: str = "",
          message_for: Callable[[Any], str | None] = lambda row: None) -> str:
    """Returns an HTML table without empty columns. A message from message_for(row) replaces all cells but the row's first."""
    messages = [message_for(row) for row in rows]
    cells = [[column.cell(row) for column in columns] if message is None else [columns[0].cell(row)]
             for row, message in zip(rows, messages, strict=True)]
    complete = [row_cells for row_cells, message in zip(cells, messages, strict=True) if message is None]
    indices = [index for index in range(len(columns)) if any(row_cells[index] for row_cells in complete)]
    indices = indices or [*range(len(columns))][:2]
    head = "".join(f"<th{' class=text' if column.words else ''}>{escape(column.header)}</th>"
                   for column in (columns[index] for index in indices))
    body = ""
    for row_cells, message in zip(cells, messages, strict=True):
        if message is None:
            row_cells = [row_cells[index] for index in indices]
        else:
            row_cells.append(f'<td class="text" colspan="{max(1, len(indices) - 1)}">{escape(message)}</td>')
        body += f"<tr>{''.join(cell or '<td></td>' for cell in row_cells)}</tr>"
    return f'<div class="scroll {style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def text(value: object) -> str:
    return "" if value is None else f'<td class="text">{escape(str(value))}</td>'


def cell(value: object, formatter: Callable[[Any], str] = str, bad: bool = False) -> str:
    """Returns an HTML cell with a formatted value, or "" for None."""
    return "" if value is None else f"<td{' class=bad' if bad else ''}>{escape(formatter(value))}</td>"
