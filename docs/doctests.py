"""Examples in docstrings are code on the site: griffe takes a doctest for text unless it is fenced."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^([ ]*)>>>.*(?:\n\1[^\n]+)*", re.MULTILINE)
"""A doctest with its output: up to the next blank line, or to a line that is indented less."""


class Doctests(griffe.Extension):
    """Puts every doctest into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
