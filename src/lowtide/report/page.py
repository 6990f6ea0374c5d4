"""The page of a report: one HTML file that needs no network.

The charts are uPlot's (``assets/uPlot.iife.min.js``, MIT licence beside it); everything else is the plain
HTML, CSS and JavaScript in ``assets``.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from string import Template
from typing import Any, Protocol

from lowtide.report.names import layers_of, part_of
from lowtide.version import __version__

_SCRIPTS = ("step.js", "tables.js", "charts.js", "main.js")


class Pageable(Protocol):
    """What a page is made of: a `lowtide.report.Report`."""

    @property
    def title(self) -> str: ...

    @property
    def decided(self) -> tuple[Any, ...]: ...

    def to_json(self) -> dict[str, Any]: ...


def page(report: Pageable) -> str:
    """The text of the page: HTML with its styles, scripts and data inside."""
    return Template(_asset("page.html")).substitute(
        title=html.escape(f"{report.title} - lowtide report"),
        style=_asset("uPlot.min.css") + _asset("page.css"),
        library=_asset("uPlot.iife.min.js"),
        scripts="\n".join(_asset(name) for name in _SCRIPTS),
        # a text with "</script>" or "<!--" in it would end the data's element
        data=json.dumps(page_data(report), separators=(",", ":")).replace("<", "\\u003c"),
        version=html.escape(__version__),
    )


def page_data(report: Pageable) -> dict[str, Any]:
    """What the page's scripts read: the report, and for each module its layer and what it is within that."""
    data = report.to_json()
    texts = data["texts"]
    named = sorted({label[1] for label in data["labels"]})
    layers = layers_of({texts[module] for module in named} | {row.module for row in report.decided})
    of_label = {module: layers[texts[module]] for module in named}
    return {
        **data,
        "modules": {module: [layer, part_of(texts[module], layer)] for module, layer in of_label.items()},
        "layers": {row.module: layers[row.module] for row in report.decided},
    }


def _asset(name: str) -> str:
    return files("lowtide.report").joinpath("assets", name).read_text(encoding="utf-8")
