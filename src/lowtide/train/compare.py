"""The proof at the end of a run: one plain and one planned step from the same state, measured side by
side.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import meter
from lowtide.meter.resident import own_share, resident_workspace_bytes
from lowtide.plan.data import Plan
from lowtide.progress import Work, working
from lowtide.report.picture import Curve
from lowtide.trace.untouched import gpus_of
from lowtide.train.memory import free_bytes

PAIRS = 5
ENOUGH_SECONDS = 60.0
"""After this long two pairs do, for steps that take many seconds each."""


@dataclass(frozen=True)
class Measured:
    """What one way of running the step did.

    Attributes:
        peak_bytes: the most live bytes, of everything that counts against the budget.
        seconds: of the pair whose change is the median of all pairs.
        curve: live bytes over one step.
    """

    peak_bytes: int
    seconds: float
    curve: Curve = field(repr=False)


@dataclass(frozen=True)
class Comparison:
    """One step, plain and planned.

    Attributes:
        plan: what the planned step ran.
        planned, plain: what was measured; ``plain`` is ``None`` where the plain step does not fit into
            memory.
        different: names of the gradients (or ``loss``) that were not bitwise equal; ``None`` where there was
            nothing to compare with.
    """

    plan: Plan
    planned: Measured
    plain: Measured | None
    different: tuple[str, ...] | None

    @property
    def extra(self) -> float | None:
        """Measured extra time as a share of the plain step; ``None`` where that did not fit."""
        return None if self.plain is None else self.planned.seconds / self.plain.seconds - 1

    @property
    def within_budget(self) -> bool | None:
        """Whether the measured peak is at or below the budget; ``None`` without a budget."""
        return None if self.plan.budget_bytes is None else self.planned.peak_bytes <= self.plan.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The numbers, without the curves' moments."""

        def plain(measured: Measured | None) -> dict[str, Any] | None:
            return (
                None if measured is None else {"peak_bytes": measured.peak_bytes, "seconds": measured.seconds}
            )

        plan = {
            key: value
            for key, value in asdict(self.plan).items()
            if isinstance(value, int | float | str) or value is None
        }
        return {
            "budget_bytes": self.plan.budget_bytes,
            "within_budget": self.within_budget,
            "plain": plain(self.plain),
            "planned": plain(self.planned),
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "predicted_extra": self.plan.predicted_extra,
            "calibrated_extra": self.plan.calibrated_extra,
            "measured_extra": self.extra,
            "gap": self.plan.gap,
            "bitwise_equal": None if self.different is None else not self.different,
            "different": self.different,
            "plan": plan,
        }


def compare(
    model: nn.Module,
    handle: Any,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    device: torch.device,
    pairs: int = PAIRS,
    agree: Callable[[bool], bool] = bool,
    clear: Callable[[], None] | None = None,
) -> Comparison:
    """Run forward and backward in turn with and without the plan, each from the same weights, random state
    and empty gradients.

    Args:
        model: the limited model.
        handle: what `lowtide.limit_memory` gave for it.
        optimizer: whose state counts as resident.
        loss_of: runs the forward and returns the loss.
        device: whose memory counts.
        pairs: how often, or fewer for steps of many seconds; one uncounted pair warms up, and its loss and
            gradients are compared.
        agree: whether something holds for any of the ranks that share the model, which have to run the same
            steps.
        clear: makes the gradients what a step finds; without it they are none.
    """
    clear = clear or optimizer.zero_grad

    def run(planned: bool) -> tuple[meter.Measurement, int]:
        """One measured step: its measurement, and the resident bytes before it. Gradients stay."""
        clear()
        resident = meter.resident_bytes(model, optimizer, device) + resident_workspace_bytes(device)

        def step() -> Tensor:
            loss = loss_of()
            loss.backward()
            return loss.detach()

        with nullcontext() if planned else handle.paused(), torch.random.fork_rng(gpus_of([model])):
            measured = meter.measure(step, device=device)
        return measured, resident

    with working("measuring", "measured") as work:
        return _measure(work, model, handle, optimizer, run, device, pairs, agree)


def _measure(
    work: Work,
    model: nn.Module,
    handle: Any,
    optimizer: torch.optim.Optimizer,
    run: Callable[..., tuple[meter.Measurement, int]],
    device: torch.device,
    pairs: int,
    agree: Callable[[bool], bool],
) -> Comparison:
    """As `compare`; ``run`` gives a step's measurement, and the resident bytes before it."""
    work.say("measuring a planned step")
    first, resident = run(planned=True)
    planned_digests = _digests(model, first.value)
    plan: Plan = handle.plan
    room = free_bytes(device)
    if agree(room is not None and plan.plain_peak_bytes - resident > 0.9 * room):
        runs = [run(planned=True)[0] for _ in work.each("measuring planned steps", range(pairs))]
        middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        measured = _highest("planned", runs, middle, resident + plan.slab_bytes)
        return Comparison(plan, measured, None, None)
    work.say("measuring a plain step")
    plain_digests = _digests(model, run(planned=False)[0].value)
    plain_runs, planned_runs = [], []
    began = time.perf_counter()
    for pair in work.each("measuring pairs of a plain and a planned step", range(pairs)):
        if pair >= 2 and agree(time.perf_counter() - began > ENOUGH_SECONDS):
            break
        order = (False, True) if pair % 2 == 0 else (True, False)
        for planned in order:
            (planned_runs if planned else plain_runs).append(run(planned)[0])
            work.tick()
    optimizer.zero_grad(set_to_none=True)
    # one pair gives both times and their change: on a noisy machine two medians contradict that of the pairs
    plain, planned = median_pair(list(zip(plain_runs, planned_runs, strict=True)))
    different = tuple(name for name, digest in plain_digests.items() if planned_digests.get(name) != digest)
    return Comparison(
        plan,
        _highest("planned", planned_runs, planned, resident),
        _highest("plain", plain_runs, plain, resident),
        different,
    )


def median_pair(
    pairs: list[tuple[meter.Measurement, meter.Measurement]],
) -> tuple[meter.Measurement, meter.Measurement]:
    """Of pairs of a plain and a planned step, one right after the other, the one with the median change."""
    ranked = sorted(pairs, key=lambda pair: pair[1].seconds / pair[0].seconds)
    return ranked[(len(ranked) - 1) // 2]


def _highest(label: str, runs: list[meter.Measurement], middle: meter.Measurement, resident: int) -> Measured:
    """The highest peak of some runs; the time and the curve of the middle one."""
    moments = [(when, resident + live) for when, live in middle.timeline]
    return Measured(
        resident + max(run.peak_bytes for run in runs),
        middle.seconds,
        Curve(label, moments),
    )


def _digests(model: nn.Module, loss: Tensor) -> dict[str, bytes]:
    """A digest of the loss's and of every gradient's bytes: comparing these holds no second set of
    gradients.
    """
    found = {"loss": _digest(loss)}
    for name, parameter in model.named_parameters():
        found[name] = b"" if parameter.grad is None else _digest(parameter.grad)
    return found


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(
        own_share(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    ).digest()
