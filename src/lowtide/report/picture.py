"""Live memory over one step, before and after, drawn with braille dots in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from lowtide.budget import format_bytes
from lowtide.report.formats import seconds_text

# Dots of a braille cell, by row from the top and column: bits of the code point above U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_STYLES = ("red", "green", "blue", "magenta")


@dataclass(frozen=True)
class Curve:
    """Live bytes over one step.

    Attributes:
        label: what it is, for the legend.
        moments: (seconds since the step began, live bytes) after each change, in order of time.
    """

    label: str
    moments: Sequence[tuple[float, int]]

    @property
    def seconds(self) -> float:
        """When the last change happened."""
        return self.moments[-1][0] if self.moments else 0.0

    @property
    def peak_bytes(self) -> int:
        """The most live bytes."""
        return max((live for _, live in self.moments), default=0)

    def columns(self, count: int, seconds: float) -> list[int | None]:
        """The most live bytes within each of ``count`` equal stretches of time; ``None`` after the end.

        >>> Curve("", [(0.0, 5), (0.5, 9), (0.6, 2)]).columns(4, 1.0)
        [5, 5, 9, None]
        """
        result: list[int | None] = []
        place, live = 0, 0
        for column in range(count):
            end = seconds * (column + 1) / count
            most = live
            seen = place
            while place < len(self.moments) and (self.moments[place][0] < end or column == count - 1):
                live = self.moments[place][1]
                most = max(most, live)
                place += 1
            result.append(most if place < len(self.moments) or seen < place else None)
        return result


def terminal_picture(
    curves: Sequence[Curve], budget_bytes: int | None = None, width: int = 80, height: int = 12
) -> Text:
    """The curves over one time axis, with the budget as a line.

    Args:
        curves: up to four.
        budget_bytes: where to draw the line.
        width, height: in characters, axis labels included; a legend stands below.
    """
    top = max([curve.peak_bytes for curve in curves] + [budget_bytes or 0, 1])
    seconds = max([curve.seconds for curve in curves] + [1e-9])
    margin = 10
    across, down = max(10, width - margin - 2), max(3, height - 2)
    bits = [[0] * across for _ in range(down)]
    styles = [["dim"] * across for _ in range(down)]

    def dot(x: int, y: int, style: str) -> None:
        row, column = y // 4, x // 2
        bits[row][column] |= _DOTS[y % 4][x % 2]
        styles[row][column] = style

    def level(live: int) -> int:
        return min(down * 4 - 1, round((1 - live / top) * (down * 4 - 1)))

    if budget_bytes is not None:
        for x in range(0, across * 2, 3):
            dot(x, level(budget_bytes), "yellow")
    for curve, style in zip(curves, _STYLES, strict=False):
        before: int | None = None
        for x, live in enumerate(curve.columns(across * 2, seconds)):
            if live is None:
                break
            y = level(live)
            for between in range(
                min(y, y if before is None else before), max(y, y if before is None else before) + 1
            ):
                dot(x, between, style)
            before = y

    picture = Text()
    for row in range(down):
        label = format_bytes(top) if row == 0 else "0 B" if row == down - 1 else ""
        picture.append(
            f"{label:>{margin}} │" if row not in (0, down - 1) else f"{label:>{margin}} ┤", style="dim"
        )
        for code, style in zip(bits[row], styles[row], strict=True):
            picture.append(chr(0x2800 + code), style=style)
        picture.append("\n")
    picture.append(" " * (margin + 1) + "└" + "─" * across + "\n", style="dim")
    picture.append(" " * (margin + 2) + "0 s" + f"{seconds_text(seconds):>{across - 3}}" + "\n", style="dim")
    named = [
        ("━", style, f"{curve.label}, peak {format_bytes(curve.peak_bytes)}")
        for curve, style in zip(curves, _STYLES, strict=False)
    ]
    named += [("┅", "yellow", f"budget {format_bytes(budget_bytes)}")] if budget_bytes is not None else []
    legend = [Text.assemble((mark, style), f" {name}") for mark, style, name in named]
    in_one_line = margin + 2 + sum(map(len, legend)) + 3 * (len(legend) - 1) <= width
    indent = " " * (margin + 2)
    return picture + Text(indent) + Text("   " if in_one_line else f"\n{indent}").join(legend)
