"""Live memory over one step, before and after, drawn with blocks in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from lowtide.budget import format_bytes
from lowtide.words import seconds_text

_EIGHTHS = " ▁▂▃▄▅▆▇█"
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
    curves: Sequence[Curve], budget_bytes: int | None = None, width: int = 80, height: int = 6
) -> Text:
    """The curves one below the other, on one scale of time and of bytes, with the budget as a line.

    Args:
        curves: up to four.
        budget_bytes: where to draw the line.
        width, height: in characters, of each curve.
    """
    top = max([curve.peak_bytes for curve in curves] + [budget_bytes or 0, 1])
    seconds = max([curve.seconds for curve in curves] + [1e-9])
    steps = len(_EIGHTHS) - 1
    limit = None if budget_bytes is None else min(height - 1, int(height * budget_bytes / top))
    picture = Text()
    for curve, style in zip(curves, _STYLES, strict=False):
        levels = [round(steps * height * (live or 0) / top) for live in curve.columns(width, seconds)]
        words = f"{curve.label}, peak {format_bytes(curve.peak_bytes)}, {seconds_text(curve.seconds)}\n"
        picture.append(words, style=style)
        for row in reversed(range(height)):
            for level in levels:
                filled = max(0, min(steps, level - steps * row))
                if filled or row != limit:
                    picture.append(_EIGHTHS[filled], style=style)
                else:
                    picture.append("┄", style="yellow")
            picture.append("\n")
    if budget_bytes is not None:
        picture.append(f"┄ budget {format_bytes(budget_bytes)}", style="yellow")
    return picture
