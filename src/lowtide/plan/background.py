"""A search that goes on while training does, in a process of its own.

In: a `StepGraph`, a budget in bytes and a policy. Out, later: a plan, or nothing. The process has the lowest
priority and one thread, gets the graph through a pipe, and ends by itself when the one that started it is
gone.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from lowtide.errors import LowtideError
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan

_ASK_SECONDS = 1.0
"""How often the process asks whether the one that started it is still there."""


class BackgroundSearch:
    """Searches for the best plan for a step, until it is stopped or nobody holds it.

    Args:
        graph: the step.
        budget: the most live bytes; ``None`` for the smallest peak that can be met.
        policy: searches; `lowtide.plan.policies.optimal` where none is given.
        least: the most live bytes where a smaller peak is of no use.
    """

    def __init__(
        self, graph: StepGraph, budget: int | None, policy: Callable[..., Plan] | None = None, least: int = 0
    ) -> None:
        self.lowers = budget is None
        """whether a lower peak is what is searched for"""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        line = [sys.executable, "-c", f"from {__name__} import main; main()", str(os.getpid())]
        self._process = subprocess.Popen(
            line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._said: list[bytes] = []
        given = self._process, (graph, budget, policy, least), self._said
        self._thread = threading.Thread(target=_converse, args=given, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _kill, self._process, os.getpid())

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return not self._thread.is_alive()

    def plan(self) -> Plan | None:
        """What it found; waits for its end. ``None`` where it failed or was stopped."""
        self._thread.join()
        said = b"".join(self._said)
        return Plan.from_json(said.decode()) if said and not self._process.returncode else None

    def stop(self) -> None:
        """End it now."""
        self._end()
        self._thread.join()


def _converse(process: subprocess.Popen[bytes], given: tuple[object, ...], said: list[bytes]) -> None:
    """Give the process what it needs, and take down what it says. It does not hold the search."""
    with suppress(OSError, ValueError):  # it was stopped
        said.append(process.communicate(pickle.dumps(given))[0])


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, unless this one is a fork of its owner."""
    if os.getpid() == owner:
        process.kill()


def main() -> None:
    """The process: what to search for from standard input, the plan as JSON to standard output."""
    from lowtide.plan.policies import optimal

    owner = int(sys.argv[1])
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    with suppress(OSError, AttributeError):
        os.nice(19)
    graph, budget, policy, least = pickle.load(sys.stdin.buffer)
    policy = policy or optimal()
    with suppress(LowtideError):
        plan = policy(graph, budget)
        if plan.predicted_peak_bytes < least:
            plan = policy(graph, least)
        sys.stdout.write(plan.to_json())
        sys.stdout.flush()


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_ASK_SECONDS)
    os._exit(1)
