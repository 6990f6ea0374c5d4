"""The errors that lowtide raises: one family, each message names what was given, what is allowed and what to do."""

from __future__ import annotations


class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose."""


class BudgetError(LowtideError):
    """A budget is malformed, or no plan can meet it.

    Attributes:
        smallest_bytes: the smallest budget that a plan is known for, or ``None`` when the text was malformed.
        detail: what stands at the peak of the plan that needs it, and what to do; part of the message.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None, detail: str = "") -> None:
        super().__init__(f"{message} {detail}" if detail else message)
        self.smallest_bytes = smallest_bytes
        self.detail = detail

    def add(self, more: str) -> None:
        """Another sentence of detail."""
        self.detail = f"{self.detail} {more}".strip()
        self.args = (f"{self} {more}",)


class TraceError(LowtideError):
    """A step could not be recorded."""


class PlanError(LowtideError):
    """A plan is inconsistent with its step graph, or a plan file is damaged."""


class ReplayError(LowtideError, RuntimeError):
    """A value given up during the forward did not come back bitwise equal."""
