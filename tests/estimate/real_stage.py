"""One rank of a pipeline stage run for real, as `lowtide simulate` says that it runs, and what the meter
reads meanwhile.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from ranks import any_rank, collectives_at_once
from recomputed import Recomputed

from lowtide.estimate import Config
from lowtide.estimate.schedule import turns
from lowtide.estimate.simulation.pieces import DTYPES, Piece, hidden_shape
from lowtide.estimate.simulation.simulate import simulate
from lowtide.estimate.simulation.traced import default_dtype, run_backward, run_forward
from lowtide.meter import peak
from lowtide.parallel.context.context import Context
from lowtide.parallel.groups import tensor_group

READINGS = 40
"""How often a step is read at most; every second reading of one that replays collectives is too high."""


def recomputing(piece: Piece, how: object) -> Piece:
    """The piece when its recomputation is done by scopes."""
    for place, block in enumerate(piece.blocks):
        if how == "full":
            piece.blocks[place] = Recomputed(block)
        elif how == "selective":
            block.attention.core = Recomputed(block.attention.core)  # type: ignore[union-attr, assignment]
    return piece


def build(config: Config, stage: int, group: Any) -> list[Piece]:
    """The chunks of a stage."""
    last, context = config.interleave - 1, None
    if config.cp > 1:
        group, context = None, Context(tensor_group(group), config.cp_exchange)  # type: ignore[arg-type]
    with default_dtype(DTYPES[config.dtype]):
        made = [
            Piece(
                config,
                first=stage == 0 and chunk == 0,
                last=stage == config.pp - 1 and chunk == last,
                group=group,
                context=context,
            )
            for chunk in range(config.interleave)
        ]
    return [recomputing(piece, config.recompute) for piece in made]


def run_step(config: Config, stage: int, pieces: list[Piece], tokens: torch.Tensor) -> None:
    """All turns of a stage. What other stages would send is made up here; what it would send is let go."""
    dtype = DTYPES[config.dtype]
    flying: dict[tuple[int, int], Any] = {}
    for kind, micro_batch, chunk in turns(config, stage):
        piece = pieces[chunk]
        if kind == "forward":
            source = (
                tokens if piece.first else torch.zeros(hidden_shape(config), dtype=dtype).requires_grad_()
            )
            edge, out = run_forward(piece, config, source, tokens if piece.last else None)
            kept = out if config.keep_output_tensors else None
            flying[micro_batch, chunk] = (edge, source, kept)
            del edge, out, source, kept
        else:
            edge, source, kept = flying.pop((micro_batch, chunk))
            gradient = None if piece.last else torch.zeros(hidden_shape(config), dtype=dtype)
            run_backward(edge, gradient)
            del edge, gradient, kept
            source.grad = None
            del source


def measured_and_simulated(config: Config, stage: int, group: Any, simulated: int | None) -> tuple[int, int]:
    """Bytes that the step adds at most to weights and inputs: read by the meter, and simulated.

    Gloo's threads may hold a collective's buffers a little longer than the step does, and nothing waits for
    them where collectives are replayed. So where a rank reads more than is simulated, all read again, and the
    least counts.
    """
    gc.collect()
    torch.manual_seed(0)
    pieces = build(config, stage, group)
    tokens = torch.zeros(config.micro_batch, config.seq, dtype=torch.long)
    expected = added(config, stage) if simulated is None else simulated
    least = 1 << 62
    with default_dtype(DTYPES[config.dtype]), collectives_at_once():
        run_step(config, stage, pieces, tokens)  # caches and one-time buffers
        for _ in range(1 if group is None else READINGS):
            for piece in pieces:
                piece.zero_grad(set_to_none=True)
            gc.collect()
            with peak("cpu") as seen:
                run_step(config, stage, pieces, tokens)
            least = min(least, seen.peak_bytes)
            if group is not None and not any_rank(least > expected + 1024, group):
                break
    return least, expected


def added(config: Config, stage: int) -> int:
    """What a simulation says that the step adds at most."""
    timeline = simulate(config, stages=[stage], fresh_gradients=True, scratch=True).stages[0].timeline
    return timeline.peak_bytes - timeline.parameter_bytes - timeline.buffer_bytes - timeline.input_bytes
