"""From traced chunks to the memory timeline of a whole step on one rank of one pipeline stage.

A stage goes through `lowtide.estimate.schedule.turns`: forwards and backwards of micro-batches in its chunks.
Every turn of a chunk is the same trace, so the stage's timeline is exact without tracing more than one
micro-batch of each kind of chunk: what is resident, plus what the chunks in flight hold, plus the curve of
the turn at work. Gradients are resident from the beginning, as frameworks that sum them over micro-batches
have them; or the first backward of each chunk makes them, as after ``zero_grad(set_to_none=True)``, and has a
trace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lowtide.estimate.config import Config
from lowtide.estimate.schedule import turns
from lowtide.estimate.simulation.traced import Traced
from lowtide.plan.simulate import Simulation

Bytes = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A model chunk on a stage under the recomputation asked for.

    Attributes:
        steady, steady_run: its trace with gradients there, and the simulation.
        fresh, fresh_run: the same for a first micro-batch that makes the gradients; ``None`` where they are
            resident from the beginning.
    """

    steady: Traced
    steady_run: Simulation
    fresh: Traced | None = None
    fresh_run: Simulation | None = None

    @property
    def held_bytes(self) -> int:
        """What one micro-batch holds between its forward and its backward."""
        run, traced = self.steady_run, self.steady
        return int(run.live_bytes[traced.split - 1]) - traced.graph.resident_bytes

    def forward(self) -> tuple[Bytes, Bytes]:
        """Live bytes after every event of the forward, and the most at it, above what was resident before."""
        base, split = self.steady.graph.resident_bytes, self.steady.split
        return self.steady_run.live_bytes[:split] - base, self.steady_run.top_bytes[:split] - base

    def backward(self, first: bool) -> tuple[Bytes, Bytes]:
        """The same for a backward, from what is held on."""
        traced, run = self.steady, self.steady_run
        if first and self.fresh is not None and self.fresh_run is not None:
            traced, run = self.fresh, self.fresh_run
        base = traced.graph.resident_bytes
        return run.live_bytes[traced.split :] - base, run.top_bytes[traced.split :] - base

    def seconds(self) -> tuple[float, float]:
        """Forward's and backward's, by the operations' costs; replays count in backward."""
        operations = self.steady.graph.operations
        forward = sum(op.seconds for op in operations if op.phase == "forward")
        backward = sum(op.seconds for op in operations if op.phase == "backward")
        return forward, backward + self.steady_run.extra_seconds


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a stage's peak is.

    Attributes:
        turn: which turn of the schedule, from 0.
        kind, micro_batch, chunk: what that turn does.
        operation, module: what runs then.
        in_replay: whether it is being recomputed.
    """

    turn: int
    kind: str
    micro_batch: int
    chunk: int
    operation: str
    module: str
    in_replay: bool


@dataclass(frozen=True, eq=False)
class StageTimeline:
    """One step on one rank of a stage.

    Attributes:
        stage: which.
        parameter_bytes, buffer_bytes, input_bytes: what is live throughout: weights, buffers, tokens and
            targets of a micro-batch.
        gradient_bytes: gradients once they are all there.
        held_bytes: the most that micro-batches in flight hold between turns.
        peak_bytes: the most live bytes at any moment.
        peak: where that is.
        turn_peaks: the most live bytes within each turn.
        live_bytes, seconds: the whole timeline, of at most `FINE_TURNS` turns, for pictures. Without costs
            each turn takes one second.
        timed: whether operations have costs.
        in_flight: the most (micro-batch, chunk) pairs between forward and backward.
    """

    stage: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    held_bytes: int
    peak_bytes: int
    peak: Moment
    turn_peaks: tuple[int, ...]
    in_flight: int
    timed: bool
    live_bytes: Bytes = field(repr=False)
    seconds: NDArray[np.float64] = field(repr=False)

    @property
    def activation_peak_bytes(self) -> int:
        """The peak above weights, buffers, inputs and gradients."""
        return (
            self.peak_bytes
            - self.parameter_bytes
            - self.buffer_bytes
            - self.input_bytes
            - self.gradient_bytes
        )


FINE_TURNS = 200
"""Pictures show each event of this many turns."""


def compose(config: Config, stage: int, chunks: Sequence[Chunk]) -> StageTimeline:
    """The timeline of a stage whose model chunks are ``chunks``."""
    parameters = sum(chunk.steady.parameter_bytes for chunk in chunks)
    buffers = sum(chunk.steady.buffer_bytes for chunk in chunks)
    every_gradient = sum(chunk.steady.gradient_bytes for chunk in chunks)
    resident = sum(chunk.steady.graph.resident_bytes for chunk in chunks) - every_gradient
    gradients = sum(chunk.steady.gradient_bytes for chunk in chunks if chunk.fresh is None)
    held, most_held, in_flight, most_in_flight = 0, 0, 0, 0
    done: set[int] = set()
    peak, where = resident, (0, "forward", 0, 0, 0)
    peaks: list[int] = []
    fine: list[Bytes] = []
    clock: list[NDArray[np.float64]] = []
    now = 0.0
    for number, (kind, micro_batch, index) in enumerate(turns(config, stage)):
        chunk = chunks[index]
        before = resident + gradients + held
        if kind == "forward":
            live, top = chunk.forward()
            in_flight += 1
            after = chunk.held_bytes
            held += after
        else:
            first = index not in done
            before -= chunk.held_bytes
            live, top = chunk.backward(first)
            held -= chunk.held_bytes
            in_flight -= 1
            if first:
                done.add(index)
                gradients += int(live[-1]) if chunk.fresh is not None else 0
        most_held, most_in_flight = max(most_held, held), max(most_in_flight, in_flight)
        at = int(np.argmax(top))
        peaks.append(before + int(top[at]))
        if peaks[-1] > peak:
            peak, where = peaks[-1], (number, kind, micro_batch, index, at)
        if number < FINE_TURNS:
            fine.append(before + live)
            length = chunk.seconds()[kind == "backward"] or 1.0
            clock.append(now + np.linspace(0, length, len(live)))
            now += length
    return StageTimeline(
        stage=stage, parameter_bytes=parameters, buffer_bytes=buffers,
        input_bytes=resident - parameters - buffers, gradient_bytes=gradients, held_bytes=most_held,
        peak_bytes=peak, peak=_moment(chunks, where), turn_peaks=tuple(peaks), in_flight=most_in_flight,
        timed=any(sum(chunk.seconds()) > 0 for chunk in chunks), live_bytes=np.concatenate(fine),
        seconds=np.concatenate(clock),
    )  # fmt: skip


def _moment(chunks: Sequence[Chunk], where: tuple[int, str, int, int, int]) -> Moment:
    number, kind, micro_batch, index, at = where
    chunk = chunks[index]
    event = at if kind == "forward" else chunk.steady.split + at
    run = chunk.steady_run
    if (
        kind == "backward"
        and run.peak_event >= chunk.steady.split
        and run.peak_operation is not None
        and abs(run.peak_event - event) <= 2
    ):
        return Moment(
            number, kind, micro_batch, index, run.peak_operation.name, run.peak_operation.module,
            run.peak_in_replay,
        )  # fmt: skip
    events = chunk.steady.graph.events
    event = min(event, len(events) - 1)
    while event >= 0 and events[event].kind != "op":
        event -= 1
    if event < 0:
        return Moment(number, kind, micro_batch, index, "", "", False)
    op = chunk.steady.graph.operations[events[event].index]
    return Moment(number, kind, micro_batch, index, op.name, op.module, False)
