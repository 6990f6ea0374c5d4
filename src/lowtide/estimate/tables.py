"""Tables that are whole on any terminal."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import TextType


class Whole:
    """A table in parts below each other where the terminal is too narrow for all of its columns: the first
    column stands in each part.

    Args:
        table: the table; each of its columns but the first fits by itself.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        first, *rest = self.table.columns
        part, title = [first], self.table.title
        for column in rest:
            if len(part) > 1 and not self._fits([*part, column], console, options):
                yield self._part(part, title)
                part, title = [first], None
            part.append(column)
        yield self._part(part, title)

    def _part(self, columns: list[Column], title: TextType | None = None) -> Table:
        part = copy.copy(self.table)
        part.columns, part.title = columns, title
        return part

    def _fits(self, columns: list[Column], console: Console, options: ConsoleOptions) -> bool:
        wide = options.update(max_width=1 << 16)
        columns = [column for column in columns if column.no_wrap] or columns[:1]
        return Measurement.get(console, wide, self._part(columns)).maximum <= options.max_width
