"""Times and shares as people read them; bytes are `lowtide.budget.format_bytes`."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Seconds with three figures.

    >>> seconds_text(1.234), seconds_text(0.0123), seconds_text(83)
    ('1.23 s', '12.3 ms', '1 min 23 s')
    """
    if abs(seconds) < 1e-9:
        return "0 ms"
    if abs(seconds) >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def percent_text(share: float) -> str:
    """A signed share of something as percent.

    >>> percent_text(0.0423), percent_text(-0.5)
    ('+4.2 %', '-50.0 %')
    """
    return f"{share * 100:+.1f} %"
