"""Tables in terminals that are too narrow for them: a paragraph a row, each value behind its heading."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class Fitting:
    """A table where there is room for it; else its rows as lines of text.

    Args:
        table: whose headings say what its values are; in a row without any but its first, they are one line.
        least: columns of text that it needs; as many as it would take, unless some of it may wrap.

    Example:
        >>> table = Table("t", "GiB", title="sizes")
        >>> table.add_row("4", "59.7")
        >>> Console(width=9).print(Fitting(table, least=10))
        sizes
        t 4,
          GiB
          59.7
    """

    def __init__(self, table: Table, least: int | None = None) -> None:
        self.table, self.least = table, least

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, least = self.table, self.least
        if least is None:
            least = Measurement.get(console, options.update(max_width=10**4), table).maximum
        if least <= options.max_width:
            yield table
            return
        if table.title:
            yield Text(str(table.title), style="italic")
        for row in zip(*(column.cells for column in table.columns), strict=True):
            cells = [
                (" ".join(str(column.header).split()), cell)
                for column, cell in zip(table.columns, row, strict=True)
                if cell
            ]
            line = Text(", ").join(Text(f"{name} " if name else "") + _text(cell) for name, cell in cells)
            first, *rest = line.wrap(console, max(4, options.max_width - 2))
            yield first
            yield from (Padding(more, (0, 0, 0, 2)) for more in rest)


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))
