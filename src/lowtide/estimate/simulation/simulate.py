"""`simulate`: a configuration -> the memory timeline of one step on one rank of each pipeline stage asked
for, beside its closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide.budget import format_bytes, parse
from lowtide.errors import BudgetError
from lowtide.estimate.config import Config
from lowtide.estimate.devices import Device
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.layer import segment_layers
from lowtide.estimate.lines import Stage
from lowtide.estimate.settings import describe
from lowtide.estimate.simulation.compare import Row, comparison, held_by_name
from lowtide.estimate.simulation.compose import Chunk, StageTimeline, compose
from lowtide.estimate.simulation.traced import Traced, pretended_ranks, trace_chunk
from lowtide.estimate.total import stage_estimate
from lowtide.graph import StepGraph
from lowtide.plan import policies
from lowtide.plan.blocks import block_stored, blocks_of, default_blocks, full_stored, sqrt_stored
from lowtide.plan.policies.by_rule import attention_stored
from lowtide.plan.simulate import Simulation, Simulator
from lowtide.progress import current
from lowtide.trace.costs.specs import OpCost, Signature

Pair = tuple[Traced, Traced | None]
"""A chunk's trace with gradients there, and the one that makes them."""

"""Told what begins, how many pieces of work are done, and how many there are."""


@dataclass(frozen=True, eq=False)
class StageSimulation:
    """A stage: the trace, and the closed form beside it.

    Attributes:
        timeline: the traced step.
        closed: the closed form of the same stage.
        rows: what each keeps, line by line.
    """

    timeline: StageTimeline
    closed: Stage
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        timeline, peak = self.timeline, self.timeline.peak
        return {
            "stage": timeline.stage, "peak_bytes": timeline.peak_bytes,
            "parameter_bytes": timeline.parameter_bytes, "buffer_bytes": timeline.buffer_bytes,
            "input_bytes": timeline.input_bytes, "gradient_bytes": timeline.gradient_bytes,
            "held_bytes": timeline.held_bytes, "activation_peak_bytes": timeline.activation_peak_bytes,
            "micro_batches_and_chunks_in_flight": timeline.in_flight,
            "turn_peaks": list(timeline.turn_peaks),
            "peak_at": {name: getattr(peak, name) for name in peak.__slots__},
            "closed": self.closed.to_json(), "rows": [row.to_json() for row in self.rows],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class StepSimulation:
    """What was simulated.

    Attributes:
        config: what was asked.
        stages: the stages asked for.
        notes: what should be known.
    """

    config: Config
    stages: tuple[StageSimulation, ...]
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most of any stage."""
        return max(stage.timeline.peak_bytes for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "config": dict(describe(self.config)),
            "peak_bytes": self.peak_bytes,
            "stages": [stage.to_json() for stage in self.stages],
            "notes": list(self.notes),
        }


def simulate(
    config: Config,
    *,
    stages: Sequence[int] | None = None,
    policy: str | None = None,
    budget: str | int | None = None,
    device: Device | None = None,
    fresh_gradients: bool = False,
    scratch: bool = False,
    build: Callable[[], nn.Module] | None = None,
) -> StepSimulation:
    """Trace one rank of each stage on fake tensors, and compose the step.

    Args:
        config: the model and how it is trained. ``offload_*``, ``partition_activations`` and ZeRO are closed
            forms only.
        stages: which pipeline stages; all where ``None``. Stages of one kind share a trace.
        policy: a policy of `lowtide.plan` instead of ``config.recompute``.
        budget: most bytes on a device at any moment (``"40GiB"``); plans are searched for that keep the stage
            below it.
        device: gives operations their seconds by a roofline, which plans for a budget weigh; an A100 where
            ``None`` and a budget is given.
        fresh_gradients: the first backward makes the gradients (``zero_grad(set_to_none=True)``); else they
            are resident from the beginning.
        scratch: count what operations allocate while they run, too, by running each once on this machine.
            Only for small shapes.
        build: makes the whole model (tokens, targets -> loss) where it is not the project's own; for one
            stage.

    Raises:
        EstimateError: the configuration is not one that can be traced.
        BudgetError: no plan keeps a stage within the budget.

    Example:
        >>> from lowtide.estimate import configure
        >>> found = simulate(configure("gpt2", layers=2, seq=64, attention="unfused"))
        >>> stage = found.stages[0]
        >>> abs(stage.timeline.held_bytes / stage.closed.activations_bytes - 1) < 0.01
        True
    """
    _check(config, build)
    wanted = list(range(config.pp)) if stages is None else list(stages)
    for stage in wanted:
        if not 0 <= stage < config.pp:
            raise EstimateError(f"--stage={stage}: choose a pipeline stage from 0 to {config.pp - 1}")
    limit = None if budget is None else parse(budget)
    if limit is not None and device is None:
        from lowtide.estimate.devices import device as find

        device = find("a100")
    kinds = list(dict.fromkeys(kind for stage in wanted for kind in _kinds(config, stage)))
    ways = (True, False) if fresh_gradients else (True,)
    known: dict[Signature, OpCost] = {}
    jobs = [(kind, with_gradients) for kind in kinds for with_gradients in ways]
    pairs: dict[tuple[bool, bool], list[Traced]] = {kind: [] for kind in kinds}
    with pretended_ranks(config) as ranks:
        for kind, with_gradients in current().each("tracing stages", jobs):
            pairs[kind].append(
                trace_chunk(
                    config,
                    first=kind[0],
                    last=kind[1],
                    with_gradients=with_gradients,
                    ranks=ranks,
                    device=device,
                    scratch=known if scratch else None,
                    whole_layers=policy is None and limit is None and config.recompute in ("full", "sqrt"),
                    build=build,
                )
            )
    traces: dict[tuple[bool, bool], Pair] = {
        kind: (pair[0], pair[1] if fresh_gradients else None) for kind, pair in pairs.items()
    }
    current().say("simulating")
    found = []
    for stage in wanted:
        chunks = [traces[kind] for kind in _kinds(config, stage)]
        made = (
            [_chunk(config, pair, policy) for pair in chunks]
            if limit is None
            else _within(config, stage, chunks, limit)
        )
        timeline = compose(config, stage, made)
        closed = stage_estimate(config, stage)
        found.append(
            StageSimulation(timeline, closed, tuple(comparison(config, closed, _held(config, stage, made))))
        )
    return StepSimulation(config, tuple(found), tuple(_notes(config, policy, budget)))


def _check(config: Config, build: Callable[[], nn.Module] | None) -> None:
    for name in (
        "offload_optimizer", "offload_activations", "partition_activations", "keep_gathered",
        "gather_logits", "compile", "float8", "overlap_tensor", "lora", "optimizer_in_backward",
        "ddp_buckets", "fused_qkv", "unfused_norms",
    ):  # fmt: skip
        if getattr(config, name):
            raise EstimateError(
                f"simulate traces a step without --{name.replace('_', '-')}: estimate has it in closed form; "
                "leave it out here"
            )
    if config.zero > 1:
        raise EstimateError(
            f"simulate --zero={config.zero}: one rank is traced, and what ranks share of gradients and "
            "weights is not; estimate has it in closed form; give --zero 1, whose step is the plain one, or "
            "leave it out"
        )
    if config.model.experts and build is None:
        raise EstimateError(
            f"simulate traces no experts, and this model has {config.model.experts} a layer: estimate has "
            "them in closed form"
        )
    if config.head_chunks > 1:
        raise EstimateError(
            f"simulate --head-chunks={config.head_chunks}: the project's own attention is traced, which "
            "works on all heads at once; estimate has it in closed form; leave it out here"
        )
    if config.tiles > 1 and (config.tp > 1 or build is not None):
        raise EstimateError(
            f"simulate --tiles={config.tiles}: lowtide.tile of the project's own MLP is traced, without "
            "tensor parallelism and --transformers; estimate has the others in closed form"
        )
    if config.cp > 1 and (build is not None or config.cp_exchange == "all-gather"):
        raise EstimateError(
            f"simulate --cp={config.cp} --cp-exchange={config.cp_exchange}: ring and all-to-all of the "
            "project's own models are traced, without --transformers; estimate has the others in closed form"
        )
    if config.cp > 1 and config.cp_exchange == "ring" and config.seq % (2 * config.cp):
        raise EstimateError(
            f"simulate --seq={config.seq} --cp={config.cp}: a ring's rank holds two chunks of 2 x cp: choose "
            f"a multiple of {2 * config.cp}"
        )
    own = replace(config, loss="auto", loss_chunks=8).loss_kind
    if config.loss_kind not in (own, "chunked-forward"):
        raise EstimateError(
            f"simulate --loss={config.loss}: the project's own models are traced, whose loss at "
            f"--tp={config.tp} is {own} or chunked-forward"
        )
    if isinstance(config.recompute, int) or config.recompute in ("selective-op", "selective-layer"):
        raise EstimateError(
            f"simulate --recompute={config.recompute}: choose none, selective, full or sqrt, or give --budget"
        )
    if config.gradient_dtype != "auto" and config.gradient_bytes != config.weight_bytes:
        raise EstimateError(
            f"simulate --gradient-dtype={config.gradient_dtype}: autograd sums gradients in the weights' "
            f"dtype ({config.dtype}); leave it out here"
        )
    if build is not None and (config.tp > 1 or config.pp > 1):
        raise EstimateError(
            f"--transformers, or a build= of one's own, with --tp={config.tp} --pp={config.pp}: such a model "
            "is traced whole; leave --tp and --pp at 1"
        )


def _kinds(config: Config, stage: int) -> list[tuple[bool, bool]]:
    """Of each chunk on a stage: whether it has the embedding, and the output layer."""
    last = config.interleave - 1
    return [
        (stage == 0 and chunk == 0, stage == config.pp - 1 and chunk == last)
        for chunk in range(config.interleave)
    ]


def stored_values(config: Config, graph: StepGraph, policy: str | None = None) -> frozenset[int]:
    """The values that stay under the configured recomputation."""
    simulator = Simulator(graph)
    name = policy or {"none": "keep_all"}.get(str(config.recompute), str(config.recompute))
    if name == "keep_all":
        return frozenset(simulator.droppable)
    if name == "full":
        return full_stored(simulator)
    if name == "sqrt" and policy is None:
        return _segments(config, graph, simulator)
    if name == "sqrt":
        return sqrt_stored(simulator)
    if name == "selective":
        cores = list(
            dict.fromkeys(op.module for op in graph.operations if op.module.endswith("attention.core"))
        )
        if policy is None and cores:  # the project's own models name the core
            return block_stored(simulator, blocks_of(graph, cores))
        return attention_stored(simulator)
    raise EstimateError(
        f"--policy={name!r}: choose keep_all, full, sqrt or selective, or give --budget for the best plan "
        "within it"
    )


def _segments(config: Config, graph: StepGraph, simulator: Simulator) -> frozenset[int]:
    """Sublinear checkpointing: what enters each segment of k layers stays."""
    size = segment_layers(config)
    blocks = default_blocks(graph)
    block = blocks_of(graph, blocks)
    return block_stored(simulator, {op: number // size for op, number in block.items()})


def _chunk(config: Config, pair: Pair, policy: str | None) -> Chunk:
    steady, fresh = pair

    def run(traced: Traced) -> Simulation:
        return Simulator(traced.graph).simulate(stored_values(config, traced.graph, policy))

    return Chunk(steady, run(steady), fresh, run(fresh) if fresh is not None else None)


def _within(config: Config, stage: int, pairs: Sequence[Pair], limit: int) -> list[Chunk]:
    """Chunks under plans that keep the stage's peak within ``limit``, by bisection over the budget of a
    chunk.
    """
    kept = [_chunk(config, pair, "keep_all") for pair in pairs]
    if compose(config, stage, kept).peak_bytes <= limit:
        return kept
    best: list[Chunk] | None = None
    smallest = compose(config, stage, kept).peak_bytes
    low, high = 0.0, 1.0
    for _ in range(8):
        share = (low + high) / 2
        try:
            made = [_budgeted(chunk, share) for chunk in kept]
        except BudgetError:
            low = share
            continue
        peak = compose(config, stage, made).peak_bytes
        smallest = min(smallest, peak)
        if peak <= limit:
            best, low = made, share
        else:
            high = share
    if best is None:
        raise BudgetError(
            f"no plan keeps stage {stage} within {format_bytes(limit)}: the smallest peak found is "
            f"{format_bytes(smallest)} ({smallest} bytes); give --budget at least that, more pipeline stages "
            "or tensor-parallel ranks, or a smaller --micro-batch",
            smallest,
            budget_bytes=limit,
        )
    return best


def _budgeted(chunk: Chunk, share: float) -> Chunk:
    """The chunk when what it adds to what is resident is a share of what it adds with everything kept."""

    def run(traced: Traced, kept: Simulation) -> Simulation:
        base = traced.graph.resident_bytes
        plan = policies.optimal()(traced.graph, base + int((kept.peak_bytes - base) * share))
        return Simulator(traced.graph).simulate(plan.stored)

    fresh = (
        run(chunk.fresh, chunk.fresh_run) if chunk.fresh is not None and chunk.fresh_run is not None else None
    )
    return Chunk(chunk.steady, run(chunk.steady, chunk.steady_run), chunk.fresh, fresh)


def _held(config: Config, stage: int, chunks: Sequence[Chunk]) -> dict[str, int]:
    """By name, what is held at the stage's fullest moment between turns."""
    from lowtide.estimate.schedule import turns

    flying = [0] * len(chunks)
    sizes = [chunk.held_bytes for chunk in chunks]
    most, at = -1, [0] * len(chunks)
    for kind, _, index in turns(config, stage):
        flying[index] += 1 if kind == "forward" else -1
        total = sum(count * size for count, size in zip(flying, sizes, strict=True))
        if total > most:
            most, at = total, list(flying)
    found: dict[str, int] = {}
    for chunk, count in zip(chunks, at, strict=True):
        for name, size in held_by_name(config, chunk).items():
            found[name] = found.get(name, 0) + count * size
    return found


def _notes(config: Config, policy: str | None, budget: str | int | None) -> list[str]:
    notes = []
    if config.fused_attention and config.dropout:
        notes.append(
            "attention's own dropout is left out: a fused kernel draws it again from its seed and keeps no "
            "mask"
        )
    if config.dtype != "fp32":
        notes.append(
            "traced as the CPU's kernels keep things: norms of bfloat16 keep their statistics in bfloat16"
        )
    if policy is not None or budget is not None:
        notes.append("the closed form beside it is that of --recompute " + str(config.recompute))
    if config.gradient_dtype == "auto" and config.gradient_bytes != config.weight_bytes:
        notes.append(
            "the trace's gradients have the weights' dtype, as PyTorch makes them; the closed form counts "
            "float32 ones"
        )
    return notes
