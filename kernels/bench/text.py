"""Makes tables for the terminal and in Markdown, and replaces a page's section that contains a generated table."""

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, left: int = 1) -> str:
    """Formats a table for the terminal. The first `left` columns are left-aligned, the other columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) if index < left else cell.rjust(width)
                       for index, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Rows, left: int = 1) -> str:
    """Formats a Markdown table. The first row is the heading."""
    heading, *body = rows
    rule = ["---" if index < left else "---:" for index in range(len(heading))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, rule, *body))


def fill_section(text: str, name: str, section: str) -> str:
    """Replaces the text between <!-- NAME: measured --> and <!-- end of NAME: measured -->, if `text` has these markers."""
    start = f"<!-- {name}: measured -->"
    end = f"<!-- end of {name}: measured -->"
    if start not in text or end not in text:
        return text
    head, _, rest = text.partition(start)
    return f"{head}{start}\n\n{section}\n\n{end}{rest.partition(end)[2]}"
