"""Tables of state machines: those of cached plans and of compiled steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")
Evidence = TypeVar("Evidence")
Fact = TypeVar("Fact", bound=str)
Action = TypeVar("Action")


class Row(NamedTuple, Generic[State, Evidence, Fact, Action]):
    """One line of a table. It fits what is in one of its states, on its evidence, where all of its facts are
    true.

    Attributes:
        states: the states that it is for; empty for any.
        evidence: what happened.
        facts: what has to be true of it.
        then: the next state; ``None`` is the same one.
        action: what follows.
        warning: what users are warned of; empty where they are not warned.
    """

    states: tuple[State, ...]
    evidence: Evidence
    facts: tuple[Fact, ...]
    then: State | None
    action: Action
    warning: str = ""


@dataclass(frozen=True)
class Table(Generic[State, Evidence, Fact, Action]):
    """What follows from what happened: the first row that fits holds.

    Attributes:
        rows: its lines.
        nothing: what follows where no row fits.
    """

    rows: tuple[Row[State, Evidence, Fact, Action], ...]
    nothing: Action

    @cached_property
    def _by_evidence(self) -> dict[Evidence, list[Row[State, Evidence, Fact, Action]]]:
        """The rows of each evidence, in their order: every step looks some up."""
        found = defaultdict[Evidence, list[Row[State, Evidence, Fact, Action]]](list)
        for row in self.rows:
            found[row.evidence].append(row)
        return found

    def row(
        self, state: State, evidence: Evidence, facts: Iterable[Fact] = ()
    ) -> Row[State, Evidence, Fact, Action]:
        """The first row that fits; one that leaves all as it is where none does. It changes nothing.

        Args:
            state: the present one.
            evidence: what happened.
            facts: what is true of it; others are not.

        Example:
            >>> door = Table((Row(("open",), "push", ("unlocked",), "shut", "ring"),), nothing="")
            >>> door.row("open", "push", ["unlocked"]).action, door.row("open", "push").action
            ('ring', '')
        """
        true = set(facts)
        for row in self._by_evidence.get(evidence, ()):
            if (not row.states or state in row.states) and true.issuperset(row.facts):
                return row
        return Row((), evidence, (), None, self.nothing)
